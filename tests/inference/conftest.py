"""Targets and heads that the engine's tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from draftsmith.models.heads import HeadConfig, MTPHead, build_head  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402

PROMPTS = [
    torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (1, 7, 16, 17, 33)
]


@pytest.fixture(scope="session")
def target(tiny_llama_folder: Callable[..., Path]) -> Target:
    """A tiny random target in float64, where every schedule must give the very same tokens."""
    return Target.load(TargetConfig(source=str(tiny_llama_folder()), dtype="float64", device="cpu"))


@pytest.fixture(scope="session")
def head(target: Target) -> MTPHead:
    """A head away from its start; it drafts badly, which must not matter."""
    head = build_head(HeadConfig(), target.folder, 2.0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head.double()
