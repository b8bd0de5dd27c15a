"""The backward pass in matrix tiles against float64, where the processor has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.kernels import tiled_pull
from draftsmith.kernels.ttt_attention import ttt_attention, ttt_attention_dense

CASES = {
    "one document": (9, 3, 64, (0, 300)),
    "several, of odd sizes": (4, 2, 64, (0, 1, 40, 128, 257)),
    "narrow": (2, 2, 32, (0, 130)),
    "wide": (6, 1, 128, (0, 33, 161)),
    "a block and a row": (2, 1, 64, (0, 129)),
}


def gradients(
    form: Callable[..., Tensor], leaves: list[Tensor], bounds: tuple[int, ...], pulled: Tensor
) -> list[Tensor]:
    """Of q, k, v and two chain steps."""
    q, k, v, *chain = leaves
    out = form(q, k, v, chain[:2], chain[2:], bounds, scaling=q.shape[-1] ** -0.5)
    return list(torch.autograd.grad(out, leaves, pulled.to(q.dtype)))


@pytest.mark.skipif(
    not tiled_pull.serves(torch.empty(1, 1, 32, dtype=torch.bfloat16)),
    reason="no AMX, or no compiler, here",
)
@pytest.mark.parametrize("name", list(CASES))
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    """Of queries, committed keys and values with a chain beside them, not transposed and
    transposed in memory: as near to float64 as bfloat16 lets them be, nearer than PyTorch's."""
    heads, key_heads, width, bounds = CASES[name]
    generator = torch.Generator().manual_seed(0)
    tokens = bounds[-1]
    counts = [heads, *[key_heads] * 6]
    leaves = [
        torch.randn(tokens, n, width, generator=generator).bfloat16().transpose(0, 1)
        for n in counts
    ]
    pulled = torch.randn(tokens, heads, width, generator=generator).bfloat16().transpose(0, 1)
    exact = gradients(
        ttt_attention_dense, [x.double().requires_grad_() for x in leaves], bounds, pulled
    )
    errors = []
    for served in (True, False):
        if not served:
            monkeypatch.setattr(tiled_pull, "serves", lambda q: False)
        found = gradients(
            ttt_attention, [x.detach().requires_grad_() for x in leaves], bounds, pulled
        )
        assert all(one.isfinite().all() for one in found)
        errors.append(
            [
                float((got.double() - want).norm() / want.norm())
                for got, want in zip(found, exact, strict=True)
            ]
        )
    for ours, theirs in zip(*errors, strict=True):
        assert ours < 5e-3 and ours < 1.3 * theirs


def test_what_it_does_not_serve():
    """Other types and widths."""
    assert not tiled_pull.serves(torch.empty(1, 4, 64))
    assert not tiled_pull.serves(torch.empty(1, 4, 48, dtype=torch.bfloat16))
    assert not tiled_pull.serves(torch.empty(1, 4, 256, dtype=torch.bfloat16))
