"""Compressed files, tables, plain text and folders: what they are is seen from their content."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.data import text_records
from draftsmith.data.clean import clean
from draftsmith.data.conversations import Conversation
from draftsmith.data.sources import RecordSource, open_source
from draftsmith.data.text_records import TextRecords
from draftsmith.models.files import sha256_file

RECORDS: list[dict[str, Any]] = [
    {
        "id": str(n),
        "conversations": [
            {"from": "human", "value": f"question {n}"},
            {"from": "gpt", "value": f"answer {n * 7919 % 1000003}"},
        ],
    }
    for n in range(600)
]
LINES = "\n".join(map(json.dumps, RECORDS)).encode()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return sink.getvalue().to_pybytes()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstd,
    "bzip2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
}


def parquet(records: list[Any], **settings: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=100, **settings)
    return sink.getvalue()


def arrow(records: list[Any], new: Callable[..., Any], batch: int = 100) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(records)
    with new(sink, table.schema) as writer:
        for part in table.to_batches(max_chunksize=batch):
            writer.write_batch(part)
    return sink.getvalue().to_pybytes()


def records_of(source: RecordSource) -> list[Any]:
    """Records only; their indices must count up."""
    found = list(source)
    assert [index for index, _ in found] == list(range(len(found)))
    assert source.read == len(found)
    return [record for _, record in found]


@pytest.mark.parametrize("codec", sorted(PACK))
def test_compressed(tmp_path: Path, codec: str) -> None:
    """Known by its first bytes; members one after another are one text."""
    path = tmp_path / "x.json"
    half = LINES.index(b"\n", len(LINES) // 2)
    path.write_bytes(PACK[codec](LINES[:half]) + PACK[codec](LINES[half:]))
    source = open_source(path)
    assert (source.form, source.total) == (f"JSONL, {codec}", None)
    assert records_of(source) == RECORDS


@pytest.mark.parametrize("codec", sorted(PACK))
def test_compressed_and_cut(tmp_path: Path, codec: str) -> None:
    """Refused with the number of whole records, or salvaged up to the damage."""
    noise = random.Random(0)
    records = [{"id": n, "messages": [noise.randbytes(200).hex()]} for n in range(3000)]
    data = PACK[codec]("\n".join(map(json.dumps, records)).encode())
    path = tmp_path / "x.json"
    path.write_bytes(data[: len(data) * 4 // 5])
    with pytest.raises(ValueError, match=f"the {codec} stream is damaged or cut.*whole records"):
        records_of(open_source(path))
    source = open_source(path, "salvage")
    found = records_of(source)
    assert found == records[: len(found)]
    assert source.torn == 1
    assert len(found) > 1000


@pytest.mark.parametrize("form", ["Parquet", "file", "stream"])
def test_tables(tmp_path: Path, form: str) -> None:
    """The same records as from JSON, nested columns and all."""
    path = tmp_path / "x.json"
    writer = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    path.write_bytes(parquet(RECORDS) if form == "Parquet" else arrow(RECORDS, writer))
    source = open_source(path)
    assert source.form == ("Parquet" if form == "Parquet" else "Arrow")
    assert source.total == (600 if form == "Parquet" else None)
    assert records_of(source) == RECORDS


def test_mixed_keys_in_a_table_clean_the_same(tmp_path: Path) -> None:
    """A table fills the keys that a turn has not with nulls; the conversation does not notice."""
    mixed = [
        {
            "conversations": None,
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        },
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet(mixed))
    found = [clean(record, index, Counter()) for index, record in open_source(path)]
    hashes = {one.content_hash for one in found if isinstance(one, Conversation)}
    assert len(hashes) == 1
    assert all(isinstance(one, Conversation) for one in found)


def test_parquet_that_was_cut_cannot_be_salvaged(tmp_path: Path) -> None:
    """Its table of contents is at the end, which the message says with the position."""
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet(RECORDS)[:5000])
    for torn in ("refuse", "salvage"):
        with pytest.raises(ValueError, match="byte 5000: .*without its footer.*nothing can be sal"):
            open_source(path, torn)
    whole = parquet(RECORDS)
    path.write_bytes(whole[:-200] + bytes(150) + whole[-50:])
    with pytest.raises(ValueError, match="the Parquet footer is damaged"):
        open_source(path)


def test_parquet_that_is_damaged_inside(tmp_path: Path) -> None:
    """The row group and the records before it are named; it is no torn end, so never salvaged."""
    data = parquet(RECORDS, write_page_checksum=True)
    place = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(3).column(1).data_page_offset + 40
    path = tmp_path / "x.parquet"
    path.write_bytes(data[:place] + bytes(8) + data[place + 8 :])
    source = open_source(path, "salvage")
    with pytest.raises(ValueError, match="row group 4 of 6, record 301: damaged.*300 whole"):
        records_of(source)


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_that_was_cut(tmp_path: Path, writer: Callable[..., Any]) -> None:
    """Batches before the cut are whole."""
    data = arrow(RECORDS, writer)
    path = tmp_path / "x.arrow"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"byte \d+, record \d01: the file stops inside this bat"):
        records_of(open_source(path))
    source = open_source(path, "salvage")
    found = records_of(source)
    assert found == RECORDS[: len(found)]
    assert (len(found) % 100, source.torn) == (0, 1)
    assert len(found) > 0


def test_arrow_without_its_end_loses_nothing(tmp_path: Path) -> None:
    """All batches are there, which only the mark at the end can say."""
    path = tmp_path / "x.arrow"
    path.write_bytes(arrow(RECORDS, pa.ipc.new_stream)[:-8])
    with pytest.raises(ValueError, match="record 601: the stream is not closed; 600 whole"):
        records_of(open_source(path))
    source = open_source(path, "salvage")
    assert records_of(source) == RECORDS
    assert source.torn == 0


def test_arrow_that_is_damaged_inside(tmp_path: Path) -> None:
    """Never salvaged: what follows could not be trusted."""
    data = bytearray(arrow(RECORDS, pa.ipc.new_stream))
    second = data.index(b"\xff\xff\xff\xff", data.index(b"\xff\xff\xff\xff", 10) + 8)
    data[second + 4 : second + 8] = b"\x10\x00\x00\x00"
    path = tmp_path / "x.arrow"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"byte \d+, record 101: damaged.*100 whole"):
        records_of(open_source(path, "salvage"))


@pytest.mark.parametrize("form", ["Parquet", "Arrow"])
def test_tables_without_rows_and_packed_tables(tmp_path: Path, form: str) -> None:
    """An empty table is refused like an empty list; a packed one is to be unpacked."""
    empty = pa.table({"text": pa.array([], pa.string())})
    sink = io.BytesIO()
    if form == "Parquet":
        pq.write_table(empty, sink)
    else:
        with pa.ipc.new_stream(sink, empty.schema) as writer:
            writer.write_table(empty)
    path = tmp_path / "x"
    path.write_bytes(sink.getvalue())
    with pytest.raises(ValueError, match="the table is empty"):
        records_of(open_source(path))
    path.write_bytes(gzip.compress(sink.getvalue()))
    with pytest.raises(ValueError, match="a table inside gzip; unpack the file first"):
        open_source(path)


def test_memory_of_a_table_does_not_grow(tmp_path: Path) -> None:
    """A row group of 8,000 records is read a few hundred at a time."""
    path = tmp_path / "x.parquet"
    rows = [{"id": n, "text": f"{n}" + "x" * 900} for n in range(8000)]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False)
    del rows
    tracemalloc.start()
    count = sum(1 for _ in open_source(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8000
    assert peak < 1_500_000


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_plain_text(tmp_path: Path, ends: str, packed: bool) -> None:
    """Blocks between blank lines are documents; the name must say that it is text."""
    text = "\ufeff\n[Music]\nline two\n \n\n  indented ä\n\n\n".replace("\n", ends).encode()
    path = tmp_path / ("x.txt.gz" if packed else "x.txt")
    path.write_bytes(gzip.compress(text) if packed else text)
    source = open_source(path)
    assert source.form == ("plain text, gzip" if packed else "plain text")
    assert records_of(source) == [{"text": "[Music]\nline two"}, {"text": "  indented ä"}]
    other = path.rename(tmp_path / "x.log")
    with pytest.raises(ValueError, match="or name a plain text .txt|damaged JSON"):
        records_of(open_source(other))


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("[1] See the appendix.", "plain text"),
        ('{"quoted"} words', "plain text"),
        ('["Hello," she said]', "plain text"),
        ('[{"text": "[1] See"}]', "JSON list"),
        ('{ "te\\"xt" : "x", "text": "{words}"}', "JSONL"),
    ],
)
def test_text_that_begins_as_json_does(tmp_path: Path, text: str, form: str) -> None:
    """In a file named .txt only objects with a key, or a list of them, are JSON."""
    path = tmp_path / "x.txt"
    path.write_text(text)
    source = open_source(path)
    assert source.form == form
    [record] = records_of(source)
    assert form != "plain text" or record == {"text": text}


@pytest.mark.parametrize("chunk", range(1, 8))
def test_a_line_end_that_falls_on_a_chunk_s_border(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CR and LF are one line end wherever the reader stops between them."""
    monkeypatch.setattr(text_records, "_CHUNK", chunk)
    path = tmp_path / "x.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n")
    assert records_of(open_source(path)) == [{"text": "one\ntwo"}, {"text": "three"}]


