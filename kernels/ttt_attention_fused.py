"""`ttt_attention` for GPUs: the causal block in fused kernels, the diagonal of the chain merged by
log-sum-exp.

    causal block     out_0, l_0 = attention and log-sum-exp over step-0 keys of the own document
    chain step j     s_j = cap(scaling * q . k_j), one key per query
    l    = log(e^{l_0} + sum_j e^{s_j})
    out  = e^{l_0 - l} out_0 + sum_j e^{s_j - l} v_j

    With P = e^{s - l} of any column and delta = sum(d_out * out):
    dV = P^T d_out      dS = P * (d_out V^T - delta) * (1 - (s / softcap)^2)
    dQ = scaling * dS K      dK = scaling * dS^T Q

Both parts of the derivative need only l and delta, so they are independent. No sum is taken with
atomics: a key block's gradient is summed by one program over its queries in order, so runs repeat
bit for bit. Memory is linear in N. The diagonal is elementwise work in PyTorch.

Legend: as in `ttt_attention`; reach: a query sees keys less than `reach` positions back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .jit import Kernel, interpreting, power_of_two

if TYPE_CHECKING:
    import triton.language as tl


def ttt_attention_fused(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    chain_k: Sequence[Tensor],
    chain_v: Sequence[Tensor],
    bounds: Sequence[int],
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See `ttt_attention`, whose arguments these are, checked; bounds are the document borders."""
    return _Fused.apply(bounds, scaling, window, softcap, q, k0, v0, *chain_k, *chain_v)


class _Fused(torch.autograd.Function):
    """Saves inputs, output and log-sum-exp."""

    @staticmethod
    def forward(ctx, bounds, scaling, window, softcap, q, k0, v0, *chain):  # type: ignore[override]
        steps = len(chain) // 2
        borders = torch.tensor(bounds, dtype=torch.int32, device=q.device)
        sizes = borders.diff().long()
        documents = torch.stack(
            [
                edge.repeat_interleave(sizes, output_size=q.shape[1])
                for edge in (borders[:-1], borders[1:])
            ]
        )  # [2, N] first and end of each token's document
        ctx.plan = scaling, window, softcap, steps
        q, k0, v0 = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k0, v0))
        out = torch.empty(
            q.shape[1],
            q.shape[0],
            v0.shape[2],
            dtype=torch.float32 if steps else q.dtype,
            device=q.device,
        ).transpose(0, 1)
        mass = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        _launch(causal_forward_kernel, ctx.plan, documents, q, k0, v0, out, mass)
        if steps:
            scores = _diagonal(ctx.plan, q, chain[:steps])
            whole = torch.logsumexp(torch.cat([mass[..., None], scores], -1), -1)
            out *= (mass - whole).exp()[..., None]
            grouped = out.unflatten(0, (k0.shape[0], -1))
            weights = (scores - whole[..., None]).exp().unflatten(0, (k0.shape[0], -1))
            for step, value in enumerate(chain[steps:]):
                grouped.addcmul_(weights[..., step, None], value.float()[:, None])
            out, mass = out.to(q.dtype), whole
        ctx.save_for_backward(q, k0, v0, out, mass, documents, *chain)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        q, k0, v0, out, mass, documents, *chain = ctx.saved_tensors
        scaling, _, softcap, steps = ctx.plan
        num_kv = k0.shape[0]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1).contiguous()  # [Hq, N]
        grad_q = torch.empty(q.shape, dtype=torch.float32 if steps else q.dtype, device=q.device)
        grad_k0, grad_v0 = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k0, v0))
        inputs = ctx.plan, documents, q, k0, v0
        _launch(causal_query_kernel, *inputs, grad, mass, delta=delta, slopes=(grad_q,))
        _launch(causal_key_kernel, *inputs, grad, mass, delta=delta, slopes=(grad_k0, grad_v0))
        grads_k, grads_v = [], []
        if steps:
            scores = _diagonal(ctx.plan, q, chain[:steps])
            weights = (scores - mass[..., None]).exp()
            grouped_q, grouped_grad = (
                x.float().unflatten(0, (num_kv, -1)) for x in (q, grad)
            )  # [Hkv, G, N, width]
            grouped_out = grad_q.unflatten(0, (num_kv, -1))
            for step in range(steps):
                key, value = chain[step].float()[:, None], chain[steps + step].float()[:, None]
                weight = weights[..., step].unflatten(0, (num_kv, -1))
                slope = (grouped_grad * value).sum(-1) - delta.unflatten(0, (num_kv, -1))
                slope = weight * slope * scaling
                if softcap is not None:
                    score = scores[..., step].unflatten(0, (num_kv, -1))
                    slope *= torch.where(weight > 0, 1 - (score / softcap).square(), 0)
                grouped_out.addcmul_(slope[..., None], key)
                grads_k.append((slope[..., None] * grouped_q).sum(1).to(key.dtype))
                grads_v.append((weight[..., None] * grouped_grad).sum(1))
        chains = [x.to(like.dtype) for x, like in zip(grads_k + grads_v, chain, strict=True)]
        return None, None, None, None, grad_q.to(q.dtype), grad_k0, grad_v0, *chains


