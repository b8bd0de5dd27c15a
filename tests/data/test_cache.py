"""A cache gives back what was written, or says which file, row or field is wrong."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.data import cache as cache_module
from draftsmith.data import shards as shards_module
from draftsmith.data.cache import Cache, CacheWriter, check_free_space, forecast_bytes
from draftsmith.data.rows import Rows
from draftsmith.data.shards import FORMAT, ShardFile, ShardRows
from draftsmith.kernels.shift import supervision
from draftsmith.models.files import sha256_file

H = 8
TARGET = {"config": "c", "tokenizer": "t", "chat_template": "p", "weights": "w"}
ABOUT = {
    "engine": "e",
    "target": TARGET,
    "dtype": "bf16",
    "rows_key": "k",
    "split": "train",
    "num_layers": 2,
    "probes": {},
}
SHARDS = [[0, 1, 2], [4], [5, 6]]


def states(row: int, boundary: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * row + boundary)
    return torch.randn(length, H, generator=generator).to(torch.bfloat16)


def write_number(writer: CacheWriter, rows: Rows, number: int) -> Any:
    """One shard of known states; row 3 is quarantined in shard 1."""
    read = [rows[row] for row in SHARDS[number]]
    content = ShardRows(
        tuple(SHARDS[number]),
        tuple(len(row.tokens) for row in read),
        tuple(row.sha256 for row in read),
        (3,) if number == 1 else (),
    )
    tokens = torch.from_numpy(np.concatenate([row.tokens for row in read]))
    supervised = torch.from_numpy(np.concatenate([row.supervised for row in read]))
    parts = {
        k: torch.cat([states(row, k, len(rows[row].tokens)) for row in SHARDS[number]])
        for k in writer.boundaries
    }
    return content, writer.write(number, content, tokens, supervised, parts)


@pytest.fixture
def folder(tmp_path: Path, toy_rows: Rows) -> Path:
    """A finished cache of six rows at the boundaries 1 and 2."""
    writer = CacheWriter(tmp_path / "cache", "key-1", (1, 2), H)
    written = [write_number(writer, toy_rows, number) for number in range(3)]
    writer.finish(
        [fact for _, fact in written], [content for content, _ in written], toy_rows, ABOUT
    )
    return tmp_path / "cache"


def reseal(folder: Path, name: str) -> None:
    """Make the manifest agree with a changed file, as a faulty writer would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    lines = [manifest["index"]] if name == "index.parquet" else manifest["shards"]
    for line in lines:
        if line.get("name", name) == name:
            line["bytes"] = (folder / name).stat().st_size
            line["sha256"] = sha256_file(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewrite(
    folder: Path, number: int, change: Callable[[dict[str, Any], dict[str, str]], None]
) -> None:
    """Rewrite a shard through the library with changed tensors or metadata."""
    path = folder / f"shard-{number:05d}.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)
    reseal(folder, path.name)


def test_rows_come_back(folder: Path, toy_rows: Rows) -> None:
    """Tokens, mask and states of every row, in the order written; the quarantined row is named."""
    cache = Cache.open(folder)
    assert cache.rows.tolist() == [0, 1, 2, 4, 5, 6]
    assert cache.boundaries == (1, 2)
    for place, row in enumerate(cache.rows.tolist()):
        source, read = toy_rows[row], cache.row(place)
        assert cache.ids[place] == source.id
        assert read.tokens.dtype == torch.int64
        assert read.tokens.tolist() == source.tokens.tolist()
        assert read.supervised.tolist() == source.supervised.tolist()
        for boundary in (1, 2):
            assert torch.equal(read.states[boundary], states(row, boundary, len(source.tokens)))
    counts = cache.manifest["counts"]
    assert counts["rows"] == 6
    assert counts["tokens"] == sum(len(toy_rows[row].tokens) for row in (0, 1, 2, 4, 5, 6))
    assert counts["supervised"] == sum(
        int(toy_rows[r].supervised.sum()) for r in (0, 1, 2, 4, 5, 6)
    )
    quarantined = {"row": 3, "id": toy_rows[3].id, "tokens": len(toy_rows[3].tokens)}
    assert cache.manifest["quarantined"] == [quarantined]
    assert cache.manifest["complete"] is True


def test_shards_are_plain_safetensors(folder: Path) -> None:
    """Case 65: any reader opens them; each says its format version, key and number."""
    path = folder / "shard-00001.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["key"], metadata["shard"]) == (str(FORMAT), "key-1", "1")
    tensors = load_file(path)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "tokens": torch.int32,
        "supervised": torch.uint8,
        "boundary_1": torch.bfloat16,
        "boundary_2": torch.bfloat16,
    }


