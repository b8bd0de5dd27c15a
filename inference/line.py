"""What the ranks of one engine say to each other: numbered things, calls to them, the states they
are fed (`parallel`).

A call is one flat int64 buffer on the host: length, `Call`, number of the thing called, arguments.
Its first block has a fixed size, so that one broadcast does for a decode step.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum, auto
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..models.lean import LeanRotary
from ..models.shard import Group, leave_at_exit
from .pages import KVPool

T = TypeVar("T")

_IN_A_CALL = timedelta(minutes=5)
_BETWEEN_CALLS = timedelta(days=1)
_FIRST = 1024  # int64 of the first broadcast; what does not fit follows in a second


class Call(IntEnum):
    """What the leader asks for."""

    STOP = 0
    DROP = auto()
    """Things that the leader has no more."""
    TARGET = auto()
    """Load a share of a target's layers."""
    HEAD = auto()
    """Make a share of a head; its weights follow."""
    LINEAR = auto()
    """Keep rows of a matrix; they follow."""
    POOL = auto()
    """Keep pages; arguments: layers, slots, poison."""
    PAGES = auto()
    """Change pages beside a call; argument: name and values of a method of the pool."""
    LAYERS = auto()
    """The target's layers over a batch; embeddings [N, H] follow."""
    STEP = auto()
    """A head's step over a batch; embeddings and states [N, 2H] follow."""
    ROWS = auto()
    """Kept rows of a matrix times states; states [N, H] follow."""
    MEMORY = auto()
    """Tell what is held."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank holds: weights, pages (of layers that have run), and what the system says
    of the process (its largest resident set so far)."""

    weights: int
    pages: int
    resident: int


class Line:
    """What ranks hear each other by.

    Args:
        group: for work inside a call, where nobody waits long. calls: for buffers, which may be
            days apart; on the host.
    """

    def __init__(self, group: Group, calls: dist.ProcessGroup) -> None:
        self.group = group
        self.calls = calls

    @classmethod
    def open(cls) -> Line:
        """Join the group that the launcher announced."""
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_IN_A_CALL)
            leave_at_exit()
        ranks, calls = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_BETWEEN_CALLS)
        assert ranks is not None and isinstance(calls, dist.ProcessGroup)
        return cls(Group(dist.get_rank(), dist.get_world_size(), ranks), calls)

    def send(self, numbers: list[int]) -> None:
        """The leader's buffer."""
        block = torch.zeros(_FIRST, dtype=torch.int64)
        told = torch.tensor([len(numbers) + 1, *numbers], dtype=torch.int64)
        block[: len(told)] = told[:_FIRST]
        self._broadcast(block)
        if len(told) > _FIRST:
            self._broadcast(told[_FIRST:].clone())

    def hear(self) -> list[int]:
        """The leader's next buffer."""
        block = self._broadcast(torch.empty(_FIRST, dtype=torch.int64))
        length = int(block[0])
        if length <= _FIRST:
            return block[1:length].tolist()
        rest = self._broadcast(torch.empty(length - _FIRST, dtype=torch.int64))
        return [*block[1:].tolist(), *rest.tolist()]

    def share(self, states: Tensor) -> Tensor:
        """The leader's states on every rank, whose tensor of that shape and dtype they fill."""
        states = states.contiguous()
        with self.group.connected():
            dist.broadcast(states, 0, group=self.group.ranks)
        return states

    def _broadcast(self, numbers: Tensor) -> Tensor:
        with self.group.connected():
            dist.broadcast(numbers, 0, group=self.calls)
        return numbers

    def meet(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; what each of them returned, by rank.

        Raises:
            what this rank's `work` raised; ValueError where only another's did, with its words.
        """
        error: Exception | None = None
        mine: tuple[Any, str | None] = (None, None)
        try:
            mine = work(), None
        except Exception as caught:  # whatever it is, the others must not wait for this rank
            error, mine = caught, (None, f"{type(caught).__name__}: {caught}")
        everyone: list[Any] = [None] * self.group.size
        with self.group.connected():
            dist.all_gather_object(everyone, mine, group=self.calls)
        if error is not None:
            raise error
        for number, (_, fault) in enumerate(everyone):
            if fault is not None:
                raise ValueError(f"rank {number} could not do its part: {fault}")
        return [result for result, _ in everyone]


def held(things: list[Any], pools: list[KVPool]) -> RankMemory:
    """What this process holds: the weights that `things` lead to, each counted once, and pages."""
    weights: dict[int, Tensor] = {}
    seen: set[int] = set()
    ours = __name__.split(".")[0]
    left = list(things)
    while left:
        thing = left.pop()
        # A rotary table is worked out, no weight; it grows with the positions that came up.
        if id(thing) in seen or isinstance(thing, KVPool | LeanRotary):
            continue
        seen.add(id(thing))
        if isinstance(thing, DTensor):  # transformers' shares
            left.append(thing.to_local())
        elif isinstance(thing, Tensor):
            # Weights that oneDNN has laid out have no address to be known by.
            strided = thing.layout == torch.strided
            weights[thing.untyped_storage().data_ptr() if strided else id(thing)] = thing
        elif isinstance(thing, dict):
            left += thing.values()
        elif isinstance(thing, list | tuple):
            left += thing
        elif isinstance(thing, nn.Module) or type(thing).__module__.split(".")[0] == ours:
            left += vars(thing).values()
    pages = [one for pool in pools for one in (*pool.keys, *pool.values) if one is not None]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankMemory(sum(map(_bytes, weights.values())), sum(map(_bytes, pages)), resident)


def _bytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes()


def written(value: Any) -> list[int]:
    """JSON as numbers."""
    return list(json.dumps(value).encode())


def read(numbers: list[int]) -> Any:
    return json.loads(bytes(numbers))
