"""Records in Parquet and Arrow files, read batch by batch in flat memory.

Parquet keeps its table of contents at the end: a file that was cut there cannot be read at all, and
nothing can be salvaged. Arrow files (also those that `datasets` writes) are read as the stream they
hold, so the whole batches before a cut can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PARQUET = b"PAR1"
ARROW_FILE = b"ARROW1\x00\x00"
ARROW_STREAM = b"\xff\xff\xff\xff"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_BATCH = 256
# what a damaged file makes pyarrow raise, besides its own
_DAMAGE = (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, RecursionError)


class ParquetRecords:
    """Iterator over the rows of a Parquet file; read once.

    Attributes:
        torn: always 0.
        total: rows by the file's table of contents.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0
        size = path.stat().st_size
        with open(path, "rb") as file:
            file.seek(max(size - 4, 0))
            whole = file.read() == PARQUET and size >= 12
        if not whole:
            raise ValueError(
                f"{path}: byte {size}: the Parquet file stops without its footer, the table of "
                "contents at its end; without it no record can be read, so nothing can be salvaged "
                "either: get a whole file"
            )
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        except _DAMAGE as error:
            raise ValueError(
                f"{path}: byte {size}: the Parquet footer is damaged ({_short(error)}), so no "
                "record can be read: get a whole file"
            ) from error
        self.total: int | None = self._file.metadata.num_rows

    def __iter__(self) -> Iterator[Any]:
        if not self.total:
            raise ValueError(f"{self.path}: the table is empty; give a file of conversations")
        read = group = 0
        try:
            for group in range(self._file.num_row_groups):
                for batch in self._file.iter_batches(_BATCH, row_groups=[group], use_threads=False):
                    batch.validate(full=True)
                    for record in batch.to_pylist():
                        read += 1
                        yield record
        except _DAMAGE as error:
            raise ValueError(
                f"{self.path}: row group {group + 1} of {self._file.num_row_groups}, record "
                f"{read + 1}: damaged ({_short(error)}); {read} whole records lie before it; get a "
                "whole file"
            ) from error
        finally:
            self._file.close()


class ArrowRecords:
    """Iterator over the rows of an Arrow file or stream; read once.

    Attributes:
        torn: 1 where the file stops inside a batch and that is salvaged.
        total: None, since a stream does not say.
    """

    total: int | None = None

    def __init__(self, path: Path, salvage: bool) -> None:
        self.path = path
        self.torn = 0
        self._salvage = salvage
        self._read = 0
        self._size = path.stat().st_size

    def __iter__(self) -> Iterator[Any]:
        with pa.OSFile(str(self.path)) as file:
            if file.read(len(ARROW_FILE)) != ARROW_FILE:
                file.seek(0)
            start = file.tell()
            try:
                stream = pa.ipc.open_stream(file)
            except _DAMAGE as error:
                raise ValueError(self._fault(start, error)) from error
            while (batch := self._next(stream, file)) is not None:
                for offset in range(0, batch.num_rows, _BATCH):
                    for record in self._records(batch.slice(offset, _BATCH), start):
                        self._read += 1
                        yield record
                start = file.tell()
        if not self._read and not self.torn:
            raise ValueError(f"{self.path}: the table is empty; give a file of conversations")

    def _next(self, stream: pa.RecordBatchReader, file: pa.NativeFile) -> pa.RecordBatch | None:
        """The next batch; None at the end, whole or salvaged."""
        begin = file.tell()
        try:
            batch = stream.read_next_batch()
            batch.validate(full=True)
            return batch
        except StopIteration:
            end = file.tell()
            file.seek(max(end - len(_END_OF_STREAM), 0))
            if file.read(len(_END_OF_STREAM)) != _END_OF_STREAM and not self._salvage:
                raise ValueError(self._torn(end, "the stream is not closed")) from None
            return None
        except _DAMAGE as error:
            if not self._was_cut(file):
                raise ValueError(self._fault(begin, error)) from error
            if not self._salvage:
                raise ValueError(self._torn(begin, "the file stops inside this batch")) from error
            self.torn += 1
            return None

    def _was_cut(self, file: pa.NativeFile) -> bool:
        """Whether the fault lies in the file's end: all was read, and what closes it is missing."""
        if file.tell() < self._size:
            return False
        file.seek(max(self._size - len(_END_OF_STREAM), 0))
        tail = file.read(len(_END_OF_STREAM))
        return tail != _END_OF_STREAM and not tail.endswith(ARROW_FILE[:6])

    def _records(self, batch: pa.RecordBatch, start: int) -> list[Any]:
        try:
            return batch.to_pylist()
        except _DAMAGE as error:
            raise ValueError(self._fault(start, error)) from error

    def _torn(self, byte: int, what: str) -> str:
        return (
            f"{self._place(byte)}: {what}; {self._read} whole records lie before it; get a whole "
            "file, or set data.rows.torn=salvage to keep those"
        )

    def _fault(self, byte: int, error: BaseException) -> str:
        return (
            f"{self._place(byte)}: damaged ({_short(error)}); {self._read} whole records lie "
            "before it; get a whole file"
        )

    def _place(self, byte: int) -> str:
        return f"{self.path}: byte {byte}, record {self._read + 1}"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
