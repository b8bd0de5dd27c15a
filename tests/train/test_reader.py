"""Reading ahead: order, depth, errors, end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest

from draftsmith.data.batches import PackedBatch
from draftsmith.train.reader import Reader


@pytest.fixture
def read(toy: ModuleType) -> Callable[[int], PackedBatch]:
    """A batch that carries its index as its row's name."""

    def batch(index: int) -> PackedBatch:
        return toy.packed([toy.random_row(index, 4)], [str(index)])

    return batch


@pytest.mark.parametrize("ahead", [0, 1, 2, 50])
def test_batches_come_in_order_and_end(read: Callable[[int], PackedBatch], ahead: int) -> None:
    """Every depth gives the same batches, then StopIteration; no thread is left."""
    before = threading.active_count()
    with Reader(read, range(3, 30, 3), ahead) as reader:
        assert [reader.next().row_ids for _ in range(9)] == [(str(i),) for i in range(3, 30, 3)]
        with pytest.raises(StopIteration):
            reader.next()
    assert threading.active_count() == before


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_is_read_than_asked_for(read: Callable[[int], PackedBatch], ahead: int) -> None:
    """After n batches at most n + ahead were begun, and depth 0 reads in the caller's thread."""
    begun: list[int] = []
    threads: set[str] = set()

    def counting(index: int) -> PackedBatch:
        begun.append(index)
        threads.add(threading.current_thread().name)
        return read(index)

    with Reader(counting, range(100), ahead) as reader:
        for number in range(1, 6):
            reader.next()
            assert len(begun) <= number + ahead
    assert begun == list(range(len(begun))) and len(begun) <= 5 + ahead
    assert threads == ({threading.current_thread().name} if ahead == 0 else {"batches_0"})


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_comes_as_itself_where_its_batch_would_have(
    read: Callable[[int], PackedBatch], ahead: int
) -> None:
    """The batches before it are handed out first; then the reading's own error."""

    def failing(index: int) -> PackedBatch:
        if index == 2:
            raise ValueError("shard-00001.safetensors: row 17 is damaged")
        return read(index)

    with Reader(failing, range(10), ahead) as reader:
        assert [reader.next().row_ids for _ in range(2)] == [("0",), ("1",)]
        with pytest.raises(ValueError, match="shard-00001.safetensors: row 17 is damaged"):
            reader.next()


def test_leaving_early_waits_for_the_reading_in_progress(
    read: Callable[[int], PackedBatch],
) -> None:
    """An error in training ends the context: what has begun ends, the rest is never begun."""
    begun: list[int] = []
    gate = threading.Event()

    def slow(index: int) -> PackedBatch:
        begun.append(index)
        if index == 1:
            gate.wait(5)
        return read(index)

    with pytest.raises(KeyError):
        with Reader(slow, range(10), 5) as reader:
            reader.next()
            threading.Timer(0.05, gate.set).start()
            raise KeyError
    assert begun in ([0], [0, 1])
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())
