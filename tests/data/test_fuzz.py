"""Damaged files and misshapen records by the thousand: nothing but ValueError, and all is counted.

FUZZ_INPUTS sets how many inputs the first two tests try, and a seventieth of it the third, which
makes rows of them; the inputs are the same in every run.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from draftsmith.data.clean import REMOVALS, clean
from draftsmith.data.cleaning import DEFAULT, CleaningConfig
from draftsmith.data.conversations import Conversation
from draftsmith.data.rows import RowsConfig, prepare
from draftsmith.data.schemas import SCHEMAS
from draftsmith.data.sources import open_source

INPUTS = int(os.environ.get("FUZZ_INPUTS", "700"))
FUZZ = settings(
    max_examples=INPUTS,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
CHATS = [
    {
        "id": f"chat-{n}",
        "conversations": [
            {"from": role, "value": f'{n} ä😀 {role} \\ " <br> `x` ' * (1 + n % 3)}
            for role in ["system", "human", "gpt", "human", "gpt"][n % 2 : 3 + n % 3]
        ],
    }
    for n in range(12)
]
RECORDS: list[Any] = [
    CHATS[0],
    CHATS[1]["conversations"],
    {
        "id": 7,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "name": "f", "content": "r"},
            {"role": "assistant", "content": "<think>t</think>a", "reasoning_content": "t"},
        ],
    },
    {"instruction": "i", "input": "j", "output": "o", "system": "s", "history": [["q", "a"]]},
    {"prompt": [{"role": "user", "content": "q"}], "completion": "a"},
    {"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"},
    {"chosen": CHATS[2]["conversations"], "rejected": []},
    {"text": "<s>whole text</s>"},
    {"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}},
]
JUNK = st.one_of(
    st.sampled_from(
        [
            None, True, -1, 10**400, 1.5, float("nan"), "", " \n", "\ud83d", "\x00\ufeff", "user",
            "gpt", "tool", "system", "</think>", "[[", '{"a": 1}', b"\xff", [], {}, [None], [[]],
        ]
    ),
    st.text(max_size=8),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["from", "value", "role", "content", "x"]), inner),
        max_leaves=6,
    ),
)  # fmt: skip
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat", "remove", "zero"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)


def _files() -> dict[str, bytes]:
    """The toy conversations in every form."""
    lines = "\n".join(json.dumps(chat, ensure_ascii=False) for chat in CHATS).encode()
    table = pa.Table.from_pylist(CHATS)
    parquet, small = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, row_group_size=4)
    pq.write_table(table, small, compression="none", use_dictionary=False)
    zstd = pa.BufferOutputStream()
    with pa.CompressedOutputStream(zstd, "zstd") as file:
        file.write(lines)
    found = {
        "list.json": json.dumps(CHATS, indent=1).encode(),
        "lines.jsonl": lines,
        "lines.jsonl.gz": gzip.compress(lines, mtime=0),
        "lines.jsonl.zst": zstd.getvalue().to_pybytes(),
        "rows.parquet": parquet.getvalue(),
        "plain.parquet": small.getvalue(),
        "text.txt": b"one\ntwo\n\nthree \xc3\xa4\n\n\nfour",
    }
    for name, new in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        sink = pa.BufferOutputStream()
        with new(sink, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=4):
                writer.write_batch(batch)
        found[name] = sink.getvalue().to_pybytes()
    return found


FILES = _files()


def mutated(data: bytes, mutations: list[tuple[str, float, bytes]]) -> bytes:
    """The bytes with every mutation applied at its place."""
    for kind, place, extra in mutations:
        at, span = int(place * len(data)), 1 + extra[0]
        match kind:
            case "flip":
                data = data[:at] + extra + data[at + len(extra) :]
            case "cut":
                data = data[:at]
            case "insert":
                data = data[:at] + extra + data[at:]
            case "repeat":
                data = data[: at + span] + data[at:]
            case "remove":
                data = data[:at] + data[at + span :]
            case "zero":
                data = data[:at] + bytes(min(span, len(data) - at)) + data[at + span :]
    return data


def account(records: Any, cleaning: CleaningConfig = DEFAULT, schema: str = "auto") -> list[Any]:
    """Cleans (index, record) pairs and holds the counts and the form of every conversation to what
    is promised; gives the records."""
    repairs: Counter[str] = Counter()
    seen = []
    try:
        for index, record in records:
            assert index == len(seen)
            seen.append(record)
            found = clean(record, index, repairs, cleaning, schema)
            found.id.encode()
            if isinstance(found, Conversation):
                check(found)
            else:
                assert found.reason
                found.message.encode()
    finally:
        removed = sum(repairs[name] for name in REMOVALS)
        assert repairs["read"] == repairs["kept"] + repairs["in_dropped_records"] + removed
        assert min(repairs.values(), default=1) > 0
    return seen


def check(found: Conversation) -> None:
    """Alternation, an answer at the end, texts that can be encoded, or raw text alone."""
    json.dumps([found.messages(), found.tools, found.raw], ensure_ascii=False).encode()
    assert len(found.content_hash) == 64
    roles = [turn.role for turn in found.turns if turn.role != "tool"]
    if found.raw:
        assert not roles
        return
    assert roles[-1] == "assistant" == found.turns[-1].role
    assert "system" not in roles[1:]
    spoken = roles[roles[0] == "system" :]
    assert spoken[0] == "user"
    for turn, after in zip(found.turns, found.turns[1:], strict=False):
        assert turn.role != after.role or turn.role == "tool"
        assert after.role != "tool" or turn.tool_calls or turn.role == "tool"


@pytest.mark.slow
@FUZZ
@given(
    name=st.sampled_from(sorted(FILES)),
    mutations=MUTATIONS,
    torn=st.sampled_from(["refuse", "salvage"]),
)
def test_damaged_files(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    mutations: list[tuple[str, float, bytes]],
    torn: str,
) -> None:
    """A damaged file is read, salvaged or refused by name; a cut one gives its first records."""
    path = folder(tmp_path_factory) / name
    path.write_bytes(mutated(FILES[name], mutations))
    try:
        source = open_source(path, torn)
        seen = account(source)
    except ValueError as error:
        assert type(error) is ValueError
        assert str(path) in str(error)
        return
    assert source.read == len(seen)
    if not name.endswith(".txt") and all(kind == "cut" for kind, _, _ in mutations):
        assert seen == CHATS[: len(seen)]
        assert torn == "salvage" or seen == CHATS


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_misshapen_records(data: st.DataObject) -> None:
    """Values replaced, keys renamed, turns repeated: cleaned or dropped, under any policy."""
    record = data.draw(st.sampled_from(RECORDS))
    for _ in range(data.draw(st.integers(1, 4))):
        record = misshapen(record, data)
    hints = get_type_hints(CleaningConfig)
    names = ["leading_assistant", "same_role", "blank_turns", "system", "late_system"]
    names += ["unknown_role", "html", "reasoning", "tools"]
    policies = {name: data.draw(st.sampled_from(get_args(hints[name]))) for name in names}
    limit = data.draw(st.sampled_from([None, 5]))
    schema = data.draw(st.sampled_from(["auto", "auto", *SCHEMAS]))
    cleaning = CleaningConfig(max_turn_characters=limit, **policies)
    account(enumerate([record]), cleaning, schema)
    account(enumerate([record]))


@pytest.mark.slow
@settings(FUZZ, max_examples=max(INPUTS // 70, 1))
@given(data=st.data())
def test_preparing_misshapen_records(
    tmp_path_factory: pytest.TempPathFactory,
    smollm2_tokenizer: PreTrainedTokenizerBase,
    data: st.DataObject,
) -> None:
    """Twenty at a time, and good ones, through the whole of prepare: the ledger adds up."""
    records = [misshapen(data.draw(st.sampled_from(RECORDS)), data) for _ in range(20)]
    tools = data.draw(st.sampled_from(get_args(get_type_hints(CleaningConfig)["tools"])))
    path = folder(tmp_path_factory) / "records.jsonl"
    path.write_text(json.dumps([*records, *CHATS], default=str))
    config = RowsConfig(str(path), max_length=200, holdout=2, cleaning=CleaningConfig(tools=tools))
    fingerprint = {"tokenizer": "t", "chat_template": "c"}
    out = folder(tmp_path_factory) / "rows"
    counts = prepare(config, smollm2_tokenizer, fingerprint, out).ledger["records"]
    assert counts["read"] == 20 + len(CHATS)
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
    assert counts["kept"] >= len(CHATS) - 1


def misshapen(value: Any, data: st.DataObject) -> Any:
    """A copy of a nested value with one fault somewhere in it."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 4)) == 0:
        return data.draw(JUNK)
    if isinstance(value, list):
        at = data.draw(st.integers(0, len(value) - 1))
        fault = data.draw(st.sampled_from(["deeper", "deeper", "repeat", "remove", "swap"]))
        if fault == "deeper":
            return [*value[:at], misshapen(value[at], data), *value[at + 1 :]]
        if fault == "repeat":
            return [*value[:at], value[at], *value[at:]]
        return [*value[:at], *value[at + 1 :], *([value[at]] if fault == "swap" else [])]
    key = data.draw(st.sampled_from(sorted(value, key=str)))
    rest = {name: item for name, item in value.items() if name != key}
    fault = data.draw(st.sampled_from(["deeper", "deeper", "deeper", "remove", "rename"]))
    if fault == "deeper":
        return {**value, key: misshapen(value[key], data)}
    if fault == "remove":
        return rest
    names = ["from", "value", "role", "content", "messages", "conversations", "prompt", "text", "x"]
    return {**rest, data.draw(st.sampled_from(names)): value[key]}


def folder(factory: pytest.TempPathFactory) -> Path:
    """One folder for all inputs: a thousand folders are slow."""
    found = factory.getbasetemp() / "fuzz"
    found.mkdir(exist_ok=True)
    return found
