"""A folder of files, on a local disk or behind a URL that fsspec knows (s3://…, memory://…).

Files are whole or absent in all of them. A local file is written under a temporary name, flushed
and renamed; an object store gets each file in one put, which it shows only when it is complete;
anything else (sftp://…) gets a temporary name and a move. Local files are read through a map of
their pages, remote ones by byte ranges.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from ..models.files import atomic_write_blocks, parse_json

Spans = list[tuple[int, int]]
Reader = Callable[[Spans], list[np.ndarray]]
"""[start, end) byte ranges -> one uint8 array each; of a local file the arrays are views of it."""
_BLOCK = 1 << 24
_ONE_PUT = {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "hf"}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def expanded(place: str) -> str:
    """A path with the home folder for ~ (~NAME: that user's), or a URL as it is.

    Raises:
        ValueError: nobody is called NAME.
    """
    if not place.startswith("~"):
        return place
    try:
        return str(Path(place).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{place}: {error}; write the folder's whole name") from None


class Store:
    """One folder.

    Args:
        place: a path, or an fsspec URL; nothing is made before the first `write`.
    Attributes:
        place: as text, without a slash at its end. local: the path, None where it is remote.
    Raises:
        ValueError: a URL whose protocol fsspec does not know, or whose library is not installed;
            the home folder of a user who is not known.
    """

    def __init__(self, place: Path | str) -> None:
        self.place = expanded(str(place).rstrip("/") or "/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.place)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{self.place}: {error}") from error
        self.local: Path | None = None
        if isinstance(self._files, LocalFileSystem):
            self.local = Path(self.place.removeprefix("file://").removeprefix("local://"))
            self.place = str(self.local)

    def path(self, name: str) -> str:
        """The full name of a file, as messages show it."""
        return f"{self.place}/{name}"

    def names(self) -> list[str]:
        """The files in the folder, sorted, hidden ones included; none where the folder is not."""
        if self.local is not None:
            if not self.local.is_dir():
                return []
            return sorted(entry.name for entry in os.scandir(self.local) if entry.is_file())
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(each["name"]) for each in found if each["type"] == "file")

    def exists(self, name: str) -> bool:
        """Whether the file is there, whole."""
        if self.local is not None:
            return (self.local / name).is_file()
        self._files.invalidate_cache()
        return bool(self._files.isfile(self._at(name)))

    def is_file(self) -> bool:
        """Whether the place is a file instead of a folder."""
        return self.local.is_file() if self.local else bool(self._files.isfile(self._root))

    def modified(self, name: str) -> float | None:
        """When a file was written, in seconds since 1970; None where that is not known."""
        try:
            if self.local is not None:
                return (self.local / name).stat().st_mtime
            return self._files.modified(self._at(name)).timestamp()
        except (FileNotFoundError, NotImplementedError):
            return None

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            FileNotFoundError: it is not there.
        """
        if self.local is not None:
            return (self.local / name).stat().st_size
        return int(self._files.size(self._at(name)))

    def read(self, name: str) -> bytes:
        """A whole file."""
        if self.local is not None:
            return (self.local / name).read_bytes()
        return self._files.cat_file(self._at(name))

    def read_json(self, name: str) -> Any:
        """A whole JSON file; ValueError names a damaged one and the place of the fault."""
        return parse_json(self.read(name), self.path(name))

    def open(self, name: str) -> Reader:
        """A file for reading by ranges."""
        if self.local is not None:
            # copy-on-write: torch warns when it borrows memory that cannot be written
            mapped = np.memmap(self.local / name, np.uint8, mode="c")
            return lambda spans: [mapped[start:end] for start, end in spans]
        at = self._at(name)

        def fetch(spans: Spans) -> list[np.ndarray]:
            starts, ends = [start for start, _ in spans], [end for _, end in spans]
            parts = self._files.cat_ranges([at] * len(spans), starts, ends, on_error="raise")
            return [np.frombuffer(bytearray(part), np.uint8) for part in parts]

        return fetch

    def write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write a file so that a kill leaves the old one or the new one. A remote write gathers the
        blocks in memory first.

        Raises:
            ValueError: the disk is full; nothing half-written stays.
        """
        try:
            if self.local is not None:
                atomic_write_blocks(self.local / name, blocks)
                return
            data = b"".join(blocks)
            protocols = self._files.protocol
            known = {protocols} if isinstance(protocols, str) else set(protocols)
            if known & _ONE_PUT:
                self._files.pipe_file(self._at(name), data)
                return
            self._files.makedirs(self._root, exist_ok=True)
            temporary = self._at(f".{name}.{os.getpid()}.tmp")
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, self._at(name))
        except OSError as error:
            if error.errno in _FULL:
                raise ValueError(
                    f"the disk under {self.place} is full while writing {name}; the files before "
                    "it are whole: free some space and run the command again, it goes on from there"
                ) from error
            raise

    def write_json(self, name: str, value: Any) -> None:
        """Write indented JSON; refuses NaN and infinities, which JSON has not."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self.write(name, [text.encode("utf-8")])

    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        if self.local is not None:
            (self.local / name).unlink(missing_ok=True)
        elif self.exists(name):
            self._files.rm_file(self._at(name))

    def free_bytes(self) -> int | None:
        """Bytes free on the local disk that holds, or will hold, the folder; None where unknown."""
        if self.local is None:
            return None
        place = self.local.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def sibling(self, name: str) -> Store:
        """The folder of that name beside this one."""
        if self.local is not None:
            # as `reference` sees it: a link's neighbours are those of the folder that it names
            return Store(self.local.resolve().parent / name)
        return Store(f"{self.place.rpartition('/')[0]}/{name}")

    def reference(self, other: Store) -> str:
        """How a file in this folder names another: `../NAME` under the same parent, else whole."""
        if self.local is not None and other.local is not None:
            mine, theirs = self.local.resolve(), other.local.resolve()
            return f"../{theirs.name}" if mine.parent == theirs.parent else str(theirs)
        parent, _, name = other.place.rpartition("/")
        return f"../{name}" if parent == self.place.rpartition("/")[0] else other.place

    def resolve(self, reference: str) -> Store:
        """The folder that `reference` named."""
        beside = reference.removeprefix("../")
        return self.sibling(beside) if beside != reference else Store(reference)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def blocks_of(reader: Reader, start: int, end: int) -> Iterator[np.ndarray]:
    """Bytes [start, end) in pieces of 16 MB at most."""
    for begin in range(start, end, _BLOCK):
        yield reader([(begin, min(begin + _BLOCK, end))])[0]
