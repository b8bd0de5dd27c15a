"""Builds a cache folder: knows which shards are whole, writes the others behind the computation,
and makes the folder a cache when all are there.

Shards are hashed and written by one background thread. At most one shard is being written while the
next is computed, so two are in memory, and a dump waits for the disk only where the disk is slower
than the target.

Several ranks write into one folder without speaking to each other: rank r of W owns the shards r,
r + W, …; what is on disk is all they share. Rank 0 alone removes what no plan names, waits for the
others' shards, and writes index and manifest, which are the same bytes for any W.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from torch import Tensor

from .cache_index import INDEX, MANIFEST, index_of, write_manifest
from .quantise import state_bytes
from .shards import ShardFacts, ShardFile, ShardRows, shard_name, write_shard
from .store import Store

_log = logging.getLogger(__name__)
_QUARANTINE_SHARE = 0.01
_SPARE = 1.02  # headers, index and manifest
_STALE = 3600.0  # seconds; no file is being written for so long
_POLL, _LONGEST_POLL, _TELL_EVERY = 0.1, 5.0, 30.0  # seconds


def forecast_bytes(
    num_tokens: int, hidden_size: int, num_boundaries: int, dtype: str = "bf16"
) -> int:
    """Bytes of a cache: 2·H (bf16) or H + 4 (fp8, int8) for each boundary, 4 for the id and 1 for
    the mask, for each token."""
    return num_tokens * (state_bytes(dtype, hidden_size) * num_boundaries + 5)


def check_free_space(store: Store, needed: int) -> None:
    """Refuse to begin what would not fit; where the store cannot tell its room, say so.

    Raises:
        ValueError: with the bytes needed and the bytes free.
    """
    free = store.free_bytes()
    if free is None:
        if needed:
            _log.warning(
                "%s: %.3f GB will be written; its free space cannot be asked for and is not "
                "checked",
                store.place,
                needed / 1e9,
            )
    elif needed * _SPARE > free:
        raise ValueError(
            f"the cache needs {needed / 1e9:.3f} GB more and {store.place} has {free / 1e9:.3f} GB "
            "free; lower data.dump.max_tokens, cache fewer boundaries, take data.dump.dtype=fp8, "
            "or choose another disk"
        )


def refuse_many(left_out: list[str], planned: int) -> None:
    """A row with non-finite states is left out; many are no accident.

    Args:
        left_out: ids. planned: how many rows were to be cached.
    Raises:
        ValueError: more than 1 %, and more than one.
    """
    if len(left_out) > max(1, int(_QUARANTINE_SHARE * planned)):
        raise ValueError(
            f"{len(left_out)} of {planned} rows have non-finite states (first: {left_out[:5]}), "
            f"more than {_QUARANTINE_SHARE:.0%}; try target.dtype=float32, or look at the target's "
            "weights"
        )


class CacheWriter:
    """One rank's part in a cache folder. Close it, or use it as a context.

    Args:
        store: the folder. keys: of every planned shard. boundaries, hidden_size, dtype: what each
            shard holds. rank, world_size: this process among those that write the folder.
    Attributes:
        messages: what was removed from the folder, and why.
        kept: number -> rows left out of it, of each whole shard of this rank that an earlier run
            left; its checksum is verified.
    """

    def __init__(
        self,
        store: Store,
        keys: list[str],
        boundaries: tuple[int, ...],
        hidden_size: int,
        dtype: str = "bf16",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.store = store
        self.keys = keys
        self.boundaries = boundaries
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.rank = rank
        self.messages: list[str] = []
        self.own = range(rank, len(keys), world_size)
        self.kept: dict[int, tuple[tuple[int, str, int], ...]] = {}
        self._there: set[int] = set()
        self._pool = ThreadPoolExecutor(1, "shard-writer")
        self._writing: Future[ShardFacts] | None = None
        if rank == 0:
            store.delete(MANIFEST)
            store.delete(INDEX)
        self._clear()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def _clear(self) -> None:
        """Keep this rank's whole shards; remove what is unfinished, foreign or unreadable."""
        mine = {shard_name(number): number for number in self.own}
        planned = {shard_name(number) for number in range(len(self.keys))}
        for name in self.store.names():
            shard = name.strip(".").split(".")[0] + ".safetensors"
            if name.startswith(".") and name.endswith(".tmp"):
                # another rank may be writing its own, and a second dump this rank's
                due = shard in mine or (self.rank == 0 and shard not in planned)
                if due and self._forsaken(name):
                    self._remove(name, "it is unfinished")
            elif name in mine:
                self._judge(name, mine[name])
            elif self.rank == 0 and name.startswith("shard-") and name not in planned:
                self._remove(name, "the plan has no such shard")

    def _forsaken(self, name: str) -> bool:
        """Whether nobody writes this temporary file, whose name ends with its writer's process."""
        written = self.store.modified(name)
        if written is not None and time.time() - written > _STALE:
            return True
        if self.store.local is None:
            return False
        process = name.split(".")[-2]
        return not (process.isdecimal() and _alive(int(process)))

    def _judge(self, name: str, number: int) -> None:
        try:
            file = ShardFile(self.store, name)
            if file.number != number:
                fault = f"inside it is shard {file.number}"
            elif file.key != self.keys[number]:
                fault = "it was made of other rows or settings"
            else:
                file.check_schema(self.boundaries, self.hidden_size, self.dtype)
                file.verify()
                self.kept[number] = file.content.quarantined
                return
        except ValueError as error:
            fault = str(error)
        self._remove(name, fault)

    def _remove(self, name: str, why: str) -> None:
        self.store.delete(name)
        self.messages.append(f"removed {name}: {why}")

    def submit(self, number: int, content: ShardRows, tensors: dict[str, Tensor]) -> None:
        """Write a shard in the background; waits until the one before it is written.

        Args:
            tensors: by their names in the file, on the CPU; not to be changed afterwards.
        Raises:
            ValueError, OSError: the shard before it could not be written.
        """
        self.flush()
        self._writing = self._pool.submit(
            write_shard, self.store, number, self.keys[number], self.dtype, content, tensors
        )

    def check(self) -> None:
        """Raise what the background thread met, if it met anything yet; waits for nothing."""
        if self._writing is not None and self._writing.done():
            self.flush()

    def flush(self) -> None:
        """Wait until every submitted shard is on the disk; raises what prevented it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def missing(self) -> list[int]:
        """Numbers of planned shards, of any rank, that are not on the disk with their key."""
        names = set(self.store.names())
        for number, key in enumerate(self.keys):
            if number not in self._there and shard_name(number) in names:
                try:
                    if ShardFile(self.store, shard_name(number)).key == key:
                        self._there.add(number)
                except ValueError as error:  # its owner will replace it
                    _log.debug("%s", error)
        return [number for number in range(len(self.keys)) if number not in self._there]

    def wait(self) -> None:
        """Until the shards of all ranks are there; names the missing ones every 30 seconds."""
        told, pause = time.monotonic(), _POLL
        while missing := self.missing():
            if time.monotonic() - told >= _TELL_EVERY:
                told = time.monotonic()
                _log.warning(
                    "%s: waiting for %d shards of other ranks: %s%s",
                    self.store.place,
                    len(missing),
                    ", ".join(map(str, missing[:16])),
                    ", …" if len(missing) > 16 else "",
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL)

    def finish(self, key: str, about: dict[str, Any]) -> dict[str, Any]:
        """Write index and manifest from the headers of all shards.

        Args:
            about: what the manifest says besides the files: target, probes, counts' context.
        Raises:
            ValueError: a shard is missing, or not what was planned; too many rows of all ranks
                were left out.
        """
        self.flush()
        facts: list[ShardFacts] = []
        contents: list[ShardRows] = []
        for number in range(len(self.keys)):
            file = ShardFile(self.store, shard_name(number))
            if file.key != self.keys[number]:
                raise ValueError(
                    f"{file.path} has the key {file.key[:16]}, planned is "
                    f"{self.keys[number][:16]}; two dumps write into one folder: give each its own"
                )
            file.check_schema(self.boundaries, self.hidden_size, self.dtype)
            facts.append(file.facts())
            contents.append(file.content)
        quarantined = [
            {"row": row, "id": name, "tokens": tokens}
            for content in contents
            for row, name, tokens in content.quarantined
        ]
        rows = sum(len(content.rows) for content in contents) + len(quarantined)
        refuse_many([str(each["id"]) for each in quarantined], rows)
        about = {**about, "boundaries": list(self.boundaries), "hidden_size": self.hidden_size}
        lines = [asdict(fact) for fact in facts]
        return write_manifest(self.store, key, about, index_of(contents), lines, quarantined)


def _alive(process: int) -> bool:
    """Whether another process of this machine has this number."""
    if process == os.getpid():  # of an earlier run that had the number: this one has begun none
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
