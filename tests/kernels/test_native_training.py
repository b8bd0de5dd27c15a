"""C++ forms of a training step against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.kernels.distill_chunk import distill_chunk, distill_chunk_reference
from draftsmith.kernels.distill_loss import distill_loss
from draftsmith.kernels.native import Native
from draftsmith.kernels.rms_norm import rms_norm
from draftsmith.kernels.ttt_attention import ttt_attention

needs_compiler = pytest.mark.skipif(
    Native("rms_norm", {}).library is None, reason="no C++ compiler on this machine"
)


@needs_compiler
def test_a_chunk_equals_its_definition(choose: Callable[[str], None]):
    """Figures and gradient, odd numbers of rows and columns, ties, a cap, both types."""
    choose("compiled")
    torch.manual_seed(0)
    for dtype, softcap, size in (
        (torch.float32, 5.0, 37),
        (torch.bfloat16, None, 4097),
    ):
        students = (torch.randn(5, size) * 3).to(dtype)
        teachers = (torch.randn(3, size) * 3).to(dtype)
        students[1, [7, 30]] = 20.0
        rows = torch.tensor([0, 2, 2, 1, 0])
        exact = students.double()
        with torch.no_grad():
            figures = distill_chunk(students, teachers, rows, logit_scale=0.7, softcap=softcap)
        expected = distill_chunk_reference(
            exact, teachers.double(), rows, logit_scale=0.7, softcap=softcap
        )
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(students.double(), exact, rtol=tolerance, atol=2e-6)
        for got, want in zip(figures[:3], expected[:3], strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
        assert torch.equal(figures.student_top, expected.student_top)
        assert torch.equal(figures.teacher_top, expected.teacher_top)


@needs_compiler
@pytest.mark.parametrize("own_head", [False, True])
def test_the_loss_is_the_same_through_it(choose: Callable[[str], None], own_head: bool):
    """Value, every gradient and every statistic against the plain form; rows of many chunks, rows
    that some steps leave out."""
    torch.manual_seed(0)
    steps, rows, hidden, columns = 3, 41, 16, 4099
    students = torch.randn(steps, rows, hidden)
    teacher, head = torch.randn(rows, hidden), torch.randn(columns, hidden)
    weight = torch.rand(steps, rows) * (torch.rand(steps, rows) > 0.4)
    own = torch.randn(columns, hidden) if own_head else None

    def run() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (students, own) if x is not None]
        loss, stats = distill_loss(
            leaves[0],
            teacher,
            weight,
            head,
            student_head=leaves[1] if own_head else None,
            chunk=24,
        )
        return [loss.detach(), *torch.autograd.grad(loss, leaves), *stats]

    choose("compiled")
    fused = run()
    choose("reference")
    for got, want in zip(fused, run(), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@needs_compiler
def test_a_training_step_is_the_same_through_it(choose: Callable[[str], None]):
    """Norms and the chain's part of attention: values and gradients against the plain forms."""
    torch.manual_seed(0)
    x, weight = torch.randn(37, 24), torch.rand(24)
    q, k, v = torch.randn(4, 37, 16), torch.randn(2, 37, 16), torch.randn(2, 37, 16)
    chain = [torch.randn(2, 37, 16) for _ in range(4)]

    def run() -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in (x, weight, q, k, v, *chain)]
        normed = rms_norm(leaves[0], leaves[1], 1e-5)
        seen = ttt_attention(
            leaves[2], leaves[3], leaves[4], leaves[5:7], leaves[7:], [0, 20, 37], scaling=0.25
        )
        loss = normed.square().sum() + (seen * seen.detach().roll(1)).sum()
        return [normed.detach(), seen.detach(), *torch.autograd.grad(loss, leaves)]

    choose("compiled")
    fused = run()
    choose("reference")
    for got, want in zip(fused, run(), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
