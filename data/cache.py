"""The hidden-state cache: manifest.json + index.parquet (cache_index.py) + shard-*.safetensors
(shards.py), in a local folder or behind an fsspec URL.

The manifest is written last; without it the dump is not finished. It holds the target's
fingerprint, the boundaries, the dtype, the rows' key, the engine's version, the probes' findings
and for each shard its key and a checksum of its header, which holds that of its data. Boundary k is
the residual stream entering layer k, L the output of the last layer before the final norm: states
are always raw, and always bf16 when read.

The shards of a combination (combine.py) lie in other folders, which its manifest names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cache_index import read_index, read_manifest
from .quantise import dequantise, has_scale
from .rowfile import token_hash
from .runs import RunIndex
from .shards import ShardFile, boundary_name, mask_hash, scale_name, shard_name
from .store import Store

_OPEN_SHARDS = 32
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


class Cache:
    """A finished cache, read by slices.

    Attributes:
        lengths: [R] int32. ids: the rows' ids. rows: their numbers in the token rows. boundaries,
            hidden_size: what `row` gives. dtype: how states are stored. manifest: as on disk.
    """

    def __init__(self, store: Store, manifest: dict[str, Any]) -> None:
        self.store = store
        self.manifest = manifest
        self.key: str = manifest["key"]
        self.boundaries: tuple[int, ...] = tuple(manifest["boundaries"])
        self.hidden_size: int = manifest["hidden_size"]
        self.dtype: str = manifest["dtype"]
        table = read_index(store, manifest)
        self.ids: list[str] = table["id"].to_pylist()
        self.lengths: np.ndarray = table["length"].to_numpy()
        self.rows: np.ndarray = table["row"].to_numpy()
        self._shard: np.ndarray = table["shard"].to_numpy()
        self._start: np.ndarray = table["start"].to_numpy()
        self._sha256: list[str] = table["sha256"].to_pylist()
        self._masks: list[str] = table["mask_sha256"].to_pylist()
        runs = table["runs"].combine_chunks()
        self._runs = RunIndex(runs.flatten().to_numpy(), runs.offsets.to_numpy())
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._names = ["tokens", "supervised", *map(boundary_name, self.boundaries)]
        if has_scale(self.dtype):
            self._names += map(scale_name, self.boundaries)

    @classmethod
    def open(
        cls, path: Path | str, expect: dict[str, Any] | None = None, verify: bool = True
    ) -> Cache:
        """Open a cache and check that it is what training asks for.

        Args:
            path: a folder or an fsspec URL.
            expect: fields and values: config, tokenizer, chat_template, weights (the target's
                fingerprint), boundaries, dtype, hidden_size, num_layers, rows_key, split, engine.
            verify: read every shard once and compare its checksum; the index and the shards'
                headers are compared in any case.
        Raises:
            ValueError: no cache, unfinished, another format, a damaged or altered manifest, a
                damaged or foreign shard, or a field that differs; names it, both values and what
                to do.
        """
        store = Store(path)
        manifest = read_manifest(store)
        _compare(store, manifest, expect or {})
        cache = cls(store, manifest)
        for number in range(len(manifest["shards"])):
            file = cache._checked(number)
            if verify:
                file.verify()
        return cache

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, index: int) -> CacheRow:
        """Row `index`, read by slices; the hashes of its tokens and its mask, the scales and the
        finiteness of its states are checked.

        Raises:
            ValueError: names the shard and the row.
        """
        start = int(self._start[index])
        end = start + int(self.lengths[index])
        file = self._open(int(self._shard[index]))
        read = dict(zip(self._names, file.read(self._names, start, end), strict=True))
        where = f"{file.path}: row {index} (id {self.ids[index]!r})"
        for name, found, expected in (
            ("tokens", token_hash(read["tokens"].numpy()), self._sha256[index]),
            ("mask", mask_hash(read["supervised"].numpy()), self._masks[index]),
        ):
            if found != expected:
                raise ValueError(
                    f"{where}: its {name} does not match the index; the cache is damaged: delete "
                    "the shard and run dump again"
                )
        states = {}
        for boundary in self.boundaries:
            scale = read.get(scale_name(boundary))
            if scale is not None and not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise ValueError(
                    f"{where}: a scale of boundary {boundary} is not a positive number; delete the "
                    "shard and run dump again"
                )
            states[boundary] = dequantise(read[boundary_name(boundary)], scale)
            if not torch.isfinite(states[boundary]).all():
                raise ValueError(
                    f"{where}: the states of boundary {boundary} hold NaN or infinity; delete the "
                    "shard and run dump again"
                )
        return CacheRow(read["tokens"].long(), read["supervised"].bool(), states)

    def supervised_counts(self, steps: int) -> np.ndarray:
        """[R, K] int64: supervised head rows of each row at step k, from the index alone."""
        return self._runs.counts(steps)

    def supervised_tokens(self) -> Iterator[np.ndarray]:
        """The supervised ids of one row after another, [m] int32; reads no states."""
        for index in range(len(self)):
            start = int(self._start[index])
            file = self._open(int(self._shard[index]))
            end = start + int(self.lengths[index])
            tokens, supervised = file.read(["tokens", "supervised"], start, end)
            yield tokens.numpy()[supervised.numpy() != 0]

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
            line = self.manifest["shards"][shard]
            self._files[shard] = ShardFile(folder_of(self.store, line), line["name"])
            if len(self._files) > _OPEN_SHARDS:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _checked(self, number: int) -> ShardFile:
        """A shard whose header is the one that the manifest names."""
        line = self.manifest["shards"][number]
        place = folder_of(self.store, line)
        if not place.exists(line["name"]):
            raise ValueError(_absent(self.store, place, line["name"]))
        file = self._open(number)
        if file.key != line["key"] or shard_name(file.number) != line["name"]:
            raise ValueError(
                f"{file.path}: it is shard {file.number} with the key {file.key[:16]}, the "
                f"manifest promises {line['key'][:16]}; files of two caches are mixed: delete "
                "it and run dump again"
            )
        file.check_schema(self.boundaries, self.hidden_size, self.dtype)
        if file.size != line["bytes"] or file.facts().header_sha256 != line["header_sha256"]:
            raise ValueError(
                f"{file.path}: its header differs from what the manifest promises ({line['bytes']} "
                f"bytes, header sha256 {line['header_sha256'][:16]}); it is damaged: delete it and "
                "run dump again"
            )
        return file


def folder_of(store: Store, line: dict[str, Any]) -> Store:
    """Where the shard of a manifest's line lies."""
    return store.resolve(line["folder"]) if "folder" in line else store


