"""Attention of an unrolled head against its dense forms, forward and backward.

9 query and 3 key heads of 64 (a 135M target), step 2 of an unroll over one document, bfloat16.
`mask` is PyTorch's fused attention with the whole boolean mask [N, 3N], `definition` the softmax
written out.

    python -m draftsmith.scripts.bench.attention [OUT.json]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.ttt_attention import ttt_attention, ttt_attention_dense
from ._forms import compare
from .train import sdpa_attention

HEADS, KEY_HEADS, WIDTH, STEPS = 9, 3, 64, 2
FORMS = {"ours": ttt_attention, "mask": sdpa_attention, "definition": ttt_attention_dense}


def make(form: str, tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    """One forward and backward pass; the gradients of all tensors."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        rows = torch.randn(tokens, heads, WIDTH, generator=generator)
        return rows.bfloat16().transpose(0, 1).requires_grad_()

    q, pull = random(HEADS), random(HEADS).detach()
    keys, values = ([random(KEY_HEADS) for _ in range(1 + STEPS)] for _ in range(2))
    attention = FORMS[form]

    def call() -> tuple[Tensor, ...]:
        out = attention(
            q,
            keys[0],
            values[0],
            keys[1:],
            values[1:],
            [0, tokens],
            scaling=WIDTH**-0.5,
            window=None,
            softcap=None,
        )
        return torch.autograd.grad(out, [q, *keys, *values], pull)

    return call


if __name__ == "__main__":
    title = f"attention of step {STEPS}"
    sys.exit(compare(title, make, "ours", ("mask", "definition"), sys.argv[1:]))
