"""Toy targets on disk for the tests of the layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.models.trunk import Trunk

from .eagle_toys import target_config


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A maker of toy targets."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(target_config(name)).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def trunks(folders: Callable[[str], Path]) -> Callable[[str], Trunk]:
    """Their trunks in float32."""
    return cache(lambda name: Trunk.load(folders(name), torch.float32))
