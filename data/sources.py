"""Conversation files, read one record at a time in flat memory.

The form is detected from the content, never from the file's name: a JSON list, JSON objects one
after another (JSONL, also pretty-printed), each plain or gzipped. Positions in messages are true
bytes of the (uncompressed) text.

A file that *stops inside* a record is torn. `torn="refuse"` says where; `torn="salvage"` keeps the
whole records before it and counts one torn record. Salvage is not a licence to skip: damage in the
middle of a JSON list is always refused, since nothing after it could be read; in JSONL a damaged
line is counted as torn and the next line is read.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

TORN = ("refuse", "salvage")
_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_TURN_KEYS = ("conversations", "messages")
_ESCAPE_TAIL = (
    12  # a cut inside \uXXXX\uXXXX, a literal or a number fails this near the end of the text
)


class RecordStream:
    """Iterator of (index, record) over one file; read once.

    Attributes:
        read: whole records given so far.
        torn: records that were cut and left out (only with torn="salvage").
    """

    def __init__(self, path: Path | str, torn: str = "refuse") -> None:
        if torn not in TORN:
            raise ValueError(f"torn={torn!r}: choose one of {', '.join(TORN)}")
        self.path = Path(path)
        self.read = 0
        self.torn = 0
        self._salvage = torn == "salvage"
        self._json = json.JSONDecoder(strict=False)
        self._text = ""
        self._pos = 0  # characters of _text already consumed
        self._byte = 0  # bytes before _text[_pos]
        self._file: BufferedIOBase | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._bad: str | None = None  # why the bytes after _text cannot be read
        self._foreign = False  # they are not UTF-8: no torn end, and never salvaged
        self._ended = False

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        with _open(self.path) as self._file:
            first = self._peek()
            if self._text.startswith("\ufeff") and self._byte == 0:
                self._advance(1)
                first = self._peek()
            if first == "":
                if self._bad:
                    raise ValueError(self._fault(self._bad, "save the file as UTF-8"))
                raise ValueError(f"{self.path}: the file is empty; give a file of conversations")
            if first == "[":
                yield from self._list()
            elif first == "{":
                yield from self._objects()
            else:
                raise ValueError(
                    f"{self.path}: not JSON (byte {self._byte} is {first!r}); give a JSON list of "
                    "conversations or JSONL, plain or gzipped"
                )

    def _list(self) -> Iterator[tuple[int, Any]]:
        self._advance(1)
        if self._peek() == "]":
            raise ValueError(f"{self.path}: the list is empty; give a file of conversations")
        while True:
            found = self._value()
            if found is None:
                return
            yield self.read, found[0]
            self.read += 1
            mark = self._peek()
            if mark == ",":
                self._advance(1)
            elif mark == "]":
                self._advance(1)
                if self._peek():
                    raise ValueError(
                        self._fault("text goes on after the list's closing bracket", _ONE_LIST)
                    )
                return
            elif mark == "":
                self._cut(self._bad or "the list is not closed", between=self._bad is None)
                return
            else:
                raise ValueError(
                    self._fault(f"expected ',' or ']' and found {mark!r}", "repair the file there")
                )

    def _objects(self) -> Iterator[tuple[int, Any]]:
        while mark := self._peek():
            if mark not in "{[":
                if not self._skip_line(f"found {mark!r} where a record should begin"):
                    return
                continue
            try:
                found = self._value()
            except ValueError as error:
                if not self._salvage:
                    raise
                if not self._skip_line(str(error)):
                    return
                continue
            if found is None:
                return
            record = found[0]
            if self.read == 0 and _not_a_record(record) and not self._peek():
                keys = ", ".join(sorted(map(str, record))[:8]) or "none"
                raise ValueError(
                    f"{self.path}: the file is one object with the keys {keys}, not conversations; "
                    "give the list inside it as a file of its own"
                )
            yield self.read, record
            self.read += 1
        if self._bad:
            self._cut(self._bad)

    def _value(self) -> tuple[Any] | None:
        """The next JSON value; None when the file stops inside it and that is salvaged."""
        self._peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._pos)
            except json.JSONDecodeError as error:
                open_string = error.msg.startswith("Unterminated string")
                if not open_string and error.pos < len(self._text) - _ESCAPE_TAIL:
                    where = self._byte + len(self._text[self._pos : error.pos].encode())
                    raise ValueError(
                        self._fault(f"damaged JSON ({error.msg})", "repair the file there", where)
                    ) from None
                if self._more():
                    continue
                if self._bad or open_string or error.pos >= len(self._text.rstrip()) - _ESCAPE_TAIL:
                    self._cut(self._bad or "the file stops inside this record")
                    return None
                raise ValueError(
                    self._fault(f"damaged JSON ({error.msg})", "repair the file there")
                ) from None
            except RecursionError:
                raise ValueError(
                    self._fault("the record is nested too deeply", "remove this record")
                ) from None
            if end == len(self._text) and self._more():
                continue  # a number may go on in the next chunk
            self._advance(end - self._pos)
            return (value,)

    def _cut(self, why: str, between: bool = False) -> None:
        """Count a torn end, or refuse it."""
        if self._foreign:
            raise ValueError(self._fault(why, "save the file as UTF-8"))
        if not self._salvage:
            raise ValueError(
                self._fault(why, "get a whole file, or set data.rows.torn=salvage to keep those")
            )
        if not between:
            self.torn += 1
        self._text, self._pos, self._ended = "", 0, True

    def _skip_line(self, why: str) -> bool:
        """Leave a damaged JSONL line behind; False at the end of the file."""
        if not self._salvage:
            raise ValueError(
                self._fault(why, "repair it, or set data.rows.torn=salvage to leave it out")
            )
        self.torn += 1
        while (end := self._text.find("\n", self._pos)) < 0:
            self._advance(len(self._text) - self._pos)
            if not self._more():
                return False
        self._advance(end + 1 - self._pos)
        return True

    def _fault(self, what: str, remedy: str, byte: int | None = None) -> str:
        position = self._byte if byte is None else byte
        return (
            f"{self.path}: byte {position}, record {self.read + 1}: {what}; "
            f"{self.read} whole records lie before it; {remedy}"
        )

    def _peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._pos)
            assert match is not None
            self._advance(match.end() - self._pos)
            if self._pos < len(self._text):
                return self._text[self._pos]
            if not self._more():
                return ""

    def _advance(self, characters: int) -> None:
        end = self._pos + characters
        self._byte += len(self._text[self._pos : end].encode())
        self._pos = end

    def _more(self) -> bool:
        """Append the next chunk of text; grows with what is still unread, so a huge record stays
        linear.
        """
        if self._ended or self._file is None:
            return False
        kept = self._text[self._pos :]
        data = self._read(max(_CHUNK, len(kept)))
        try:
            fresh = self._utf8.decode(data, final=not data)
        except UnicodeDecodeError as error:
            fresh = cast(bytes, error.object)[: error.start].decode("utf-8")
            cut = not data and self._bad is None
            reason = "the file stops inside a character" if cut else "the bytes are not UTF-8"
            self._bad = self._bad or reason
            self._foreign = not cut
            self._ended = True
        if not data:
            self._ended = True
        self._text, self._pos = kept + fresh, 0
        return bool(fresh)

    def _read(self, size: int) -> bytes:
        """About `size` bytes, b"" at the end; what a damaged gzip stream still gives is kept."""
        assert self._file is not None
        parts: list[bytes] = []
        while size > 0 and self._bad is None:
            try:
                part = self._file.read1(size)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self._bad = f"the gzip stream is damaged or cut ({error})"
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


_ONE_LIST = "write one list, or one object a line"


def stream_records(path: Path | str, torn: str = "refuse") -> RecordStream:
    """Records of a file of conversations, in order, in flat memory.

    Args:
        path: JSON list or JSONL, plain or gzipped; the form is detected from the content.
        torn: what to do when the file stops inside a record: "refuse" or "salvage" (keep the whole
            ones).
    Returns:
        an iterator of (index, record) that also counts `read` and `torn`.
    Raises:
        ValueError: empty, not JSON, not UTF-8, damaged, or torn; with the byte and the number of
            whole records.
    """
    return RecordStream(path, torn)


def _not_a_record(record: Any) -> bool:
    return isinstance(record, dict) and not any(
        key in record for key in (*_TURN_KEYS, "prompt", "turns")
    )


def _open(path: Path) -> BufferedIOBase:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a file of conversations (JSON or JSONL)")
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        raise ValueError(f"{path}: this is Parquet; write the conversations as JSON or JSONL")
    return cast("BufferedIOBase", gzip.open(path)) if magic[:2] == b"\x1f\x8b" else open(path, "rb")
