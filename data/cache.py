"""The hidden-state cache: manifest.json + index.parquet + shard-*.safetensors (shards.py).

The manifest is written last; without it the dump is not finished. It holds the target's
fingerprint, the boundaries, the dtype, the rows' key, the engine's version, the probes' findings
and a checksum of every file. Boundary k is the residual stream entering layer k, L the output of
the last layer before the final norm: states are always raw.

index.parquet, one line a row: `row` (its number in the token rows), `id`, `shard`, `start` (token
offset in the shard), `length`, `sha256` of its tokens, `runs` (lengths of its unbroken supervised
runs, one less for a run that begins the row, since the row's first token has no head row).
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..models.files import atomic_write_json, commit, read_json, sha256_file
from .rowfile import Rows, token_hash
from .runs import RunIndex, supervised_runs
from .shards import FORMAT, ShardFacts, ShardFile, ShardRows, boundary_name, shard_name, write_shard

DTYPES = ("bf16",)
_OPEN_SHARDS = 32
_SPARE = 1.02  # headers, index and manifest
_REMEDIES = {
    "boundaries": "dump again with these boundaries, or train a head that reads the cached ones",
    "dtype": "dump again with this dtype",
    "split": "give the folder of the cache of that split",
    "rows_key": "dump again from these token rows, or train from the rows the cache was made of",
}
_TARGET_REMEDY = "dump again with this target, or name the target the cache was made with"


class CacheRow(NamedTuple):
    """tokens [n] int64, supervised [n] bool, states: boundary -> [n, H] bf16, raw."""

    tokens: Tensor
    supervised: Tensor
    states: dict[int, Tensor]


def engine_version() -> str:
    """The version of this package, whose engine made the states."""
    try:
        return importlib.metadata.version("draftsmith")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def forecast_bytes(num_tokens: int, hidden_size: int, num_boundaries: int) -> int:
    """Bytes of a cache: 2·H for each boundary, 4 for the id and 1 for the mask, for each token."""
    return num_tokens * (2 * hidden_size * num_boundaries + 5)


def check_free_space(folder: Path, needed: int) -> None:
    """Refuse to begin what would not fit.

    Raises:
        ValueError: with the bytes needed and the bytes free.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed * _SPARE > free:
        raise ValueError(
            f"the cache needs {needed / 1e9:.3f} GB more and {folder} has {free / 1e9:.3f} GB "
            "free; lower "
            "data.dump.max_tokens, cache fewer boundaries, or choose another disk"
        )


