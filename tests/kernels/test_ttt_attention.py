"""Chain attention against its dense definition: outputs, every gradient, and memory that is linear
in the tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.kernels import ttt_attention as module
from draftsmith.kernels.ttt_attention import QUERY_BLOCK, ttt_attention, ttt_attention_dense

SHAPES = {
    "one-token": ([1], 4, 2),
    "rows-of-one": ([1, 1, 1], 2, 1),
    "odd-rows": ([1, 7, 33, 2], 4, 2),
    "gqa-9-3": ([5, 29], 9, 3),
    "mha": ([17], 3, 3),
    "over-one-block": ([QUERY_BLOCK + 5, 3, QUERY_BLOCK], 3, 1),
}
DTYPES = {"fp64": (torch.float64, 1e-10), "fp32": (torch.float32, 5e-6)}


@pytest.fixture(params=["flash", "blocks"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of a CPU; blocks serve what flash attention does not, and other devices."""
    if request.param == "blocks":
        monkeypatch.setattr(module, "flash_serves", lambda *_: False)
    return request.param


def _inputs(
    lengths: list[int], heads: int, kv_heads: int, steps: int, dtype: torch.dtype, width: int = 8
):
    """q, k0, v0, chain keys, chain values (as the rows of a packed [N, heads, D] buffer) and the
    borders."""
    generator = torch.Generator().manual_seed(sum(lengths) + 7 * steps)

    def make(num_heads: int, size: int) -> Tensor:
        rows = torch.randn(sum(lengths), num_heads, size, generator=generator, dtype=torch.float64)
        return rows.to(dtype).transpose(0, 1).requires_grad_()

    chain_k = [make(kv_heads, 8) for _ in range(steps)]
    chain_v = [make(kv_heads, width) for _ in range(steps)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return make(heads, 8), make(kv_heads, 8), make(kv_heads, width), chain_k, chain_v, starts


def _compare(inputs: tuple, tolerance: float, **options: Any) -> None:
    q, k0, v0, chain_k, chain_v, starts = inputs
    leaves = [q, k0, v0, *chain_k, *chain_v]
    options = {"scaling": 0.3, **options}
    ours = ttt_attention(*inputs, **options)
    dense = ttt_attention_dense(*inputs, **options)
    torch.testing.assert_close(ours, dense, rtol=0, atol=tolerance)
    pull = torch.randn(
        dense.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).to(q.dtype)
    for name, a, b in zip(
        ["q", "k0", "v0", *(f"chain[{i}]" for i in range(2 * len(chain_k)))],
        torch.autograd.grad(ours, leaves, pull),
        torch.autograd.grad(dense, leaves, pull),
        strict=True,
    ):
        scale = max(1.0, float(b.abs().max()))
        torch.testing.assert_close(
            a, b, rtol=0, atol=tolerance * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_equal_the_definition(dtype: str, shape: str, steps: int) -> None:
    """Steps 0 to 3 of an unroll over ragged rows, in fp64 to 1e-10 and in fp32 to 5e-6 of the
    largest entry."""
    precision, tolerance = DTYPES[dtype]
    _compare(_inputs(*SHAPES[shape], steps, precision), tolerance)


@pytest.mark.parametrize("window", [1, 2, 3, 9, 200])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_sliding_window_hides_keys_by_position(window: int, steps: int) -> None:
    """The query of step k stands at p + k, so the window shortens by k on step-0 keys and then eats
    the chain."""
    _compare(
        _inputs([1, 7, 33, QUERY_BLOCK + 20], 4, 2, steps, torch.float64), 1e-10, window=window
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_soft_cap_bounds_scores_before_the_mask(steps: int, window: int | None) -> None:
    """softcap * tanh(score / softcap), with its derivative, alone and under a window."""
    inputs = _inputs([3, 20], 4, 2, steps, torch.float64)
    _compare(inputs, 1e-10, softcap=1.5, window=window, scaling=1.1)


OPTIONS = {"plain": {}, "window": {"window": 4}, "softcap": {"softcap": 1.5}}


def _slice(inputs: tuple, begin: int, end: int) -> tuple:
    """Inputs whose queries are the rows [begin, end)."""
    q, k0, v0, chain_k, chain_v, starts = inputs

    def cut(x: Tensor) -> Tensor:
        return x[:, begin:end].detach().requires_grad_()

    return cut(q), k0, v0, [cut(k) for k in chain_k], [cut(v) for v in chain_v], starts


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 9), (5, 40), (40, QUERY_BLOCK + 30), (QUERY_BLOCK + 70, None), (8, 9)]
)
def test_a_slice_of_the_queries_sees_the_keys_of_all_rows(
    begin: int, end: int | None, steps: int, options: str
) -> None:
    """Rows [begin, end) against the keys of all: the definition's rows and gradients, which are
    zero at keys that none of them sees."""
    inputs = _inputs([7, 2 * QUERY_BLOCK, 5], 4, 2, steps, torch.float64, width=11)
    end = inputs[0].shape[1] if end is None else end
    _compare(_slice(inputs, begin, end), 1e-10, offset=begin, **OPTIONS[options])


