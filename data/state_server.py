"""States by a target in another process.

A serving process listens on the interface that leads to the launch's master, and leaves its
address and a random token in the launcher's key-value store. Each training process keeps one
connection to one server:

    trainer -> {"token": hex}                                           once
    server  -> {"fingerprint": {...}, "hidden_size": H}                 when the target is loaded
    trainer -> {"lengths": [n, ...], "boundaries": [...]}  + ids [N] little-endian int64
    server  -> {"shape": [N, B·H]}                         + states, bf16
               {"error": text}                             where the target refuses

A server ends when all its trainers have closed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..models.target import Target
from .online import LiveRows, live_states
from .rowfile import Rows
from .wire import exactly, receive, send

_TOKEN_BYTES = 32
_GREETING_SECONDS = 10.0


class Address(NamedTuple):
    """Where a server listens, its rank in the launch, and the token that it expects."""

    host: str
    port: int
    rank: int
    token: str


class StateServer:
    """Serves states to a known number of trainers.

    Args:
        host: the interface to listen on. rank: this process in the launch, for messages.
        trainers: how many will connect.
    Attributes:
        address: to be published.
    """

    def __init__(self, host: str, rank: int, trainers: int) -> None:
        self._listener = socket.create_server((host, 0))
        self._trainers = trainers
        self._one_pass = threading.Lock()
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, rank, secrets.token_hex(_TOKEN_BYTES))

    def serve(self, load: Callable[[], Target], timeout: float) -> None:
        """Load the target while trainers connect, then answer them until all have closed.

        Raises:
            ValueError: the target cannot be loaded, or not all trainers came within `timeout`
                seconds of that.
        """
        with self._listener:
            target = load()
            deadline = time.monotonic() + timeout
            threads = []
            while len(threads) < self._trainers:
                link = self._accept(deadline, len(threads))
                if link is not None:
                    thread = threading.Thread(target=self._answer, args=(link, target), daemon=True)
                    thread.start()
                    threads.append(thread)
        for thread in threads:
            thread.join()

    def _accept(self, deadline: float, connected: int) -> socket.socket | None:
        """A connection that knows the token; None for a stranger's."""
        self._listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            link, _ = self._listener.accept()
        except TimeoutError:
            raise ValueError(
                f"{connected} of {self._trainers} trainers came to rank {self.address.rank}, which "
                "serves the target's states; see what the others say, or raise data.online.timeout"
            ) from None
        link.settimeout(_GREETING_SECONDS)
        try:
            token = exactly(link, 2 * _TOKEN_BYTES)
        except (OSError, EOFError):
            token = bytearray()
        if not hmac.compare_digest(bytes(token), self.address.token.encode()):
            link.close()
            return None
        link.settimeout(None)
        _keep_alive(link)
        return link

    def _answer(self, link: socket.socket, target: Target) -> None:
        """One trainer's requests, until it closes or is gone."""
        with link:
            try:
                send(link, {"fingerprint": target.fingerprint, "hidden_size": target.hidden_size})
                while True:
                    header, body = receive(link)
                    try:
                        with self._one_pass:
                            states = _states(target, header, body)
                    except Exception as error:  # the trainer shall say it, and this end lives on
                        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                        send(link, {"error": f"{kind}{error}"})
                        continue
                    raw = states.contiguous().view(torch.uint8).numpy()
                    send(link, {"shape": list(states.shape)}, raw.reshape(-1).data)
            except (EOFError, OSError):
                return


def _states(target: Target, header: dict[str, Any], body: bytearray) -> Tensor:
    ids = torch.from_numpy(np.frombuffer(body, "<i8").astype(np.int64))
    boundaries = tuple(header["boundaries"])
    return live_states(target, list(ids.split(header["lengths"])), boundaries).cpu()


