"""Who picks a kernel, and that a machine without Triton never needs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from draftsmith.kernels import jit
from draftsmith.kernels.jit import recorded, use_triton
from draftsmith.kernels.rms_norm import rms_norm

X = torch.zeros(1)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the variable as if the process began with it."""

    def set_variable(word: str) -> None:
        monkeypatch.setenv(jit.VARIABLE, word)
        jit.choice.cache_clear()

    yield set_variable
    jit.choice.cache_clear()


def test_the_choice_by_device(choose: Callable[[str], None]):
    """On a CPU `auto` and `reference` are the plain form; float64 is plain under any choice."""
    for choice, expected in {"auto": False, "reference": False, "triton": True}.items():
        choose(choice)
        assert use_triton(X) is expected
        assert not use_triton(X.double())


def test_choices_that_cannot_be_are_refused(
    choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    """An unknown word, Triton asked for on a CPU, Triton asked for and absent."""
    choose("fast")
    with pytest.raises(ValueError, match="'fast': choose one of auto, compiled, reference, triton"):
        use_triton(X)
    choose("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="tensors are on cpu.*TRITON_INTERPRET=1"):
        use_triton(X)
    monkeypatch.setattr(jit, "installed", lambda: False)
    with pytest.raises(ValueError, match="not installed: pip install triton"):
        use_triton(X)


def test_recorded_launches_run_nothing():
    """Sizes of a real model on the meta device: the launch is written down with its arguments."""
    x = torch.empty(64, 8192, dtype=torch.bfloat16, device="meta")
    with recorded() as launches:
        rms_norm(x, x[0], 1e-5)
    (launch,) = launches
    assert launch.grid == (64,) and launch.num_warps == 16
    assert launch.arguments["size"] == 8192 and launch.arguments["x"] is x


def test_ops_import_and_run_without_triton():
    """Importing every op imports no Triton, and the plain forms run where it cannot be imported."""
    program = """
import sys
sys.modules["triton"] = None
import torch
from draftsmith.kernels import (accept_chains, add_norm, distill_chunk, kv_append, kv_move,
    norm_concat, paged_attention, place_rows, renormalise, shift)
x = torch.randn(2, 8)
assert torch.equal(norm_concat.norm_concat(x, x, None, None, 1e-5), torch.cat([x, x], 1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
