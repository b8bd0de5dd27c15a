"""One way to read records from wherever they lie: a file, a folder of files, a package, the hub.

What a file is, is seen from its content, never from its name: Parquet, Arrow, a JSON list, JSONL;
each but the tables may be compressed. Plain text has no mark of its own, so it must be named .txt
(before .gz and the like). The files of a folder, those below it included, are read one after
another in the order of their paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..models.files import read_json, sha256_file
from ..models.source import resolve
from .compression import ByteStream
from .hub_records import HubRecords, is_dataset
from .json_records import JsonRecords
from .table_records import ARROW_FILE, ARROW_STREAM, PARQUET, ArrowRecords, ParquetRecords
from .text_records import TextRecords

TORN = ("refuse", "salvage")
_HEAD = 4096
# an object with a key, or a list of them: `[1] a footnote` and `{"quoted"} words` are text
_JSON = re.compile(r'\s*(?:\[\s*){0,2}(?:\{\s*(?:"(?:[^"\\]|\\.)*(?:"\s*(?::|$)|\\?$)|$)|$)')
_TEXT_NAMES = (".txt", ".text")
# what lies beside the data in folders that a hub client or `datasets` wrote
_NO_DATA = re.compile(
    r"[._].*|readme.*|licen[cs]e.*|.*\.md|dataset_infos?\.json|dataset_dict\.json|state\.json",
    re.IGNORECASE,
)


# a work folder may lie below the source: rows, caches and training runs are no conversations
_OURS = ("manifest.json", "provenance.json", "run.json")
_MARKS = ({"command", "config", "versions"}, {"identity", "finished"})
_LARGEST_MARK = 1 << 26


class Reader(Protocol):
    """The records of one file."""

    torn: int
    total: int | None

    def __iter__(self) -> Iterator[Any]: ...


class RecordSource:
    """Iterator of (index, record) over one source; read once. Indices run on from file to file.

    Attributes:
        read: whole records given so far.
        form: what the source is, in words, e.g. "JSON list, gzip".
        total: records in all, where the source says so without being read.
    """

    def __init__(self, source: str, readers: list[tuple[Reader, str]], files: list[Path]) -> None:
        self.source = source
        self.read = 0
        self._readers = [reader for reader, _ in readers]
        self._files = files
        forms = sorted({form for _, form in readers})
        self.form = forms[0] if len(readers) == 1 else f"{len(readers)} files ({'; '.join(forms)})"
        totals = [reader.total for reader in self._readers]
        known = [total for total in totals if total is not None]
        self.total = sum(known) if len(known) == len(totals) else None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for reader in self._readers:
            for record in reader:
                self.read += 1
                yield self.read - 1, record

    @property
    def torn(self) -> int:
        """Records that were cut and left out so far (only with torn="salvage")."""
        return sum(reader.torn for reader in self._readers)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What determines the records, as JSON: the SHA-256 of every file in order, or the hub's
        commit, config and split. Where the source lies is no part of it."""
        (first, *_) = self._readers
        if isinstance(first, HubRecords):
            return first.identity
        return {"sha256": [sha256_file(path) for path in self._files]}


def open_source(source: str | Path, torn: str = "refuse") -> RecordSource:
    """The records of a source, in order, in flat memory.

    Args:
        source: the path of a file or folder, pkg://package/inside, hf://owner/name/file, or
            hf://owner/name[@revision][?config=NAME&split=NAME].
        torn: what to do when a file stops inside a record: "refuse" or "salvage" (keep the whole
            ones).
    Returns:
        an iterator of (index, record) that also counts `read` and `torn`.
    Raises:
        ValueError: nothing there, an unknown form, empty, not UTF-8, damaged or torn; with the
            file, the position and the number of whole records. Damage shows when it is reached.
    """
    if torn not in TORN:
        raise ValueError(f"torn={torn!r}: choose one of {', '.join(TORN)}")
    source = str(source)
    if is_dataset(source):
        hub = HubRecords(source)
        return RecordSource(source, [(hub, hub.form)], [])
    path = resolve(source, dataset=True)
    files = _files_below(path) if path.is_dir() else [path]
    return RecordSource(source, [_reader(file, torn == "salvage") for file in files], files)


def _files_below(folder: Path) -> list[Path]:
    """Data files below a folder in the order of their paths, but for what was made of them."""
    made = {path.parent for name in _OURS for path in folder.rglob(name) if _is_ours(path)}
    found = [
        path
        for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts)
        if path.is_file()
        and made.isdisjoint(path.parents)
        and not any(_NO_DATA.fullmatch(part) for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise ValueError(f"{folder}: the folder holds no files of conversations; name another")
    return found


def _is_ours(path: Path) -> bool:
    """Whether a file is the mark of rows, a cache or a training run, and not a file of records."""
    if not path.is_file() or path.stat().st_size > _LARGEST_MARK:
        return False
    try:
        mark = read_json(path)
    except ValueError:
        return False
    return isinstance(mark, dict) and (
        mark.get("kind") in ("rows", "cache") or any(keys <= mark.keys() for keys in _MARKS)
    )


def _reader(path: Path, salvage: bool) -> tuple[Reader, str]:
    """The reader that the content of a file calls for, and the form in words."""
    stream = ByteStream(path)
    try:
        head = stream.read(_HEAD)
    finally:
        stream.close()
    table = next((m for m in (PARQUET, ARROW_FILE, ARROW_STREAM) if head.startswith(m)), None)
    if table and stream.codec:
        raise ValueError(f"{path}: a table inside {stream.codec}; unpack the file first")
    if table == PARQUET:
        return ParquetRecords(path), "Parquet"
    if table:
        return ArrowRecords(path, salvage), "Arrow"
    packed = f", {stream.codec}" if stream.codec else ""
    text = head.decode("utf-8", "replace").removeprefix("\ufeff")
    if text.strip() and not _JSON.match(text) and _is_named_text(path, bool(packed)):
        return TextRecords(path, salvage), f"plain text{packed}"
    kind = "JSON list" if text.lstrip().startswith("[") else "JSONL"
    return JsonRecords(path, salvage), f"{kind}{packed}"


def _is_named_text(path: Path, packed: bool) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if packed and suffixes and suffixes[-1] not in _TEXT_NAMES:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _TEXT_NAMES
