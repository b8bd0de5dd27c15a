"""Bytes and text of a file that may be compressed: gzip, zstd, bzip2 or xz, known by its first
bytes, several members one after another included."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Protocol, cast

import pyarrow as pa

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException)
_PIECE = 1 << 16  # a damaged stream loses at most this much of what could still be unpacked


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


def codec_of(path: Path) -> str:
    """gzip, zstd, bzip2, xz, or "" for a file that is not compressed."""
    with _opened(path) as file:
        head = file.read(8)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


class ByteStream:
    """The unpacked bytes of a file.

    Attributes:
        codec: as `codec_of` names it.
        fault: why the bytes end before the file does, in words; None while all is well.
    """

    def __init__(self, path: Path) -> None:
        self.codec = codec_of(path)
        self.fault: str | None = None
        self._file = _unpacked(path, self.codec)

    def read(self, size: int) -> bytes:
        """About `size` bytes, b"" at the end; what a damaged stream still gives is kept."""
        parts: list[bytes] = []
        while size > 0 and self.fault is None:
            try:
                part = self._file.read(min(size, _PIECE))
            except _DAMAGE as error:
                if not self.codec:
                    raise
                self.fault = f"the {self.codec} stream is damaged or cut ({error})"
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TextStream:
    """The text of a UTF-8 file, plain or compressed.

    Attributes:
        fault: why the text ends before the file does; None while all is well.
        foreign: the fault is bytes that are not UTF-8, which is no torn end.
        position: bytes of the text given so far.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = ByteStream(path)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._ended = False
        self.fault: str | None = None
        self.foreign = False
        self.position = 0

    def read(self, size: int) -> str:
        """Text of about `size` bytes, "" at the end."""
        text = ""
        while not text and not self._ended:
            data = self._bytes.read(size)
            self._ended = not data
            self.fault = self._bytes.fault
            try:
                text = self._utf8.decode(data, final=not data)
            except UnicodeDecodeError as error:
                text = cast(bytes, error.object)[: error.start].decode("utf-8")
                self.foreign = bool(data)
                self._ended = True
                self.fault = (
                    "the bytes are not UTF-8"
                    if data
                    else self.fault or "the file stops inside a character"
                )
        self.position += len(text.encode())
        return text

    def close(self) -> None:
        """Close the file."""
        self._bytes.close()


def _unpacked(path: Path, codec: str) -> _Readable:
    match codec:
        case "gzip":
            # read1 gives what lies before the damage; read would lose it
            return _ReadOne(gzip.open(path))
        case "bzip2":
            return _ReadOne(bz2.open(path))
        case "xz":
            return _ReadOne(lzma.open(path))
        case "zstd":
            return cast(_Readable, pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return _opened(path)


class _ReadOne:
    """`read1` under the name of `read`."""

    def __init__(self, file: gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile) -> None:
        self.read = file.read1
        self.close = file.close


def _opened(path: Path) -> io.BufferedReader:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a file of conversations, or a folder of them")
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened ({error}); check its permissions") from error
