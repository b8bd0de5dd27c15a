"""A dump stores the engine's own states, stops cleanly, and resumes to the same bytes."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.data.batches import BatchPlan
from draftsmith.data.cache import Cache
from draftsmith.data.cache_writer import forecast_bytes
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.online import OnlineRows
from draftsmith.data.plan import plan_shards
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.data.store import Store
from draftsmith.inference.capture import capture
from draftsmith.models import files as files_module
from draftsmith.models.target import Target, load_tokenizer

SMALL = DumpConfig(shard_tokens=300, tokens_per_batch=128)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tokens_of(rows: Rows, row: int) -> Tensor:
    return torch.from_numpy(rows[row].tokens.astype(np.int64))


@pytest.mark.parametrize(
    ("lengths", "shard", "limit", "expected"),
    [
        ([3, 3, 3, 3], 6, None, [[0, 1], [2, 3]]),
        ([3, 4, 3], 6, None, [[0], [1], [2]]),
        ([9, 1, 1], 6, None, [[0], [1, 2]]),
        ([3, 0, 3], 6, None, [[0, 2]]),
        ([3, 3, 3], 100, 6, [[0, 1]]),
        ([3, 5, 1], 100, 7, [[0]]),
        ([9], 100, 8, []),
        ([], 100, None, []),
    ],
)
def test_plan(lengths: list[int], shard: int, limit: int | None, expected: list[list[int]]) -> None:
    """Rows in order; a shard closes before it would overflow, the plan before its limit."""
    assert plan_shards(np.array(lengths, np.int32), shard, limit) == expected


def test_states_are_the_engines_own(undisturbed: Path, toy_rows: Rows, toy_target: Target) -> None:
    """Cases 2-4: every row equals the row run alone, within bf16, in the order of the rows."""
    cache = Cache.open(undisturbed)
    assert cache.rows.tolist() == list(range(len(toy_rows)))
    last = toy_target.num_layers
    for row in range(len(cache)):
        read = cache.row(row)
        alone = capture(toy_target, [tokens_of(toy_rows, row)], (last,))[last]
        torch.testing.assert_close(read.states[last].float(), alone, rtol=1e-2, atol=1e-2)
        assert read.tokens.tolist() == toy_rows[row].tokens.tolist()
        assert read.supervised.tolist() == toy_rows[row].supervised.tolist()


def test_manifest(undisturbed: Path, toy_rows: Rows, toy_target: Target) -> None:
    """It identifies target, rows and states, and opens against what training asks for."""
    manifest = json.loads((undisturbed / "manifest.json").read_text())
    assert manifest["target"] == toy_target.fingerprint
    assert manifest["target_dtype"] == "float32"
    assert manifest["boundaries"] == [2]
    assert manifest["rows_key"] == toy_rows.key
    assert manifest["counts"]["rows"] == 36
    assert manifest["counts"]["tokens"] == int(toy_rows.lengths.sum())
    assert manifest["counts"]["supervised"] == int(toy_rows.num_supervised.sum())
    assert manifest["probes"]["argmax_agreement"] >= 0.98
    assert len(manifest["shards"]) > 3
    expected = {**toy_target.fingerprint, "boundaries": (2,), "rows_key": toy_rows.key}
    Cache.open(undisturbed, {**expected, "dtype": "bf16", "num_layers": 2, "hidden_size": 32})


def test_max_tokens_takes_the_first_rows(
    toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """Whole rows from the front, never more tokens than asked for."""
    limit = int(toy_rows.lengths[:5].sum()) + 1
    done = dump(DumpConfig(max_tokens=limit), toy_rows, toy_target, tmp_path / "a")
    assert done.manifest["counts"]["rows"] == 5
    with pytest.raises(ValueError, match="no row fits max_tokens=3 .* raise data.dump.max_tokens"):
        dump(DumpConfig(max_tokens=3), toy_rows, toy_target, tmp_path / "b")


def test_progress_ends_at_the_total(toy_rows: Rows, toy_target: Target, tmp_path: Path) -> None:
    """Tokens done never fall, and end at the tokens to do."""
    seen: list[tuple[int, int | None]] = []
    dump(SMALL, toy_rows, toy_target, tmp_path, lambda *counts: seen.append(counts))
    total = int(toy_rows.lengths.sum())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 10


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_one_byte_states(
    undisturbed: Path, toy_rows: Rows, toy_target: Target, tmp_path: Path, dtype: str
) -> None:
    """H + 4 bytes a token and boundary, read as bf16 near the exact states; the manifest says what
    the dtype costs."""
    config = replace(SMALL, dtype=dtype, max_tokens=400)
    done = dump(config, toy_rows, toy_target, tmp_path)
    cache, exact = Cache.open(tmp_path, {"dtype": dtype}), Cache.open(undisturbed)
    for row in range(len(cache)):
        read, wanted = cache.row(row).states[2], exact.row(row).states[2]
        assert read.dtype == torch.bfloat16
        error = (read.float() - wanted.float()).norm() / wanted.float().norm()
        assert 0 < error < 0.05
    probes = done.manifest["probes"]
    assert 0.5 < probes["dtype_agreement"] <= 1
    assert abs(probes["dtype_nll"]) < 0.5
    tokens = done.manifest["counts"]["tokens"]
    size = sum(file.stat().st_size - head_size(file) for file in tmp_path.glob("shard-*"))
    assert size == forecast_bytes(tokens, 32, 1, dtype) == tokens * (32 + 4 + 5)


def head_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_the_writers_error_stops_the_dump_at_once(
    toy_rows: Rows, toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 64: a disk that fills while the next shard is computed ends the run with its own
    message; no half-written file stays and earlier shards do."""
    calls = 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:  # a file and its folder are flushed for each shard
            raise OSError(errno.ENOSPC, "No space left on device")

    seen: list[int] = []
    monkeypatch.setattr(files_module.os, "fsync", full)
    with pytest.raises(ValueError, match="is full while writing shard-00001.* run the command"):
        dump(SMALL, toy_rows, toy_target, tmp_path, lambda done, total: seen.append(done))
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    shards = plan_shards(toy_rows.lengths, 300, None)
    assert seen[-1] <= int(toy_rows.lengths[sum(shards[:3], [])].sum())


