"""A loss of K students against one teacher, with neither's logits ever held as [N, V].

    loss = sum_{k,n} weight[k,n] * L(p_n, q_{k,n})       L: soft cross-entropy, or one of `losses`
    p_n = softmax(z(teacher_n))    q_{k,n} = softmax(z(student_{k,n}))
    z(h) = softcap(logit_scale * head_weight @ h)
    z(h) = student_head @ h                              of students with a head of their own

Rows without weight are dropped before the head. The rest is walked in chunks: the teacher's
distribution of a row is computed once for all students, and the gradients of the students and of
their own head are filled during the forward pass, so the backward pass only scales them and nothing
of size [N, V] exists at any time. The teacher and its head are frozen and get no gradient.

Legend: N rows, H hidden, V columns of the head (the draft vocabulary when it is reduced), K unroll
steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .distill_chunk import distill_chunk, serves
from .jit import use_triton
from .logit_chunks import Readout, Workspace, default_rows, row_chunks, top_columns
from .losses import STATES, LossConfig, Pair, mix, parse, smooth_l1


class DistillStats(NamedTuple):
    """What one call saw, per step; sums, so that calls and ranks add up. All without gradient."""

    weight: Tensor  # [K] sum of weights
    rows: Tensor  # [K] rows with a weight
    loss: Tensor  # [K] sum of weight * loss, of the loss that was asked for
    cross: Tensor  # [K] sum of weight * soft cross-entropy, whatever was asked for
    kl: Tensor  # [K] sum of KL(p || q) over rows, nats
    acceptance: Tensor  # [K] sum of sum_x min(p, q), the expected acceptance of a draft from q
    agreement: Tensor  # [K] rows where student and teacher have the same argmax
    student_top: Tensor  # [K, N] int64, the student's argmax column; -1 where the row was skipped
    teacher_top: Tensor  # [N] int64, the teacher's argmax column; -1 where no student needed it
    outside: Tensor  # [K] sum over rows of the teacher's mass outside its head's columns; 0 unasked


def distill_loss(
    students: Tensor,
    teacher: Tensor,
    weight: Tensor,
    head_weight: Tensor,
    *,
    loss: LossConfig = LossConfig(),  # noqa: B008 (frozen)
    labels: Tensor | None = None,
    student_head: Tensor | None = None,
    full_head: Tensor | None = None,
    chunk: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, DistillStats]:
    """Weighted loss summed over all rows of all steps, and its statistics.

    students [K, N, H']: student k of row n is judged against teacher row n. teacher [N, H], already
    normed. weight [K, N] fp32, >= 0; 0 = not supervised, the row is never read (it may hold NaN).
    head_weight [V, H], with logit_scale and softcap. student_head [V, H']: the students' own, read
    plainly; it gets a gradient where it requires one, summed over chunks in fp32. None: students
    are read as the teacher is (H' = H). loss: what is minimised.
    labels [N] int64: the columns that `ce` wants, -1 = none; None takes the teacher's argmax.
    full_head [all ids, H]: given, the teacher's mass outside `head_weight`, whose rows are some of
    it, is measured.
    chunk: rows of logits alive at a time, students and teacher together (default by device and V).
    Matrix products run in the autocast dtype where autocast is on, else in the dtype of `students`;
    softmax and sums in fp32 (fp64 for fp64 students).
    Returns (scalar loss, DistillStats); with no weight at all the loss is exactly 0 and so is the
    gradient.
    Raises ValueError for shapes that do not fit, a negative or non-finite weight, and labels that
    are no columns.
    """
    steps, num_rows, _ = students.shape
    num_columns, hidden = head_weight.shape
    own = head_weight if student_head is None else student_head
    if (
        teacher.shape != (num_rows, hidden)
        or own.shape != (num_columns, students.shape[2])
        or weight.shape != (steps, num_rows)
    ):
        raise ValueError(
            f"students {list(students.shape)}, teacher {list(teacher.shape)}, weight "
            f"{list(weight.shape)}, head_weight {list(head_weight.shape)} and student_head "
            f"{None if student_head is None else list(student_head.shape)} do not fit: expected "
            "[K, N, H], [N, H], [K, N], [V, H] and [V, H of the students] or none"
        )
    if chunk is not None and chunk < 2:
        raise ValueError(
            f"chunk {chunk} cannot hold a teacher row and a student row; give at least 2"
        )
    if STATES in parse(loss.kind) and students.shape[2] != hidden:
        raise ValueError(
            f"{STATES} compares states: students have width {students.shape[2]}, the teacher "
            f"{hidden}; leave it out of the loss"
        )
    _check_labels(labels, num_rows, num_columns)
    compute = _compute_dtype(students)
    with_gradient = torch.is_grad_enabled() and students.requires_grad
    learns = torch.is_grad_enabled() and student_head is not None and student_head.requires_grad
    with torch.no_grad(), torch.autocast(students.device.type, enabled=False):
        of_teacher = Readout(head_weight.to(compute), logit_scale, softcap)
        of_student = of_teacher
        if student_head is not None:
            of_student = Readout(student_head.detach().to(compute), 1.0, None)
        total, stats, grad, head_grad = _forward(
            students.detach(),
            teacher,
            weight,
            of_teacher,
            of_student,
            loss=loss,
            labels=labels,
            full_head=None if full_head is None else full_head.to(compute),
            chunk=chunk,
            with_gradient=with_gradient or learns,
            with_head_gradient=learns,
        )
    if grad is not None:
        total = _FilledGradient.apply(students, student_head, total, grad, head_grad)
    return total, stats


def _check_labels(labels: Tensor | None, num_rows: int, num_columns: int) -> None:
    if labels is None:
        return
    if labels.shape != (num_rows,):
        raise ValueError(f"labels {list(labels.shape)} do not fit: expected [N] = [{num_rows}]")
    bad = ((labels < -1) | (labels >= num_columns)).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"labels[{row}] is {int(labels[row])}; a label is a column of the head, 0 to "
            f"{num_columns - 1}, or -1 for none"
        )


def _compute_dtype(students: Tensor) -> torch.dtype:
    device = students.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else students.dtype


def _mass_outside(
    states: Tensor, log_z: Tensor, full: Readout, elements: int, accurate: torch.dtype
) -> Tensor:
    """1 - exp(log_z - log Z over the whole vocabulary), [c], for teacher states [c, H] whose log_z
    [c] runs over the columns of a part; at most `elements` logits at a time."""
    inside = []
    size = max(1, elements // full.head.shape[0])
    for part, log_part in zip(states.split(size), log_z.split(size), strict=True):
        raw = torch.empty(len(part), len(full.head), dtype=full.head.dtype, device=states.device)
        logits = raw if raw.dtype == accurate else torch.empty_like(raw, dtype=accurate)
        full(part, raw, logits)
        inside.append(log_part - logits.logsumexp(-1))
    return -torch.expm1(torch.cat(inside)).clamp_(max=0)


def _forward(
    students: Tensor,
    teacher: Tensor,
    weight: Tensor,
    of_teacher: Readout,
    of_student: Readout,
    *,
    loss: LossConfig,
    labels: Tensor | None,
    full_head: Tensor | None,
    chunk: int | None,
    with_gradient: bool,
    with_head_gradient: bool,
) -> tuple[Tensor, DistillStats, Tensor | None, Tensor | None]:
    """Loss, statistics, d loss / d students [K, N, H'] and d loss / d student head [V, H']."""
    steps, num_rows, width = students.shape
    num_columns, compute, device = of_teacher.head.shape[0], of_teacher.head.dtype, students.device
    accurate = torch.promote_types(compute, torch.float32)
    terms = parse(loss.kind)
    # Soft cross-entropy alone needs no more than the statistics do: its gradient is q - p.
    plain = terms == {"kl": 1.0}
    top_k = min(loss.top_k, num_columns - 1) if "topk" in terms else 0
    flat_students, flat_weight = students.reshape(-1, width), weight.reshape(-1).to(accurate)
    values, cross, kl, acceptance = torch.zeros(4, steps * num_rows, dtype=accurate, device=device)
    student_top = torch.full((steps * num_rows,), -1, dtype=torch.int64, device=device)
    teacher_top = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    outside = torch.zeros(num_rows, dtype=accurate, device=device)
    grad = torch.zeros_like(flat_students) if with_gradient else None
    head_grad = None
    if with_head_gradient:
        head_grad = torch.zeros(num_columns, width, dtype=accurate, device=device)
    limit = chunk or default_rows(device, num_columns)
    space = None
    finish = of_teacher.scale, of_teacher.softcap
    fused = plain and full_head is None and finish == (of_student.scale, of_student.softcap)
    like = of_teacher.head.new_empty(0, num_columns)
    fused = fused and (serves(like) or use_triton(like))

    def pull(final: Tensor, rows: Tensor, states: Tensor) -> None:
        """Gradients of states and head from that of the raw logits, but for its factors."""
        assert grad is not None
        scale = (flat_weight[rows] * of_student.scale)[:, None]
        pulled = torch.mm(final, of_student.head).to(accurate)
        grad[rows] = pulled.mul_(scale).to(grad.dtype)
        if head_grad is not None:
            head_grad.add_(torch.mm(final.T, (states * scale).to(compute)))

    for part in row_chunks(weight, limit):
        num_teachers = part.teacher.numel()
        rows = torch.cat(
            [part.teacher[chosen] + k * num_rows for k, chosen in enumerate(part.students)]
        )
        teachers, states = teacher[part.teacher].to(compute), flat_students[rows].to(compute)
        size = num_teachers + rows.numel()
        if space is None:  # the first chunk is the largest: rows with most students come first
            space = Workspace(max(limit, size), num_columns, compute, accurate, device, fused)
        if fused:
            raw = space.raw[:size]
            torch.mm(teachers, of_teacher.head.T, out=raw[:num_teachers])
            torch.mm(states, of_student.head.T, out=raw[num_teachers:])
            index, final = torch.cat(part.students), raw[num_teachers:]
            figures = distill_chunk(
                final,
                raw[:num_teachers],
                index,
                logit_scale=of_teacher.scale,
                softcap=of_teacher.softcap,
                with_gradient=grad is not None,
            )
            cross[rows], kl[rows], acceptance[rows] = figures[:3]
            student_top[rows], teacher_top[part.teacher[index]] = figures[3:]
            if grad is not None:
                pull(final, rows, states)
            continue
        raw, logits, probs = (buffer[:size] for buffer in (space.raw, space.logits, space.probs))
        of_teacher(teachers, raw[:num_teachers], logits[:num_teachers])
        of_student(states, raw[num_teachers:], logits[num_teachers:])
        best, top = top_columns(logits)

        target, target_logits = probs[:num_teachers], logits[:num_teachers]
        torch.softmax(target_logits, -1, out=target)
        teacher_log_z = (
            best[:num_teachers] - target.gather(1, top[:num_teachers, None]).squeeze(1).log()
        )
        likeliest = target_logits[:, : num_columns if top_k else 0].topk(top_k, -1).indices
        product = torch.mul(target_logits, target, out=target_logits if plain else None)
        entropy = teacher_log_z - product.sum(-1)
        teacher_top[part.teacher] = top[:num_teachers]
        if full_head is not None:
            full = of_teacher._replace(head=full_head)
            elements = max(limit, size) * num_columns
            outside[part.teacher] = _mass_outside(teachers, teacher_log_z, full, elements, accurate)
        label = (teacher_top if labels is None else labels)[part.teacher]

        slope, end = probs[num_teachers:], 0  # will hold the gradient of the finished logits
        for chosen, prefix in zip(part.students, part.prefix, strict=True):
            begin, end = end, end + chosen.numel()
            index = slice(0, end - begin) if prefix else chosen
            wanted, here = target[index], rows[begin:end]
            one, z = slope[begin:end], logits[num_teachers + begin : num_teachers + end]
            expected = torch.mul(wanted, z, out=one).sum(-1)  # sum_x p(x) z(x)
            torch.softmax(z, -1, out=one)
            place = num_teachers + begin, num_teachers + end
            log_z = best[slice(*place)] - one.gather(1, top[slice(*place), None]).squeeze(1).log()
            soft = log_z - expected
            cross[here] = soft
            kl[here] = soft - entropy[chosen]
            if plain:
                one.sub_(wanted)
                continue
            acceptance[here] = torch.minimum(wanted, one).sum(-1)
            pair = Pair(
                p=wanted,
                q=one,
                teacher_logits=target_logits[index],
                logits=z,
                cross=soft,
                label=label[index],
                top=likeliest[index],
                config=loss,
            )
            values[here], gradient = mix(terms, pair)
            one.copy_(gradient)
        student_top[rows] = top[num_teachers:]
        if grad is not None:
            final = slope
            if of_student.softcap is not None:
                capped = logits[num_teachers:].div_(of_student.softcap)
                final = capped.square_().neg_().add_(1).mul_(slope)
            if compute != accurate:
                final = raw[num_teachers:].copy_(final)
            pull(final, rows, states)
        if plain:
            acceptance[rows] = 1 - slope.abs_().sum(-1) / 2  # sum_x min(p, q)
        if STATES in terms:
            wanted = torch.cat([teachers[chosen] for chosen in part.students])
            value, away = smooth_l1(states.to(accurate), wanted.to(accurate))
            values[rows] += terms[STATES] * value
            if grad is not None:
                grad[rows] += (away * (terms[STATES] * flat_weight[rows])[:, None]).to(grad.dtype)

    if plain:
        values = cross
    values, cross, kl, acceptance, student_top = (
        x.view(steps, num_rows) for x in (values, cross, kl, acceptance, student_top)
    )
    losses = (values * weight.to(accurate)).sum(1)
    agreed = (student_top == teacher_top) & (student_top >= 0)
    stats = DistillStats(
        weight=weight.to(accurate).sum(1),
        rows=(weight > 0).sum(1),
        loss=losses,
        cross=(cross * weight.to(accurate)).sum(1),
        kl=kl.sum(1),
        acceptance=acceptance.sum(1),
        agreement=agreed.sum(1),
        student_top=student_top,
        teacher_top=teacher_top,
        outside=((weight > 0) * outside).sum(1),
    )
    return losses.sum(), stats, None if grad is None else grad.view_as(students), head_grad


class _FilledGradient(torch.autograd.Function):
    """A loss whose gradients are known already: backward only scales them."""

    @staticmethod
    def forward(
        ctx,
        students: Tensor,
        student_head: Tensor | None,
        loss: Tensor,
        grad: Tensor,
        head_grad: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(grad, head_grad)
        ctx.head_dtype = None if student_head is None else student_head.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):  # type: ignore[override]
        grad, head_grad = ctx.saved_tensors
        if head_grad is not None:
            head_grad = (head_grad * grad_loss).to(ctx.head_dtype)
        # The factor stays in its own precision: a tensor without dimensions would be rounded to the
        # gradient's type first.
        scaled = torch.mul(grad, grad_loss.reshape(1), out=torch.empty_like(grad))
        return scaled, head_grad, None, None, None
