"""Targets and heads that the engine's tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from small_heads import HEAD_CONFIGS, away_from_its_start  # noqa: E402

from draftsmith.models.heads import Head, HeadConfig  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402


@pytest.fixture(scope="session")
def target(tiny_llama_folder: Callable[..., Path]) -> Target:
    """A tiny random target in float64, where every schedule must give the very same tokens."""
    return Target.load(TargetConfig(source=str(tiny_llama_folder()), dtype="float64", device="cpu"))


@pytest.fixture(scope="session")
def head(target: Target) -> Head:
    """One recycled MTP module."""
    return away_from_its_start(HeadConfig(), target)


@pytest.fixture(scope="session", params=list(HEAD_CONFIGS))
def any_head(request: pytest.FixtureRequest, target: Target) -> Head:
    """A head of each family in turn."""
    return away_from_its_start(HEAD_CONFIGS[request.param], target)
