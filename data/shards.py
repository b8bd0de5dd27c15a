"""One shard of a hidden-state cache: a safetensors file whose header says what it is.

Tensors: `tokens` int32 [N], `supervised` uint8 [N], and for each boundary K `boundary_K` [N, H] in
bf16, or in one byte a value with `scale_K` float32 [N] (quantise.py); rows lie end to end. Header
metadata (text): `format`, `key` (what made this shard, see plan.py), `shard` (its number), `dtype`,
`data_sha256` (of all bytes after the header), and as JSON lists the rows: `rows`, `ids`, `lengths`,
`sha256` of the tokens, `masks` (sha256), `supervised`, `runs`, `crc32` of each row's bytes, and
`quarantined`. So a shard describes its rows without any other file, and a checksum of the header
alone answers for the whole.

The file is written and read here rather than by the library: its bytes must be the same on every
run (the library orders the metadata as its hash map falls), and a remote file is read by ranges.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .quantise import has_scale, stored_dtype
from .rowfile import token_hash
from .store import Store, blocks_of

FORMAT = 2
_BLOCK = 1 << 24
_FIRST_READ = 1 << 16
_NAMES = {
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class ShardRows:
    """Which rows a shard holds, a tuple a column: numbers in the token rows, ids, lengths, token
    hashes, mask hashes, how many tokens are supervised, in which runs (runs.py); and the rows left
    out of it, as (row, id, tokens).
    """

    rows: tuple[int, ...]
    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    sha256: tuple[str, ...]
    masks: tuple[str, ...]
    supervised: tuple[int, ...]
    runs: tuple[list[int], ...]
    quarantined: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True)
class ShardFacts:
    """A shard's line in the manifest."""

    name: str
    key: str
    bytes: int
    header_sha256: str
    rows: int
    tokens: int


def shard_name(number: int) -> str:
    """shard-00000.safetensors"""
    return f"shard-{number:05d}.safetensors"


def boundary_name(boundary: int) -> str:
    """The tensor that holds a boundary's states."""
    return f"boundary_{boundary}"


def scale_name(boundary: int) -> str:
    """The tensor that holds a boundary's scales."""
    return f"scale_{boundary}"


def mask_hash(supervised: np.ndarray) -> str:
    """Hex SHA-256 of a mask [n], one byte a token."""
    return hashlib.sha256(np.ascontiguousarray(supervised, np.uint8).tobytes()).hexdigest()


def write_shard(
    store: Store, number: int, key: str, dtype: str, content: ShardRows, tensors: dict[str, Tensor]
) -> ShardFacts:
    """Write one shard, whole or not at all.

    Args:
        tensors: contiguous CPU tensors by name, all with N = sum of content.lengths rows.
    Raises:
        ValueError: the disk is full; whole shards stay.
    """
    # widest dtype first: every tensor then begins at a multiple of its own width
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    data = hashlib.sha256()
    for block in _blocks(ordered):
        data.update(block)
    described = {
        field.name: json.dumps(getattr(content, field.name), ensure_ascii=False)
        for field in fields(ShardRows)
    }
    header: dict[str, Any] = {
        "__metadata__": {
            "format": str(FORMAT),
            "key": key,
            "shard": str(number),
            "dtype": dtype,
            "data_sha256": data.hexdigest(),
            "crc32": json.dumps(_row_sums(content.lengths, ordered)),
            **described,
        }
    }
    offset = 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    store.write(shard_name(number), itertools.chain([head], _blocks(ordered)))
    return ShardFacts(
        shard_name(number),
        key,
        len(head) + offset,
        hashlib.sha256(head).hexdigest(),
        len(content.rows),
        sum(content.lengths),
    )


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _blocks(tensors: list[tuple[str, Tensor]]) -> Iterator[memoryview]:
    for _, tensor in tensors:
        if tensor.numel():
            view = _bytes(tensor)
            for start in range(0, len(view), _BLOCK):
                yield view[start : start + _BLOCK]


def _row_sums(lengths: tuple[int, ...], tensors: list[tuple[str, Tensor]]) -> list[int]:
    """crc32 of each row's bytes, tensor after tensor."""
    sums = [0] * len(lengths)
    for _, tensor in tensors:
        start = 0
        for place, length in enumerate(lengths):
            sums[place] = zlib.crc32(_bytes(tensor[start : start + length]), sums[place])
            start += length
    return sums