class StateClient:
    """A trainer's connection to one server.

    Args:
        timeout: seconds to wait for the target to be loaded, and for each answer.
    Attributes:
        fingerprint: the server's target.
    Raises:
        ValueError: the server cannot be reached; names its rank and address.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.fingerprint: dict[str, str] = {}
        self.hidden_size = 0
        self._timeout = timeout
        try:
            self._link = socket.create_connection((address.host, address.port), timeout)
            _keep_alive(self._link)
            self._link.sendall(address.token.encode())  # waits there until it is accepted
        except OSError as error:
            raise self._gone(error) from error

    def meet(self) -> None:
        """Wait until the server has loaded its target and says which it is; once."""
        if not self.fingerprint:
            hello, _ = self._answer(None)
            self.fingerprint, self.hidden_size = hello["fingerprint"], hello["hidden_size"]

    def states(self, tokens: list[Tensor], boundaries: tuple[int, ...]) -> Tensor:
        """[N, B·H] bf16 of several rows, R x [n] int64.

        Raises:
            ValueError: what the target says about these rows, or that the server ended.
        """
        ids = torch.cat(tokens).numpy().astype("<i8").tobytes()
        request = {"lengths": [len(row) for row in tokens], "boundaries": boundaries}
        header, body = self._answer((request, ids))
        if "error" in header:
            raise ValueError(f"rank {self.address.rank}, which runs the target: {header['error']}")
        return torch.frombuffer(body, dtype=torch.bfloat16).reshape(header["shape"])

    def close(self) -> None:
        """Let the server end. A thread that waits for its answer gets its ValueError now."""
        with contextlib.suppress(OSError):  # closed by either side already
            self._link.shutdown(socket.SHUT_RDWR)  # close alone wakes no one who reads
        self._link.close()

    def _answer(
        self, request: tuple[dict[str, Any], bytes] | None
    ) -> tuple[dict[str, Any], bytearray]:
        """What comes back, after a request where there is one."""
        try:
            if request is not None:
                send(self._link, *request)
            return receive(self._link)
        except (OSError, EOFError) as error:
            self.close()
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> ValueError:
        rank, place = self.address.rank, f"{self.address.host}:{self.address.port}"
        if isinstance(error, TimeoutError):
            reason = (
                f"did not answer within {self._timeout:g} s; raise data.online.timeout where "
                "loading or a pass takes that long"
            )
        else:
            reason = (
                f"ended or cannot be reached ({str(error) or type(error).__name__}); see what it "
                "said last. The same command goes on from the newest checkpoint"
            )
        return ValueError(f"rank {rank} ({place}), which serves the target's states, {reason}")


class RemoteRows(LiveRows):
    """States by the target of another process, on the CPU.

    Raises:
        ValueError: the server holds another target than `fingerprint` says; names the field.
    """

    def __init__(
        self,
        rows: Rows,
        client: StateClient,
        fingerprint: dict[str, str],
        boundaries: tuple[int, ...],
    ) -> None:
        for name, value in fingerprint.items():
            if client.fingerprint.get(name) != value:
                raise ValueError(
                    f"{name} of the target on rank {client.address.rank} is "
                    f"{client.fingerprint.get(name)!r}, here it is {value!r}; give all processes "
                    "one target"
                )
        super().__init__(rows, fingerprint, boundaries)
        self._client = client

    def states(self, tokens: list[Tensor]) -> Tensor:
        return self._client.states(tokens, self.boundaries)


def facing(host: str) -> str:
    """The address of this machine's interface that leads to `host`."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return probe.getsockname()[0]


def launcher_store(timeout: float) -> Store:
    """The key-value store of this launch: the launcher's own under torchrun, else that of rank 0,
    which is there once its process group is.

    Raises:
        ValueError: not reached within `timeout` seconds.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
    except RuntimeError as error:
        raise ValueError(
            f"no process of this launch answers at {host}:{port} (MASTER_ADDR, MASTER_PORT) within "
            f"{timeout:g} s; see what rank 0 says"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"draftsmith/states/{attempt}", store)


def publish(store: Store, number: int, address: Address) -> None:
    """Leave the address of server `number` (0-based) for the trainers."""
    store.set(str(number), json.dumps(address))


def look_up(store: Store, number: int, timeout: float) -> Address:
    """Wait for the address of server `number`; ValueError after `timeout` seconds."""
    wait_for(store, str(number), f"target rank {number} of this launch", timeout)
    return Address(*json.loads(store.get(str(number))))


def wait_for(store: Store, key: str, who: str, timeout: float) -> None:
    """Wait until `key` is set; ValueError that names `who` after `timeout` seconds."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise ValueError(
            f"{who} did not come up within {timeout:g} s; see what it says, or raise "
            "data.online.timeout"
        ) from error


def _keep_alive(link: socket.socket) -> None:
    """Small messages at once, and notice of a machine that vanished."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