def intact(store: Store, manifest: dict[str, Any]) -> bool:
    """Whether index and shards' headers are as the manifest says; no data are read."""
    try:
        cache = Cache(store, manifest)
        for number in range(len(manifest["shards"])):
            cache._checked(number)
    except ValueError:
        return False
    return True


def _absent(store: Store, place: Store, name: str) -> str:
    if place is store:
        return f"{place.path(name)} is missing although the manifest names it; run dump again"
    what = name if place.names() else "the whole folder"
    return (
        f"{store.place} is combined of other caches, and of {place.place} {what} is missing; put "
        "it back, or run combine again without it"
    )


def _compare(store: Store, manifest: dict[str, Any], expect: dict[str, Any]) -> None:
    names = ("boundaries", "dtype", "hidden_size", "num_layers", "rows_key", "split", "engine")
    held = {**manifest["target"], **{name: manifest[name] for name in names}}
    for name, value in expect.items():
        if name not in held:
            raise ValueError(
                f"{store.place}: the cache has no field {name!r} to compare; known: "
                f"{', '.join(sorted(held))}; dump again"
            )
        wanted = list(value) if isinstance(value, tuple) else value
        # a combination is made of the rows of several folders
        if name == "rows_key" and isinstance(held[name], list) and wanted in held[name]:
            continue
        if held[name] != wanted:
            raise ValueError(
                f"{store.place}: {name} of the cache is {held[name]!r}, training asks for "
                f"{wanted!r}; {_REMEDIES.get(name, _TARGET_REMEDY)}"
            )
