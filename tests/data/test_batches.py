"""The global order of batches, and what a packed batch holds."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.data.batches import BatchPlan
from draftsmith.data.runs import RunIndex, supervised_runs
from draftsmith.kernels.shift import supervision


class Source:
    """Rows of known contents: token = 1000 * row + position, state = the same, random masks."""

    def __init__(self, lengths: list[int]) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.array(lengths, np.int32)
        self.ids = [f"row-{number}" for number in range(len(lengths))]
        self.masks = [rng.random(length) < 0.8 for length in lengths]
        runs = [supervised_runs(mask) for mask in self.masks]
        offsets = np.cumsum([0, *map(len, runs)])
        self.runs = RunIndex(np.array(sum(runs, []), np.int64), offsets)
        self.boundaries = (1,)
        self.reads: list[int] = []

    def supervised_counts(self, steps: int) -> np.ndarray:
        return self.runs.counts(steps)

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        self.reads += indices
        tokens = [1000 * row + torch.arange(int(self.lengths[row])) for row in indices]
        masks = [torch.from_numpy(self.masks[row]) for row in indices]
        return tokens, masks, torch.cat(tokens)[:, None].expand(-1, 3).float()


class Lengths:
    """Rows of which nothing but the length is known."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.ids = [str(number) for number in range(len(lengths))]
        self.boundaries = (1,)

    def supervised_counts(self, steps: int) -> np.ndarray:
        return np.ones((len(self.lengths), steps), np.int64)

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        raise AssertionError("a plan needs no row")


LENGTHS = np.random.default_rng(1).integers(1, 40, 101).tolist()


def plan(**settings: Any) -> BatchPlan:
    return BatchPlan(Source(LENGTHS), **{"tokens_per_batch": 64, "seed": 3, **settings})


def test_every_row_once_an_epoch_within_the_limit() -> None:
    """Each epoch is a permutation of all rows, packed well, in an order of its own."""
    batches = plan()
    epochs = []
    for epoch in range(3):
        rows = batches.epoch_batches(epoch)
        assert sorted(sum(rows, [])) == list(range(101))
        sizes = [sum(LENGTHS[row] for row in batch) for batch in rows]
        assert max(sizes) <= 64
        assert sum(sizes) / (64 * len(sizes)) > 0.9
        epochs.append(sum(rows, []))
    assert epochs[0] != epochs[1] != epochs[2]


def test_best_fit_fills_nearly_everything() -> None:
    """20,000 rows of any length up to the batch's: more than 98 % of each batch on average, in less
    than two seconds; `fill` says so."""
    lengths = np.random.default_rng(0).integers(1, 2049, 20_000)
    batches = BatchPlan(Lengths(lengths), tokens_per_batch=2048)
    began = time.perf_counter()
    rows = batches.epoch_batches(0)
    assert time.perf_counter() - began < 2
    sizes = [int(lengths[batch].sum()) for batch in rows]
    assert max(sizes) <= 2048 and sorted(sum(rows, [])) == list(range(20_000))
    assert batches.fill == pytest.approx(np.mean(sizes) / 2048) and batches.fill > 0.98


def test_a_row_goes_where_it_leaves_the_least_room() -> None:
    """Whatever the order, each row went to the fullest batch that had room for it, and opened one
    only where none had."""
    batches = plan()
    order = np.random.default_rng((3, 0)).permutation(101).tolist()
    numbers = {row: number for number, rows in enumerate(batches.epoch_batches(0)) for row in rows}
    room: list[int] = []
    for row in order:
        fitting = [left for left in room if left >= LENGTHS[row]]
        if numbers[row] == len(room):
            assert not fitting
            room.append(64)
        else:
            assert room[numbers[row]] == min(fitting)
        room[numbers[row]] -= LENGTHS[row]


def test_long_rows_stay_whole_and_are_told_once() -> None:
    """A row longer than a batch is a batch of its own; one warning says how many there are, which
    is the longest and what it costs."""
    with pytest.warns(UserWarning) as caught:
        batches = BatchPlan(Source([3, 70, 5, 160, 64]), tokens_per_batch=64)
    (message,) = [str(one.message) for one in caught]
    assert "2 of 5 rows are longer than tokens_per_batch=64" in message
    assert "(row 3, id 'row-3') has 160 tokens" in message and "2.5 times the memory" in message
    for epoch in range(3):
        rows = batches.epoch_batches(epoch)
        assert sorted(map(sorted, rows)) == [[0, 2], [1], [3], [4]]
    place = batches.epoch_batches(0).index([3])
    assert len(batches.batch(place).tokens) == 160


def test_global_indices_run_through_the_epochs() -> None:
    """Batch i of all epochs end to end, asked for in any order."""
    batches = plan()
    expected = [rows for epoch in range(3) for rows in batches.epoch_batches(epoch)]
    fresh = plan()
    order = np.random.default_rng(0).permutation(len(expected)).tolist()
    assert [fresh.rows(index) for index in order] == [expected[index] for index in order]
    assert fresh.num_batches(3) == len(expected)
    assert fresh.num_batches(1) == len(batches.epoch_batches(0))
    first = fresh.num_batches(1)
    assert fresh.epoch_of(first - 1) == (0, first - 1)
    assert fresh.epoch_of(first) == (1, 0)
    with pytest.raises(ValueError, match="batch -1: global indices begin at 0"):
        fresh.rows(-1)


