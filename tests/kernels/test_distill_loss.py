"""The chunked distillation loss against its float64 definition: value, gradient, statistics,
memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.kernels.distill_loss import DistillStats, distill_loss

_Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def _inputs(
    steps: int,
    rows: int,
    hidden: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
) -> _Inputs:
    """students, teacher, weight (about a third zero), head_weight."""
    generator = torch.Generator().manual_seed(steps * 1000 + rows)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = torch.rand(steps, rows, generator=generator)
    weight = weight * (torch.rand(steps, rows, generator=generator) > 0.33)
    head = make(columns, hidden) * spread / hidden**0.5
    return (
        make(steps, rows, hidden).to(dtype).requires_grad_(),
        make(rows, hidden).to(dtype),
        weight,
        head.to(dtype),
    )


def _definition(
    students: Tensor,
    teacher: Tensor,
    weight: Tensor,
    head: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, DistillStats]:
    """The formula with every logit written out, in float64."""

    def logits(states: Tensor) -> Tensor:
        z = logit_scale * (states.double() @ head.double().T)
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    z, target = logits(students), logits(teacher)
    log_q, p = z.log_softmax(-1), target.softmax(-1)
    cross = -(p * log_q).sum(-1)
    entropy = -(p * target.log_softmax(-1)).sum(-1)
    active = weight > 0
    top, teacher_top = z.argmax(-1), target.argmax(-1)
    losses = (weight.double() * cross).sum(1)
    stats = DistillStats(
        weight=weight.double().sum(1),
        rows=active.sum(1),
        loss=losses.detach(),
        cross=losses.detach(),
        kl=((cross - entropy) * active).sum(1).detach(),
        acceptance=(torch.minimum(p, log_q.exp()).sum(-1) * active).sum(1).detach(),
        agreement=((top == teacher_top) & active).sum(1),
        student_top=torch.where(active, top, -1),
        teacher_top=torch.where(active.any(0), teacher_top, -1),
        outside=torch.zeros(weight.shape[0], dtype=torch.float64),
    )
    return losses.sum(), stats


def _compare(inputs: _Inputs, tolerance: float, chunk: int | None = None, **options: Any) -> None:
    students = inputs[0]
    loss, stats = distill_loss(*inputs, chunk=chunk, **options)
    exact, exact_stats = _definition(*inputs, **options)
    assert float((loss.double() - exact).abs().detach()) <= tolerance * max(
        1.0, float(exact.detach())
    )
    for name, ours, right in zip(DistillStats._fields, stats, exact_stats, strict=True):
        exactly = not ours.is_floating_point()
        torch.testing.assert_close(
            ours.to(right.dtype),
            right,
            rtol=0 if exactly else tolerance,
            atol=0 if exactly else 100 * tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )
    (grad,) = torch.autograd.grad(3 * loss, students)
    (right,) = torch.autograd.grad(3 * exact, students)
    scale = max(1.0, float(right.abs().max()))
    torch.testing.assert_close(grad.double(), right.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("columns", [1, 17, 511, 512, 1000, 1024])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_value_gradient_and_statistics_equal_the_definition(steps: int, columns: int) -> None:
    """K = 1..4 with zero weights in any pattern, widths around the argmax block, in float64."""
    _compare(_inputs(steps, 23, 16, columns, torch.float64), 1e-10)


@pytest.mark.parametrize("chunk", [2, 3, 7, 16, 1000])
def test_the_chunk_changes_nothing(chunk: int) -> None:
    """Any number of logit rows at a time gives the same result."""
    _compare(_inputs(3, 37, 16, 600, torch.float64), 1e-10, chunk)


def test_fp32_is_accurate() -> None:
    """fp32 inputs to 5e-6 of the float64 definition."""
    _compare(_inputs(3, 37, 32, 1000, torch.float32), 5e-6)


def test_the_whole_vocabulary_of_a_real_target() -> None:
    """V = 49,152, a handful of rows."""
    _compare(_inputs(2, 5, 32, 49152, torch.float32, spread=3.0), 5e-6)


@pytest.mark.parametrize("spread", [60.0, 400.0])
def test_saturated_rows_stay_finite_and_right(spread: float) -> None:
    """Distributions that are one-hot to the last bit: no NaN from 0 * log 0, the gradient is the
    definition's."""
    _compare(_inputs(2, 19, 16, 700, torch.float32, spread=spread), 5e-5)


def test_logit_scale_and_soft_cap_are_part_of_both_distributions() -> None:
    """The target's finishing of logits and its derivative."""
    _compare(_inputs(2, 19, 16, 700, torch.float64), 1e-10, logit_scale=0.6)
    _compare(
        _inputs(2, 19, 16, 700, torch.float64, spread=4.0), 1e-10, 8, logit_scale=1.7, softcap=2.5
    )


