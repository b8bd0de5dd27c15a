"""Where a training run reads its states: the caches that `dump` wrote, or the target itself."""

from __future__ import annotations

from typing import Any, Protocol

from ..conf.schema import Config
from ..data.batches import RowSource
from ..data.cache import Cache
from ..data.online import OnlineRows
from ..data.rows import Rows
from ..data.state_server import (
    RemoteRows,
    StateClient,
    StateServer,
    facing,
    launcher_store,
    look_up,
    publish,
    wait_for,
)
from ..models.target import Target
from ..train.ranks import Roles, barrier, rank
from .artifacts import Artifacts

_PREPARED = "prepared"


class Feed(Protocol):
    """Rows with states.

    Attributes:
        identity: what determines the states, JSON-ready.
    """

    identity: dict[str, Any]

    def train(self) -> RowSource:
        """The rows to learn from."""
        ...

    def heldout(self) -> RowSource | None:
        """Those to validate with; None where nothing is held out."""
        ...

    def close(self) -> None:
        """Leave whoever makes the states."""
        ...


class CacheFeed:
    """Caches below the run's inputs; needs no target. The checksums are compared by rank 0.

    Raises:
        ValueError: no cache, or one that is stale, damaged or of the other split.
    """

    def __init__(
        self, config: Config, rows: Rows, marks: dict[str, str], boundaries: tuple[int, ...]
    ) -> None:
        self._artifacts = Artifacts.of(config)
        place = self._artifacts.cache
        expect = {**marks, "rows_key": rows.key, "split": "train"}
        self._cache = Cache.open(place, expect, verify=rank() == 0)
        held = self._cache.boundaries
        if not set(boundaries) <= set(held):
            raise ValueError(
                f"{place} holds the boundaries {list(held)}, head.kind={config.head.kind} reads "
                f"{list(boundaries)}: dump again with this head, whose boundaries are then the "
                "default, or name them in data.dump.boundaries"
            )
        self._expect = {**marks, "boundaries": held}
        self.identity: dict[str, Any] = {"cache": self._cache.key}

    def train(self) -> RowSource:
        return self._cache

    def heldout(self) -> RowSource | None:
        rows = Rows.open(self._artifacts.learned, "heldout")
        if not len(rows):
            return None
        expect = {**self._expect, "rows_key": rows.key, "split": "heldout"}
        return Cache.open(self._artifacts.heldout_cache, expect, verify=rank() == 0)

    def close(self) -> None:
        """Nothing is held."""


class OnlineFeed:
    """The target in this process, loaded when first needed, or on another rank.

    Args:
        client: the connection to that rank.
    """

    def __init__(
        self,
        config: Config,
        rows: Rows,
        marks: dict[str, str],
        boundaries: tuple[int, ...],
        client: StateClient | None,
    ) -> None:
        self._config = config
        self._rows = rows
        self._marks = marks
        self._boundaries = boundaries
        self._client = client
        self._target: Target | None = None
        self.identity: dict[str, Any] = {
            "data.source": "online",
            "rows": rows.key,
            "boundaries": list(boundaries),
            "target.dtype": config.target.dtype,
            **{f"target.{name}": value for name, value in marks.items()},
        }

    def train(self) -> RowSource:
        return self._source(self._rows)

    def heldout(self) -> RowSource | None:
        rows = Rows.open(Artifacts.of(self._config).learned, "heldout")
        return self._source(rows) if len(rows) else None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _source(self, rows: Rows) -> RowSource:
        if self._client is not None:
            self._client.meet()
            return RemoteRows(rows, self._client, self._marks, self._boundaries)
        if self._target is None:
            self._target = Target.load(self._config.target)
        return OnlineRows(rows, self._target, self._boundaries)


def serve(config: Config, roles: Roles) -> None:
    """Be a target rank: serve states until the trainers have ended.

    Raises:
        ValueError: the trainers do not come, or the target cannot be loaded.
    """
    assert roles.server is not None
    timeout = config.data.online.timeout
    store = launcher_store(timeout)
    trainers = len(range(roles.server, roles.trainers, roles.servers))
    server = StateServer(facing(roles.master), roles.rank, trainers)
    publish(store, roles.server, server.address)

    def load() -> Target:
        # A GGUF file is converted once, by the first trainer.
        wait_for(store, _PREPARED, "the first trainer", timeout)
        return Target.load(config.target)

    server.serve(load, timeout)


def connect(config: Config, roles: Roles) -> StateClient | None:
    """This trainer's connection to its target rank; None where there are none. All trainers must
    call it, after the target's folder is prepared."""
    if not roles.servers:
        return None
    timeout = config.data.online.timeout
    store = launcher_store(timeout)
    if rank() == 0:
        store.set(_PREPARED, "")
    barrier()
    return StateClient(look_up(store, roles.rank % roles.servers, timeout), timeout)
