"""A combination reads as one cache, copies no state, and says what does not fit together."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.data.cache import Cache
from draftsmith.data.combine import CombineConfig, Combined, combine
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.rows import Row, Rows, RowsConfig, prepare
from draftsmith.data.store import Store
from draftsmith.models.target import Target, load_tokenizer

CONFIG = DumpConfig(shard_tokens=300, tokens_per_batch=128)


@pytest.fixture(scope="module")
def caches(toy_rows: Rows, toy_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all: every toy row; few: the first of them."""
    folder = tmp_path_factory.mktemp("caches")
    dump(CONFIG, toy_rows, toy_target, folder / "all")
    few = replace(CONFIG, max_tokens=int(toy_rows.lengths[:9].sum()))
    dump(few, toy_rows, toy_target, folder / "few")
    return folder


def joined(
    caches: Path, out: Path | str, *names: str, overwrite: bool = False, **choice: Any
) -> Combined:
    """Combine some of the caches."""
    places = tuple(str(caches / name) for name in names)
    return combine(CombineConfig(caches=places, **choice), out, overwrite)


def test_merge_counts_duplicates(caches: Path, tmp_path: Path) -> None:
    """Rows that an earlier cache holds are left out; the others read the same states, and no shard
    is copied."""
    done = joined(caches, tmp_path / "both", "few", "all")
    assert done.left_out == {"duplicate": 9}
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == [
        "index.parquet",
        "manifest.json",
    ]
    both, whole = Cache.open(tmp_path / "both"), Cache.open(caches / "all")
    assert both.ids == whole.ids
    assert both.manifest["counts"] == whole.manifest["counts"]
    for row in (0, 8, 9, 35):
        assert torch.equal(both.row(row).states[2], whole.row(row).states[2])
    assert both.supervised_counts(3).tolist() == whole.supervised_counts(3).tolist()
    key = whole.manifest["rows_key"]
    assert both.manifest["rows_key"] == [key]
    Cache.open(tmp_path / "both", {**whole.manifest["target"], "rows_key": key})
    with pytest.raises(ValueError, match="rows_key of the cache is"):
        Cache.open(tmp_path / "both", {"rows_key": "other"})


def test_no_row_that_any_cache_holds_out_is_taught(
    toy_rows: Rows, toy_target: Target, chats_file: Path, tmp_path: Path
) -> None:
    """The same chats, split by other seeds: what one holds out is training data of the other."""
    hashes: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for name, seed in (("a", 0), ("b", 7)):
        rows = tmp_path / name / "rows"
        config = RowsConfig(str(chats_file), holdout=4, max_length=2048, seed=seed)
        prepare(config, load_tokenizer(toy_target.folder), toy_target.fingerprint, rows)
        for split, place in (("train", "cache"), ("heldout", "cache-heldout")):
            read = Rows.open(rows, split)
            hashes[split] |= {row.sha256 for row in read}
            dump(CONFIG, read, toy_target, tmp_path / name / place)
    both = hashes["train"] & hashes["heldout"]
    assert len(both) > 4
    done = joined(tmp_path, tmp_path / "out", "a/cache", "b/cache")
    assert done.left_out == {"heldout": len(both), "duplicate": 40 - len(hashes["heldout"])}
    taught = pq.read_table(tmp_path / "out" / "index.parquet")["sha256"].to_pylist()
    assert set(taught) == hashes["train"] - hashes["heldout"]
    (tmp_path / "b" / "cache-heldout" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="b/cache-heldout: the dump is not finished"):
        joined(tmp_path, tmp_path / "other", "a/cache", "b/cache")


def test_repeats_are_those_of_earlier_caches(
    toy_target: Target, chats_file: Path, tmp_path: Path
) -> None:
    """A row that stands twice in one cache is no duplicate; one with another mask neither."""
    chats = json.loads(chats_file.read_text())[:3]
    source = tmp_path / "chats.json"
    source.write_text(json.dumps([*chats, chats[0]]))
    config = RowsConfig(str(source), holdout=0, max_length=2048)
    prepare(config, load_tokenizer(toy_target.folder), toy_target.fingerprint, tmp_path / "rows")

    class Changed(Rows):
        def __getitem__(self, index: int) -> Row:
            read = super().__getitem__(index)
            return read if index != 1 else replace(read, supervised=~read.supervised)

    for name, kind in (("a", Rows), ("b", Changed)):
        dump(CONFIG, kind.open(tmp_path / "rows"), toy_target, tmp_path / name)
    done = joined(tmp_path, tmp_path / "out", "a", "b")
    assert done.left_out == {"duplicate": 3}
    assert Cache.open(tmp_path / "out").rows.tolist() == [0, 1, 2, 3, 1]


