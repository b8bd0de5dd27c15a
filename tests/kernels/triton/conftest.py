"""Every test here runs the Triton form, on memory that holds NaN where nothing was written.

In the interpreter by default (see tests/conftest.py). TRITON_INTERPRET=0 runs the same tests with
compiled kernels and tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from draftsmith.kernels import jit
from draftsmith.kernels.jit import interpreting


@pytest.fixture(autouse=True)
def triton_form(monkeypatch: pytest.MonkeyPatch, nan_memory: None) -> Iterator[None]:
    """The ops pick Triton; without the interpreter new tensors lie on the GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(jit, "choice", lambda: "triton")
    if not interpreting() and not torch.cuda.is_available():
        pytest.skip("TRITON_INTERPRET=0 and no GPU")
    torch.manual_seed(0)
    with torch.device("cpu" if interpreting() else "cuda"):
        yield


@pytest.fixture
def far_memory() -> Callable[[int], torch.Tensor]:
    """A maker of bfloat16 buffers with more elements than 32 bits can count. On a CPU the system
    gives a page of it only when it is touched, so a test that touches a few rows needs little."""

    def make(extra: int) -> torch.Tensor:
        if not interpreting():
            return torch.zeros(2**31 + extra, dtype=torch.bfloat16)
        return torch.from_numpy(np.zeros(2**31 + extra, np.uint16)).view(torch.bfloat16)

    return make
