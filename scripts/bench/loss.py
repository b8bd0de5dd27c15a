"""The distillation loss against its dense form: lm_head, loss and the students' gradient.

H = 576, V = 49,152 (a 135M target), one student a row, bfloat16 states and head, KL. The dense form
is what one writes first: all logits of students and teacher, softmax in float32, autograd.

    python -m draftsmith.scripts.bench.loss [OUT.json]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.distill_loss import distill_loss
from ._forms import compare

HIDDEN, VOCABULARY = 576, 49152


def dense_loss(students: Tensor, teacher: Tensor, weight: Tensor, head: Tensor) -> Tensor:
    """`distill_loss` with every logit written out."""
    p = torch.softmax((teacher @ head.T).float(), -1)
    log_q = torch.log_softmax((students @ head.T).float(), -1)
    return -(weight[..., None] * p * log_q).sum()


def make(form: str, tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    """One forward and backward pass; what is returned is the students' gradient."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    head, teacher = random(VOCABULARY, HIDDEN) * 0.1, random(tokens, HIDDEN)
    students, weight = random(1, tokens, HIDDEN).requires_grad_(), torch.ones(1, tokens)

    def call() -> tuple[Tensor, ...]:
        if form == "ours":
            loss, _ = distill_loss(students, teacher, weight, head)
        else:
            loss = dense_loss(students, teacher, weight, head)
        return torch.autograd.grad(loss, students)

    return call


if __name__ == "__main__":
    sys.exit(compare("distillation loss", make, "ours", ("dense",), sys.argv[1:]))
