"""Sequence parallelism: several ranks train one packed batch together, each a share of its rows.

```
              rank r of S holds                            and needs of the others
head          its rows and their halo (`batch_slice`)      nothing: it works row by row
attention     queries, chain keys of its rows              step-0 keys and values of all rows
loss          students and teachers of its rows            nothing: sums over ranks add up
```
So attention alone communicates: keys and values of a layer's first step are gathered from the
group, and in the backward pass their gradients are summed and scattered back. This is the
all-gather form of context parallelism (Llama 3, arXiv 2407.21783, section 3.3.2); it asks nothing
of the number of heads, where an exchange of heads for rows needs one that S divides.

A group has its own batch, and groups are to batches what ranks are without this.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..data.batch_slice import BatchSlice, slice_batch
from ..data.batches import PackedBatch
from ..models.heads import Head
from ..models.trunk import Trunk
from .ranks import rank, world_size
from .unroll import UnrollContext, unroll


class SequenceGroup:
    """The ranks that train this rank's batches with it; with size 1 the rank alone.

    Args:
        size: S ranks a group; neighbours, so that the gathers stay inside a node where S divides
            its GPUs. steps: K, how far an unroll looks ahead at most.
    Attributes:
        number, count: which group this is, of how many.
    Raises:
        ValueError: S does not divide the number of ranks.
    """

    def __init__(self, size: int, steps: int) -> None:
        if world_size() % size:
            raise ValueError(
                f"train.sequence_parallel={size} does not divide the {world_size()} training "
                "ranks: every group has so many; launch a multiple of it, or give a divisor"
            )
        self.size, self.steps = size, steps
        self.index = rank() % size
        self.number, self.count = rank() // size, world_size() // size
        self.handle = _groups(size, world_size())[self.number] if size > 1 else None

    def share(self, batch: PackedBatch) -> PackedBatch:
        """This rank's rows of a batch of its group."""
        if self.size == 1:
            return batch
        return slice_batch(batch, self.index, self.size, self.steps)

    def unroll(
        self,
        head: Head,
        trunk: Trunk,
        batch: PackedBatch,
        steps: int,
        *,
        states: dict[int, Tensor] | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """`unroll.unroll` of a share: [K, n, H] for its n rows; all ranks of the group must call
        it."""
        assert self.handle is not None and isinstance(batch, BatchSlice)
        context = SliceContext(batch, self.handle)
        return unroll(head, trunk, batch, steps, states=states, context=context, noise=noise)


class SliceContext(UnrollContext):
    """What a rank's rows may see: the step-0 keys of the whole batch, and their own chains.

    Args:
        batch: the share. group: the ranks that have the others.
    """

    def __init__(self, batch: BatchSlice, group: Any) -> None:
        super().__init__(batch.borders)
        self.pieces, self.group = batch.pieces, group

    def commit(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The whole batch's, [Hkv, N, D] and [Hkv, N, Dv], from those of this rank's rows."""
        both = torch.cat([key, value], -1)
        own, at = [], 0
        for begin, end, stop in self.pieces:
            own.append(both[:, at : at + end - begin])
            at += stop - begin
        gathered = _Gather.apply(torch.stack(own), self.group)  # [S, 2, Hkv, rows, D + Dv]
        ordered = torch.cat([gathered[:, 0], gathered[:, 1].flip(0)])
        whole = ordered.transpose(0, 1).flatten(1, 2)  # [Hkv, N, D + Dv]
        return whole[..., : key.shape[-1]], whole[..., key.shape[-1] :]

    def look(
        self,
        q: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `UnrollContext`; one piece after the other."""
        parts, at = [], 0
        for begin, _, stop in self.pieces:
            rows = slice(at, at + stop - begin)
            parts.append(
                self.attention(
                    q[:, rows],
                    keys[0],
                    values[0],
                    [key[:, rows] for key in keys[1:]],
                    [value[:, rows] for value in values[1:]],
                    self.starts,
                    scaling=scaling,
                    window=window,
                    softcap=softcap,
                    offset=begin,
                )
            )
            at += stop - begin
        return torch.cat(parts, 1)


class _Gather(torch.autograd.Function):
    """x of every rank, [S, *x.shape]; backward: the sum over ranks of the gradient of one's own,
    taken in at least fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        size = dist.get_world_size(group)
        out = x.new_empty(size * x.shape[0], *x.shape[1:])
        dist.all_gather_single(out, x.contiguous(), group=group)
        return out.unflatten(0, (size, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        accurate = torch.promote_types(grad.dtype, torch.float32)
        summed = grad.new_empty(grad.shape[1:], dtype=accurate)
        dist.reduce_scatter_single(
            summed, grad.to(accurate).flatten(0, 1).contiguous(), group=ctx.group
        )
        return summed.to(grad.dtype), None


@lru_cache
def _groups(size: int, world: int) -> list[Any]:
    """The groups of neighbours; every rank makes all of them, once a process."""
    return [
        dist.new_group(list(range(first, first + size)), use_local_synchronization=False)
        for first in range(0, world, size)
    ]
