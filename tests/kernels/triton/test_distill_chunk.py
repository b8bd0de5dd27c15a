"""The loss of a chunk of logits and the gradient written over it, against autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.kernels.distill_chunk import distill_chunk, distill_chunk_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", [1, 37, 4097])
def test_figures_and_gradient(size: int, softcap: float | None, dtype: torch.dtype):
    """Odd vocabularies, several students of one teacher row, a teacher row without a student that
    holds NaN."""
    students, teachers = (torch.randn(5, size) * 3).to(dtype), (torch.randn(4, size) * 3).to(dtype)
    teachers[3] = float("nan")
    rows = torch.tensor([0, 2, 2, 1, 0])
    exact = students.double()
    figures = distill_chunk(students, teachers, rows, logit_scale=0.7, softcap=softcap)
    expected = distill_chunk_reference(
        exact, teachers.double(), rows, logit_scale=0.7, softcap=softcap
    )
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(students.double(), exact, rtol=tolerance, atol=1e-6)
    for got, want in zip(figures[:3], expected[:3], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(figures.student_top, expected.student_top)
    assert torch.equal(figures.teacher_top, expected.teacher_top)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_definition_is_the_gradient_of_its_loss(softcap: float | None):
    """What is written equals autograd's derivative of `cross`, but for the factor logit_scale."""
    logits = torch.randn(3, 19, dtype=torch.float64, requires_grad=True)
    teachers, scale = torch.randn(3, 19, dtype=torch.float64), 0.7
    z, t = logits * scale, teachers * scale
    if softcap is not None:
        z, t = softcap * torch.tanh(z / softcap), softcap * torch.tanh(t / softcap)
    loss = -(t.softmax(-1) * z.log_softmax(-1)).sum(-1)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    written = logits.detach().clone()
    figures = distill_chunk_reference(
        written, teachers, torch.arange(3), logit_scale=scale, softcap=softcap
    )
    torch.testing.assert_close(written * scale, grad)
    torch.testing.assert_close(figures.cross, loss.detach())


@pytest.mark.parametrize("size", [49152, 151936])
def test_real_vocabularies(size: int):
    """Sums over many blocks; ties take the first column, in the middle of a block or across two."""
    students, teachers = torch.randn(2, size), torch.randn(1, size)
    students[0, [4000, 4100, size - 1]] = 9.0
    teachers[0, [size // 2, size - 2]] = 9.0
    before = students.clone()
    rows = torch.tensor([0, 0])
    figures = distill_chunk(students, teachers, rows, with_gradient=False)
    assert torch.equal(students, before), "nothing is written without a gradient"
    expected = distill_chunk_reference(students.double(), teachers.double(), rows)
    for got, want in zip(figures[:3], expected[:3], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert figures.student_top[0] == 4000 and figures.teacher_top[0] == size // 2


def test_teachers_behind_the_reach_of_32_bits(far_memory: Callable[[int], torch.Tensor]):
    """Row 2**14 of 2**17 columns begins at element 2**31."""
    far = far_memory(2**17).view(2**14 + 1, 2**17)
    far[2**14, [7, 2**17 - 3]] = 5
    students = torch.randn(1, 2**17).bfloat16()
    copy, rows = students.clone(), torch.tensor([2**14])
    figures = distill_chunk(students, far, rows)
    near = distill_chunk(copy, far[2**14 :].clone(), torch.tensor([0]))
    assert torch.equal(students, copy) and figures.teacher_top.tolist() == [7]
    for got, want in zip(figures, near, strict=True):
        assert torch.equal(got, want)


def test_no_rows():
    """A chunk of no students gives no figures."""
    empty = torch.empty(0, dtype=torch.int64)
    figures = distill_chunk(torch.empty(0, 7), torch.randn(1, 7), empty)
    assert all(tensor.shape == (0,) for tensor in figures)
