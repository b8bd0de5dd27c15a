"""Reading ahead: order, depth, errors, end."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from draftsmith.data.batches import PackedBatch
from draftsmith.data.state_server import Address, StateClient
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


def test_leaving_early_waits_for_no_reading(read: Callable[[int], PackedBatch]) -> None:
    """An error in training ends the context at once: what has begun ends by itself, the rest is
    never begun."""
    begun: list[int] = []
    gate = threading.Event()

    def slow(index: int) -> PackedBatch:
        begun.append(index)
        if index == 1:
            gate.wait(20)
        return read(index)

    with pytest.raises(KeyError):
        with Reader(slow, range(10), 5) as reader:
            reader.next()
            raise KeyError
    assert not gate.is_set() and begun in ([0], [0, 1])
    assert left() == 1
    gate.set()
    assert eventually(lambda: not left()) and begun in ([0], [0, 1])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts; in a shell's background job it would be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stop_while_the_first_batch_is_read(
    read: Callable[[int], PackedBatch], interruptible: None
) -> None:
    """The reading that was under way is the last one."""
    begun: list[int] = []
    gate = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def first(index: int) -> PackedBatch:
        begun.append(index)
        if not index:
            time.sleep(0.2)  # until the caller waits
            signal.pthread_kill(main, signal.SIGINT)
            gate.wait(20)
        return read(index)

    with pytest.raises(KeyboardInterrupt):
        with Reader(first, range(10), 5):
            pass
    gate.set()
    assert eventually(lambda: not left()) and begun == [0]


def test_a_stop_does_not_wait_for_a_hung_server(read: Callable[[int], PackedBatch]) -> None:
    """The connection is closed behind the reader, which wakes the thread that waits on it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], 1, "0" * 64)
        client = StateClient(address, timeout=60)
        asked = threading.Event()

        def remote(index: int) -> PackedBatch:
            if index:
                asked.set()
                client.states([torch.arange(4)], (2,))  # never answered
            return read(index)

        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            with contextlib.closing(client), Reader(remote, range(10), 2) as reader:
                reader.next()
                assert asked.wait(20)
                raise KeyboardInterrupt
        assert eventually(lambda: not left())
        assert time.monotonic() - began < 20


def left() -> int:
    """Threads that read ahead."""
    return sum(thread.name.startswith("batches") for thread in threading.enumerate())


def eventually(true: Callable[[], bool]) -> bool:
    """Whether it comes true within ten seconds."""
    until = time.monotonic() + 10
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()
