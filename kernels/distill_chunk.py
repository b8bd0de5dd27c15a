"""One chunk of the distillation loss on logits that exist already: a softmax pair per row, loss and
gradient in two reads, the gradient written over the student's logits.

    z = softcap(logit_scale * logits)       p = softmax(z_teacher)    q = softmax(z_student)
    cross = logsumexp(z_student) - sum_x p(x) z_student(x)            kl = cross - entropy(p)
    d cross / d logits = logit_scale * (1 - (z_student / softcap)^2) * (q - p)

What is written is that gradient without the factor logit_scale, which the caller applies in float32
with the row's weight: small weights must not be lost in a 16-bit type. Plain PyTorch needs six
passes over two float32 copies of the logits.

Legend: M student rows, T teacher rows, V columns of the head.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .jit import Kernel, power_of_two, use_triton
from .native import INTEGER, POINTER, SMALL, TYPES, Native

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 4096


NATIVE = Native(
    "distill_chunk",
    {
        "distill_chunk": [SMALL, *[POINTER] * 3, *[INTEGER] * 3]
        + [ctypes.c_double, ctypes.c_double, SMALL, *[POINTER] * 6]
    },
)


def serves(logits: Tensor) -> bool:
    """Whether the C++ form takes such logits; float64 keeps the plain form."""
    return logits.dtype != torch.float64 and NATIVE.serves(logits)


class ChunkFigures(NamedTuple):
    """Per student row, without weight; float32, tops int64."""

    cross: Tensor  # [M] cross-entropy, nats
    kl: Tensor  # [M] KL(p || q), nats
    acceptance: Tensor  # [M] sum_x min(p, q)
    student_top: Tensor  # [M] the student's first argmax column
    teacher_top: Tensor  # [M] the teacher's


def distill_chunk_reference(
    students: Tensor,
    teachers: Tensor,
    rows: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> ChunkFigures:
    """The plain definition, see `distill_chunk`."""
    accurate = torch.promote_types(students.dtype, torch.float32)
    z, t = students.to(accurate) * logit_scale, teachers[rows].to(accurate) * logit_scale
    if softcap is not None:
        z, t = softcap * torch.tanh(z / softcap), softcap * torch.tanh(t / softcap)
    log_q, log_p = z.log_softmax(-1), t.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    figures = ChunkFigures(
        cross=-(p * log_q).sum(-1),
        kl=(p * (log_p - log_q)).sum(-1),
        acceptance=torch.minimum(p, q).sum(-1),
        student_top=z.argmax(-1),
        teacher_top=t.argmax(-1),
    )
    if with_gradient:
        slope = q - p
        students.copy_(slope if softcap is None else slope * (1 - (z / softcap).square()))
    return figures


def distill_chunk(
    students: Tensor,
    teachers: Tensor,
    rows: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> ChunkFigures:
    """See the module's formulae.

    Args:
        students: [M, V] raw logits, contiguous; overwritten with the gradient when with_gradient.
        teachers: [T, V] raw logits, contiguous. rows: [M] int64, the teacher's row of each student.
        logit_scale, softcap: how the target's head finishes its logits.
    Returns:
        The figures of each row.
    """
    if serves(students):
        return _native(students, teachers, rows, float(logit_scale), softcap, with_gradient)
    if not use_triton(students):
        return distill_chunk_reference(
            students,
            teachers,
            rows,
            logit_scale=logit_scale,
            softcap=softcap,
            with_gradient=with_gradient,
        )
    assert students.is_contiguous() and teachers.is_contiguous()
    count, size = students.shape
    cross, kl, acceptance = torch.empty(3, count, dtype=torch.float32, device=students.device)
    tops = torch.empty(2, count, dtype=torch.int64, device=students.device)
    if count:
        distill_chunk_kernel[(count,)](
            students,
            teachers,
            rows,
            cross,
            kl,
            acceptance,
            tops,
            count,
            size,
            float(logit_scale),
            softcap,
            GRADIENT=with_gradient,
            BLOCK=min(_BLOCK, power_of_two(size)),
            num_warps=8,
        )
    return ChunkFigures(cross, kl, acceptance, tops[0], tops[1])


def _native(
    students: Tensor,
    teachers: Tensor,
    rows: Tensor,
    logit_scale: float,
    softcap: float | None,
    with_gradient: bool,
) -> ChunkFigures:
    assert students.is_contiguous() and teachers.is_contiguous()
    (count, size), num_teachers = students.shape, teachers.shape[0]
    accurate = torch.promote_types(students.dtype, torch.float32)
    cross, kl, acceptance = torch.empty(3, count, dtype=accurate)
    log_sums = torch.empty(num_teachers, dtype=accurate)
    top, teacher_top = (torch.empty(n, dtype=torch.int64) for n in (count, num_teachers))
    rows = rows.contiguous()
    NATIVE.functions.distill_chunk(
        TYPES[students.dtype],
        students.data_ptr(),
        teachers.data_ptr(),
        rows.data_ptr(),
        count,
        num_teachers,
        size,
        logit_scale,
        softcap or 0.0,
        with_gradient,
        log_sums.data_ptr(),
        teacher_top.data_ptr(),
        cross.data_ptr(),
        kl.data_ptr(),
        acceptance.data_ptr(),
        top.data_ptr(),
    )
    return ChunkFigures(cross, kl, acceptance, top, teacher_top[rows])


@Kernel
def distill_chunk_kernel(
    students,
    teachers,
    rows,
    cross,
    kl,
    acceptance,
    tops,
    count,
    size,
    logit_scale,
    softcap,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One student row: maxima and sums first, then probabilities, figures and gradient."""
    row = tl.program_id(0).to(tl.int64)
    student = students + row * size
    teacher = teachers + tl.load(rows + row).to(tl.int64) * size
    lane = tl.arange(0, BLOCK)
    best_s = tl.full([], float("-inf"), tl.float32)
    best_t = tl.full([], float("-inf"), tl.float32)
    mass_s = tl.zeros([], tl.float32)
    mass_t = tl.zeros([], tl.float32)
    top_s = tl.zeros([], tl.int32)
    top_t = tl.zeros([], tl.int32)
    for base in range(0, size, BLOCK):
        at = base + lane
        inside = at < size
        z = tl.load(student + at, inside, 0.0).to(tl.float32) * logit_scale
        t = tl.load(teacher + at, inside, 0.0).to(tl.float32) * logit_scale
        if softcap is not None:
            z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)  # tanh
            t = softcap * (2.0 * tl.sigmoid(2.0 * t / softcap) - 1.0)
        z = tl.where(inside, z, float("-inf"))
        t = tl.where(inside, t, float("-inf"))
        peak_s = tl.max(z)
        peak_t = tl.max(t)
        top_s = tl.where(peak_s > best_s, tl.min(tl.where(z == peak_s, at, size)), top_s)
        top_t = tl.where(peak_t > best_t, tl.min(tl.where(t == peak_t, at, size)), top_t)
        peak_s = tl.maximum(best_s, peak_s)
        peak_t = tl.maximum(best_t, peak_t)
        mass_s = mass_s * tl.exp(best_s - peak_s) + tl.sum(tl.exp(z - peak_s))
        mass_t = mass_t * tl.exp(best_t - peak_t) + tl.sum(tl.exp(t - peak_t))
        best_s = peak_s
        best_t = peak_t
    log_mass_s = tl.log(mass_s)
    log_mass_t = tl.log(mass_t)
    loss = tl.zeros([], tl.float32)
    entropy = tl.zeros([], tl.float32)
    overlap = tl.zeros([], tl.float32)
    for base in range(0, size, BLOCK):
        at = base + lane
        inside = at < size
        z = tl.load(student + at, inside, 0.0).to(tl.float32) * logit_scale
        t = tl.load(teacher + at, inside, 0.0).to(tl.float32) * logit_scale
        if softcap is not None:
            z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
            t = softcap * (2.0 * tl.sigmoid(2.0 * t / softcap) - 1.0)
        log_q = z - best_s - log_mass_s
        log_p = t - best_t - log_mass_t
        q = tl.where(inside, tl.exp(log_q), 0.0)
        p = tl.where(inside, tl.exp(log_p), 0.0)
        loss -= tl.sum(p * log_q)
        entropy -= tl.sum(p * log_p)
        overlap += tl.sum(tl.minimum(p, q))
        if GRADIENT:
            slope = q - p
            if softcap is not None:
                slope *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(student + at, slope.to(students.dtype.element_ty), inside)
    tl.store(cross + row, loss)
    tl.store(kl + row, loss - entropy)
    tl.store(acceptance + row, overlap)
    tl.store(tops + row, top_s.to(tl.int64))
    tl.store(tops + (count + row), top_t.to(tl.int64))
