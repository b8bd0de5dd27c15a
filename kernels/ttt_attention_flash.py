"""`ttt_attention` on a CPU through PyTorch's flash attention, one call a document.

The committed block is flash attention's own causal case, which returns the log-sum-exp L0 of each
query. The chain's scores s_j join it by log-sum-exp:

    L = logaddexp(L0, s_1 .. s_k)      out = e^(L0 - L) out_0 + sum_j e^(s_j - L) v_j

Flash attention's backward rebuilds probabilities as e^(score - L) and reads sum_d grad_d out_d, so
called with the *merged* out and L it gives the committed block's share of the whole gradient (Dao,
arXiv 2307.08691, algorithm 2). The chain's share is elementwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import tiled_pull
from .native import INTEGER, POINTER, SMALL, TYPES, Native

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_STRIDED = [POINTER, INTEGER, INTEGER]
_NATIVE = Native(
    "ttt_chain",
    {
        "chain_scores": [SMALL, *[INTEGER] * 4, *_STRIDED * 2, POINTER, ctypes.c_double],
        "chain_pull": [SMALL, *[INTEGER] * 4, *_STRIDED * 4, *[POINTER] * 5, ctypes.c_double],
    },
)
_WIDEST = 512  # columns of a head that the C++ form holds


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
    if _native(q, *chain_k):
        out = torch.empty(len(chain_k), *q.shape[:2], dtype=_wide(q))
        for scores, key in zip(out, chain_k, strict=True):
            places = [*_place(q), *_place(key), scores.data_ptr()]
            _NATIVE.functions.chain_scores(*_sizes(q, key), *places, scaling)
        return out
    grouped = _grouped(q, chain_k[0])
    return torch.stack([(grouped * key[:, None]).sum(-1).flatten(0, 1) for key in chain_k]).mul_(
        scaling
    )


def _native(*tensors: Tensor) -> bool:
    """Whether the chain's C++ form serves [heads, N, D] tensors; float64 takes the plain one."""
    return (
        all(
            _NATIVE.serves(x) and x.dtype == tensors[0].dtype != torch.float64 and x.stride(-1) == 1
            for x in tensors
        )
        and tensors[0].shape[-1] <= _WIDEST
    )


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _sizes(q: Tensor, key: Tensor) -> list[int]:
    return [TYPES[q.dtype], key.shape[0], q.shape[0] // key.shape[0], *key.shape[1:]]


def _place(x: Tensor) -> list[int]:
    return [x.data_ptr(), x.stride(0), x.stride(1)]


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

    q, grad [Hq, N, D]; added [Hq, N, D], share, the step's probability, and drop, sum_d grad_d
    out_d, [Hq, N], in at least float32.
    """
    if _native(q, grad, key, value):
        of_key, of_value = (torch.empty(x.shape, dtype=x.dtype) for x in (key, value))
        sums = (x.contiguous() for x in (share, drop))
        pointers = [x.data_ptr() for x in (*sums, added, of_key, of_value)]
        places = [*_place(q), *_place(grad), *_place(key), *_place(value)]
        _NATIVE.functions.chain_pull(*_sizes(q, key), *places, *pointers, scaling)
        return of_key, of_value
    grouped_q, grouped_grad, wide = _grouped(q, key), _grouped(grad, key), added.dtype
    share, drop = share.unflatten(0, (len(key), -1)), drop.unflatten(0, (len(key), -1))
    slope = share * ((grouped_grad * value[:, None]).sum(-1) - drop) * scaling
    added.add_((slope[..., None] * key.to(wide)[:, None]).flatten(0, 1))
    of_key = (slope[..., None] * grouped_q).sum(1)
    of_value = (share[..., None] * grouped_grad).sum(1)
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
        drop = (grad.to(total.dtype) * out).sum(-1)
        if tiled_pull.serves(q):
            grads = tiled_pull.tiled_pull(q, k0, v0, grad, total, drop, ctx.bounds, scaling)
        else:
            grads = torch.empty_like(q), torch.empty_like(k0), torch.empty_like(v0)
            parts = _documents(ctx.bounds, grad, q, k0, v0, out, total, *grads)
            for pulled, queries, keys, values, mixed, mass, *places in parts:
                found = _BACKWARD(
                    pulled, queries, keys, values, mixed, mass, 0.0, True, scale=scaling
                )
                for place, value in zip(places, found, strict=True):
                    place.copy_(value)
        grad_q, grad_k0, grad_v0 = grads
        if not num_chain:
            return None, None, None, grad_q, grad_k0, grad_v0
        chain_k, chain_v = chain[:num_chain], chain[num_chain:]
        shares = torch.exp(_scores(q, chain_k, scaling) - total)
        added, found = torch.zeros(q.shape, dtype=shares.dtype, device=q.device), []
        for share, key, value in zip(shares, chain_k, chain_v, strict=True):
            found.append(_pull(added, q, grad, key, value, share, drop, scaling))
        grad_q += added.to(grad_q.dtype)
        of_keys, of_values = zip(*found, strict=True)
        return None, None, None, grad_q, grad_k0, grad_v0, *of_keys, *of_values
