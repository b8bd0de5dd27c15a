"""Plain text, read one document at a time in flat memory.

A document is a block of lines between blank lines; one longer than 16,384 characters is divided at
a line end, or in the line where there is none. Each becomes a record {"text": ...}. Text has no
turns: all of it is supervised but the first token (see clean.py). Rendered conversations,
which have blank lines inside, belong into JSONL as {"text": ...}.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .compression import TextStream

_CHUNK = 1 << 20
_LONGEST = 1 << 14


class TextRecords:
    """Iterator over the documents of one file; read once.

    Attributes:
        torn: 1 where the file stops inside a document and that is salvaged.
        total: None, since the file does not say.
    """

    total: int | None = None

    def __init__(self, path: Path, salvage: bool) -> None:
        self.path = path
        self.torn = 0
        self._salvage = salvage

    def __iter__(self) -> Iterator[Any]:
        read = 0
        for document in self._documents():
            read += 1
            yield {"text": document}
        if not read and not self.torn:
            raise ValueError(f"{self.path}: the file holds no text; give a file of conversations")

    def _documents(self) -> Iterator[str]:
        """Blocks of lines; the last one of a damaged file is torn."""
        block: list[str] = []
        size = read = 0
        stream = TextStream(self.path)
        try:
            for line in _lines(stream):
                full = size + len(line) > _LONGEST
                if block and (full or not line.strip()):
                    read += 1
                    yield "".join(block).rstrip("\n")
                    block, size = [], 0
                if line.strip():
                    block.append(line)
                    size += len(line)
            if stream.fault:
                self._refuse(stream, read)
                self.torn += 1
            elif block:
                yield "".join(block).rstrip("\n")
        finally:
            stream.close()

    def _refuse(self, stream: TextStream, read: int) -> None:
        if self._salvage and not stream.foreign:
            return
        remedy = (
            "save the file as UTF-8"
            if stream.foreign
            else "get a whole file, or set data.rows.torn=salvage to keep those"
        )
        raise ValueError(
            f"{self.path}: byte {stream.position}, record {read + 1}: {stream.fault}; {read} whole "
            f"records lie before it; {remedy}"
        )


def _lines(stream: TextStream) -> Iterator[str]:
    """Lines with their ends, none longer than a document may be; a byte-order mark is left out."""
    rest, first = "", True
    while piece := stream.read(_CHUNK):
        if first:
            piece, first = piece.removeprefix("\ufeff"), False
        *lines, rest = (rest + piece).replace("\r\n", "\n").split("\n")
        for line in lines:
            yield from _divided(line + "\n")
        while len(rest) > _LONGEST:
            yield rest[:_LONGEST]
            rest = rest[_LONGEST:]
    if rest:
        yield from _divided(rest)


def _divided(line: str) -> Iterator[str]:
    for start in range(0, len(line), _LONGEST):
        yield line[start : start + _LONGEST]