def test_subset(
    caches: Path, tmp_path: Path, toy_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By length, by tokens, by ids; shards without a wanted row are not named."""
    whole = Cache.open(caches / "all")
    lengths = whole.lengths.tolist()
    short = joined(caches, tmp_path / "short", "all", min_length=90, max_length=110)
    wanted = [row for row, length in enumerate(lengths) if 90 <= length <= 110]
    assert 0 < len(wanted) < 36
    assert Cache.open(short.folder).rows.tolist() == wanted
    assert short.left_out == {"length": 36 - len(wanted)}
    first = joined(caches, tmp_path / "first", "all", max_tokens=sum(lengths[:4]) + 1)
    assert Cache.open(first.folder).rows.tolist() == [0, 1, 2, 3]
    assert len(first.manifest["shards"]) < len(whole.manifest["shards"])
    (tmp_path / "ids").write_text(f"{whole.ids[30]}\n{whole.ids[2]}\n")
    named = joined(caches, tmp_path / "named", "all", ids=str(tmp_path / "ids"))
    cache = Cache.open(named.folder)
    assert cache.rows.tolist() == [2, 30]
    tokens = [part.tolist() for part in cache.supervised_tokens()]
    assert tokens == [toy_rows[r].tokens[toy_rows[r].supervised].tolist() for r in (2, 30)]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert joined(caches, "~/named", "all", ids="~/ids", overwrite=True).folder == named.folder
    (tmp_path / "ids").write_text("nobody\n")
    with pytest.raises(ValueError, match=r"1 ids are in none of .*\['nobody'\]"):
        joined(caches, tmp_path / "none", "all", ids=str(tmp_path / "ids"))


def test_moves_with_its_neighbours(caches: Path, tmp_path: Path) -> None:
    """Folders under one parent refer to each other by relative names, through a second combination
    as well; a source that is gone is named."""
    home = tmp_path / "home"
    shutil.copytree(caches, home)
    joined(home, home / "once", "few", "all")
    joined(home, home / "twice", "once", max_length=110)
    home.rename(tmp_path / "moved")
    cache = Cache.open(tmp_path / "moved" / "twice")
    assert len(cache) > 5
    (tmp_path / "moved" / "all").rename(tmp_path / "moved" / "away")
    with pytest.raises(ValueError, match="moved/all the whole folder is missing; put it back"):
        Cache.open(tmp_path / "moved" / "twice")


def test_remote(caches: Path, toy_rows: Rows, toy_target: Target) -> None:
    """A URL beside a URL, and a folder named from one."""
    few = replace(CONFIG, max_tokens=int(toy_rows.lengths[:9].sum()))
    dump(few, toy_rows, toy_target, "memory://combine/few")
    places = ("memory://combine/few", str(caches / "all"))
    done = combine(CombineConfig(caches=places), "memory://combine/both")
    folders = {line["folder"] for line in done.manifest["shards"]}
    assert folders == {"../few", str(caches / "all")}
    assert len(Cache.open("memory://combine/both")) == 36
    Store("memory://combine/few").delete("shard-00000.safetensors")
    with pytest.raises(ValueError, match="combine/few shard-00000.safetensors is missing"):
        Cache.open("memory://combine/both")


def test_what_differs_is_named(
    caches: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """Another dtype, other boundaries, another split."""
    few = replace(CONFIG, max_tokens=300)
    dump(replace(few, dtype="int8"), toy_rows, toy_target, tmp_path / "int8")
    dump(replace(few, boundaries=(1,)), toy_rows, toy_target, tmp_path / "other")
    dump(CONFIG, Rows.open(toy_rows.folder, "heldout"), toy_target, tmp_path / "held")
    for name, told in (
        ("int8", "its dtype is 'int8', that of .*all is 'bf16'"),
        ("other", r"its boundaries is \[1\]"),
        ("held", "its split is 'heldout'"),
    ):
        places = (str(caches / "all"), str(tmp_path / name))
        with pytest.raises(ValueError, match=told):
            combine(CombineConfig(caches=places), tmp_path / "out")


def test_refusals(caches: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path) -> None:
    """Nothing asked for, a folder that holds something else, nothing left; a dump does not take a
    combination's place."""
    with pytest.raises(ValueError, match="needs combine.caches="):
        combine(CombineConfig(), tmp_path / "out")
    with pytest.raises(ValueError, match="holds something else than a combination"):
        joined(caches, caches / "few", "all")
    with pytest.raises(ValueError, match=r"no row of .* is left: {'length': 36}"):
        joined(caches, tmp_path / "none", "all", min_length=5000)
    with pytest.raises(ValueError, match="no row is both"):
        CombineConfig(min_length=5, max_length=4)
    out = tmp_path / "out"
    first = joined(caches, out, "all", max_length=100)
    assert joined(caches, out, "all", max_length=100).manifest == first.manifest
    with pytest.raises(ValueError, match="holds another combination, of .*all; choose another out"):
        joined(caches, out, "all")
    joined(caches, out, "all", overwrite=True)
    assert len(Cache.open(out)) == 36
    with pytest.raises(ValueError, match="holds a combination of other caches"):
        dump(CONFIG, toy_rows, toy_target, out)
