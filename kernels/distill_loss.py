"""Soft cross-entropy of K students against one teacher, with neither's logits ever held as [N, V].

    loss = sum_{k,n} weight[k,n] * CE(p_n, q_{k,n})      d loss / d logits = weight * (q - p)
    p_n = softmax(z(teacher_n))    q_{k,n} = softmax(z(student_{k,n}))
    z(h) = softcap(logit_scale * head_weight @ h)

Rows without weight are dropped before the head. The rest is walked in chunks: the teacher's
distribution of a row is computed once for all students, and the students' gradient is filled during
the forward pass, so the backward pass only scales it and nothing of size [N, V] exists at any time.
Head and teacher are frozen and get no gradient.

Legend: N rows, H hidden, V columns of the head (the draft vocabulary when it is reduced), K unroll
steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of one chunk of logits. On a CPU three such buffers should stay near the last-level cache
# (measured 2**21..2**25 at V = 49,152 and 8,192); on a GPU larger matrix products are worth more
# than cache.
_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
_TOP_BLOCK = 256


class DistillStats(NamedTuple):
    """What one call saw, per step; sums, so that calls and ranks add up. All without gradient."""

    weight: Tensor  # [K] sum of weights
    rows: Tensor  # [K] rows with a weight
    loss: Tensor  # [K] sum of weight * cross-entropy
    kl: Tensor  # [K] sum of KL(p || q) over rows, nats
    acceptance: Tensor  # [K] sum of sum_x min(p, q), the expected acceptance of a draft from q
    agreement: Tensor  # [K] rows where student and teacher have the same argmax
    student_top: Tensor  # [K, N] int64, the student's argmax column; -1 where the row was skipped
    teacher_top: Tensor  # [N] int64, the teacher's argmax column; -1 where no student needed it


def distill_loss(
    students: Tensor,
    teacher: Tensor,
    weight: Tensor,
    head_weight: Tensor,
    *,
    chunk: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, DistillStats]:
    """Weighted soft cross-entropy summed over all rows of all steps, and its statistics.

    students [K, N, H]: student k of row n is judged against teacher row n. teacher [N, H], already
    normed. weight [K, N] fp32, >= 0; 0 = not supervised, the row is never read (it may hold NaN).
    head_weight [V, H]. chunk: rows of logits alive at a time, students and teacher together
    (default by device and V). Matrix products run in the autocast dtype where autocast is on, else
    in the dtype of `students`; softmax and sums in fp32 (fp64 for fp64 students).
    Returns (scalar loss, DistillStats); with no weight at all the loss is exactly 0 and so is the
    gradient.
    Raises ValueError for shapes that do not fit and for a negative or non-finite weight.
    """
    steps, num_rows, hidden = students.shape
    if (
        teacher.shape != (num_rows, hidden)
        or head_weight.shape[1] != hidden
        or weight.shape != (steps, num_rows)
    ):
        raise ValueError(
            f"students {list(students.shape)}, teacher {list(teacher.shape)}, weight "
            f"{list(weight.shape)} and head_weight {list(head_weight.shape)} do not fit: expected "
            "[K, N, H], [N, H], [K, N], [V, H]"
        )
    if chunk is not None and chunk < 2:
        raise ValueError(
            f"chunk {chunk} cannot hold a teacher row and a student row; give at least 2"
        )
    compute = _compute_dtype(students)
    with_gradient = torch.is_grad_enabled() and students.requires_grad
    with torch.no_grad(), torch.autocast(students.device.type, enabled=False):
        loss, stats, grad = _forward(
            students.detach(),
            teacher,
            weight,
            head_weight.to(compute),
            chunk=chunk,
            logit_scale=logit_scale,
            softcap=softcap,
            with_gradient=with_gradient,
        )
    if grad is not None:
        loss = _FilledGradient.apply(students, loss, grad)
    return loss, stats


def _compute_dtype(students: Tensor) -> torch.dtype:
    device = students.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else students.dtype


def _top(values: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and first argmax of each row [m, V]: blocks by amax, which is vectorised, then one
    block by argmax."""
    num_columns = values.shape[1]
    if num_columns < 2 * _TOP_BLOCK:
        best = values.max(-1)
        return best.values, best.indices
    whole = num_columns - num_columns % _TOP_BLOCK
    peaks = values[:, :whole].unflatten(1, (-1, _TOP_BLOCK)).amax(-1)
    if whole < num_columns:
        peaks = torch.cat([peaks, values[:, whole:].amax(-1, keepdim=True)], 1)
    begin = (peaks.argmax(-1, keepdim=True) * _TOP_BLOCK).clamp_(max=num_columns - _TOP_BLOCK)
    columns = begin + torch.arange(_TOP_BLOCK, device=values.device)
    best = values.gather(1, columns).max(-1)
    return best.values, best.indices + begin.squeeze(1)


class _Chunk(NamedTuple):
    """Row numbers of one chunk, teacher rows first ordered by their number of students, most
    first."""

    teacher: Tensor  # [c] row numbers
    students: list[Tensor]  # per step [c_k] indices into `teacher`
    prefix: list[bool]  # per step: whether those indices are 0 .. c_k - 1, so that a slice will do