def _diagonal(plan: tuple[Any, ...], q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scaled, capped scores of the chain in float32, [Hq, N, c]; -inf where the window hides a
    step."""
    scaling, window, softcap, steps = plan
    grouped = q.float().unflatten(0, (keys[0].shape[0], -1))
    scores = torch.stack([(grouped * key.float()[:, None]).sum(-1) for key in keys], -1)
    scores = scores.flatten(0, 1) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[..., : max(0, steps - window)] = float("-inf")
    return scores


def _launch(
    kernel: Kernel,
    plan: tuple[Any, ...],
    documents: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mass: Tensor,
    delta: Tensor | None = None,
    slopes: tuple[Tensor, ...] = (),
) -> None:
    """One of the three kernels; `out` is the output, or its gradient in the backward pass."""
    scaling, window, softcap, steps = plan
    heads, num_tokens, width = q.shape
    key_heads, value_width = k.shape[0], v.shape[2]
    wide = max(width, value_width) > 128
    block = 32 if wide and delta is not None else 64
    programs = key_heads if kernel is causal_key_kernel else heads
    extra = () if delta is None else (delta, *slopes)
    if not num_tokens:
        return
    kernel[(-(-num_tokens // block), programs)](
        q,
        k,
        v,
        out,
        mass,
        documents,
        *extra,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        num_tokens,
        width,
        value_width,
        scaling,
        None if window is None else window - steps,
        softcap,
        GROUP=heads // key_heads,
        EXACT=interpreting(),
        BLOCK_M=block,
        BLOCK_N=32 if wide or delta is not None else 64,
        BLOCK_D=max(16, power_of_two(width)),
        BLOCK_V=max(16, power_of_two(value_width)),
        num_warps=8,
        num_stages=1 if delta is not None else 2,
    )


@Kernel
def causal_forward_kernel(
    q,
    k,
    v,
    out,
    mass,
    documents,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    out_head,
    out_row,
    num_tokens,
    width,
    value_width,
    scaling,
    reach,
    softcap,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_M queries of one head against the keys of their documents. EXACT: see
    `paged_attention`."""
    head = tl.program_id(1).to(tl.int64)
    top = tl.program_id(0) * BLOCK_M
    query = top + tl.arange(0, BLOCK_M)
    alive = query < num_tokens
    row = query.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    asked = tl.load(
        q + head * q_head + row[:, None] * q_row + column[None, :],
        alive[:, None] & (column < width)[None, :],
        0.0,
    ).to(tl.float32)
    if not EXACT:
        asked = asked.to(q.dtype.element_ty)
    first = tl.load(documents + query, alive, 0)
    low = tl.load(documents + tl.full([], top, tl.int64))
    if reach is not None:
        low = tl.maximum(low, top - reach + 1)
    high = tl.minimum(top + BLOCK_M, num_tokens)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    k_base = k + (head // GROUP) * k_head
    v_base = v + (head // GROUP) * v_head
    for base in range(low, high, BLOCK_N):
        at = base + tl.arange(0, BLOCK_N)
        exists = at < high
        place = at.to(tl.int64)[:, None]
        key = tl.load(
            k_base + place * k_row + column[None, :],
            exists[:, None] & (column < width)[None, :],
            0.0,
        ).to(tl.float32)
        value = tl.load(
            v_base + place * v_row + value_column[None, :],
            exists[:, None] & (value_column < value_width)[None, :],
            0.0,
        ).to(tl.float32)
        if not EXACT:
            key = key.to(k.dtype.element_ty)
            value = value.to(v.dtype.element_ty)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
        if softcap is not None:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        seen = (at[None, :] <= query[:, None]) & (at[None, :] >= first[:, None]) & alive[:, None]
        if reach is not None:
            seen = seen & (query[:, None] - at[None, :] < reach)
        score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        anchor = tl.where(peak == float("-inf"), 0.0, peak)  # nothing seen yet
        weight = tl.exp(score - anchor[:, None])
        shrink = tl.exp(best - anchor)
        total = total * shrink + tl.sum(weight, 1)
        if not EXACT:
            weight = weight.to(v.dtype.element_ty)
        mixed = mixed * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        best = peak
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(mass + head * num_tokens + row, best + tl.log(total), alive)
    tl.store(
        out + head * out_head + row[:, None] * out_row + value_column[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        alive[:, None] & (value_column < value_width)[None, :],
    )


@Kernel
def causal_query_kernel(
    q,
    k,
    v,
    grad,
    mass,
    documents,
    delta,
    grad_q,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    grad_head,
    grad_row,
    num_tokens,
    width,
    value_width,
    scaling,
    reach,
    softcap,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dQ of BLOCK_M queries of one head; grad_q is contiguous."""
    head = tl.program_id(1).to(tl.int64)
    top = tl.program_id(0) * BLOCK_M
    query = top + tl.arange(0, BLOCK_M)
    alive = query < num_tokens
    row = query.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    asked = tl.load(
        q + head * q_head + row[:, None] * q_row + column[None, :],
        alive[:, None] & (column < width)[None, :],
        0.0,
    ).to(tl.float32)
    pull = tl.load(
        grad + head * grad_head + row[:, None] * grad_row + value_column[None, :],
        alive[:, None] & (value_column < value_width)[None, :],
        0.0,
    ).to(tl.float32)
    if not EXACT:
        asked = asked.to(q.dtype.element_ty)
        pull = pull.to(q.dtype.element_ty)
    whole = tl.load(mass + head * num_tokens + row, alive, 0.0)
    shift = tl.load(delta + head * num_tokens + row, alive, 0.0)
    first = tl.load(documents + query, alive, 0)
    low = tl.load(documents + tl.full([], top, tl.int64))
    if reach is not None:
        low = tl.maximum(low, top - reach + 1)
    high = tl.minimum(top + BLOCK_M, num_tokens)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_base = k + (head // GROUP) * k_head
    v_base = v + (head // GROUP) * v_head
    for base in range(low, high, BLOCK_N):
        at = base + tl.arange(0, BLOCK_N)
        exists = at < high
        place = at.to(tl.int64)[:, None]
        key = tl.load(
            k_base + place * k_row + column[None, :],
            exists[:, None] & (column < width)[None, :],
            0.0,
        ).to(tl.float32)
        value = tl.load(
            v_base + place * v_row + value_column[None, :],
            exists[:, None] & (value_column < value_width)[None, :],
            0.0,
        ).to(tl.float32)
        if not EXACT:
            key = key.to(k.dtype.element_ty)
            value = value.to(v.dtype.element_ty)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
        if softcap is not None:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        seen = (at[None, :] <= query[:, None]) & (at[None, :] >= first[:, None]) & alive[:, None]
        if reach is not None:
            seen = seen & (query[:, None] - at[None, :] < reach)
        weight = tl.exp(tl.where(seen, score - whole[:, None], float("-inf")))
        slope = tl.dot(pull, tl.trans(value), input_precision="ieee") - shift[:, None]
        slope *= weight
        if softcap is not None:
            slope *= 1.0 - (score / softcap) * (score / softcap)
        if not EXACT:
            slope = slope.to(k.dtype.element_ty)
        summed += tl.dot(slope, key, input_precision="ieee")
    tl.store(
        grad_q + (head * num_tokens + row)[:, None] * width + column[None, :],
        (summed * scaling).to(grad_q.dtype.element_ty),
        alive[:, None] & (column < width)[None, :],
    )


@Kernel
def causal_key_kernel(
    q,
    k,
    v,
    grad,
    mass,
    documents,
    delta,
    grad_k,
    grad_v,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    grad_head,
    grad_row,
    num_tokens,
    width,
    value_width,
    scaling,
    reach,
    softcap,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dK and dV of BLOCK_M keys of one key head, over the query heads of its group and their
    queries in order, BLOCK_N at a time; both are contiguous."""
    key_head = tl.program_id(1).to(tl.int64)
    top = tl.program_id(0) * BLOCK_M
    at = top + tl.arange(0, BLOCK_M)
    exists = at < num_tokens
    place = at.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_V)
    key = tl.load(
        k + key_head * k_head + place[:, None] * k_row + column[None, :],
        exists[:, None] & (column < width)[None, :],
        0.0,
    ).to(tl.float32)
    value = tl.load(
        v + key_head * v_head + place[:, None] * v_row + value_column[None, :],
        exists[:, None] & (value_column < value_width)[None, :],
        0.0,
    ).to(tl.float32)
    if not EXACT:
        key = key.to(k.dtype.element_ty)
        value = value.to(v.dtype.element_ty)
    end = tl.load(documents + (num_tokens + at), exists, 0)
    high = tl.max(end)
    if reach is not None:
        high = tl.minimum(high, top + BLOCK_M - 1 + reach)
    summed_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    summed_v = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        for base in range(top, high, BLOCK_N):
            query = base + tl.arange(0, BLOCK_N)
            alive = query < high
            row = query.to(tl.int64)
            asked = tl.load(
                q + head * q_head + row[:, None] * q_row + column[None, :],
                alive[:, None] & (column < width)[None, :],
                0.0,
            ).to(tl.float32)
            pull = tl.load(
                grad + head * grad_head + row[:, None] * grad_row + value_column[None, :],
                alive[:, None] & (value_column < value_width)[None, :],
                0.0,
            ).to(tl.float32)
            if not EXACT:
                asked = asked.to(q.dtype.element_ty)
                pull = pull.to(q.dtype.element_ty)
            whole = tl.load(mass + head * num_tokens + row, alive, 0.0)
            shift = tl.load(delta + head * num_tokens + row, alive, 0.0)
            score = tl.dot(key, tl.trans(asked), input_precision="ieee") * scaling
            if softcap is not None:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            seen = (at[:, None] <= query[None, :]) & (query[None, :] < end[:, None])
            seen = seen & alive[None, :]
            if reach is not None:
                seen = seen & (query[None, :] - at[:, None] < reach)
            weight = tl.exp(tl.where(seen, score - whole[None, :], float("-inf")))
            slope = tl.dot(value, tl.trans(pull), input_precision="ieee") - shift[None, :]
            slope *= weight
            if softcap is not None:
                slope *= 1.0 - (score / softcap) * (score / softcap)
            if not EXACT:
                weight = weight.to(v.dtype.element_ty)
                slope = slope.to(q.dtype.element_ty)
            summed_v += tl.dot(weight, pull, input_precision="ieee")
            summed_k += tl.dot(slope, asked, input_precision="ieee")
    tl.store(
        grad_k + (key_head * num_tokens + place)[:, None] * width + column[None, :],
        (summed_k * scaling).to(grad_k.dtype.element_ty),
        exists[:, None] & (column < width)[None, :],
    )
    tl.store(
        grad_v + (key_head * num_tokens + place)[:, None] * value_width + value_column[None, :],
        summed_v.to(grad_v.dtype.element_ty),
        exists[:, None] & (value_column < value_width)[None, :],
    )