def test_gather_lays_boundaries_side_by_side(folder: Path) -> None:
    """[N, 2H] in the order of the boundaries."""
    cache = Cache.open(folder)
    tokens, masks, hidden = cache.gather([4, 1])
    assert hidden.shape == (len(tokens[0]) + len(tokens[1]), 2 * H)
    assert torch.equal(hidden[: len(tokens[0]), H:], cache.row(4).states[2])
    assert torch.equal(hidden[len(tokens[0]) :, :H], cache.row(1).states[1])
    assert [len(mask) for mask in masks] == [len(part) for part in tokens]


def test_supervised_counts_come_from_the_index(folder: Path, toy_rows: Rows) -> None:
    """They equal what the mask of training gives."""
    counts = Cache.open(folder).supervised_counts(4)
    for place, row in enumerate((0, 1, 2, 4, 5, 6)):
        mask = torch.from_numpy(toy_rows[row].supervised.copy())
        expected = supervision(mask, torch.tensor([0, len(mask)]), 4).sum(1)
        assert counts[place].tolist() == expected.tolist()


def test_unfinished_cache(folder: Path) -> None:
    """No manifest means that the dump goes on when it is run again."""
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="the dump is not finished .* run it again, it goes on"):
        Cache.open(folder)


@pytest.mark.parametrize(
    ("field", "asked", "told"),
    [
        (
            "weights",
            "x",
            "weights of the cache is 'w', training asks for 'x'; dump again with this",
        ),
        ("tokenizer", "x", "tokenizer of the cache is 't'"),
        ("chat_template", "x", "chat_template of the cache is 'p'"),
        ("config", "x", "config of the cache is 'c'"),
        ("boundaries", (2,), r"boundaries of the cache is \[1, 2\], training asks for \[2\]; dump"),
        ("dtype", "fp8", "dtype of the cache is 'bf16'"),
        ("rows_key", "x", "rows_key of the cache is 'k', .* from these token rows"),
        ("hidden_size", 9, "hidden_size of the cache is 8, training asks for 9"),
        (
            "split",
            "heldout",
            "split of the cache is 'train', .* the folder of the cache of that split",
        ),
        ("num_layers", 3, "num_layers of the cache is 2"),
        ("colour", 3, "no field 'colour' to compare"),
    ],
)
def test_any_difference_names_the_field(folder: Path, field: str, asked: Any, told: str) -> None:
    """Cases 16, 63: the field, both values, the remedy."""
    same = {**TARGET, "boundaries": (1, 2), "dtype": "bf16", "rows_key": "k", "hidden_size": H}
    assert len(Cache.open(folder, same)) == 6
    with pytest.raises(ValueError, match=told):
        Cache.open(folder, {**same, field: asked})


def test_other_versions_are_refused(folder: Path) -> None:
    """Case 65: in the manifest and in a shard."""
    rewrite(folder, 1, lambda tensors, metadata: metadata.update(format="0"))
    with pytest.raises(
        ValueError, match="shard-00001.* has the cache format '0', this version reads 1"
    ):
        Cache.open(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 7}))
    with pytest.raises(ValueError, match="format 7; this version reads kind 'cache', format 1"):
        Cache.open(folder)


def test_renamed_tensor(folder: Path) -> None:
    """Case 66: the message lists what was expected and what was found."""

    def rename(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors["last"] = tensors.pop("boundary_2")

    rewrite(folder, 2, rename)
    with pytest.raises(ValueError, match=r"expected boundary_1 .*boundary_2.*; found .*last BF16"):
        Cache.open(folder)


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "index.parquet"])
def test_damaged_files(folder: Path, name: str) -> None:
    """A cut file, zeros in its second half, a missing one: each is named."""
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{name}: its .* bytes differ from what the manifest"):
        Cache.open(folder, verify=False)
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    with pytest.raises(ValueError, match=f"{name}: its .* bytes differ from what the manifest"):
        Cache.open(folder)
    path.unlink()
    with pytest.raises(ValueError, match=f"{name} is missing although the manifest names it"):
        Cache.open(folder)


def test_cut_shard_with_a_matching_manifest(folder: Path) -> None:
    """A file that safetensors cannot open is named with the remedy."""
    path = folder / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    reseal(folder, path.name)
    with pytest.raises(ValueError, match="shard-00000.* cannot be read .* cut or damaged"):
        Cache.open(folder)


