"""Answers on disk by the row they belong to: what a killed run has made is there for the next one.

A row's key is the hash of its ids and its mask, so re-ordered or added rows find their answers
whatever their place. A running command writes `answers-NNNNN.parquet` parts; a finished one gathers
them in `answers.parquet`, from which a later run over more rows goes on. Every file carries the
settings that its answers were made with. Answers are dear: those of other settings are removed only
when asked, and a damaged file stays until what it held is there again.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..models.files import atomic_write_bytes, changes
from .rowfile import Row

Answers = tuple[np.ndarray, ...]
"""The answers of one row in order, each [n] int32, its end id included."""
_NAME = re.compile(r"answers(?:-(\d+))?\.parquet")
_SCHEMA = pa.schema(
    [pa.field("key", pa.string()), pa.field("answers", pa.list_(pa.list_(pa.int32())))]
)


def row_key(row: Row) -> str:
    """Hex SHA-256 of a row's ids (little-endian int32) and its mask."""
    digest = hashlib.sha256(np.ascontiguousarray(row.tokens, "<i4").tobytes())
    digest.update(np.packbits(row.supervised).tobytes())
    return digest.hexdigest()


class AnswerStore:
    """The answers in a folder, all of them in memory (four bytes a token).

    Args:
        settings: JSON values that determine an answer.
        seconds: new answers are written once this much time has passed since the last part.
        overwrite: remove files whose answers were made with other settings.
        rank, world_size: this process among those that write parts into the folder.
    Attributes:
        messages: what is made anew and why, for the user.
    Raises:
        ValueError: answers of other settings and no `overwrite`, with the fields and the number of
            rows, or a file that cannot be opened. Nothing is removed then.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        seconds: float,
        overwrite: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.folder = folder
        self.messages: list[str] = []
        self._settings = json.loads(json.dumps(settings))
        self._seconds = seconds
        self._found: dict[str, Answers] = {}
        self._new: list[str] = []
        self._written = time.monotonic()
        self._read: set[str] = set()
        # the numbers of a rank's parts leave one remainder, so that no two ranks take the same one
        free = max((number + 1 for number in self._numbered()), default=0)
        self._parts, self._step = free + (rank - free) % world_size, world_size
        others: dict[str, list[Path]] = {}
        rows = 0
        for path in sorted(folder.glob("answers*.parquet")):
            table = self._load(path) if _NAME.fullmatch(path.name) else None
            if table is None:
                continue
            settings = json.loads(table.schema.metadata[b"settings"])
            changed = "; ".join(changes(settings, self._settings))
            if changed:
                others.setdefault(changed, []).append(path)
                rows += table.num_rows
            else:
                self._take(table)
        if others and not overwrite:
            raise ValueError(
                f"{folder} holds answers of {rows:,} rows made with other settings "
                f"({' and '.join(others)}); choose another work folder, or overwrite=true to "
                "replace them"
            )
        for changed, paths in others.items():
            for path in paths:
                path.unlink(missing_ok=True)  # another rank may have done it
            self.messages.append(f"earlier answers are made anew: {changed}")

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> Answers:
        return self._found[key]

    def add(self, key: str, answers: list[list[int]]) -> None:
        """Keep a row's answers, and write a part when it is time."""
        self._found[key] = tuple(np.array(answer, np.int32) for answer in answers)
        self._new.append(key)
        if time.monotonic() - self._written >= self._seconds:
            self.flush()

    def flush(self) -> None:
        """Write what is new as a part."""
        self._written = time.monotonic()
        if self._new:
            path = self.folder / f"answers-{self._parts:05d}.parquet"
            self._write(path, self._new)
            self._read.add(path.name)
            self._parts += self._step
            self._new = []

    def refresh(self) -> None:
        """Take up the parts that other processes have written since."""
        for _, path in sorted(self._numbered().items()):
            if path.name not in self._read and (table := self._load(path)) is not None:
                self._take(table)

    def gather(self) -> None:
        """One file instead of the parts."""
        parts = self._numbered()
        if parts or self._new:
            self._write(self.folder / "answers.parquet", sorted(self._found))
            self._new, self._parts = [], 0
            for path in parts.values():
                path.unlink()

    def _numbered(self) -> dict[int, Path]:
        """The parts by their number."""
        names = ((_NAME.fullmatch(path.name), path) for path in self.folder.glob("answers-*"))
        return {int(name[1]): path for name, path in names if name and name[1]}

    def _load(self, path: Path) -> pa.Table | None:
        """What a file holds; None, and a message, where its content is damaged."""
        self._read.add(path.name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{path} cannot be opened ({error.strerror}); its answers are still there: make it "
                "readable, or choose another work folder"
            ) from error
        try:
            table = pq.read_table(pa.BufferReader(data)).combine_chunks()
            settings = json.loads((table.schema.metadata or {})[b"settings"])
            if not table.schema.equals(_SCHEMA) or not isinstance(settings, dict):
                raise KeyError("columns")
        except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
            self.messages.append(f"the answers of {path.name} are made anew: damaged ({error})")
            return None
        return table

    def _take(self, table: pa.Table) -> None:
        if table.num_rows:
            rows = table["answers"].chunk(0)
            flat = rows.values.values.to_numpy()
            borders, first = rows.values.offsets.to_numpy(), rows.offsets.to_numpy()
            for place, key in enumerate(table["key"].to_pylist()):
                spans = range(first[place], first[place + 1])
                self._found[key] = tuple(flat[borders[n] : borders[n + 1]] for n in spans)

    def _write(self, path: Path, keys: list[str]) -> None:
        answers = [answer for key in keys for answer in self._found[key]]
        counts = [len(self._found[key]) for key in keys]
        inner = pa.ListArray.from_arrays(
            _borders([len(answer) for answer in answers]),
            pa.array(np.concatenate([np.empty(0, np.int32), *answers]), pa.int32()),
        )
        outer = pa.ListArray.from_arrays(_borders(counts), inner)
        schema = _SCHEMA.with_metadata({"settings": json.dumps(self._settings)})
        table = pa.Table.from_arrays([pa.array(keys, pa.string()), outer], schema=schema)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        atomic_write_bytes(path, sink.getvalue().to_pybytes())


def _borders(lengths: list[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]).astype(np.int32))
