"""Every test here runs the Triton form, on memory that holds NaN where nothing was written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def triton_form(monkeypatch: pytest.MonkeyPatch, nan_memory: None) -> None:
    """The ops pick Triton, in its interpreter (see tests/conftest.py)."""
    pytest.importorskip("triton")
    monkeypatch.setenv("DRAFTSMITH_KERNELS", "triton")


@pytest.fixture
def far_memory() -> Callable[[int], torch.Tensor]:
    """A maker of bfloat16 buffers with more elements than 32 bits can count. The system gives a
    page of it only when it is touched, so a test that touches a few rows needs little."""

    def make(extra: int) -> torch.Tensor:
        buffer = np.zeros(2**31 + extra, dtype=np.uint16)
        return torch.from_numpy(buffer).view(torch.bfloat16)

    return make
