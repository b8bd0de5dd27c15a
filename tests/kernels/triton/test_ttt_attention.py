"""The fused form of chain attention against the dense definition: outputs and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.ttt_attention import ttt_attention, ttt_attention_dense

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
SHAPES: dict[str, tuple[list[int], tuple[int, int], tuple[int, int]]] = {
    "one token": ([1], (4, 2), (8, 8)),
    "documents of one": ([1, 1, 1], (2, 1), (8, 5)),
    "odd documents": ([1, 7, 33, 2], (4, 2), (9, 5)),
    "over one block": ([5, 70], (3, 1), (8, 8)),
    "keys wider than values": ([17, 3], (2, 2), (144, 16)),
}


def _inputs(
    lengths: list[int],
    heads: tuple[int, int],
    widths: tuple[int, int],
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], Tensor]:
    """q, k0, v0, chain keys, chain values, as rows of a packed [N, heads, width] buffer."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(sum(lengths) + 7 * steps)

    def make(num_heads: int, width: int) -> Tensor:
        rows = torch.randn(sum(lengths), num_heads, width, generator=generator)
        return rows.to(dtype).transpose(0, 1).requires_grad_()

    leaves = [make(heads[0], widths[0]), make(heads[1], widths[0]), make(heads[1], widths[1])]
    leaves += [make(heads[1], widths[0]) for _ in range(steps)]
    leaves += [make(heads[1], widths[1]) for _ in range(steps)]
    return leaves, torch.tensor([0, *itertools.accumulate(lengths)])


def _run(op: Any, leaves: list[Tensor], starts: Tensor, pull: Tensor, **options: Any):
    """The output and all gradients."""
    steps = (len(leaves) - 3) // 2
    chain = leaves[3 : 3 + steps], leaves[3 + steps :]
    out = op(*leaves[:3], *chain, starts, scaling=leaves[0].shape[-1] ** -0.5, **options)
    return out, *torch.autograd.grad(out, leaves, pull.to(out.dtype))


def _compare(leaves: list[Tensor], starts: Tensor, **options: Any) -> None:
    dtype = leaves[0].dtype
    pull = torch.randn(leaves[0].shape[0], leaves[0].shape[1], leaves[2].shape[2]).to(dtype)
    ours = _run(ttt_attention, leaves, starts, pull, **options)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    dense = _run(ttt_attention_dense, exact, starts, pull, **options)
    for got, want in zip(ours, dense, strict=True):
        assert got.dtype == dtype
        scale = max(1.0, float(want.detach().abs().max()))
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_outputs_and_gradients_equal_the_definition(shape: str, steps: int):
    """Ragged documents, groups of query heads, unequal widths."""
    _compare(*_inputs(*SHAPES[shape], steps))


@pytest.mark.parametrize("steps", [0, 2])
def test_bfloat16(steps: int):
    """Loads are widened at once, sums are float32."""
    _compare(*_inputs(*SHAPES["odd documents"], steps, torch.bfloat16))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 3, 40])
@pytest.mark.parametrize("steps", [0, 3])
def test_window_and_soft_cap(steps: int, window: int, softcap: float | None):
    """A window of one hides the whole causal block from step 1 on."""
    _compare(*_inputs([1, 70], (2, 1), (8, 8), steps), window=window, softcap=softcap)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("begin", "end"), [(0, 3), (30, 75), (5, 6)])
def test_a_slice_of_the_queries(begin: int, end: int, steps: int, options: dict[str, Any]):
    """Queries of rows [begin, end) against the keys of all 75."""
    leaves, starts = _inputs([5, 70], (3, 1), (8, 8), steps)
    for number in (0, *range(3, len(leaves))):
        leaves[number] = leaves[number][:, begin:end].detach().requires_grad_()
    _compare(leaves, starts, offset=begin, **options)


@pytest.mark.parametrize("steps", [0, 2])
def test_keys_that_no_query_sees_are_not_read(steps: int):
    """NaN in the document before a slice of queries and behind the slice: outputs are those of
    clean keys, and the gradients of the poisoned ones are 0."""
    results = []
    for poison in (0.0, float("nan")):
        leaves, starts = _inputs([5, 70], (3, 1), (8, 8), steps)
        for number in (0, *range(3, len(leaves))):
            leaves[number] = leaves[number][:, 30:41].detach().requires_grad_()
        for number in (1, 2):
            dirty = leaves[number].detach().clone()
            dirty[:, :5], dirty[:, 41:] = poison, poison
            leaves[number] = dirty.requires_grad_()
        pull = torch.linspace(-1, 1, 3 * 11 * 8).view(3, 11, 8)
        results.append(_run(ttt_attention, leaves, starts, pull, offset=30))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    assert not bool(results[1][2][:, 41:].any()) and bool(results[1][2][:, 5:41].any())


@pytest.mark.parametrize("steps", [0, 2])
def test_a_document_that_is_nan_leaves_its_neighbours_alone(steps: int):
    """All of the middle document, its gradient included: the others, which would share a block with
    it, give the bits that they give beside a clean one, and it gives NaN."""
    results = []
    for poison in (0.0, float("nan")):
        leaves, starts = _inputs([5, 9, 70], (3, 1), (8, 8), steps)
        pull = torch.linspace(-1, 1, 3 * 84 * 8).view(3, 84, 8)
        pull[:, 5:14] += poison
        for number, leaf in enumerate(leaves):
            dirty = leaf.detach().clone()
            dirty[:, 5:14] += poison
            leaves[number] = dirty.requires_grad_()
        results.append(_run(ttt_attention, leaves, starts, pull))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean[:, :5], poisoned[:, :5])
        assert torch.equal(clean[:, 14:], poisoned[:, 14:])
        assert bool(poisoned[:, 5:14].isnan().all()) and not bool(clean.isnan().any())


def test_runs_repeat_bit_for_bit():
    """No sum depends on the order of programs: two runs give the same gradients."""
    leaves, starts = _inputs(*SHAPES["over one block"], 2)
    pull = torch.randn(3, 75, 8)
    one, other = (_run(ttt_attention, leaves, starts, pull) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_rows_further_apart_than_32_bits_count(far_memory: Callable[[int], Tensor]):
    """Keys with a row stride of 2**30: row 2 begins at element 2**31."""
    near = torch.randn(1, 3, 8).bfloat16()
    far = far_memory(64).as_strided((1, 3, 8), (8, 2**30, 1))
    far.copy_(near)
    results = []
    for q in (near, far):
        leaves = [q.detach().requires_grad_() for _ in range(3)]
        results.append(_run(ttt_attention, leaves, torch.tensor([0, 3]), torch.ones(1, 3, 8)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