class CacheWriter:
    """Builds a cache folder; knows which shards of an earlier, killed run are whole.

    Args:
        folder: made when absent.
        key: hash of everything that determines the states.
        boundaries, hidden_size: what each shard holds.
    Attributes:
        messages: what was removed from the folder, and why.
    """

    def __init__(
        self, folder: Path, key: str, boundaries: tuple[int, ...], hidden_size: int
    ) -> None:
        self.folder = folder
        self.key = key
        self.boundaries = boundaries
        self.hidden_size = hidden_size
        self.messages: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").unlink(missing_ok=True)
        self._whole: dict[int, tuple[ShardRows, ShardFacts]] = {}
        self._clear()

    def _clear(self) -> None:
        """Remove temporary files, shards of another key and unreadable ones."""
        for path in sorted(self.folder.glob(".*.tmp")):
            path.unlink()
            self.messages.append(f"removed the unfinished file {path.name}")
        (self.folder / "index.parquet").unlink(missing_ok=True)
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            try:
                file = ShardFile(path)
                file.check_schema(self.boundaries, self.hidden_size)
                fault = "" if file.key == self.key else "it was made with other settings"
                if not fault and shard_name(file.number) != path.name:
                    fault = f"inside it is shard {file.number}"
                if not fault:
                    self._whole[file.number] = (file.content, file.facts())
            except ValueError as error:
                fault = str(error)
            if fault:
                path.unlink()
                self.messages.append(f"removed {path.name}: {fault}")

    def existing(self, number: int) -> tuple[ShardRows, ShardFacts] | None:
        """The whole shard of this number that an earlier run left, its checksum verified."""
        return self._whole.get(number)

    def write(
        self,
        number: int,
        content: ShardRows,
        tokens: Tensor,
        supervised: Tensor,
        states: dict[int, Tensor],
    ) -> ShardFacts:
        """Write a shard: tokens [N] int32, supervised [N] bool, states boundary -> [N, H] bf16."""
        tensors = {"tokens": tokens.to(torch.int32), "supervised": supervised.to(torch.uint8)}
        tensors |= {boundary_name(boundary): states[boundary] for boundary in self.boundaries}
        return write_shard(self.folder, number, self.key, content, tensors)

    def finish(
        self, facts: list[ShardFacts], contents: list[ShardRows], rows: Rows, about: dict[str, Any]
    ) -> dict[str, Any]:
        """Write the index, then the manifest, which makes the cache whole.

        Args:
            about: what the manifest says besides the files: target, probes, counts' context.
        """
        columns: dict[str, list[Any]] = {name: [] for name in _INDEX.names}
        supervised = 0
        for number, content in enumerate(contents):
            start = 0
            for row, length, digest in zip(
                content.rows, content.lengths, content.sha256, strict=True
            ):
                source = rows[row]
                supervised += int(source.supervised.sum())
                runs = supervised_runs(source.supervised)
                line = (row, source.id, number, start, length, digest, runs)
                for name, value in zip(_INDEX.names, line, strict=True):
                    columns[name].append(value)
                start += length
        index = self.folder / "index.parquet"
        temporary = self.folder / f".{index.name}.{os.getpid()}.tmp"
        pq.write_table(pa.table(columns, schema=_INDEX), temporary, compression="zstd")
        commit(temporary, index)
        quarantined = [
            {"row": row, "id": rows[row].id, "tokens": len(rows[row].tokens)}
            for content in contents
            for row in content.quarantined
        ]
        manifest = {
            "kind": "cache",
            "format": FORMAT,
            "key": self.key,
            **about,
            "boundaries": list(self.boundaries),
            "hidden_size": self.hidden_size,
            "counts": {
                "rows": sum(fact.rows for fact in facts),
                "tokens": sum(fact.tokens for fact in facts),
                "supervised": supervised,
                "quarantined": len(quarantined),
            },
            "quarantined": quarantined,
            "index": {"bytes": index.stat().st_size, "sha256": sha256_file(index)},
            "shards": [asdict(fact) for fact in facts],
            "complete": True,
        }
        atomic_write_json(self.folder / "manifest.json", manifest)
        return manifest


_INDEX = pa.schema(
    [
        pa.field("row", pa.int64()),
        pa.field("id", pa.string()),
        pa.field("shard", pa.int32()),
        pa.field("start", pa.int64()),
        pa.field("length", pa.int32()),
        pa.field("sha256", pa.string()),
        pa.field("runs", pa.list_(pa.int32())),
    ]
)


