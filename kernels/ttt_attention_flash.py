"""`ttt_attention` on a CPU through PyTorch's flash attention, one call a document.

The committed block is flash attention's own causal case, which returns the log-sum-exp L0 of each
query. The chain's scores s_j join it by log-sum-exp:

    L = logaddexp(L0, s_1 .. s_k)      out = e^(L0 - L) out_0 + sum_j e^(s_j - L) v_j

Flash attention's backward rebuilds probabilities as e^(score - L) and reads sum_d grad_d out_d, so
called with the *merged* out and L it gives the committed block's share of the whole gradient (Dao,
arXiv 2307.08691, algorithm 2). The chain's share is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .compiled import Compiled, use_compiled

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_MANY = 1 << 20  # elements of q from which the chain's C++ form repays its compilation


def flash_serves(q: Tensor, v0: Tensor, window: int | None, softcap: float | None) -> bool:
    """Whether this form computes the case: on a CPU, keys and values of one width, every key of the
    prefix in sight, no cap."""
    same_width = q.shape[-1] == v0.shape[-1]
    return q.device.type == "cpu" and same_width and window is None and softcap is None


def ttt_attention_flash(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    chain_k: Sequence[Tensor],
    chain_v: Sequence[Tensor],
    bounds: tuple[int, ...],
    scaling: float,
) -> Tensor:
    """See `ttt_attention.ttt_attention`, whose arguments these are, checked; only where
    `flash_serves`."""
    return _FlashTTT.apply(bounds, scaling, len(chain_k), q, k0, v0, *chain_k, *chain_v)


def _documents(bounds: tuple[int, ...], *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Each document's rows of tensors [heads, N, …], as a batch of one."""
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        yield [x[None, :, begin:end] for x in tensors]


def _scores(q: Tensor, chain_k: Sequence[Tensor], scaling: float) -> Tensor:
    """[k, Hq, N] in at least float32: each query with its own chain's keys."""
    grouped = q.unflatten(0, (chain_k[0].shape[0], -1))
    score = _pick(_score, q)
    return torch.stack([score(grouped, key, scaling).flatten(0, 1) for key in chain_k])


def _pick(form: Compiled, like: Tensor) -> Callable[..., Any]:
    return form if use_compiled(like, like.numel() >= _MANY) else form.function


@Compiled
def _score(q: Tensor, key: Tensor, scaling: float) -> Tensor:
    """q [Hkv, G, N, D] with key [Hkv, N, D] -> [Hkv, G, N]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q.to(wide) * key.to(wide)[:, None]).sum(-1) * scaling


@Compiled
def _pull(
    added: Tensor,
    q: Tensor,
    grad: Tensor,
    key: Tensor,
    value: Tensor,
    share: Tensor,
    drop: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """One chain step's gradients of key and value [Hkv, N, D]; that of q is added to `added`.

    q, grad, added [Hkv, G, N, D]; share, the step's probability, and drop, sum_d grad_d out_d,
    [Hkv, G, N].
    """
    wide = added.dtype
    q, grad = q.to(wide), grad.to(wide)
    slope = share * ((grad * value.to(wide)[:, None]).sum(-1) - drop) * scaling
    added.add_(slope[..., None] * key.to(wide)[:, None])
    of_key, of_value = (slope[..., None] * q).sum(1), (share[..., None] * grad).sum(1)
    return of_key.to(key.dtype), of_value.to(value.dtype)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[Hq, N, D] -> [Hkv, G, N, D] in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(0, (like.shape[0], -1))


class _FlashTTT(torch.autograd.Function):
    """One step over all documents. Saves its inputs, the output and one log-sum-exp a query."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        bounds: tuple[int, ...],
        scaling: float,
        num_chain: int,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        *chain: Tensor,
    ) -> Tensor:
        out = q.new_empty(q.shape[1], q.shape[0], v0.shape[-1]).transpose(0, 1)
        total = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        parts = _documents(bounds, q, k0, v0, out, total)
        for queries, keys, values, place, mass in parts:
            mixed, log_mass = _FORWARD(queries, keys, values, 0.0, True, scale=scaling)
            place.copy_(mixed)
            mass.copy_(log_mass)
        if num_chain:
            scores = _scores(q, chain[:num_chain], scaling)
            committed = total
            total = torch.logsumexp(torch.cat([total[None], scores]), 0)
            shares = torch.exp(scores - total).to(out.dtype)
            out *= torch.exp(committed - total).to(out.dtype)[..., None]
            grouped = out.unflatten(0, (k0.shape[0], -1))
            for share, value in zip(shares, chain[num_chain:], strict=True):
                weight = share.unflatten(0, (k0.shape[0], -1))[..., None]
                grouped.addcmul_(weight, value[:, None])
        ctx.save_for_backward(q, k0, v0, out, total, *chain)
        ctx.bounds, ctx.scaling, ctx.num_chain = bounds, scaling, num_chain
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, k0, v0, out, total, *chain = ctx.saved_tensors
        num_chain, scaling = ctx.num_chain, ctx.scaling
        grads = torch.empty_like(q), torch.empty_like(k0), torch.empty_like(v0)
        parts = _documents(ctx.bounds, grad, q, k0, v0, out, total, *grads)
        for pulled, queries, keys, values, mixed, mass, *places in parts:
            found = _BACKWARD(pulled, queries, keys, values, mixed, mass, 0.0, True, scale=scaling)
            for place, value in zip(places, found, strict=True):
                place.copy_(value)
        grad_q, grad_k0, grad_v0 = grads
        if not num_chain:
            return None, None, None, grad_q, grad_k0, grad_v0
        chain_k, chain_v = chain[:num_chain], chain[num_chain:]
        groups = k0.shape[0], -1
        shares = torch.exp(_scores(q, chain_k, scaling) - total)
        drop = (_grouped(grad, k0) * _grouped(out, k0)).sum(-1)
        added = torch.zeros_like(_grouped(q, k0))
        pull, found = _pick(_pull, q), []
        for share, key, value in zip(shares, chain_k, chain_v, strict=True):
            share = share.unflatten(0, groups)
            found.append(
                pull(
                    added,
                    q.unflatten(0, groups),
                    grad.unflatten(0, groups),
                    key,
                    value,
                    share,
                    drop,
                    scaling,
                )
            )
        grad_q += added.flatten(0, 1).to(grad_q.dtype)
        of_keys, of_values = zip(*found, strict=True)
        return None, None, None, grad_q, grad_k0, grad_v0, *of_keys, *of_values
