"""Decode and verify passes of the target in buffers that stay where they are, so that a CUDA graph
of each shape is captured once and replayed (`engine.cuda_graphs`).

    shape     rows, rows of a sequence, keys, columns of a tree: each rounded up
    padding   every row too many is a sequence of its own, of one key in a page that belongs to
              nobody; its states are not read
    call      at first as it is (kernels are compiled), then captured, from then on replayed

A graph holds launches and no decision of the host, so attention is the form whose lengths and pages
are read on the device. Whoever captures is handed in: without a graph the same pass runs call by
call, on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.jit import power_of_two, use_triton
from ..kernels.kv_append import kv_append
from ..kernels.paged_attention import paged_attention
from ..kernels.paged_rows import DraftedRows, PagedRows
from ..models.lean import LeanStack
from ..models.target import Target
from .batch import Batch
from .config import EngineConfig
from .pages import KVPool
from .upload import upload

Capture = Callable[[Callable[[], None]], Callable[[], None]]
_MOST = 512  # rows of a pass; a longer one keeps the device busy while the host launches it
_SPAN = 1024  # keys, the least a shape has room for
_TILE = 64  # rows that a matrix product takes at once


def hindrance(target: Target, config: EngineConfig) -> str | None:
    """Why this target's passes cannot be captured here; None where they can."""
    if target.device.type != "cuda":
        return f"the target is on {target.device}, and graphs are CUDA's"
    if config.attention != "auto":
        return f"engine.attention={config.attention} plans every pass on the host"
    if not use_triton(target.trunk.embedding):
        return "PyTorch's attention reads lengths on the host; set DRAFTSMITH_KERNELS=triton"
    if not isinstance(target.stack, LeanStack):
        return "the layers are transformers' own or shared by ranks, and may wait for the device"
    if not target.stack.rotary.fixed:
        return "the rope's frequencies follow the longest position of a pass"
    return None


class CudaGraphs:
    """A `Capture`: graphs of calls that have run before, all in one memory pool, since one is
    replayed at a time."""

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        """What is returned replays the call."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            call()
        return graph.replay


class RowsContext:
    """The attention context of a pass whose rows are described on the device alone; see
    `models.attention.AttentionContext`."""

    def __init__(self, pool: KVPool, rows: PagedRows, slots: Tensor, first_layer: int) -> None:
        self.pool, self.rows, self.slots = pool, rows, slots
        self.first_layer = first_layer

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `models.attention.AttentionContext`."""
        keys, values = self.pool.layer(self.first_layer + layer, k[0], v[0])
        kv_append(keys, values, k[0], v[0], self.slots)
        settings = {"scaling": scaling, "window": window, "softcap": softcap}
        return paged_attention(q[0], keys, values, self.rows, **settings)[None]


