"""One engine on several ranks: the leader decides, the others compute their share of each call.

Rank 0 alone schedules, samples and verifies; so what is accepted is the same on all ranks by
construction, for there is one place where it is decided. Before a call to something that the ranks
hold between them it broadcasts one flat int64 buffer that describes the call, and the states that
it is fed. The others `serve`: they wait for a buffer, run the same layers on their share, and know
no request. Of state they have weights, and their heads of the pool, whose free pages may hold
anything.

    held between the ranks  the target's layers, those of its head (`models.shard`); lm_head by rows
    on the leader alone     embedding, norms outside the layers, what a head makes of boundaries;
                            heads without a lean layer (medusa, other families than Llama's), the
                            draft LM; all request state

Things are numbered as the leader makes them, and dropped by the others once the leader has dropped
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.packed_linear import PackedLinear
from ..models.attention import AttentionContext
from ..models.decoder import DecoderStack
from ..models.heads import Head, HeadFunction, HeadStep
from ..models.lean import LeanStack
from ..models.skeleton import text_config
from ..models.target import (
    DTYPES,
    Linear,
    Target,
    TargetConfig,
    eos_ids,
    prepare_folder,
    torch_device,
    torch_dtype,
    warn_of_changing_rope,
)
from ..models.trunk import Trunk
from .batch import PagedContext
from .follower import Follower, head_share, load_layers
from .line import Call, Line, RankMemory, held, written
from .pages import KVPool

Load = Callable[[TargetConfig], Target]


@contextlib.contextmanager
def joined() -> Iterator[Load | None]:
    """The ranks of this launch (torchrun) as one engine.

    Gives how to load the target: `Target.load` in a process alone, on the leader a load that shares
    it. On the other ranks it serves until the leader is done, and gives None. All ranks must have
    the leader's packages and see its files.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Target.load
        return
    line = Line.open()
    if line.group.rank:
        Follower(line).serve()
        yield None
        return
    leader = Leader(line)
    try:
        yield leader.load
    finally:
        leader.stop()


class Leader:
    """Rank 0's side: numbers things and announces calls to them."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.group = line.group
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []
        self._things: weakref.WeakSet[object] = weakref.WeakSet()
        self._pools: weakref.WeakKeyDictionary[KVPool, int] = weakref.WeakKeyDictionary()

    def load(self, config: TargetConfig) -> Target:
        """`Target.load`, shared.

        Raises:
            ValueError: what `Target.load` refuses, or a target that cannot be shared.
        """
        if config.spread:
            raise ValueError(
                "target.spread=true is for a dump in one process; ranks share a target as it is"
            )
        folder = prepare_folder(config)
        config = dataclasses.replace(config, source=str(folder))
        number = next(self._numbers)
        self.announce(Call.TARGET, number, *written(dataclasses.asdict(config)))
        share: list[DecoderStack] = []
        self.line.meet(lambda: share.append(load_layers(config, self.group)))
        return SharedTarget(self, number, folder, config, share[0])

    def announce(self, call: Call, number: int, *values: int) -> None:
        """Tell the others what comes."""
        dropped = list(self._dropped)
        if dropped:
            del self._dropped[: len(dropped)]
            self.line.send([Call.DROP, 0, *dropped])
        self.line.send([call, number, *values])

    def keep(self, owner: object, number: int | None = None) -> int:
        """A number for a thing that the others keep as long as `owner` lives."""
        number = next(self._numbers) if number is None else number
        self._things.add(owner)
        weakref.finalize(owner, self._dropped.append, number).atexit = False
        return number

    def batch(self, context: AttentionContext) -> list[int]:
        """A call's batch in numbers, see `Follower.context`.

        Raises:
            ValueError: another context than the engine's, or FlashInfer, which the other ranks
            would not run.
        """
        if not isinstance(context, PagedContext):
            raise ValueError(
                f"a target on several ranks runs the engine's batches, no {type(context).__name__}"
            )
        pool, batch = context.pool, context.batch
        if pool.attention is not None:
            raise ValueError(
                "engine.attention=flashinfer runs in one process; over several ranks set "
                "engine.attention=auto"
            )
        fields = [field.name for field in dataclasses.fields(batch)]
        told = ["sequences", "starts", "tokens", "positions", "slots", "lengths", "trees"]
        assert fields == told, "a batch has something that the other ranks are not told"
        number = self._pools.get(pool)
        if number is None:
            number = self._pools[pool] = self.keep(pool)
            self.announce(Call.POOL, number, len(pool.keys), pool.num_slots, int(pool.poison))
            # The pool must not be kept alive by what it calls.
            pool.mirror = _Mirror(self, number)
        size, trees = batch.sequences[0].page_size, batch.trees
        numbers = [number, context.first_layer, size]
        for index, (sequence, length) in enumerate(
            zip(batch.sequences, batch.lengths, strict=True)
        ):
            parents = [] if trees is None else trees.parents[index]
            numbers += [length, batch.starts[index + 1] - batch.starts[index], len(parents)]
            numbers += [*parents, *sequence.pages[: -(-length // size)]]
        return numbers

    def memory(self) -> list[RankMemory]:
        """Of every rank, by its number."""
        self.announce(Call.MEMORY, 0)
        return self.line.meet(lambda: held(list(self._things), list(self._pools)))

    def stop(self) -> None:
        """Let the others go. A leader that fails has lost them already, or lets them go as well."""
        with contextlib.suppress(ConnectionError):
            self.line.send([Call.STOP, 0])


class _Mirror:
    """See `KVPool.mirror`."""

    def __init__(self, leader: Leader, number: int) -> None:
        self.leader = leader
        self.number = number

    def __call__(self, method: str, *arguments: Any) -> None:
        self.leader.announce(Call.PAGES, self.number, *written([method, arguments]))


class SharedTarget(Target):
    """The leader's target: the same calls, each announced before it is run."""

    def __init__(
        self, leader: Leader, number: int, folder: Path, config: TargetConfig, share: DecoderStack
    ) -> None:
        self.leader = leader
        model_config = text_config(folder)
        warn_of_changing_rope(folder, model_config)
        trunk = _LeadersTrunk.load(folder, torch_dtype(config.dtype), torch_device(config.device))
        leader.keep(self, number)
        self._lean = isinstance(share, LeanStack)
        stack = _SharedStack(leader, number, share)
        super().__init__(folder, model_config, stack, trunk, eos_ids(folder, model_config))
        trunk.let_go(folder)

    def linear(self, weight: Tensor) -> Linear:
        """Rows of a matrix, on the ranks that multiply them."""
        return _SharedLinear(
            self.leader, weight, weight.data_ptr() == self.trunk.embedding.data_ptr()
        )

    def head_function(self, head: Head) -> HeadFunction:
        """See `Target`; heads without a lean layer are the leader's alone."""
        if not self._lean or not head.num_layers:
            return head.for_inference(self.dtype, self.device, self._lean)
        return _SharedHead(self.leader, head, self)

    def memory(self) -> list[RankMemory]:
        """What each rank holds, by its number."""
        return self.leader.memory()