def test_long_documents_are_divided_and_nothing_is_lost(tmp_path: Path) -> None:
    """At a line end where there is one in reach, inside the line where there is none."""
    path = tmp_path / "x.txt"
    lines = [f"{n} " + "w" * (n % 90) for n in range(2000)]
    path.write_text("\n".join(lines) + "\n\n" + "v" * 40_000)
    found = [record["text"] for _, record in open_source(path)]
    assert max(map(len, found)) <= 1 << 14
    assert "\n".join(found[:-3]) == "\n".join(lines)
    assert "".join(found[-3:]) == "v" * 40_000


def test_damaged_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are refused by place; a cut inside a character may be salvaged."""
    path = tmp_path / "x.txt"
    path.write_bytes(b"one\n\ntwo\xff\n")
    for torn in ("refuse", "salvage"):
        with pytest.raises(ValueError, match="byte 8, record 2: the bytes are not UTF-8; 1 whole"):
            records_of(open_source(path, torn))
    path.write_bytes("one\n\ntwä".encode()[:-1])
    with pytest.raises(ValueError, match="byte 7, record 2: the file stops inside a character"):
        records_of(open_source(path))
    source = open_source(path, "salvage")
    assert records_of(source) == [{"text": "one"}]
    assert source.torn == 1
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no text"):
        list(TextRecords(path, False))


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    """Whatever their forms; indices run on, what is no data is passed by, torn ends add up."""
    folder = tmp_path / "chats"
    (folder / "b").mkdir(parents=True)
    (folder / "a.json").write_bytes(gzip.compress(json.dumps(RECORDS[:2]).encode()))
    (folder / "b" / "x.parquet").write_bytes(parquet(RECORDS[2:5]))
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, RECORDS[5:7])) + '\n{"id": 1')
    for name in ("README.md", "LICENSE", ".hidden", "dataset_info.json"):
        (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=r"c\.jsonl: byte \d+, record 3: the file stops inside"):
        list(open_source(folder))
    source = open_source(str(folder), "salvage")
    assert source.form == "3 files (JSON list, gzip; JSONL; Parquet)"
    assert records_of(source) == RECORDS[:7]
    assert (source.torn, source.total) == (1, None)
    files = [folder / "a.json", folder / "b" / "x.parquet", folder / "c.jsonl"]
    assert source.identity == {"sha256": [sha256_file(path) for path in files]}


def test_what_was_made_of_a_folder_is_no_part_of_it(tmp_path: Path) -> None:
    """A work folder below the source: rows, caches and runs are passed by, a user's own
    manifest.json is data."""
    marks = {
        "work/rows/manifest.json": {"kind": "rows"},
        "work/cache/manifest.json": {"kind": "cache"},
        "work/train/run.json": {"identity": {}, "finished": None},
        "work/other/provenance.json": {"command": [], "config": {}, "versions": {}},
    }
    for name, mark in marks.items():
        for place in (tmp_path / name, tmp_path / name.replace("work/", "work/own/")):
            place.parent.mkdir(parents=True)
            place.write_text(json.dumps(mark))
            (place.parent / "further").mkdir()
            (place.parent / "further" / "x.bin").write_bytes(b"no records")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "manifest.json").write_text(json.dumps(RECORDS))
    assert records_of(open_source(tmp_path)) == [*RECORDS, *RECORDS]
    with pytest.raises(ValueError, match="rows: the folder holds no files of conversations"):
        open_source(tmp_path / "work" / "rows")


def test_identity_is_content(tmp_path: Path) -> None:
    """Another name is no other source; another byte is."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(LINES)
    first = open_source(path).identity
    other = path.rename(tmp_path / "y.txt")
    assert open_source(other).identity == first
    other.write_bytes(LINES + b"\n")
    assert open_source(other).identity != first
