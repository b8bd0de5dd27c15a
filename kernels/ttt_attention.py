"""Attention of an unrolled draft head in the context it will have in the engine.

A packed batch holds documents end to end; each of its N positions p starts one chain of drafts. At
step k the engine has the committed (step-0) keys up to p and the chain's own keys of steps 1..k, so
the query of step k sees:

    step-0 keys   at positions p' <= p of its own document   a causal block, shared by all queries
    chain keys    of steps 1..k at its own position p        a diagonal: one key per query and step

The queries may be a slice of the rows, against the step-0 keys of all: a rank's share of a packed
batch, or a chunk of it. The dense mask of all is N x (k+1)N. Here the causal block is walked in
blocks of queries, the diagonal terms are columns of the same softmax, and backward recomputes a
block's probabilities, so memory is linear in N on any device.

Legend: N tokens of a packed batch, n queries, R documents, Hq / Hkv query / key heads, G = Hq /
Hkv, D / Dv key / value width, k chain steps before and including the query's own, c = k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .jit import use_triton
from .ttt_attention_flash import flash_serves, ttt_attention_flash
from .ttt_attention_fused import ttt_attention_fused

QUERY_BLOCK = 128  # queries a block; measured on bf16 and fp32 CPU matmuls against 64, 256 and 512
CHAIN_ALIGNMENT = 32  # chain columns are padded to this, so that rows of the causal block align


class _Plan(NamedTuple):
    """What the forward and the backward pass share besides tensors."""

    bounds: tuple[int, ...]  # document borders, 0 .. N
    scaling: float
    window: int | None
    softcap: float | None
    num_chain: int
    offset: int  # the first query's row
    num_queries: int

    @property
    def padding(self) -> int:
        return -(-self.num_chain // CHAIN_ALIGNMENT) * CHAIN_ALIGNMENT

    def hidden_chain(self) -> int:
        """Chain steps that a sliding window hides from the query, which sees key j of its chain
        when k - j < window."""
        return 0 if self.window is None else max(0, self.num_chain - self.window)

    def first_key(self, start: int, query: int) -> int:
        """First step-0 key that the window leaves visible to `query`, not before its document's
        `start`."""
        return (
            start if self.window is None else max(start, query + self.num_chain - self.window + 1)
        )


class _Block(NamedTuple):
    """Queries [begin, end) of one document and the step-0 keys [first, end) that any of them
    sees."""

    first: int
    begin: int
    end: int
    queries: slice  # the same rows, counted from the first query


def ttt_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    chain_k: Sequence[Tensor],
    chain_v: Sequence[Tensor],
    starts: Tensor | Sequence[int],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    offset: int = 0,
) -> Tensor:
    """Attention of step k = len(chain_k) over a packed batch, with gradients for every tensor.

    q [Hq, n, D], the queries of rows offset .. offset + n - 1 (all N of them by default); k0 [Hkv,
    N, D]; v0 [Hkv, N, Dv]; chain_k, chain_v: k tensors [Hkv, n, D] and [Hkv, n, Dv], the keys of
    steps 1..k at the queries' rows (empty at step 0, where the query's own key is in k0); starts
    [R+1] document borders from 0 to N. Any floating dtype, one for all; probabilities are taken in
    at least fp32 and gradients of k0, v0 summed in at least fp32. window: keys further back than
    window - 1 positions are hidden (the query of step k stands at p + k). softcap c: scores become
    c * tanh(score / c). Returns [Hq, n, Dv].
    Raises ValueError for shapes that do not fit. An empty document is a fault of the packer and
    asserts.
    """
    bounds = _check(q, k0, v0, chain_k, chain_v, starts, window, offset)
    if use_triton(q):
        return ttt_attention_fused(
            q, k0, v0, chain_k, chain_v, bounds, scaling, window, softcap, offset
        )
    longest = max(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True))
    if window is not None and window >= longest + len(chain_k):
        window = None  # it reaches over every document
    if q.shape[1] == bounds[-1] and flash_serves(q, v0, window, softcap):
        return ttt_attention_flash(q, k0, v0, chain_k, chain_v, bounds, scaling)
    plan = _Plan(bounds, scaling, window, softcap, len(chain_k), offset, q.shape[1])
    return _TTTAttention.apply(plan, q, k0, v0, *chain_k, *chain_v)


def ttt_attention_dense(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    chain_k: Sequence[Tensor],
    chain_v: Sequence[Tensor],
    starts: Tensor | Sequence[int],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    offset: int = 0,
) -> Tensor:
    """The definition of `ttt_attention`: the n x (N + kn) mask written out. Quadratic; tests and
    benchmarks only."""
    bounds = torch.tensor(_check(q, k0, v0, chain_k, chain_v, starts, window, offset))
    num_queries, steps = q.shape[1], len(chain_k)
    position = torch.arange(k0.shape[1])
    own = slice(offset, offset + num_queries)
    document = torch.bucketize(position, bounds[1:], right=True)
    reach = torch.iinfo(torch.int64).max if window is None else window
    distance = position[own, None] - position[None, :]
    same = (document[own, None] == document[None, :]) & (distance >= 0)
    masks = [same & (distance + steps < reach)]
    for step in range(1, steps + 1):
        masks.append(torch.eye(num_queries, dtype=torch.bool) & (steps - step < reach))
    mask = torch.cat(masks, 1).to(q.device)  # [n, N + kn]
    keys, values = torch.cat([k0, *chain_k], 1), torch.cat([v0, *chain_v], 1)
    groups = q.shape[0] // k0.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = torch.einsum("hnd,hmd->hnm", q, keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    probabilities = (
        scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=accurate).to(values.dtype)
    )
    return probabilities @ values


def _check(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    chain_k: Sequence[Tensor],
    chain_v: Sequence[Tensor],
    starts: Tensor | Sequence[int],
    window: int | None,
    offset: int,
) -> tuple[int, ...]:
    (key_heads, num_tokens, width), num_queries = k0.shape, q.shape[1]
    if q.shape[2] != width or v0.shape[:2] != k0.shape[:2] or q.shape[0] % key_heads:
        raise ValueError(
            f"q {list(q.shape)}, k0 {list(k0.shape)}, v0 {list(v0.shape)} do not fit: expected "
            "[Hq, n, D], [Hkv, N, D], [Hkv, N, Dv] with Hq a multiple of Hkv"
        )
    if not 0 <= offset <= num_tokens - num_queries:
        raise ValueError(
            f"queries {offset} .. {offset + num_queries - 1} (offset {offset}) must lie among the "
            f"{num_tokens} rows that have keys"
        )
    shapes = (key_heads, num_queries, width), (key_heads, num_queries, v0.shape[2])
    if (
        len(chain_k) != len(chain_v)
        or any(t.shape != shapes[0] for t in chain_k)
        or any(t.shape != shapes[1] for t in chain_v)
    ):
        raise ValueError(
            f"chain keys {[list(t.shape) for t in chain_k]} and values "
            f"{[list(t.shape) for t in chain_v]} must be one pair per step, of shapes "
            f"{list(shapes[0])} and {list(shapes[1])}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window {window} hides every key; give at least 1, or None for no window")
    bounds = tuple(int(b) for b in (starts.tolist() if isinstance(starts, Tensor) else starts))
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(
            f"document borders {bounds} must run from 0 to the number of tokens, {num_tokens}"
        )
    assert all(a < b for a, b in zip(bounds[:-1], bounds[1:], strict=True)), (
        f"empty document in {bounds}"
    )
    return bounds


def _blocks(plan: _Plan):
    offset, last = plan.offset, plan.offset + plan.num_queries
    for start, stop in zip(plan.bounds[:-1], plan.bounds[1:], strict=True):
        for begin in range(max(start, offset), min(stop, last), QUERY_BLOCK):
            end = min(stop, last, begin + QUERY_BLOCK)
            first = min(plan.first_key(start, begin), end)
            yield _Block(first, begin, end, slice(begin - offset, end - offset))


def _chain_scores(plan: _Plan, q: Tensor, chain_k: Sequence[Tensor]) -> Tensor:
    """Scaled, capped scores of the diagonal, [Hkv, G, n, c]; -inf where the window hides a step."""
    grouped = q.unflatten(0, (chain_k[0].shape[0], -1))  # [Hkv, G, n, D]
    scores = torch.stack([(grouped * key[:, None]).sum(-1) for key in chain_k], -1) * plan.scaling
    if plan.softcap is not None:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    scores[..., : plan.hidden_chain()] = float("-inf")
    return scores


def _rows(x: Tensor, block: _Block, num_kv_heads: int) -> Tensor:
    """Rows of one block, heads of a group stacked: [Hq, n, D] -> [Hkv, G * b, D]."""
    return x[:, block.queries].reshape(num_kv_heads, -1, x.shape[-1])


def _probabilities(
    plan: _Plan, block: _Block, rows: Tensor, k0: Tensor, chain: Tensor | None, causal: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Probabilities of a block, [Hkv, G * b, padding + end - first], and the capped scores when
    there is a soft-cap.

    rows [Hkv, G * b, D] queries; chain [Hkv, G, n, c] diagonal scores or None; causal [block,
    block] additive mask. Columns: the c chain steps, padding up to the alignment, then step-0 keys
    [first, end).
    """
    first, begin, end, queries = block
    padding, num_keys = plan.padding, end - first
    scores = rows.new_empty(rows.shape[0], rows.shape[1], padding + num_keys)
    causal_block = scores[..., padding:]
    torch.baddbmm(
        causal_block, rows, k0[:, first:end].mT, beta=0, alpha=plan.scaling, out=causal_block
    )
    capped = None
    if plan.softcap is not None:
        causal_block.div_(plan.softcap).tanh_().mul_(plan.softcap)
        capped = causal_block.clone()
    grouped = scores.view(k0.shape[0], -1, end - begin, padding + num_keys)  # [Hkv, G, b, columns]
    if chain is not None:
        grouped[..., : plan.num_chain] = chain[:, :, queries]
        grouped[..., plan.num_chain : padding] = float("-inf")
    if plan.window is not None:
        query = torch.arange(begin, end, device=rows.device)[:, None]
        key = torch.arange(first, end, device=rows.device)[None, :]
        hidden = (key > query) | (query - key + plan.num_chain >= plan.window)
        grouped[..., padding:].masked_fill_(hidden, float("-inf"))
    else:
        grouped[..., padding + begin - first :].add_(causal[: end - begin, : end - begin])
    return torch.softmax(scores, -1), capped


