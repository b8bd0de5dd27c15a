"""States from another process: the same as from this one, and every way it can end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from draftsmith.data.online import OnlineRows, live_states
from draftsmith.data.rows import Rows
from draftsmith.data.state_server import (
    Address,
    RemoteRows,
    StateClient,
    StateServer,
    facing,
    launcher_store,
    look_up,
    publish,
)
from draftsmith.models.target import Target

Running = tuple[StateServer, threading.Thread]


@pytest.fixture
def serving(toy_target: Target) -> Iterator[Callable[..., Running]]:
    """Starts servers in threads; they must have ended at the end of the test."""
    threads: list[threading.Thread] = []

    def start(trainers: int = 1) -> Running:
        server = StateServer("127.0.0.1", rank=2, trainers=trainers)
        thread = threading.Thread(target=server.serve, args=(lambda: toy_target, 20.0))
        thread.start()
        threads.append(thread)
        return server, thread

    yield start
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a server did not end with its trainers"


def connect(server: StateServer) -> StateClient:
    client = StateClient(server.address, timeout=20.0)
    client.meet()
    return client


def test_remote_rows_are_online_rows(
    serving: Callable[..., Running], toy_rows: Rows, toy_target: Target
) -> None:
    """Lengths, ids, counts, tokens, masks and states, bit for bit; and the server ends when its
    trainer closes."""
    server, thread = serving()
    client = connect(server)
    assert client.hidden_size == toy_target.hidden_size
    remote = RemoteRows(toy_rows, client, toy_target.fingerprint, (1, 2))
    online = OnlineRows(toy_rows, toy_target, (1, 2))
    assert remote.lengths.tolist() == online.lengths.tolist() and remote.ids == online.ids
    assert remote.supervised_counts(3).tolist() == online.supervised_counts(3).tolist()
    for indices in ([3], [5, 0, 9]):
        theirs, ours = remote.gather(indices), online.gather(indices)
        assert theirs[2].dtype == torch.bfloat16 and theirs[2].shape[1] == 64
        assert torch.equal(theirs[2], ours[2])
        for left, right in zip(theirs[0] + theirs[1], ours[0] + ours[1], strict=True):
            assert torch.equal(left, right)
    client.close()
    thread.join(10)
    assert not thread.is_alive()


def test_two_trainers_share_a_server(serving: Callable[..., Running], toy_target: Target) -> None:
    """Requests at once get the states of their own tokens."""
    server, _ = serving(trainers=2)
    clients = [connect(server), connect(server)]
    rows = [torch.arange(10, 30), torch.arange(100, 150)]
    expected = [live_states(toy_target, [row], (2,)) for row in rows]
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(20):
            if not torch.equal(clients[number].states([rows[number]], (2,)), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert not wrong


def test_what_the_target_refuses_is_told(serving: Callable[..., Running]) -> None:
    """An error on the other side comes back as its own text with the rank, and the connection
    lives on."""
    server, _ = serving()
    client = connect(server)
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rank 2, which runs the target: capture of 1 rows"):
        client.states([empty], (2,))
    with pytest.raises(ValueError, match=r"rank 2, which runs the target: IndexError"):
        client.states([torch.tensor([10**9])], (2,))
    assert client.states([torch.arange(5)], (2,)).shape == (5, 32)
    client.close()


def test_strangers_are_turned_away(serving: Callable[..., Running]) -> None:
    """Who does not know the token is not answered and takes no trainer's place."""
    server, _ = serving()
    host, port, rank, _ = server.address
    for greeting in (b"GET / HTTP/1.1\r\n" * 8, b"0" * 64, b""):
        with socket.create_connection((host, port), 5) as stranger:
            stranger.sendall(greeting)
            if not greeting:
                stranger.shutdown(socket.SHUT_WR)
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:
                pass
    with pytest.raises(ValueError, match="rank 2 .*, which serves the target's states, ended"):
        StateClient(Address(host, port, rank, "f" * 64), timeout=5).meet()
    connect(server).close()


def test_another_target_is_refused(
    serving: Callable[..., Running], toy_rows: Rows, toy_target: Target
) -> None:
    """The field, the rank and both values are named."""
    server, _ = serving()
    client = connect(server)
    marks = {**toy_target.fingerprint, "weights": "other"}
    with pytest.raises(ValueError, match="weights of the target on rank 2 is .* here it is 'other"):
        RemoteRows(toy_rows, client, marks, (2,))
    client.close()


def test_a_silent_server_is_not_waited_for_without_end() -> None:
    """The message names rank, seconds and the setting."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], 5, "0" * 64)
        with pytest.raises(ValueError, match=r"rank 5 .* did not answer within 0.2 s; raise data"):
            StateClient(address, timeout=0.2).meet()
    with pytest.raises(ValueError, match=r"rank 5 .* ended or cannot be reached"):
        StateClient(address, timeout=0.2)


def test_trainers_that_do_not_come(toy_target: Target) -> None:
    """The server says how many it waited for, and ends."""
    server = StateServer("127.0.0.1", rank=3, trainers=2)
    with pytest.raises(ValueError, match="0 of 2 trainers came to rank 3"):
        server.serve(lambda: toy_target, timeout=0.1)


def test_addresses_go_through_the_launchers_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published by one process, found by another; what is missing or unreachable is named in
    time."""
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(master.port))
    address = Address("127.0.0.1", 1234, 7, "token")
    publish(launcher_store(5), 1, address)
    assert look_up(launcher_store(5), 1, 5) == address
    began = time.monotonic()
    with pytest.raises(ValueError, match="target rank 0 of this launch did not come up within 0.2"):
        look_up(launcher_store(5), 0, 0.2)
    assert time.monotonic() - began < 5
    assert facing("127.0.0.1") == "127.0.0.1"
