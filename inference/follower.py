"""The ranks beside the leader: they wait for a call, run it on their share, and know no request
(`parallel`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ..kernels.packed_linear import PackedLinear
from ..models.decoder import DecoderStack
from ..models.heads import Head, HeadConfig, HeadFunction, head_class
from ..models.shard import Group, load_library_share, load_share, narrow
from ..models.skeleton import text_config
from ..models.target import DTYPES, TargetConfig, runs_lean, torch_device, torch_dtype
from .batch import Batch, PagedContext
from .config import SamplingParams
from .line import Call, Line, held, read
from .pages import KVPool
from .sequence import Sequence


@dataclass(frozen=True)
class _Kept:
    """A follower's share of a thing."""

    share: Any
    fed: Tensor
    """[0, width], of the dtype and on the device of what a call to it is fed."""


class Follower:
    """The other ranks' side: does what it is told, and keeps what it is told to keep."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.things: dict[int, _Kept] = {}
        self.pools: dict[int, KVPool] = {}
        self._params, self._generator = SamplingParams(), torch.Generator()

    @torch.inference_mode()
    def serve(self) -> None:
        """Do what the leader says until it has no more to say.

        Raises:
            ConnectionError: another rank is gone.
        """
        work: dict[int, Callable[[int, list[int]], None]] = {
            Call.DROP: self._drop,
            Call.TARGET: self._target,
            Call.HEAD: self._head,
            Call.LINEAR: self._linear,
            Call.POOL: self._pool,
            Call.PAGES: self._pages,
            Call.LAYERS: self._layers,
            Call.STEP: self._step,
            Call.ROWS: self._rows,
            Call.MEMORY: self._memory,
        }
        while True:
            call, number, *values = self.line.hear()
            if call == Call.STOP:
                return
            work[call](number, values)

    def _drop(self, _: int, values: list[int]) -> None:
        for number in values:
            self.things.pop(number, None)
            self.pools.pop(number, None)

    def _target(self, number: int, values: list[int]) -> None:
        config = TargetConfig(**read(values))

        def load() -> None:
            width = int(text_config(config.source).hidden_size)
            share = load_layers(config, self.line.group)
            self.things[number] = _Kept(share, _fed(width, config.dtype, config.device))

        with contextlib.suppress(Exception):  # the leader hears of it, and decides
            self.line.meet(load)

    def _head(self, number: int, values: list[int]) -> None:
        about = read(values)
        config = HeadConfig.from_dict(about["head"], "the leader's head")
        head = head_class(config.kind)(
            config, AutoConfig.for_model(**about["target_config"]), about["draft_vocab_size"]
        )
        fed = _fed(2 * int(head.target_config.hidden_size), about["dtype"], about["device"])
        weights = [
            self.line.share(fed.new_empty(value.shape)) for value in head.state_dict().values()
        ]
        self.things[number] = _Kept(head_share(head, weights, self.line.group), fed)

    def _linear(self, number: int, values: list[int]) -> None:
        rows, width, dtype, cuda = values
        fed = _fed(width, list(DTYPES)[dtype], "cuda" if cuda else "cpu")
        own = self.line.group.own(self.line.group.borders(rows))
        weight = fed.new_empty(own.stop - own.start, width)
        self.line.group.receive(weight, 0)
        self.things[number] = _Kept(PackedLinear(weight), fed)

    def _pool(self, number: int, values: list[int]) -> None:
        layers, slots, poison = values
        self.pools[number] = KVPool(layers, slots, bool(poison))

    def _pages(self, number: int, values: list[int]) -> None:
        method, arguments = read(values)
        getattr(self.pools[number], method)(*arguments)

    def _layers(self, number: int, values: list[int]) -> None:
        thing, context = self.things[number], self._context(number, values)
        embeds = self._states(thing, context.batch)
        thing.share.forward(embeds, context.batch.positions, context, ())

    def _step(self, number: int, values: list[int]) -> None:
        step, offset, *rows = values
        thing, context = self.things[number], self._context(number, rows)
        embeds, hidden = self._states(thing, context.batch).chunk(2, -1)
        thing.share(embeds, hidden, context.batch.positions + offset, context, step)

    def _rows(self, number: int, values: list[int]) -> None:
        thing = self.things[number]
        states = self.line.share(thing.fed.new_empty(values[0], thing.fed.shape[1]))
        self.line.group.send(thing.share(states), 0)

    def _memory(self, _: int, values: list[int]) -> None:
        self.line.meet(lambda: held(list(self.things.values()), list(self.pools.values())))

    def _states(self, thing: _Kept, batch: Batch) -> Tensor:
        return self.line.share(thing.fed.new_empty(len(batch.tokens), thing.fed.shape[1]))

    def _context(self, number: int, values: list[int]) -> PagedContext:
        """The batch that `Leader.batch` wrote: pool, first layer, page size; by sequence how many
        slots hold keys, how many of the last of them are rows of this call, its tree if it has
        one (see `Batch.build`) behind its size, and the pages."""
        pool, first_layer, page_size, *rest = values
        device = self.things[number].fed.device
        parts, trees, place = [], [], 0
        while place < len(rest):
            length, count, columns = rest[place : place + 3]
            tree = place + 3
            place = tree + columns + -(-length // page_size)
            pages = rest[tree + columns : place]
            trees.append(rest[tree : tree + columns])
            sequence = Sequence("", [], 0, self._params, self._generator, length)
            sequence.pages, sequence.page_size = pages, page_size
            parts.append((sequence, length - count, [0] * count))
        batch = Batch.build(parts, device, trees if any(trees) else None)
        return PagedContext(self.pools[pool], batch, first_layer)


def _fed(width: int, dtype: str, device: str) -> Tensor:
    return torch.empty(0, width, dtype=torch_dtype(dtype), device=torch_device(device))


def load_layers(config: TargetConfig, group: Group) -> DecoderStack:
    """This rank's share of a target's layers; `config.source` is a folder.

    Raises:
        ValueError: they cannot be shared by so many ranks.
    """
    folder = Path(config.source)
    model_config = text_config(folder)
    load = load_share if runs_lean(config, model_config) else load_library_share
    device = torch_device(config.device)
    return load(folder, model_config, torch_dtype(config.dtype), device, group)


def head_share(head: Head, weights: list[Tensor], group: Group) -> HeadFunction:
    """A head of these weights (in the order of its state) whose layers are this rank's share."""
    head = head.to(weights[0].device, weights[0].dtype).eval().requires_grad_(False)
    for value, weight in zip(head.state_dict().values(), weights, strict=True):
        value.copy_(weight)
    for module in list(head.modules()):
        if hasattr(module, "self_attn"):
            narrow(module, group, f"a head of kind {head.kind}")
    head.lm_head = None  # the target's `linear` has it
    return head.lean()