def test_a_remote_cache_equals_a_local_one(
    undisturbed: Path, toy_rows: Rows, toy_target: Target
) -> None:
    """Every file byte for byte, read back by ranges; the same command finds it there."""
    place = "memory://remote/cache"
    done = dump(SMALL, toy_rows, toy_target, place)
    store = Store(place)
    assert {name: store.read(name) for name in store.names()} == contents(undisturbed)
    cache, local = Cache.open(done.folder), Cache.open(undisturbed)
    for row in (0, 17, 35):
        assert torch.equal(cache.row(row).states[2], local.row(row).states[2])
    assert dump(SMALL, toy_rows, toy_target, place).reused


def test_no_finite_row_at_all(toy_rows: Rows, toy_target: Target, tmp_path: Path) -> None:
    """A damaged target is named before anything is written."""
    embedding = toy_target.trunk.embedding
    toy_target.trunk.embedding = torch.full_like(embedding, float("inf"))
    try:
        with pytest.raises(ValueError, match="give no finite state; the target is damaged"):
            dump(SMALL, toy_rows, toy_target, tmp_path)
    finally:
        toy_target.trunk.embedding = embedding
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_tokenizer(toy_target: Target, chats_file: Path, tmp_path: Path) -> None:
    """Case 16: the field and both values are named."""
    for field in ("tokenizer", "chat_template"):
        fingerprint = {**toy_target.fingerprint, field: "other"}
        config = RowsConfig(str(chats_file), holdout=4, max_length=2048)
        prepare(config, load_tokenizer(toy_target.folder), fingerprint, tmp_path / field)
        rows = Rows.open(tmp_path / field)
        with pytest.raises(ValueError, match=f"{field} of the rows is 'other', the target's is"):
            dump(SMALL, rows, toy_target, tmp_path / "cache")
        with pytest.raises(ValueError, match=f"{field} of the rows is 'other'"):
            OnlineRows(rows, toy_target)


def test_rows_longer_than_the_target_reads(
    toy_target: Target, write_records: Callable[..., Path], tmp_path: Path
) -> None:
    """Made for a target of more positions: refused with both lengths, also online."""
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "word " * 1100}]
    source = str(write_records([{"conversations": turns}]))
    config, tokenizer = RowsConfig(source, holdout=0, max_length=2048), toy_target.folder
    prepare(config, load_tokenizer(tokenizer), toy_target.fingerprint, tmp_path / "rows")
    rows = Rows.open(tmp_path / "rows")
    message = f"row 0 has {rows.lengths[0]} tokens, the target reads 1024 "
    with pytest.raises(ValueError, match=message):
        dump(SMALL, rows, toy_target, tmp_path / "cache")
    with pytest.raises(ValueError, match=message):
        OnlineRows(rows, toy_target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp4"}, "dtype 'fp4': choose one of bf16"),
        ({"boundaries": (1, 1)}, r"boundaries \[1, 1\]: each may be named once"),
        ({"shard_tokens": 0}, "shard_tokens 0"),
        ({"tokens_per_batch": 0}, "tokens_per_batch 0"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"rank": 1}, "rank 1 of world_size None: give both"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2"),
        ({"folder": ""}, "folder is empty"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    """Each names the value."""
    with pytest.raises(ValueError, match=message):
        DumpConfig(**settings)


def test_cache_and_online_feed_the_same_batches(
    undisturbed: Path, toy_rows: Rows, toy_target: Target
) -> None:
    """The same plan over a cache and over the live target: equal tokens, masks, counts, states."""
    cached = BatchPlan(Cache.open(undisturbed), tokens_per_batch=256, seed=1)
    online = BatchPlan(OnlineRows(toy_rows, toy_target), tokens_per_batch=256, seed=1)
    assert online.num_batches() == cached.num_batches() > 5
    for index in range(3):
        stored, live = cached.batch(index), online.batch(index)
        assert torch.equal(stored.tokens, live.tokens)
        assert torch.equal(stored.supervised, live.supervised)
        assert torch.equal(stored.starts, live.starts)
        assert stored.row_ids == live.row_ids
        assert online.supervised(index, 4) == cached.supervised(index, 4)
        torch.testing.assert_close(stored.hidden, live.hidden, rtol=1e-2, atol=1e-2)


def test_online_states_are_checked(toy_rows: Rows, poisoned: Callable[..., Target]) -> None:
    """Case 62: NaN from the live target never reaches the optimiser either."""
    online = OnlineRows(toy_rows, poisoned(20))
    online.gather([19, 21])
    with pytest.raises(ValueError, match="NaN or infinity for a row among"):
        online.gather([19, 20])