class ShardFile:
    """A shard open for reading; its header is read, its data by ranges.

    Raises:
        ValueError: missing, cut, not a shard, or another format version.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.path = store.path(name)
        try:
            self.size = store.size(name)
            self._reader = store.open(name)
            self._head = self._read_head()
            header: dict[str, Any] = json.loads(self._head[8:].decode("utf-8"))
            metadata = header.pop("__metadata__", {})
            self._tensors = {
                each: (str(about["dtype"]), list(about["shape"]), list(about["data_offsets"]))
                for each, about in header.items()
            }
        except FileNotFoundError:
            raise ValueError(f"{self.path} is missing; run dump again") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} cannot be read ({error}); it is cut or damaged: delete it and run "
                "dump again"
            ) from error
        version = metadata.get("format")
        if version != str(FORMAT):
            raise ValueError(
                f"{self.path} has the cache format {version!r}, this version reads {FORMAT}; dump "
                "again"
            )
        end = max((offsets[1] for _, _, offsets in self._tensors.values()), default=0)
        if len(self._head) + end != self.size:
            raise ValueError(
                f"{self.path} cannot be read (its header promises {len(self._head) + end} bytes, "
                f"it has {self.size}); it is cut or damaged: delete it and run dump again"
            )
        self.key: str = metadata.get("key", "")
        self.number = int(metadata.get("shard", "-1"))
        self._metadata: dict[str, str] = metadata

    def _read_head(self) -> bytes:
        first = self._reader([(0, min(self.size, _FIRST_READ))])[0].tobytes()
        end = 8 + int.from_bytes(first[:8], "little")
        if len(first) < 8 or end > self.size:
            raise ValueError(f"{self.size} bytes end before the header does")
        return first[:end] if end <= len(first) else self._reader([(0, end)])[0].tobytes()

    @property
    def content(self) -> ShardRows:
        """The rows in this shard; ValueError where the header lacks a list."""
        try:
            lists = {f.name: json.loads(self._metadata[f.name]) for f in fields(ShardRows)}
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{self.path}: no row list {error} in its header; dump again"
            ) from None
        lists["quarantined"] = map(tuple, lists["quarantined"])
        return ShardRows(**{name: tuple(values) for name, values in lists.items()})

    def check_schema(self, boundaries: tuple[int, ...], hidden_size: int, dtype: str) -> None:
        """Compare tensor names, dtypes and shapes with what the manifest promises.

        Raises:
            ValueError: lists what was expected and what was found.
        """
        count = sum(self.content.lengths)
        expected = {"tokens": ("I32", [count]), "supervised": ("U8", [count])}
        for k in boundaries:
            expected[boundary_name(k)] = (_NAMES[stored_dtype(dtype)], [count, hidden_size])
            if has_scale(dtype):
                expected[scale_name(k)] = ("F32", [count])
        found = {name: (kind, shape) for name, (kind, shape, _) in self._tensors.items()}
        if found != expected:
            raise ValueError(
                f"{self.path}: tensors differ from the manifest; expected {_tell(expected)}; found "
                f"{_tell(found)}; dump again"
            )

    def facts(self) -> ShardFacts:
        """The manifest's line, from the header alone."""
        content = self.content
        name = self.path.rpartition("/")[2]
        digest = hashlib.sha256(self._head).hexdigest()
        rows, tokens = len(content.rows), sum(content.lengths)
        return ShardFacts(name, self.key, self.size, digest, rows, tokens)

    def read(self, names: list[str], start: int, end: int) -> list[Tensor]:
        """Tokens [start, end) of several tensors; of a local file they are views of it."""
        spans, kinds = [], []
        for name in names:
            kind, shape, (offset, _) = self._tensors[name]
            dtype = _DTYPES[kind]
            width = dtype.itemsize * math.prod(shape[1:])
            base = len(self._head) + offset
            spans.append((base + start * width, base + end * width))
            kinds.append((dtype, shape[1:]))
        return [
            torch.frombuffer(part, dtype=torch.uint8).view(dtype).view(-1, *tail)
            if len(part)
            else torch.empty(0, *tail, dtype=dtype)
            for part, (dtype, tail) in zip(self._reader(spans), kinds, strict=True)
        ]

    def verify(self) -> None:
        """Read the data once and compare it with the checksum in the header (a file may be of full
        length and hold zeros after a power cut).

        Raises:
            ValueError: names the first row that differs, and what of it.
        """
        data = hashlib.sha256()
        for block in blocks_of(self._reader, len(self._head), self.size):
            data.update(block.data)
        if data.hexdigest() != self._metadata.get("data_sha256"):
            raise ValueError(
                f"{self.path}: {self._injury()}: the data differ from the checksum in its header; "
                "the shard is damaged: delete it and run dump again"
            )

    def _injury(self) -> str:
        """The first row whose bytes changed, and the tensor where that can be told."""
        content, names = self.content, self._ordered()
        start = 0
        for place, wanted in enumerate(json.loads(self._metadata.get("crc32", "[]"))):
            end = start + content.lengths[place]
            found = 0
            parts = dict(zip(names, self.read(names, start, end), strict=True))
            for part in parts.values():
                found = zlib.crc32(_bytes(part), found)
            if found != wanted:
                what = "its states"
                if token_hash(parts["tokens"].numpy()) != content.sha256[place]:
                    what = "its tokens"
                elif mask_hash(parts["supervised"].numpy()) != content.masks[place]:
                    what = "its mask"
                elif broken := [name for name, part in parts.items() if not _sound(name, part)]:
                    what = f"NaN, infinity or a negative scale in {broken[0]}"
                return f"row {content.rows[place]} (id {content.ids[place]!r}), {what}"
            start = end
        return "outside its rows"

    def _ordered(self) -> list[str]:
        return sorted(self._tensors, key=lambda name: self._tensors[name][2][0])


def _sound(name: str, part: Tensor) -> bool:
    wide = part.float()
    return bool(torch.isfinite(wide).all()) and not (
        name.startswith("scale_") and bool((wide <= 0).any())
    )


def _tell(tensors: dict[str, tuple[str, list[int]]]) -> str:
    return ", ".join(f"{name} {dtype}{shape}" for name, (dtype, shape) in sorted(tensors.items()))