def _chunks(weight: Tensor, rows: int):
    """Split the rows that have a weight; one transfer of [K, N] bools to the host decides
    everything."""
    host = weight.detach().cpu()
    if not bool((host >= 0).all()) or not bool(host.isfinite().all()):
        step, row = (~((host >= 0) & host.isfinite())).nonzero()[0].tolist()
        raise ValueError(
            f"weight[{step}, {row}] is {float(host[step, row])}; weights must be finite and >= 0"
        )
    active = host > 0
    per_row = active.sum(0)
    order = per_row.argsort(descending=True, stable=True)[: int((per_row > 0).sum())]
    size, begin = max(1, rows // (weight.shape[0] + 1)), 0
    while begin < order.numel():
        most = int(
            per_row[order[begin]]
        )  # students of the fullest row left: later rows have no more
        size = max(1, rows // (most + 1))
        teacher = order[begin : begin + size]
        students = [active[k, teacher].nonzero().squeeze(1) for k in range(weight.shape[0])]
        prefix = [s.numel() == 0 or int(s[-1]) + 1 == s.numel() for s in students]
        device = weight.device
        yield _Chunk(teacher.to(device), [s.to(device) for s in students], prefix)
        begin += size


class _Workspace:
    """Buffers of [rows, V], made once a call: fresh ones a chunk would cost a page fault every 4
    KiB."""

    def __init__(
        self,
        rows: int,
        columns: int,
        compute: torch.dtype,
        accurate: torch.dtype,
        device: torch.device,
    ):
        self.raw = torch.empty(rows, columns, dtype=compute, device=device)
        same = compute == accurate
        self.logits = (
            self.raw if same else torch.empty(rows, columns, dtype=accurate, device=device)
        )
        self.probs = torch.empty(rows, columns, dtype=accurate, device=device)


def _forward(
    students: Tensor,
    teacher: Tensor,
    weight: Tensor,
    head: Tensor,
    *,
    chunk: int | None,
    logit_scale: float,
    softcap: float | None,
    with_gradient: bool,
) -> tuple[Tensor, DistillStats, Tensor | None]:
    """Loss, statistics and d loss / d students [K, N, H]. `head` [V, H] has the dtype of the matrix
    products."""
    steps, num_rows, hidden = students.shape
    num_columns, compute, device = head.shape[0], head.dtype, students.device
    accurate = torch.promote_types(compute, torch.float32)
    flat_students, flat_weight = students.reshape(-1, hidden), weight.reshape(-1).to(accurate)
    cross, kl, acceptance = torch.zeros(3, steps * num_rows, dtype=accurate, device=device)
    student_top = torch.full((steps * num_rows,), -1, dtype=torch.int64, device=device)
    teacher_top = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    grad = torch.zeros_like(flat_students) if with_gradient else None
    limit = chunk or max(64, min(1024, _CHUNK_ELEMENTS.get(device.type, 1 << 23) // num_columns))
    space = None
    for part in _chunks(weight, limit):
        num_teachers = part.teacher.numel()
        rows = torch.cat(
            [part.teacher[chosen] + k * num_rows for k, chosen in enumerate(part.students)]
        )
        inputs = torch.cat([teacher[part.teacher].to(compute), flat_students[rows].to(compute)])
        if space is None:  # the first chunk is the largest: rows with most students come first
            space = _Workspace(max(limit, inputs.shape[0]), num_columns, compute, accurate, device)
        raw, logits, probs = (
            buffer[: inputs.shape[0]] for buffer in (space.raw, space.logits, space.probs)
        )
        torch.mm(inputs, head.T, out=raw)
        if space.logits is not space.raw:
            logits.copy_(raw)
        if logit_scale != 1.0:
            logits.mul_(logit_scale)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        best, top = _top(logits)

        target, target_logits = probs[:num_teachers], logits[:num_teachers]
        torch.softmax(target_logits, -1, out=target)
        log_z = best[:num_teachers] - target.gather(1, top[:num_teachers, None]).squeeze(1).log()
        entropy = log_z - target_logits.mul_(target).sum(-1)
        teacher_top[part.teacher] = top[:num_teachers]

        difference, end = probs[num_teachers:], 0
        for chosen, prefix in zip(part.students, part.prefix, strict=True):
            begin, end = end, end + chosen.numel()
            wanted = target[: end - begin] if prefix else target[chosen]
            one, z = difference[begin:end], logits[num_teachers + begin : num_teachers + end]
            expected = torch.mul(wanted, z, out=one).sum(-1)  # sum_x p(x) z(x)
            torch.softmax(z, -1, out=one)
            place = num_teachers + begin, num_teachers + end
            log_z = best[slice(*place)] - one.gather(1, top[slice(*place), None]).squeeze(1).log()
            cross[rows[begin:end]] = log_z - expected
            kl[rows[begin:end]] = log_z - expected - entropy[chosen]
            one.sub_(wanted)  # q - p, the gradient of the logits for weight 1
        student_top[rows] = top[num_teachers:]
        if grad is not None:
            slope = difference
            if softcap is not None:
                slope = (
                    logits[num_teachers:].div_(softcap).square_().neg_().add_(1).mul_(difference)
                )
            if compute != accurate:
                slope = raw[num_teachers:].copy_(slope)
            pulled = torch.mm(slope, head).to(accurate)
            grad[rows] = pulled.mul_((flat_weight[rows] * logit_scale)[:, None]).to(grad.dtype)
        acceptance[rows] = 1 - difference.abs_().sum(-1) / 2  # sum_x min(p, q)

    cross, kl, acceptance, student_top = (
        x.view(steps, num_rows) for x in (cross, kl, acceptance, student_top)
    )
    losses = (cross * weight.to(accurate)).sum(1)
    agreed = (student_top == teacher_top) & (student_top >= 0)
    stats = DistillStats(
        weight=weight.to(accurate).sum(1),
        rows=(weight > 0).sum(1),
        loss=losses,
        kl=kl.sum(1),
        acceptance=acceptance.sum(1),
        agreement=agreed.sum(1),
        student_top=student_top,
        teacher_top=teacher_top,
    )
    return losses.sum(), stats, None if grad is None else grad.view_as(students)


class _FilledGradient(torch.autograd.Function):
    """A loss whose gradient is known already: backward only scales it."""

    @staticmethod
    def forward(ctx, students: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None