def test_slices_add_up_to_the_whole() -> None:
    """Outputs of three slices are those of one call, and the keys' gradients add up to its."""
    inputs = _inputs([7, 2 * QUERY_BLOCK, 5], 4, 2, 1, torch.float64)
    whole = ttt_attention(*inputs, scaling=0.3)
    borders = [0, 90, 200, whole.shape[1]]
    parts = [
        ttt_attention(*_slice(inputs, a, b), scaling=0.3, offset=a)
        for a, b in itertools.pairwise(borders)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    keys = inputs[1:3]
    squares = torch.stack([part.square().sum() for part in parts])
    summed = torch.autograd.grad(squares.sum(), keys)
    for a, b in zip(summed, torch.autograd.grad(whole.square().sum(), keys), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_values_may_be_wider_than_keys() -> None:
    """Families with latent attention have other value widths."""
    _compare(_inputs([3, 20], 4, 2, 2, torch.float64, width=13), 1e-10)


def test_bf16_stays_near_the_definition_in_fp64() -> None:
    """bf16 inputs: the output is within bf16 rounding of the exact one, and so is each gradient."""
    q, k0, v0, chain_k, chain_v, starts = _inputs([200, 3], 9, 3, 2, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (q, k0, v0, *chain_k, *chain_v)]
    ours = ttt_attention(q, k0, v0, chain_k, chain_v, starts, scaling=0.3)
    dense = ttt_attention_dense(
        exact[0], exact[1], exact[2], exact[3:5], exact[5:], starts, scaling=0.3
    )
    torch.testing.assert_close(ours.double(), dense, rtol=0, atol=0.03)
    leaves = [q, k0, v0, *chain_k, *chain_v]
    pull = torch.randn(
        dense.shape, generator=torch.Generator().manual_seed(3), dtype=torch.bfloat16
    )
    for a, b in zip(
        torch.autograd.grad(ours, leaves, pull),
        torch.autograd.grad(dense, exact, pull.double()),
        strict=True,
    ):
        assert float((a.double() - b).norm() / b.norm()) < 0.02


@pytest.mark.parametrize("steps", [0, 2])
def test_documents_never_see_each_other(steps: int) -> None:
    """Poisoning one document with NaN leaves the outputs and gradients of its neighbours bit for
    bit as they were."""
    q, k0, v0, chain_k, chain_v, starts = _inputs([9, 140, 6], 4, 2, steps, torch.float32)
    leaves = [q, k0, v0, *chain_k, *chain_v]

    def outputs(tensors: list[Tensor]) -> list[Tensor]:
        chains = tensors[3 : 3 + steps], tensors[3 + steps :]
        out = ttt_attention(tensors[0], tensors[1], tensors[2], *chains, starts, scaling=0.3)
        kept = torch.cat([out[:, :9], out[:, 149:]], 1)
        grads = torch.autograd.grad(kept.sum(), tensors)
        return [kept, *(torch.cat([g[:, :9], g[:, 149:]], 1) for g in grads)]

    poisoned = []
    for leaf in leaves:
        bad = leaf.detach().clone()
        bad[:, 9:149] = float("nan")
        poisoned.append(bad.requires_grad_())
    for clean, other in zip(outputs(leaves), outputs(poisoned), strict=True):
        assert torch.equal(clean, other)


class _Largest(TorchDispatchMode):
    """The largest tensor any operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_no_tensor_grows_with_the_square_of_the_tokens() -> None:
    """Forward and backward: the largest tensor doubles when the row does (N * block, never N *
    N)."""

    def largest(num_tokens: int) -> int:
        q, k0, v0, chain_k, chain_v, starts = _inputs([num_tokens], 2, 1, 2, torch.float32)
        with _Largest() as seen:
            ttt_attention(q, k0, v0, chain_k, chain_v, starts, scaling=0.3).sum().backward()
        assert seen.numel < num_tokens * num_tokens
        return seen.numel

    assert largest(2048) <= 2.1 * largest(1024)


def test_little_is_saved_for_backward(form: str) -> None:
    """The tensors autograd keeps are the inputs themselves, and for flash attention its output and
    one number a query: no probabilities, no copies."""
    q, k0, v0, chain_k, chain_v, starts = _inputs([300], 2, 1, 2, torch.float32)
    known = {t.data_ptr() for t in (q, k0, v0, *chain_k, *chain_v)}
    saved: dict[int, torch.Size] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.data_ptr(), t.shape) and t, lambda t: t
    ):
        out = ttt_attention(q, k0, v0, chain_k, chain_v, starts, scaling=0.3)
    new = [shape for place, shape in saved.items() if place not in known]
    assert saved and new == ([out.shape, out.shape[:2]] if form == "flash" else [])


def test_every_lane_is_written(nan_memory: None) -> None:
    """With NaN in fresh memory, outputs and gradients are still the definition's."""
    _compare(_inputs([1, 7, QUERY_BLOCK + 9], 4, 2, 2, torch.float64), 1e-10)


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    """Each refusal says what came and what belongs there."""
    q, k0, v0, chain_k, chain_v, starts = _inputs([4, 5], 4, 2, 1, torch.float32)
    with pytest.raises(ValueError, match=r"multiple of Hkv"):
        ttt_attention(q[:3], k0, v0, chain_k, chain_v, starts, scaling=1.0)
    with pytest.raises(ValueError, match=r"one pair per"):
        ttt_attention(q, k0, v0, chain_k, [], starts, scaling=1.0)
    with pytest.raises(ValueError, match=r"\(0, 4\) must run from 0 to the number of tokens, 9"):
        ttt_attention(q, k0, v0, chain_k, chain_v, starts[:2], scaling=1.0)
    with pytest.raises(ValueError, match=r"window 0 hides every key"):
        ttt_attention(q, k0, v0, chain_k, chain_v, starts, scaling=1.0, window=0)
    with pytest.raises(ValueError, match=r"queries 1 .. 9 \(offset 1\) must lie among the 9 rows"):
        ttt_attention(q, k0, v0, chain_k, chain_v, starts, scaling=1.0, offset=1)
    with pytest.raises(AssertionError, match="empty document"):
        ttt_attention(q, k0, v0, chain_k, chain_v, [0, 4, 4, 9], scaling=1.0)
