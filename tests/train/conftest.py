"""Fixtures of the training tests."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draftsmith.models.trunk import Trunk

_TOY = Path(__file__).with_name("toy.py")


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The module toy.py: rows, heads and runs of the toy."""
    spec = importlib.util.spec_from_file_location("toy", _TOY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def target(tiny_llama_folder: Callable[..., Path]) -> Path:
    """A random Llama: 2 layers, hidden 64, 4 heads, 2 key-value heads, vocabulary 512."""
    return tiny_llama_folder(num_hidden_layers=2)


@pytest.fixture(scope="session")
def trunk(target: Path) -> Trunk:
    """Its trunk in fp32."""
    return Trunk.load(target, torch.float32)


@pytest.fixture(scope="session")
def run_toy() -> Callable[..., list[str]]:
    """Run toy.py as one process or several ranks; returns the standard output of each."""

    def run(spec: dict[str, Any], ranks: int = 1, timeout: float = 120) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(ranks):
            env = {
                k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            }
            env |= {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            if ranks > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [sys.executable, str(_TOY), json.dumps(spec)]
            processes.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        try:
            outputs = [process.communicate(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors[-3000:]
        return [out for out, _ in outputs]

    return run