@dataclass(frozen=True)
class Shape:
    """What a pass has room for.

    Attributes:
        rows: in all, and sequences. most: rows of one sequence. keys: of one sequence. columns: of
            a tree, 0 where there are none.
    """

    rows: int
    most: int
    keys: int
    columns: int

    @classmethod
    def of(cls, batch: Batch) -> Shape:
        """The one that a batch runs in."""
        count = len(batch.tokens)
        tiles = -(-count // _TILE) * _TILE
        return cls(
            power_of_two(count) if count < _TILE else tiles,
            power_of_two(_most_rows(batch)),
            max(_SPAN, power_of_two(max(batch.lengths))),
            0 if batch.trees is None else power_of_two(max(batch.trees.columns)),
        )


class StaticPasses:
    """The passes of one engine's target, by shape.

    Args:
        pool: with a spare page (`KVPool.spare`). boundaries: which states to return beside L.
        most_rows: of one sequence; batches with more run elsewhere.
    """

    def __init__(
        self,
        target: Target,
        pool: KVPool,
        boundaries: tuple[int, ...],
        page_size: int,
        most_rows: int,
        capture: Capture,
    ) -> None:
        assert pool.spare >= page_size and pool.num_slots % page_size == 0
        self.target, self.pool, self.boundaries = target, pool, boundaries
        self.page_size, self.most_rows = page_size, most_rows
        self.capture = capture
        self.passes: dict[Shape, _Pass] = {}

    def __call__(self, batch: Batch) -> dict[int, Tensor] | None:
        """Raw states [N, H] by boundary, L among them, as `Target.forward` gives them; None of a
        batch that runs elsewhere."""
        if _most_rows(batch) > self.most_rows or len(batch.tokens) > _MOST:
            return None
        shape = Shape.of(batch)
        found = self.passes.get(shape)
        if found is None:
            found = self.passes[shape] = _Pass(self, shape)
        return found(batch)


class _Pass:
    """One shape: its buffers, and the graph over them."""

    def __init__(self, owner: StaticPasses, shape: Shape) -> None:
        self.owner, self.shape = owner, shape
        device, size, rows = owner.target.device, owner.page_size, shape.rows
        self.spare_page = owner.pool.num_slots // size
        # Tokens, positions, slots.
        self.flat = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.borders = torch.zeros(2, rows + 1, dtype=torch.int64, device=device)
        self.pages = torch.zeros(rows, -(-shape.keys // size), dtype=torch.int32, device=device)
        tree = None
        if shape.columns:
            ancestry = torch.zeros(rows, shape.columns, dtype=torch.int32, device=device)
            columns = torch.zeros(rows, dtype=torch.int64, device=device)
            tree = DraftedRows(ancestry, columns, self.flat[1])
        self.rows = PagedRows(
            self.borders[0], self.borders[1, :-1], self.pages, size, shape.most, shape.keys, tree
        )
        self.states: dict[int, Tensor] = {}
        self.replay: Callable[[], None] | None = None
        self.called = False

    def __call__(self, batch: Batch) -> dict[int, Tensor]:
        self.fill(batch)
        if self.called and self.replay is None:
            self.replay = self.owner.capture(self.run)
        (self.replay or self.run)()
        self.called = True
        # Copies, for the next replay writes its states to the same place.
        count = len(batch.tokens)
        return {boundary: states[:count].clone() for boundary, states in self.states.items()}

    def run(self) -> None:
        """The pass over what the buffers hold."""
        owner = self.owner
        context = RowsContext(owner.pool, self.rows, self.flat[2], 0)
        self.states = owner.target.forward(self.flat[0], self.flat[1], context, owner.boundaries)

    def fill(self, batch: Batch) -> None:
        """Write a batch into the buffers; nothing is read from the device."""
        count, filled, rows = len(batch.sequences), len(batch.tokens), self.shape.rows
        for buffer, given in zip(
            self.flat, (batch.tokens, batch.positions, batch.slots), strict=True
        ):
            buffer[:filled].copy_(given)
        # Padding rows are alike, so one of them stores the key that all of them see.
        self.flat[:2, filled:] = 0
        self.flat[2, filled:] = -1
        self.flat[2, filled : filled + 1] = self.owner.pool.num_slots
        starts = [*batch.starts, *range(filled + 1, rows + 1)]
        starts += [rows] * (rows + 1 - len(starts))
        lengths = [*batch.lengths, *[1] * (rows - filled)]
        lengths += [0] * (rows + 1 - len(lengths))
        self.borders.copy_(upload([starts, lengths], self.borders.device))
        given = batch.paged
        self.pages[:count, : given.pages.shape[1]].copy_(given.pages)
        self.pages[count:, 0] = self.spare_page
        if self.rows.tree is not None and given.tree is not None:
            drafted = given.tree.ancestry
            self.rows.tree.ancestry[:filled, : drafted.shape[1]].copy_(drafted)
            self.rows.tree.ancestry[filled:, 0] = 1
            self.rows.tree.columns[:count].copy_(given.tree.columns)
            self.rows.tree.columns[count:] = 1


def _most_rows(batch: Batch) -> int:
    return max(end - first for first, end in pairwise(batch.starts))