class _LeadersTrunk(Trunk):
    """A trunk whose lm_head, where it is not the embedding, is read again when it is asked for."""

    def let_go(self, folder: Path) -> None:
        """The rows are where they are multiplied now."""
        self.folder = folder
        if not self.tied:
            self.lm_head = self.lm_head[:0].clone()

    def lm_head_weight(self, ids: Tensor | None = None) -> Tensor:
        """See `Trunk`."""
        if len(self.lm_head):
            return super().lm_head_weight(ids)
        return Trunk.load(self.folder, self.dtype, self.device).lm_head_weight(ids)


class _SharedStack:
    """A `DecoderStack`."""

    def __init__(self, leader: Leader, number: int, share: DecoderStack) -> None:
        self.leader = leader
        self.number = number
        self.share = share

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        context: AttentionContext,
        boundaries: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """See `DecoderStack.forward`."""
        self.leader.announce(Call.LAYERS, self.number, *self.leader.batch(context))
        embeds = self.leader.line.share(embeds)
        return self.share.forward(embeds, positions, context, boundaries)


class _SharedHead:
    """A `HeadFunction`."""

    def __init__(self, leader: Leader, head: Head, target: Target) -> None:
        self.leader = leader
        self.number = leader.keep(self)
        self.modules = head.num_modules
        about = {
            "head": dataclasses.asdict(head.config),
            "draft_vocab_size": head.draft_vocab_size,
            "target_config": head.target_config.to_dict(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": target.device.type,
        }
        leader.announce(Call.HEAD, self.number, *written(about))
        weights = [
            leader.line.share(value.detach().to(target.device, target.dtype, copy=True))
            for value in head.state_dict().values()
        ]
        same = type(head)(head.config, head.target_config, head.draft_vocab_size)
        self.share = head_share(same, weights, leader.group)

    def feed(self, states: dict[int, Tensor], trunk: Trunk) -> Tensor:
        """See `Head.feed`; the others get what it gives."""
        return self.share.feed(states, trunk)

    def __call__(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        """See `Head.forward`. Positions are the batch's, moved on by the module's number."""
        offset = min(step, self.modules - 1)
        self.leader.announce(Call.STEP, self.number, step, offset, *self.leader.batch(context))
        embeds, hidden = self.leader.line.share(torch.cat((embeds, hidden), -1)).chunk(2, -1)
        return self.share(embeds, hidden, positions, context, step)


class _SharedLinear:
    """x W^T, whose columns come from the ranks that hold those rows of W.

    Args:
        weight: [out, in], of which the leader keeps its rows. whole: its memory is kept anyway.
    """

    def __init__(self, leader: Leader, weight: Tensor, whole: bool) -> None:
        self.leader = leader
        self.number = leader.keep(self)
        group = leader.group
        self.borders = group.borders(len(weight))
        dtype = list(DTYPES.values()).index(weight.dtype)
        leader.announce(Call.LINEAR, self.number, *weight.shape, dtype, int(weight.is_cuda))
        for rank in range(1, group.size):
            group.send(weight[self.borders[rank] : self.borders[rank + 1]], rank)
        own = weight[group.own(self.borders)]
        self.own = PackedLinear(own if whole else own.clone())

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        leader = self.leader
        leader.announce(Call.ROWS, self.number, len(x))
        x = leader.line.share(x)
        parts = [self.own(x)]
        for rank in range(1, leader.group.size):
            size = self.borders[rank + 1] - self.borders[rank]
            parts.append(x.new_empty(len(x), size))
            leader.group.receive(parts[-1], rank)
        return torch.cat(parts, -1)