def test_no_weight_at_all_adds_exactly_zero() -> None:
    """An all-masked batch: loss 0, gradient 0, nothing counted, and backward still runs (34)."""
    students, teacher, weight, head = _inputs(2, 9, 16, 64)
    loss, stats = distill_loss(students, teacher, torch.zeros_like(weight), head)
    (grad,) = torch.autograd.grad(loss, students)
    assert float(loss.detach()) == 0.0 and not bool(grad.any())
    assert stats.rows.tolist() == [0, 0] and stats.agreement.tolist() == [0, 0]


def test_rows_without_weight_are_never_read() -> None:
    """NaN in unsupervised students and in teachers no student needs changes no bit of the
    result."""
    students, teacher, weight, head = _inputs(3, 31, 16, 300)
    weight[:, 4:9] = 0
    loss, _ = distill_loss(students, teacher, weight, head, chunk=16)
    (grad,) = torch.autograd.grad(loss, students)
    poisoned = torch.where(weight[..., None] > 0, students.detach(), float("nan")).requires_grad_()
    teacher = torch.where((weight > 0).any(0)[:, None], teacher, float("nan"))
    again, _ = distill_loss(poisoned, teacher, weight, head, chunk=16)
    (grad_again,) = torch.autograd.grad(again, poisoned)
    assert torch.equal(loss, again) and torch.equal(grad, grad_again)


def test_head_and_teacher_get_no_gradient() -> None:
    """Only students learn, even when the other tensors would accept a gradient."""
    students, teacher, weight, head = _inputs(1, 5, 16, 64)
    teacher.requires_grad_()
    head.requires_grad_()
    distill_loss(students, teacher, weight, head)[0].backward()
    assert students.grad is not None and teacher.grad is None and head.grad is None


def test_without_grad_mode_no_gradient_is_worked_out() -> None:
    """Validation pays for the forward pass only: same value, no graph."""
    inputs = _inputs(2, 9, 16, 300)
    with torch.no_grad():
        loss, _ = distill_loss(*inputs)
    assert not loss.requires_grad
    assert torch.equal(loss, distill_loss(*inputs)[0].detach())


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_products_with_fp32_softmax(autocast: bool) -> None:
    """bf16 inputs, or fp32 inputs under autocast: within bf16 rounding of the definition, gradient
    in the students' dtype."""
    dtype = torch.float32 if autocast else torch.bfloat16
    students, teacher, weight, head = _inputs(2, 40, 64, 900, dtype, spread=2.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = distill_loss(students, teacher, weight, head)
    (grad,) = torch.autograd.grad(loss, students)
    exact, _ = _definition(students, teacher, weight, head)
    (right,) = torch.autograd.grad(exact, students)
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    assert float((loss.double() - exact).abs().detach()) < 2e-3 * float(exact.detach())
    assert float((grad.double() - right.double()).norm() / right.double().norm()) < 0.02


def test_the_factor_of_the_loss_is_not_rounded_to_bf16() -> None:
    """A run divides by its supervised weight in backward: 1.0037, which is 1 in bf16, scales bf16
    gradients as it scales real numbers."""
    students, teacher, weight, head = _inputs(2, 40, 64, 900, torch.bfloat16, spread=2.0)
    loss, _ = distill_loss(students, teacher, weight, head)
    (plain,) = torch.autograd.grad(loss, students, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss, students, torch.tensor(1.0037))
    assert torch.equal(scaled, (plain.double() * float(torch.tensor(1.0037))).bfloat16())
    assert not torch.equal(scaled, plain)


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


def test_only_a_chunk_of_logits_ever_exists() -> None:
    """No operation returns more than chunk * V elements, whatever N is (74)."""
    students, teacher, weight, head = _inputs(3, 500, 8, 2000)
    with _Largest() as seen:
        distill_loss(students, teacher, weight, head, chunk=32)[0].backward()
    assert 0 < seen.numel <= 32 * 2000


def test_every_lane_is_written(nan_memory: None) -> None:
    """With NaN in fresh memory the result is still the definition's."""
    _compare(_inputs(3, 37, 16, 600, torch.float64), 1e-10, 16)


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
def test_a_bad_weight_is_refused_with_its_place(bad: float) -> None:
    """Weights must be finite and not negative; the message says which one is not."""
    students, teacher, weight, head = _inputs(2, 9, 16, 64)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match=r"weight\[1, 3\]"):
        distill_loss(students, teacher, weight, head)


def test_shapes_that_do_not_fit_are_refused() -> None:
    """The refusal prints all four shapes; a chunk too small for a pair is refused too."""
    students, teacher, weight, head = _inputs(2, 9, 16, 64)
    with pytest.raises(ValueError, match=r"expected \[K, N, H\]"):
        distill_loss(students, teacher[:-1], weight, head)
    with pytest.raises(ValueError, match="chunk 1"):
        distill_loss(students, teacher, weight, head, chunk=1)