class Cache:
    """A finished cache, read by mapped slices.

    Attributes:
        lengths: [R] int32. ids: the rows' ids. boundaries, hidden_size: what `row` gives. manifest:
            as on disk.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.key: str = manifest["key"]
        self.boundaries: tuple[int, ...] = tuple(manifest["boundaries"])
        self.hidden_size: int = manifest["hidden_size"]
        table = pq.read_table(folder / "index.parquet")
        self.ids: list[str] = table["id"].to_pylist()
        self.lengths: np.ndarray = table["length"].to_numpy()
        self.rows: np.ndarray = table["row"].to_numpy()
        self._shard: np.ndarray = table["shard"].to_numpy()
        self._start: np.ndarray = table["start"].to_numpy()
        self._sha256: list[str] = table["sha256"].to_pylist()
        runs = table["runs"].combine_chunks()
        self._runs = RunIndex(runs.flatten().to_numpy(), runs.offsets.to_numpy())
        self._files: OrderedDict[int, ShardFile] = OrderedDict()

    @classmethod
    def open(
        cls, path: Path | str, expect: dict[str, Any] | None = None, verify: bool = True
    ) -> Cache:
        """Open a cache and check that it is what training asks for.

        Args:
            expect: fields and values: config, tokenizer, chat_template, weights (the target's
                fingerprint), boundaries, dtype, hidden_size, num_layers, rows_key, split, engine.
            verify: compare the checksum of every file (reads the whole cache once).
        Raises:
            ValueError: unfinished, another format, a damaged or foreign shard, or a field that
                differs; names it, both values and what to do.
        """
        folder = Path(path)
        if not (folder / "manifest.json").exists():
            raise ValueError(
                f"{folder}: the dump is not finished (no manifest.json); run it again, it goes on"
            )
        manifest = read_json(folder / "manifest.json")
        if manifest.get("kind") != "cache" or manifest.get("format") != FORMAT:
            raise ValueError(
                f"{folder}/manifest.json is of kind {manifest.get('kind')!r}, format "
                f"{manifest.get('format')!r}; "
                f"this version reads kind 'cache', format {FORMAT}: dump again"
            )
        _compare(folder, manifest, expect or {})
        _check_file(folder / "index.parquet", manifest["index"], verify)
        cache = cls(folder, manifest)
        for number, fact in enumerate(manifest["shards"]):
            _check_file(folder / fact["name"], fact, verify)
            file = ShardFile(folder / fact["name"])
            if file.key != cache.key or file.number != number:
                raise ValueError(
                    f"{file.path}: it is shard {file.number} of cache {file.key[:16]}, expected "
                    f"shard {number} of "
                    f"{cache.key[:16]}; files of two caches are mixed: dump again"
                )
            file.check_schema(cache.boundaries, cache.hidden_size)
        return cache

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, index: int) -> CacheRow:
        """Row `index`, read by slices; its token hash and the finiteness of its states are checked.

        Raises:
            ValueError: names the shard and the row.
        """
        start = int(self._start[index])
        end = start + int(self.lengths[index])
        file = self._open(int(self._shard[index]))
        tokens = file.read("tokens", start, end)
        where = f"{file.path}: row {index} (id {self.ids[index]!r})"
        if token_hash(tokens.numpy()) != self._sha256[index]:
            raise ValueError(
                f"{where}: its tokens do not match the index; the cache is damaged: dump again"
            )
        states = {k: file.read(boundary_name(k), start, end) for k in self.boundaries}
        for boundary, state in states.items():
            if not torch.isfinite(state).all():
                raise ValueError(
                    f"{where}: the states of boundary {boundary} hold NaN or infinity; delete the "
                    "shard and "
                    "manifest.json and run dump again"
                )
        return CacheRow(tokens.long(), file.read("supervised", start, end).bool(), states)

    def supervised_counts(self, steps: int) -> np.ndarray:
        """[R, K] int64: supervised head rows of each row at step k, from the index alone."""
        return self._runs.counts(steps)

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Several rows at once: tokens and masks of each, and their states end to end.

        Returns:
            R x [n] int64, R x [n] bool, [N, B·H] bf16 with the boundaries side by side in the order
            of `boundaries`.
        """
        read = [self.row(index) for index in indices]
        states = [torch.cat([row.states[k] for k in self.boundaries], -1) for row in read]
        return [row.tokens for row in read], [row.supervised for row in read], torch.cat(states)

    def _open(self, shard: int) -> ShardFile:
        if shard not in self._files:
            self._files[shard] = ShardFile(self.folder / shard_name(shard))
            if len(self._files) > _OPEN_SHARDS:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return self._files[shard]


def _compare(folder: Path, manifest: dict[str, Any], expect: dict[str, Any]) -> None:
    names = ("boundaries", "dtype", "hidden_size", "num_layers", "rows_key", "split", "engine")
    held = {**manifest["target"], **{name: manifest[name] for name in names}}
    for name, value in expect.items():
        if name not in held:
            raise ValueError(
                f"{folder}: the cache has no field {name!r} to compare; known: "
                f"{', '.join(sorted(held))}; dump again"
            )
        wanted = list(value) if isinstance(value, tuple) else value
        if held[name] != wanted:
            raise ValueError(
                f"{folder}: {name} of the cache is {held[name]!r}, training asks for {wanted!r}; "
                f"{_REMEDIES.get(name, _TARGET_REMEDY)}"
            )


def _check_file(path: Path, fact: dict[str, Any], verify: bool) -> None:
    if not path.exists():
        raise ValueError(
            f"{path} is missing although the manifest names it; delete manifest.json, dump again"
        )
    size = path.stat().st_size
    if size != fact["bytes"] or (verify and sha256_file(path) != fact["sha256"]):
        raise ValueError(
            f"{path}: its {size} bytes differ from what the manifest promises ({fact['bytes']} "
            "bytes, sha256 "
            f"{fact['sha256'][:16]}); it is damaged: delete it and manifest.json and run dump again"
        )
