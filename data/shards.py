"""One shard of a hidden-state cache: a safetensors file whose header says what it is.

Tensors: `tokens` int32 [N], `supervised` uint8 [N], `boundary_K` bf16 [N, H] for each boundary K;
rows lie end to end. Header metadata (text): `format`, `key` (of the cache), `shard` (its number),
`data_sha256`, and as JSON lists `rows`, `lengths`, `sha256` and `quarantined`, so that a shard
describes its rows without any other file.

The file is written here rather than by the library, because its bytes must be the same on every run
(the library orders the metadata as its hash map falls) and because the checksum is taken while
writing.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..models.files import commit

FORMAT = 1
_BLOCK = 1 << 24
_DTYPES = {torch.int32: "I32", torch.uint8: "U8", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class ShardRows:
    """Which rows a shard holds: numbers in the token rows, lengths, token hashes; and those left
    out of it.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    sha256: tuple[str, ...]
    quarantined: tuple[int, ...]


@dataclass(frozen=True)
class ShardFacts:
    """A shard's line in the manifest."""

    name: str
    bytes: int
    sha256: str
    rows: int
    tokens: int


def shard_name(number: int) -> str:
    """shard-00000.safetensors"""
    return f"shard-{number:05d}.safetensors"


def boundary_name(boundary: int) -> str:
    """The tensor that holds a boundary's states."""
    return f"boundary_{boundary}"


def write_shard(
    folder: Path, number: int, key: str, content: ShardRows, tensors: dict[str, Tensor]
) -> ShardFacts:
    """Write one shard under a temporary name, flush it, rename it.

    Args:
        tensors: contiguous CPU tensors by name, all with N = sum of content.lengths rows.
    Raises:
        ValueError: the disk is full; the temporary file is removed, whole shards stay.
    """
    # widest dtype first: every tensor then begins at a multiple of its own width
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    data = hashlib.sha256()
    for block in _blocks(ordered):
        data.update(block)
    header: dict[str, Any] = {
        "__metadata__": {
            "format": str(FORMAT),
            "key": key,
            "shard": str(number),
            "data_sha256": data.hexdigest(),
            "rows": json.dumps(content.rows),
            "lengths": json.dumps(content.lengths),
            "sha256": json.dumps(content.sha256),
            "quarantined": json.dumps(content.quarantined),
        }
    }
    offset = 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    path = folder / shard_name(number)
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    digest = hashlib.sha256()
    try:
        with open(temporary, "wb") as file:
            for block in itertools.chain([head], _blocks(ordered)):
                file.write(block)
                digest.update(block)
            file.flush()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        commit(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"the disk under {folder} is full while writing {path.name}; the {number} shards "
                "before it are whole: free some space and run dump again, it goes on from there"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return ShardFacts(path.name, size, digest.hexdigest(), len(content.rows), sum(content.lengths))


def _blocks(tensors: list[tuple[str, Tensor]]) -> Iterator[memoryview]:
    for _, tensor in tensors:
        if tensor.numel():
            view = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(view), _BLOCK):
                yield view[start : start + _BLOCK]


class ShardFile:
    """A shard open for reading; slices are read from the mapped file, nothing is loaded whole.

    Raises:
        ValueError: not a readable safetensors file, or another format version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); it is cut or damaged: delete it and run dump "
                "again"
            ) from error
        metadata = self._file.metadata() or {}
        version = metadata.get("format")
        if version != str(FORMAT):
            raise ValueError(
                f"{path} has the cache format {version!r}, this version reads {FORMAT}; dump again"
            )
        self.key = metadata.get("key", "")
        self.number = int(metadata.get("shard", "-1"))
        self._metadata = metadata

    @property
    def content(self) -> ShardRows:
        """The rows in this shard."""
        lists = {
            name: tuple(json.loads(self._metadata[name]))
            for name in ("rows", "lengths", "sha256", "quarantined")
        }
        return ShardRows(**lists)

    def check_schema(self, boundaries: tuple[int, ...], hidden_size: int) -> None:
        """Compare tensor names, dtypes and shapes with what the manifest promises.

        Raises:
            ValueError: lists what was expected and what was found.
        """
        count = sum(self.content.lengths)
        expected = {"tokens": ("I32", [count]), "supervised": ("U8", [count])}
        expected |= {boundary_name(k): ("BF16", [count, hidden_size]) for k in boundaries}
        found = {}
        for name in self._file.keys():
            part = self._file.get_slice(name)
            found[name] = (str(part.get_dtype()), list(part.get_shape()))
        if found != expected:
            raise ValueError(
                f"{self.path}: tensors differ from the manifest; expected {_tell(expected)}; found "
                f"{_tell(found)}; dump again"
            )

    def facts(self) -> ShardFacts:
        """The manifest line of a shard that an earlier run left; reads it whole.

        Raises:
            ValueError: the data differ from the checksum in the header (a file may be of full
                length and hold zeros after a power cut).
        """
        whole, data = hashlib.sha256(), hashlib.sha256()
        with open(self.path, "rb") as file:
            prefix = file.read(8)
            head = file.read(int.from_bytes(prefix, "little"))
            whole.update(prefix + head)
            while block := file.read(_BLOCK):
                whole.update(block)
                data.update(block)
        if data.hexdigest() != self._metadata.get("data_sha256"):
            raise ValueError(f"{self.path}: its data differ from the checksum in its header")
        content, size = self.content, self.path.stat().st_size
        return ShardFacts(
            self.path.name, size, whole.hexdigest(), len(content.rows), sum(content.lengths)
        )

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Rows [start, end) of a tensor."""
        return self._file.get_slice(name)[start:end]


def _tell(tensors: dict[str, tuple[str, list[int]]]) -> str:
    return ", ".join(f"{name} {dtype}{shape}" for name, (dtype, shape) in sorted(tensors.items()))
