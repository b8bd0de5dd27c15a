"""JSON files of records, read one record at a time in flat memory.

A JSON list, or JSON objects one after another (JSONL, also pretty-printed), plain or compressed.
Positions in messages are true bytes of the unpacked text.

A file that *stops inside* a record is torn. `torn="refuse"` says where; `torn="salvage"` keeps the
whole records before it and counts one torn record. Salvage is not a licence to skip: damage in the
middle of a JSON list is always refused, since nothing after it could be read; in JSONL a damaged
line is counted as torn and the next line is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .compression import TextStream
from .schemas import RECORD_KEYS

_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_ESCAPE_TAIL = (
    12  # a cut inside \uXXXX\uXXXX, a literal or a number fails this near the end of the text
)
_LONG_NUMBER = 4000  # digits; beyond these Python refuses to make an int
_MEND_LINE = "repair it, or set data.rows.torn=salvage to leave it out"
_ONE_LIST = "write one list, or one object a line"


class JsonRecords:
    """Iterator over the records of one file; read once.

    Attributes:
        read: whole records given so far.
        torn: records that were cut and left out (only with `salvage`).
        total: None, since the file does not say how many it holds.
    """

    total: int | None = None

    def __init__(self, path: Path, salvage: bool) -> None:
        self.path = path
        self.read = 0
        self.torn = 0
        self._salvage = salvage
        self._mend = "repair the file there"
        self._json = json.JSONDecoder(strict=False, parse_int=_integer)
        self._text = ""
        self._pos = 0  # characters of _text already consumed
        self._byte = 0  # bytes before _text[_pos]
        self._stream: TextStream | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        self._stream = TextStream(self.path)
        try:
            first = self._peek()
            if self._text.startswith("\ufeff") and self._byte == 0:
                self._advance(1)
                first = self._peek()
            if first == "":
                if self._bad:
                    foreign = self._stream.foreign
                    remedy = "save the file as UTF-8" if foreign else "get a whole file"
                    raise ValueError(self._fault(self._bad, remedy))
                raise ValueError(f"{self.path}: the file is empty; give a file of conversations")
            if first == "[":
                yield from self._list()
            elif first == "{":
                yield from self._objects()
            else:
                raise ValueError(
                    f"{self.path}: not JSON (byte {self._byte} is {first!r}); give JSON, JSONL, "
                    "Parquet or Arrow, or name a plain text .txt"
                )
        finally:
            self._stream.close()

    @property
    def _bad(self) -> str | None:
        """Why the bytes after _text cannot be read."""
        return self._stream.fault if self._stream else None

    def _list(self) -> Iterator[Any]:
        self._advance(1)
        if self._peek() == "]":
            raise ValueError(f"{self.path}: the list is empty; give a file of conversations")
        while True:
            found = self._value()
            if found is None:
                return
            self.read += 1
            yield found[0]
            mark = self._peek()
            if mark == ",":
                self._advance(1)
                mark = self._peek()
                if mark != "]":
                    continue
                if not self._salvage:
                    raise ValueError(
                        self._fault(
                            "a comma stands before the list's closing bracket",
                            "remove it, or set data.rows.torn=salvage to pass over it",
                        )
                    )
            if mark == "]":
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

    def _objects(self) -> Iterator[Any]:
        self._mend = _MEND_LINE
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
            foreign = isinstance(record, dict) and not any(key in record for key in RECORD_KEYS)
            if self.read == 0 and foreign and not self._peek():
                keys = ", ".join(sorted(map(str, record))[:8]) or "none"
                raise ValueError(
                    f"{self.path}: the file is one object with the keys {keys}, not conversations; "
                    "give the list inside it as a file of its own"
                )
            self.read += 1
            yield record
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
                        self._fault(f"damaged JSON ({error.msg})", self._mend, where)
                    ) from None
                if self._more():
                    continue
                if self._bad or open_string or error.pos >= len(self._text.rstrip()) - _ESCAPE_TAIL:
                    self._cut(self._bad or "the file stops inside this record")
                    return None
                raise ValueError(self._fault(f"damaged JSON ({error.msg})", self._mend)) from None
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
        if self._stream and self._stream.foreign:
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
            raise ValueError(self._fault(why, _MEND_LINE))
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
        if self._ended or self._stream is None:
            return False
        kept = self._text[self._pos :]
        fresh = self._stream.read(max(_CHUNK, len(kept)))
        self._ended = not fresh
        self._text, self._pos = kept + fresh, 0
        return bool(fresh)


def _integer(digits: str) -> int | float:
    """An integer of any length, as a float where it is too long for Python's reader."""
    return int(digits) if len(digits) < _LONG_NUMBER else float(digits)