def test_seed_decides_the_order() -> None:
    """Equal seeds give equal orders, other seeds others."""
    assert plan().epoch_batches(0) == plan().epoch_batches(0)
    assert plan().epoch_batches(0) != plan(seed=4).epoch_batches(0)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_any_world_size_walks_the_same_order(world: int) -> None:
    """Case 87: ranks are disjoint, and their union from any cursor is the global order."""
    for cursor in (0, 7):
        taken = [
            list(itertools.islice(plan(rank=rank, world_size=world).own(cursor), 30 // world))
            for rank in range(world)
        ]
        merged = [index for group in zip(*taken, strict=True) for index in group]
        assert merged == list(range(cursor, cursor + len(merged)))


@pytest.mark.parametrize("epoch", [0, 1])
def test_two_ranks_then_one_then_three_read_every_batch_once(epoch: int) -> None:
    """Case 87 over a whole epoch: 2 ranks stop, 1 goes on, then 3; together every row exactly
    once."""
    reference = plan()
    first, last = reference.num_batches(epoch), reference.num_batches(epoch + 1)
    state = plan(world_size=2).state_dict(first)
    taken: list[int] = []
    for world, steps in ((2, 5), (1, 7), (3, last)):
        plans = [plan(rank=rank, world_size=world) for rank in range(world)]
        cursor = plans[0].load_state_dict(state)
        for step in range(steps):
            taken += [next(p.own(cursor + step * world)) for p in plans]
        state = plans[0].state_dict(cursor + steps * world)
    assert taken[: last - first] == list(range(first, last))
    rows = sum((reference.rows(index) for index in taken[: last - first]), [])
    assert sorted(rows) == list(range(101))


def test_packed_batch() -> None:
    """Case 13: rows end to end, positions begin anew, borders and names in order."""
    batches = plan()
    rows = batches.rows(4)
    batch = batches.batch(4)
    assert len(rows) > 1
    lengths = [LENGTHS[row] for row in rows]
    assert batch.starts.dtype == torch.int32
    assert batch.starts.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert batch.positions.tolist() == [p for length in lengths for p in range(length)]
    assert batch.tokens.tolist() == [
        1000 * row + p for row, length in zip(rows, lengths, strict=True) for p in range(length)
    ]
    assert torch.equal(batch.hidden[:, 0], batch.tokens.float())
    assert batch.row_ids == tuple(f"row-{row}" for row in rows)
    assert batches.tokens(4) == len(batch.tokens)
    moved = batch.to("meta")
    assert {moved.tokens.device.type, moved.hidden.device.type, moved.starts.device.type} == {
        "meta"
    }
    assert moved.row_ids == batch.row_ids


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_supervised_counts_need_no_reading(steps: int) -> None:
    """The counts from runs equal the mask that training uses, at every step, and no row is read."""
    batches = plan()
    source = batches.source
    assert isinstance(source, Source)
    total = 0
    for index in range(10):
        counts = batches.supervised(index, steps)
        assert source.reads == []
        batch = batches.batch(index)
        source.reads.clear()
        mask = supervision(batch.supervised, batch.starts, steps)
        assert list(counts) == mask.sum(1).tolist()
        total += sum(counts)
    assert total > 0


@pytest.mark.parametrize(
    ("mask", "runs"),
    [([], []), ([0, 0], []), ([0, 1, 1, 0, 1], [2, 1]), ([1, 1, 1, 0, 1, 1], [2, 2]), ([1], [0])],
)
def test_runs(mask: list[int], runs: list[int]) -> None:
    """A run at the very start counts one less: nothing drafts the row's first token."""
    assert supervised_runs(np.array(mask, np.bool_)) == runs


def test_cursor_keeps_its_meaning() -> None:
    """It may be resumed with another world size, and not with other rows, seed or batch size."""
    state = plan(world_size=2).state_dict(17)
    assert plan(world_size=3, rank=2).load_state_dict(state) == 17
    with pytest.raises(ValueError, match="seed=3, this run has 4"):
        plan(seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="tokens_per_batch=64, this run has 128"):
        plan(tokens_per_batch=128).load_state_dict(state)
    with pytest.raises(ValueError, match="packing=None, this run has 'best-fit'"):
        plan().load_state_dict({name: state[name] for name in state if name != "packing"})
    with pytest.raises(ValueError, match="num_rows=101, this run has 100"):
        BatchPlan(Source(LENGTHS[:100]), tokens_per_batch=64, seed=3).load_state_dict(state)


def test_refusals() -> None:
    """No rows, none supervised, a rank outside the world, states that are missing."""
    with pytest.raises(ValueError, match="none of the 3 rows holds two supervised tokens"):
        BatchPlan(Source([1, 1, 1]), tokens_per_batch=64)
    with pytest.raises(ValueError, match="holds no rows"):
        BatchPlan(Source([]), tokens_per_batch=64)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        plan(rank=2, world_size=2)

    class Short(Source):
        def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
            tokens, masks, states = super().gather(indices)
            return tokens, masks, states[:-1]

    with pytest.raises(ValueError, match="tokens came with .* states"):
        BatchPlan(Short(LENGTHS), tokens_per_batch=64).batch(0)