def _causal_mask(like: Tensor) -> Tensor:
    return like.new_full((QUERY_BLOCK, QUERY_BLOCK), float("-inf")).triu_(1)


class _TTTAttention(torch.autograd.Function):
    """One step over all documents. Saves its inputs only; probabilities live one block at a
    time."""

    @staticmethod
    def forward(ctx, plan: _Plan, q: Tensor, k0: Tensor, v0: Tensor, *chain: Tensor) -> Tensor:
        ctx.save_for_backward(q, k0, v0, *chain)
        ctx.plan = plan
        num_kv, (num_heads, num_queries, _), width = k0.shape[0], q.shape, v0.shape[-1]
        chain_k, chain_v = chain[: plan.num_chain], chain[plan.num_chain :]
        diagonal = _chain_scores(plan, q, chain_k) if chain_k else None
        weights = torch.empty_like(diagonal) if diagonal is not None else None  # [Hkv, G, n, c]
        out = q.new_empty(num_queries, num_heads, width).transpose(0, 1)
        causal, padding = _causal_mask(q), plan.padding
        for block in _blocks(plan):
            probs, _ = _probabilities(plan, block, _rows(q, block, num_kv), k0, diagonal, causal)
            first, begin, end, queries = block
            mixed = torch.bmm(probs[..., padding:], v0[:, first:end])  # [Hkv, G * b, Dv]
            out[:, queries] = mixed.view(num_heads, end - begin, width)
            if weights is not None:
                grouped = probs.view(num_kv, -1, end - begin, probs.shape[-1])
                weights[:, :, queries] = grouped[..., : plan.num_chain]
        if weights is not None:
            grouped_out = out.unflatten(0, (num_kv, -1))  # [Hkv, G, n, Dv]
            for step, value in enumerate(chain_v):
                grouped_out.addcmul_(weights[..., step, None], value[:, None])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        plan: _Plan = ctx.plan
        q, k0, v0, *chain = ctx.saved_tensors
        num_kv, num_heads, padding = k0.shape[0], q.shape[0], plan.padding
        chain_k, chain_v = chain[: plan.num_chain], chain[plan.num_chain :]
        accurate = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grad_k0 = torch.zeros_like(k0, dtype=accurate)
        grad_v0 = torch.zeros_like(v0, dtype=accurate)
        grouped_q, grouped_grad = q.unflatten(0, (num_kv, -1)), grad.unflatten(0, (num_kv, -1))
        diagonal = weights = grad_weights = grad_scores = None
        if chain:
            diagonal = _chain_scores(plan, q, chain_k)
            weights, grad_scores = torch.empty_like(diagonal), torch.empty_like(diagonal)
            grad_weights = torch.stack(
                [(grouped_grad * value[:, None]).sum(-1) for value in chain_v], -1
            )
        causal = _causal_mask(q)
        for block in _blocks(plan):
            first, begin, end, queries = block
            rows, grad_rows = _rows(q, block, num_kv), _rows(grad, block, num_kv)
            probs, capped = _probabilities(plan, block, rows, k0, diagonal, causal)
            grad_v0[:, first:end] += torch.bmm(probs[..., padding:].mT, grad_rows)
            grad_probs = torch.empty_like(probs)
            grouped = grad_probs.view(num_kv, -1, end - begin, probs.shape[-1])
            torch.bmm(grad_rows, v0[:, first:end].mT, out=grad_probs[..., padding:])
            if weights is not None and grad_weights is not None:
                weights[:, :, queries] = probs.view_as(grouped)[..., : plan.num_chain]
                grouped[..., : plan.num_chain] = grad_weights[:, :, queries]
                grouped[..., plan.num_chain : padding] = 0
            # probs * (grad_probs - rowsum(probs * grad_probs)), summed in fp32 for bf16 inputs
            ds = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            if grad_scores is not None:
                grad_scores[:, :, queries] = ds.view_as(grouped)[..., : plan.num_chain]
            ds = ds[..., padding:]
            if capped is not None and plan.softcap is not None:
                ds = ds * (1 - (capped / plan.softcap).square())
            grad_q[:, queries] = torch.bmm(ds, k0[:, first:end]).view(num_heads, end - begin, -1)
            grad_k0[:, first:end] += torch.bmm(ds.mT, rows)
        grad_chain_k, grad_chain_v = [], []
        if diagonal is not None and weights is not None and grad_scores is not None:
            if plan.softcap is not None:
                visible = torch.where(torch.isinf(diagonal), 0, diagonal)
                grad_scores *= 1 - (visible / plan.softcap).square()
            for step, key in enumerate(chain_k):
                grad_q.unflatten(0, (num_kv, -1)).addcmul_(
                    grad_scores[..., step, None], key[:, None]
                )
                grad_chain_k.append(
                    (grad_scores[..., step, None] * grouped_q).sum(1) * plan.scaling
                )
                grad_chain_v.append((weights[..., step, None] * grouped_grad).sum(1))
        grad_q *= plan.scaling
        grad_k0 *= plan.scaling
        return (
            None,
            grad_q,
            grad_k0.to(k0.dtype),
            grad_v0.to(v0.dtype),
            *grad_chain_k,
            *grad_chain_v,
        )