def test_shard_of_another_cache(folder: Path) -> None:
    """Two caches mixed in one folder."""
    rewrite(folder, 0, lambda tensors, metadata: metadata.update(key="key-2"))
    with pytest.raises(ValueError, match="shard 0 of cache key-2, expected shard 0 of key-1"):
        Cache.open(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_never_arrive(folder: Path, value: float) -> None:
    """Case 62: refused on read, naming shard, row and boundary; other rows are read."""

    def spoil(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors["boundary_2"][-1, 3] = value

    rewrite(folder, 2, spoil)
    cache = Cache.open(folder)
    cache.row(4)
    with pytest.raises(
        ValueError, match="shard-00002.*row 5 .*states of boundary 2 hold NaN or inf"
    ):
        cache.row(5)


def test_tokens_carry_their_hash(folder: Path) -> None:
    """Cases 4, 16: a row whose tokens were exchanged is refused."""

    def exchange(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors["tokens"][0] += 1

    rewrite(folder, 1, exchange)
    with pytest.raises(ValueError, match="row 3 .*tokens do not match the index"):
        Cache.open(folder).row(3)


def test_writer_keeps_whole_shards_only(folder: Path, toy_rows: Rows) -> None:
    """After a kill: shards with this key stay, everything else goes with a message."""
    whole = (folder / "shard-00000.safetensors").read_bytes()
    (folder / ".shard-00003.safetensors.1.tmp").write_bytes(b"half")
    second = folder / "shard-00001.safetensors"
    data = bytearray(second.read_bytes())
    data[-10:] = bytes(10)
    second.write_bytes(bytes(data))
    shutil.copy(folder / "shard-00002.safetensors", folder / "shard-00005.safetensors")
    writer = CacheWriter(folder, "key-1", (1, 2), H)
    found = [writer.existing(number) for number in range(6)]
    assert [place is not None for place in found] == [True, False, True, False, False, False]
    first = found[0]
    assert first is not None
    assert first[1].sha256 == sha256_file(folder / "shard-00000.safetensors")
    assert first[0].rows == (0, 1, 2)
    assert (folder / "shard-00000.safetensors").read_bytes() == whole
    told = "\n".join(writer.messages)
    assert "removed the unfinished file .shard-00003.safetensors.1.tmp" in told
    assert "removed shard-00001.safetensors" in told
    assert "data differ from the checksum in its header" in told
    assert "removed shard-00005.safetensors: inside it is shard 2" in told
    assert sorted(path.name for path in folder.iterdir()) == [
        "shard-00000.safetensors",
        "shard-00002.safetensors",
    ]


def test_writer_removes_shards_of_other_settings(folder: Path) -> None:
    """Another key or other boundaries."""
    writer = CacheWriter(folder, "key-2", (1, 2), H)
    assert writer.messages == [
        f"removed shard-0000{n}.safetensors: it was made with other settings" for n in range(3)
    ]
    assert list(folder.iterdir()) == []


def test_full_disk_is_a_clean_stop(
    tmp_path: Path, toy_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 64: no temporary file stays, earlier shards do, and the message says how to go on."""
    writer = CacheWriter(tmp_path, "key-1", (1,), H)
    write_number(writer, toy_rows, 0)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards_module.os, "fsync", full)
    with pytest.raises(ValueError, match="is full while writing shard-00001.* the 1 shards before"):
        write_number(writer, toy_rows, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]


def test_forecast_is_what_is_written(folder: Path) -> None:
    """Case 64: 2·H bytes for each boundary, 5 more for each token; headers are the rest."""
    assert forecast_bytes(1000, 576, 4) == 1000 * (4 * 576 * 2 + 5)
    tokens = Cache.open(folder).manifest["counts"]["tokens"]
    size = headers = 0
    for path in folder.glob("shard-*"):
        size += path.stat().st_size
        headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert size - headers == forecast_bytes(tokens, H, 2)


def test_no_room_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 64: before the first byte, also for a folder that does not exist yet."""
    usage = shutil.disk_usage(tmp_path)._replace(free=2_000_000_000)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: usage)
    check_free_space(tmp_path / "a" / "b", 1_900_000_000)
    with pytest.raises(ValueError, match=r"needs 1\.990 GB more and .* has 2\.000 GB free; lower"):
        check_free_space(tmp_path / "a" / "b", 1_990_000_000)


def test_many_shards_do_not_stay_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading goes on when more shards are touched than may stay open."""
    monkeypatch.setattr(cache_module, "_OPEN_SHARDS", 1)
    cache = Cache.open(folder)
    first = [cache.row(place).tokens.tolist() for place in range(6)]
    assert [cache.row(place).tokens.tolist() for place in (5, 0, 3, 5)] == [
        first[place] for place in (5, 0, 3, 5)
    ]
    assert isinstance(cache._open(2), ShardFile)
    assert len(cache._files) == 1
