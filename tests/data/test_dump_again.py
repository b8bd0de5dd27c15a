"""A dump run again: what is there is kept, what a change touched is renewed, what was stopped goes
on to the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from draftsmith.data import prefill as prefill_module
from draftsmith.data.cache import Cache
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.plan import plan_shards, shard_keys, states_identity
from draftsmith.data.rowfile import Row
from draftsmith.data.rows import Rows
from draftsmith.data.store import Store
from draftsmith.inference.capture import capture
from draftsmith.models.files import read_json
from draftsmith.models.target import Target

SMALL = DumpConfig(shard_tokens=300, tokens_per_batch=128)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_finished_cache_is_reused(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again runs no pass and changes no byte."""
    before = contents(undisturbed)
    monkeypatch.setattr(prefill_module, "capture", None)
    done = dump(SMALL, toy_rows, toy_target, undisturbed)
    assert done.reused
    assert contents(undisturbed) == before


def test_shares_are_finished_by_a_later_call(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """Ranks that finish nothing, the first of them too, wait for none; rank 0 then keeps its shards
    and makes the cache of one process."""
    shares = [replace(SMALL, rank=rank, world_size=2) for rank in range(2)]
    for share in shares:
        assert not dump(share, toy_rows, toy_target, tmp_path, finish=False).manifest
    assert not (tmp_path / "manifest.json").exists()
    done = dump(shares[0], toy_rows, toy_target, tmp_path)
    assert done.resumed == done.shards > 1
    assert contents(tmp_path) == contents(undisturbed)


def test_finished_cache_of_other_settings_is_not_removed_unasked(
    toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """It names what differs; overwrite=true replaces it."""
    dump(DumpConfig(max_tokens=200), toy_rows, toy_target, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"1 of 1 shards .*\(boundaries \[2\] -> \[1\]; max_tokens 200 -> 300\); choose",
    ):
        dump(DumpConfig(boundaries=(1,), max_tokens=300), toy_rows, toy_target, tmp_path)
    assert contents(tmp_path) == before
    config = DumpConfig(boundaries=(1,), max_tokens=300, overwrite=True)
    assert not dump(config, toy_rows, toy_target, tmp_path).reused
    assert Cache.open(tmp_path).boundaries == (1,)


def test_held_out_rows_make_another_cache(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """The splits share one rows' key; a cache of the one is not taken for the other's."""
    held = Rows.open(toy_rows.folder, "heldout")
    with pytest.raises(ValueError, match="split 'train' -> 'heldout'"):
        dump(SMALL, held, toy_target, undisturbed)
    done = dump(SMALL, held, toy_target, tmp_path)
    assert done.manifest["counts"]["rows"] == len(held) == 4
    assert len(Cache.open(tmp_path, {"split": "heldout", "rows_key": toy_rows.key})) == 4


def test_growth_renews_the_last_shard_alone(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """More tokens of the same rows keep every shard but the one that was cut short, say which
    setting changed, and end with the bytes of a fresh dump."""
    limit = int(toy_rows.lengths[:14].sum())
    first = dump(replace(SMALL, max_tokens=limit), toy_rows, toy_target, tmp_path)
    planned = len(first.manifest["shards"])
    assert planned > 2
    done = dump(SMALL, toy_rows, toy_target, tmp_path)
    assert done.changed == (f"max_tokens {limit} -> None",)
    assert done.resumed == planned - 1
    assert contents(tmp_path) == contents(undisturbed)


def test_shrinking_is_refused_with_the_number_of_shards(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """Whole shards of a finished cache are never thrown away unasked; with overwrite those that
    still hold are kept."""
    shutil.copytree(undisturbed, tmp_path / "cache")
    config = replace(SMALL, max_tokens=int(toy_rows.lengths[:15].sum()))
    with pytest.raises(ValueError, match=r"\d+ of \d+ shards would be thrown away \(max_tokens"):
        dump(config, toy_rows, toy_target, tmp_path / "cache")
    assert contents(tmp_path / "cache") == contents(undisturbed)
    done = dump(replace(config, overwrite=True), toy_rows, toy_target, tmp_path / "cache")
    assert done.resumed >= 1
    dump(config, toy_rows, toy_target, tmp_path / "fresh")
    assert contents(tmp_path / "cache") == contents(tmp_path / "fresh")


def test_changed_rows_renew_their_shards_alone(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """A mask that changed in one row (same tokens) gives that row's shard another key, and no
    other."""
    states = states_identity(toy_target.fingerprint, "float32", (2,), "bf16", 128)
    plan = plan_shards(toy_rows.lengths, 300, None)
    before = shard_keys(states, toy_rows, plan)
    assert [line["key"] for line in read_json(undisturbed / "manifest.json")["shards"]] == before
    row = plan[2][0]

    class Changed(Rows):
        def __getitem__(self, index: int) -> Row:
            read = super().__getitem__(index)
            return read if index != row else replace(read, supervised=~read.supervised)

    after = shard_keys(states, Changed.open(toy_rows.folder), plan)
    assert [a == b for a, b in zip(before, after, strict=True)] == [
        place != 2 for place in range(len(plan))
    ]
    for name, value in {"weights": "w", "tokenizer": "t", "chat_template": "c"}.items():
        foreign = {**states, "target": {**toy_target.fingerprint, name: value}}
        assert not set(before) & set(shard_keys(foreign, toy_rows, plan))


def test_lost_and_cut_shards_of_a_finished_cache_are_renewed(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """The same command mends a finished cache from which a shard is gone or cut."""
    folder = tmp_path / "cache"
    shutil.copytree(undisturbed, folder)
    (folder / "shard-00001.safetensors").unlink()
    third = folder / "shard-00003.safetensors"
    third.write_bytes(third.read_bytes()[:-1])
    done = dump(SMALL, toy_rows, toy_target, folder)
    assert done.resumed == done.shards - 2
    assert contents(folder) == contents(undisturbed)


def test_a_manifest_that_another_rank_removes_is_none(
    undisturbed: Path,
    toy_rows: Rows,
    toy_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first rank takes the old manifest away while the second looks for it."""
    folder = tmp_path / "cache"
    shutil.copytree(undisturbed, folder)
    (folder / "index.parquet").unlink()
    exists = Store.exists

    def seen_and_gone(store: Store, name: str) -> bool:
        there = exists(store, name)
        if name == "manifest.json":
            store.delete(name)
        return there

    monkeypatch.setattr(Store, "exists", seen_and_gone)
    done = dump(replace(SMALL, rank=1, world_size=2), toy_rows, toy_target, folder)
    assert not done.manifest and done.resumed == done.shards


def test_a_damaged_manifest_is_no_reason_to_write(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """Nobody knows what it promised: it is named, nothing is removed, and without it the dump goes
    on."""
    folder = tmp_path / "cache"
    shutil.copytree(undisturbed, folder)
    for text in ("[]", '{"kind": "cache", "format": 2}'):
        (folder / "manifest.json").write_text(text)
        before = contents(folder)
        with pytest.raises(ValueError, match="manifest.json .*; delete it and run"):
            dump(SMALL, toy_rows, toy_target, folder)
        assert contents(folder) == before
    (folder / "manifest.json").unlink()
    dump(SMALL, toy_rows, toy_target, folder)
    assert contents(folder) == contents(undisturbed)


class Stop(Exception):
    """Stands for whatever ends a run."""


def stopping(after: int, error: BaseException) -> Callable[..., dict[int, Tensor]]:
    """capture that raises at its call number `after`."""
    calls = 0

    def run(*arguments: Any) -> dict[int, Tensor]:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return capture(*arguments)

    return run


@pytest.mark.parametrize("after", [20, 25])
def test_stopped_dump_goes_on_to_the_same_bytes(
    undisturbed: Path,
    toy_rows: Rows,
    toy_target: Target,
    tmp_path: Path,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C leaves whole shards and says so; the next run adds the rest and nothing differs."""
    monkeypatch.setattr(prefill_module, "capture", stopping(after, KeyboardInterrupt()))
    with pytest.raises(
        KeyboardInterrupt, match=r"[1-9]\d* of \d+ shards are whole .* goes on there"
    ):
        dump(SMALL, toy_rows, toy_target, tmp_path)
    whole = [path.name for path in tmp_path.iterdir()]
    assert all(name.startswith("shard-") for name in whole)
    with pytest.raises(ValueError, match="not finished"):
        Cache.open(tmp_path)
    monkeypatch.setattr(prefill_module, "capture", capture)
    done = dump(SMALL, toy_rows, toy_target, tmp_path)
    assert done.resumed == len(whole) > 0
    assert contents(tmp_path) == contents(undisturbed)


def test_shards_of_other_settings_are_removed_with_a_message(
    undisturbed: Path,
    toy_rows: Rows,
    toy_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unfinished dump of other settings does not leak into this one."""
    monkeypatch.setattr(prefill_module, "capture", stopping(25, Stop()))
    with pytest.raises(Stop):
        dump(DumpConfig(shard_tokens=200, tokens_per_batch=128), toy_rows, toy_target, tmp_path)
    monkeypatch.setattr(prefill_module, "capture", capture)
    assert dump(SMALL, toy_rows, toy_target, tmp_path).resumed == 0
    assert "removed shard-00000.safetensors: it was made of other rows or settings" in caplog.text
    assert contents(tmp_path) == contents(undisturbed)
