"""From logits to the law that a request samples from: temperature, min-p, top-k, top-p,
renormalised, each row with its own settings.

    z = logits / temperature      w = exp(z - max z)
    min-p   keep w >= min_p
    top-k   keep z >= the k-th largest z
    top-p   keep tokens with (mass of larger z) < p * mass, masses of what min-p and top-k kept
    out = w / sum of kept w, 0 elsewhere

The order is vLLM's. Tokens of equal z stay or go together, so the result does not depend on the
order of a sort; the likeliest token always stays. A logit of -infinity is a token that is never
drawn. The kernel does not sort: the order of floats is the order of their bits taken as an integer
with the lower 31 of a negative one flipped, so both edges are found exactly by 32 halvings of that
integer, each a pass over a row that lies in the cache.

Drawing from the law is `accept_chains` with chains of no drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import Kernel, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl

PREFIX = 512
"""The plain form on a CPU orders this many tokens first, and a whole row only where its top-p does
not end among them."""


def renormalise_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The plain definition: every filter keeps all z from some edge on. See `renormalise`."""
    size = logits.shape[1]
    accurate = torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(accurate) / temperature.to(accurate)[:, None]
    weights = (z - z.amax(-1, keepdim=True)).exp_()
    weights.masked_fill_(weights < min_p.to(accurate)[:, None], 0)
    count = torch.where((top_k <= 0) | (top_k > size), size, top_k).long()[:, None]
    width = size
    if not logits.is_cuda and len(count):  # there, reading this would wait for the device
        needed = int(torch.where(count < size, count, 1).amax())
        width = min(size, needed + 64 if int(count.amax()) < size else max(needed, PREFIX))
    ordered, order = z.topk(width, -1)
    edge = ordered.gather(1, count.clamp(max=width) - 1)
    weights.masked_fill_((z < edge) & (count < size), 0)
    limit = top_p.double()[:, None] * weights.sum(-1, keepdim=True, dtype=torch.float64)
    edge, mass = _mass_edge(ordered, weights.gather(1, order), limit)
    if width < size:
        short = ((mass < limit) & (top_p < 1)[:, None])[:, 0].nonzero()[:, 0]
        if len(short):
            ordered, order = z[short].sort(-1, descending=True)
            edge[short] = _mass_edge(ordered, weights[short].gather(1, order), limit[short])[0]
    weights.masked_fill_((z < edge) & (top_p < 1)[:, None], 0)
    return weights.div_(weights.sum(-1, keepdim=True, dtype=torch.float64).to(accurate))


def _mass_edge(ordered: Tensor, weights: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """([n, 1], [n, 1] float64): the least of the descending `ordered` [n, m] with less than the
    limit [n, 1] in front of it, which takes those of equal z along; the mass of all m."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    last = (cumulative - weights < limit).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last.clamp(min=0)), cumulative[:, -1:]


def renormalise(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """See the module's formulae.

    Args:
        logits: [n, V]; every row's largest is finite. temperature: [n] floating, > 0. top_k: [n]
            int64, 0 = all. top_p: [n] floating in (0, 1], 1 = all. min_p: [n] floating in [0, 1],
            0 = all.
    Returns:
        [n, V] float32 (float64 for float64 logits); rows sum to 1.
    """
    if not use_triton(logits):
        return renormalise_reference(logits, temperature, top_k, top_p, min_p)
    logits = logits.contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, size, dtype=torch.float32, device=logits.device)
    if rows:
        renormalise_kernel[(rows,)](
            logits,
            temperature.float(),
            top_k,
            top_p.float(),
            min_p.float(),
            out,
            size,
            BLOCK=min(4096, power_of_two(size)),
            num_warps=8,
        )
    return out


@Kernel
def renormalise_kernel(logits, temperature, top_k, top_p, min_p, out, size, BLOCK: tl.constexpr):
    """One row. `out` holds z between the passes."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * size
    place = out + row * size
    heat = tl.load(temperature + row)
    lane = tl.arange(0, BLOCK)
    best = tl.full([], float("-inf"), tl.float32)
    for base in range(0, size, BLOCK):
        at = base + lane
        z = tl.load(source + at, at < size, 0.0).to(tl.float32) / heat
        tl.store(place + at, z, at < size)
        best = tl.maximum(best, tl.max(tl.where(at < size, z, float("-inf"))))
    tl.debug_barrier()
    edge = tl.full([], -(2**31), tl.int64)  # the least order that stays
    count = tl.load(top_k + row)
    if (count > 0) & (count < size):
        # The largest order that at least `count` tokens reach.
        high = tl.full([], 2**31 - 1, tl.int64)
        for _ in range(32):
            middle = edge + (high - edge + 1) // 2
            reached = tl.zeros([], tl.int64)
            for base in range(0, size, BLOCK):
                at = base + lane
                bits = tl.load(place + at, at < size, 0.0).to(tl.int32, bitcast=True)
                order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
                reached += tl.sum(((order >= middle) & (at < size)).to(tl.int64))
            enough = reached >= count
            edge = tl.where(enough, middle, edge)
            high = tl.where(enough, high, middle - 1)
    floor = tl.load(min_p + row)
    share = tl.load(top_p + row)
    if share < 1.0:
        mass = tl.zeros([], tl.float64)
        for base in range(0, size, BLOCK):
            at = base + lane
            z = tl.load(place + at, at < size, float("-inf"))
            bits = z.to(tl.int32, bitcast=True)
            order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            weight = tl.exp(z - best)
            kept = (order >= edge) & (weight >= floor)
            mass += tl.sum(tl.where(kept, weight, 0.0).to(tl.float64))
        limit = share.to(tl.float64) * mass
        # The least order, not below the edge, with less than the limit above it.
        high = tl.full([], 2**31 - 1, tl.int64)
        for _ in range(32):
            middle = edge + (high - edge) // 2
            above = tl.zeros([], tl.float64)
            for base in range(0, size, BLOCK):
                at = base + lane
                z = tl.load(place + at, at < size, float("-inf"))
                bits = z.to(tl.int32, bitcast=True)
                order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
                weight = tl.exp(z - best)
                kept = (order > middle) & (weight >= floor)
                above += tl.sum(tl.where(kept, weight, 0.0).to(tl.float64))
            below = above < limit
            high = tl.where(below, middle, high)
            edge = tl.where(below, edge, middle + 1)
        edge = high
    mass = tl.zeros([], tl.float64)
    for base in range(0, size, BLOCK):
        at = base + lane
        z = tl.load(place + at, at < size, float("-inf"))
        bits = z.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        weight = tl.exp(z - best)
        weight = tl.where((order >= edge) & (weight >= floor), weight, 0.0)
        mass += tl.sum(weight.to(tl.float64))
    for base in range(0, size, BLOCK):
        at = base + lane
        z = tl.load(place + at, at < size, float("-inf"))
        bits = z.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        weight = tl.exp(z - best)
        weight = tl.where((order >= edge) & (weight >= floor), weight, 0.0)
        tl.store(place + at, (weight.to(tl.float64) / mass).to(tl.float32), at < size)
