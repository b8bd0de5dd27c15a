"""`ttt_attention` for GPUs: the causal block in fused kernels, the diagonal of the chain merged by
log-sum-exp.

    causal block     out_0, l_0 = attention and log-sum-exp over step-0 keys of the own document
    chain step j     s_j = cap(scaling * q . k_j), one key per query
    l    = log(e^{l_0} + sum_j e^{s_j})
    out  = e^{l_0 - l} out_0 + sum_j e^{s_j - l} v_j

Both parts of the derivative need only l and delta = sum(d_out * out) of the whole softmax, so they
are independent: the block's is `document_attention_backward`, and the diagonal's is, for P_j =
e^{s_j - l} and dS_j = P_j * (d_out . v_j - delta) * (1 - (s_j / softcap)^2):

    dv_j = P_j d_out      dq += scaling * dS_j k_j      dk_j = scaling * dS_j q

Memory is linear in N. The diagonal is elementwise work in PyTorch.

Legend: as in `ttt_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .document_attention import Reach, document_attention
from .document_gradient import document_attention_backward


def ttt_attention_fused(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    chain_k: Sequence[Tensor],
    chain_v: Sequence[Tensor],
    bounds: tuple[int, ...],
    scaling: float,
    window: int | None,
    softcap: float | None,
    offset: int = 0,
) -> Tensor:
    """See `ttt_attention`, whose arguments these are, checked; bounds are the document borders."""
    return _Fused.apply(bounds, scaling, window, softcap, offset, q, k0, v0, *chain_k, *chain_v)


class _Fused(torch.autograd.Function):
    """Saves inputs, output and log-sum-exp."""

    @staticmethod
    def forward(ctx, bounds, scaling, window, softcap, offset, q, k0, v0, *chain):  # type: ignore[override]
        steps = len(chain) // 2
        ctx.plan = scaling, window, softcap, steps
        reach = None if window is None else window - steps
        ctx.reach = Reach(bounds, scaling, reach, softcap, offset)
        q, k0, v0 = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k0, v0))
        dtype = torch.float32 if steps else q.dtype
        out, mass = document_attention(q, k0, v0, ctx.reach, dtype)
        if steps:
            scores = _diagonal(ctx.plan, q, chain[:steps])
            whole = torch.logsumexp(torch.cat([mass[..., None], scores], -1), -1)
            out *= (mass - whole).exp()[..., None]
            grouped = out.unflatten(0, (k0.shape[0], -1))
            weights = (scores - whole[..., None]).exp().unflatten(0, (k0.shape[0], -1))
            for step, value in enumerate(chain[steps:]):
                grouped.addcmul_(weights[..., step, None], value.float()[:, None])
            out, mass = out.to(q.dtype), whole
        ctx.save_for_backward(q, k0, v0, out, mass, *chain)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        q, k0, v0, out, mass, *chain = ctx.saved_tensors
        scaling, _, softcap, steps = ctx.plan
        num_kv = k0.shape[0]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1).contiguous()  # [Hq, n]
        dtype = torch.float32 if steps else q.dtype
        grad_q, grad_k0, grad_v0 = document_attention_backward(
            q, k0, v0, grad, mass, delta, ctx.reach, dtype
        )
        grads_k, grads_v = [], []
        if steps:
            scores = _diagonal(ctx.plan, q, chain[:steps])
            weights = (scores - mass[..., None]).exp()
            grouped_q, grouped_grad = (
                x.float().unflatten(0, (num_kv, -1)) for x in (q, grad)
            )  # [Hkv, G, n, width]
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
        return *(None,) * 5, grad_q.to(q.dtype), grad_k0, grad_v0, *chains


def _diagonal(plan: tuple[Any, ...], q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scaled, capped scores of the chain in float32, [Hq, n, c]; -inf where the window hides a
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
