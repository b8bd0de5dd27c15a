"""A cache gives back what was written, or says which file, row or field is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from draftsmith.data import cache as cache_module
from draftsmith.data import cache_writer as writer_module
from draftsmith.data import store as store_module
from draftsmith.data.cache import Cache
from draftsmith.data.cache_index import find_manifest, sealed
from draftsmith.data.cache_writer import CacheWriter, check_free_space, forecast_bytes
from draftsmith.data.quantise import quantise
from draftsmith.data.rows import Rows
from draftsmith.data.runs import supervised_runs
from draftsmith.data.shards import FORMAT, ShardFile, ShardRows, mask_hash
from draftsmith.data.store import Store
from draftsmith.kernels.shift import supervision

H = 8
TARGET = {"config": "c", "tokenizer": "t", "chat_template": "p", "weights": "w"}
ABOUT = {
    "engine": "e",
    "target": TARGET,
    "target_dtype": "bfloat16",
    "dtype": "bf16",
    "rows_key": "k",
    "split": "train",
    "num_layers": 2,
    "identity": {},
    "probes": {},
}
SHARDS = [[0, 1, 2], [4], [5, 6]]
KEYS = ["key-0", "key-1", "key-2"]
NOBODY = 1 << 22 | 1  # more than Linux ever numbers


def states(row: int, boundary: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * row + boundary)
    return torch.randn(length, H, generator=generator).to(torch.bfloat16)


def write_number(writer: CacheWriter, rows: Rows, number: int) -> None:
    """One shard of known states; row 3 is quarantined in shard 1."""
    read = [rows[row] for row in SHARDS[number]]
    masks = [row.supervised for row in read]
    content = ShardRows(
        rows=tuple(SHARDS[number]),
        ids=tuple(row.id for row in read),
        lengths=tuple(len(row.tokens) for row in read),
        sha256=tuple(row.sha256 for row in read),
        masks=tuple(mask_hash(mask) for mask in masks),
        supervised=tuple(int(mask.sum()) for mask in masks),
        runs=tuple(supervised_runs(mask) for mask in masks),
        quarantined=((3, rows[3].id, len(rows[3].tokens)),) if number == 1 else (),
    )
    tensors = {
        "tokens": torch.from_numpy(np.concatenate([row.tokens for row in read])),
        "supervised": torch.from_numpy(np.concatenate(masks)).to(torch.uint8),
    }
    for k in writer.boundaries:
        whole = torch.cat([states(row, k, len(rows[row].tokens)) for row in SHARDS[number]])
        codes, scale = quantise(whole, writer.dtype)
        tensors[f"boundary_{k}"] = codes
        if scale is not None:
            tensors[f"scale_{k}"] = scale
    writer.submit(number, content, tensors)


def build(place: Path | str, rows: Rows, dtype: str = "bf16") -> None:
    """A finished cache of six rows at the boundaries 1 and 2."""
    with CacheWriter(Store(place), KEYS, (1, 2), H, dtype) as writer:
        for number in range(3):
            write_number(writer, rows, number)
        writer.finish("key-of-all", {**ABOUT, "dtype": dtype})


@pytest.fixture
def folder(tmp_path: Path, toy_rows: Rows) -> Path:
    build(tmp_path / "cache", toy_rows)
    return tmp_path / "cache"


def head_size(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def reseal(folder: Path, name: str) -> None:
    """Make the manifest agree with a changed file, as a faulty writer would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / name).read_bytes()
    line = next(line for line in manifest["shards"] if line["name"] == name)
    line["bytes"] = len(data)
    line["header_sha256"] = hashlib.sha256(data[: head_size(data)]).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def rewrite(
    folder: Path, number: int, change: Callable[[dict[str, Any], dict[str, str]], None]
) -> None:
    """Rewrite a shard through the library with changed tensors or metadata, all checksums right."""
    path = folder / f"shard-{number:05d}.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors, metadata)
    data = save(tensors, metadata)
    metadata["data_sha256"] = hashlib.sha256(data[head_size(data) :]).hexdigest()
    path.write_bytes(save(tensors, metadata))
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
    assert json.loads(metadata["quarantined"])[0][0] == 3
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
    with pytest.raises(ValueError, match=r"manifest\.json is a file; name the folder of a cache"):
        (folder / "manifest.json").touch()
        Cache.open(folder / "manifest.json")


def test_what_is_no_cache(tmp_path: Path) -> None:
    """A mistyped name, an empty folder, somebody else's folder: nothing is said of a dump that goes
    on."""
    with pytest.raises(ValueError, match="nowhere does not exist; correct the name, or run"):
        Cache.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="memory://nowhere/cache does not exist; correct"):
        Cache.open("memory://nowhere/cache")
    with pytest.raises(ValueError, match="holds no cache .neither manifest.json nor shards"):
        Cache.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"kind": "rows", "format": 2}')
    with pytest.raises(ValueError, match="json describes 'rows', not a cache; name another folder"):
        Cache.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target": []}, r"has \[\] as target, expected an object"),
        ({"target": {"weights": 3}}, r"has 3 as target\.weights, expected text"),
        ({"boundaries": None}, "has None as boundaries, expected a list"),
        ({"boundaries": [1, "2"]}, r"has '2' as boundaries\[1\], expected a whole number"),
        ({"boundaries": [1, 3]}, r"has the boundaries \[1, 3\] of 2 layers"),
        ({"boundaries": []}, r"has the boundaries \[\] of 2 layers"),
        ({"hidden_size": True}, "has True as hidden_size, expected a whole number"),
        ({"rows_key": None}, "has None as rows_key, expected text"),
        ({"index": {}}, r"lacks index\.bytes, index\.sha256"),
        ({"shards": {}}, "has {} as shards, expected a list"),
        ({"shards": []}, "names no shard"),
        ({"shards": [{"name": "a"}]}, r"lacks shards\[0\]\.key, shards\[0\]\.bytes"),
        (
            {"quarantined": [[3, "a", 4]]},
            r"has \[3, 'a', 4\] as quarantined\[0\], expected",
        ),
        ({"quarantined": []}, "counts 1 rows left out and names 0"),
        ({"dtype": "fp7"}, "dtype 'fp7' is not known"),
    ],
)
def test_a_manifest_of_wrong_form(folder: Path, change: dict[str, Any], told: str) -> None:
    """Its own checksum right, as a faulty writer would leave it: the field is named, by the reader
    and by a dump that finds it."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **change})))
    with pytest.raises(ValueError, match=f"manifest.json:? {told}"):
        Cache.open(folder)
    with pytest.raises(ValueError, match=f"manifest.json:? {told}"):
        find_manifest(Store(folder))


def test_a_manifest_that_its_index_belies(folder: Path) -> None:
    """Counts and places of rows are compared, whatever the checksums say."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    counts = {**manifest["counts"], "supervised": 1}
    path.write_text(json.dumps(sealed({**manifest, "counts": counts})))
    with pytest.raises(ValueError, match=r"counts are not those of index\.parquet, .* 1 \(\d+\)"):
        Cache.open(folder)
    path.write_text(json.dumps(sealed({**manifest, "shards": manifest["shards"][:-1]})))
    with pytest.raises(ValueError, match=r"row 4 .* lies at 0 in shard 2, outside the 2 shards"):
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
        ValueError, match="shard-00001.* has the cache format '0', this version reads 2"
    ):
        Cache.open(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 7}))
    with pytest.raises(ValueError, match="format 7; this version reads kind 'cache', format 2"):
        Cache.open(folder)


def test_renamed_tensor(folder: Path) -> None:
    """Case 66: the message lists what was expected and what was found."""

    def rename(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors["last"] = tensors.pop("boundary_2")

    rewrite(folder, 2, rename)
    with pytest.raises(ValueError, match=r"expected boundary_1 .*boundary_2.*; found .*last BF16"):
        Cache.open(folder)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8"])
def test_supervised_tokens(tmp_path: Path, toy_rows: Rows, dtype: str) -> None:
    """What the draft vocabulary counts, whatever the states are held in."""
    build(tmp_path, toy_rows, dtype)
    read = [part.tolist() for part in Cache.open(tmp_path).supervised_tokens()]
    rows = [toy_rows[row] for shard in SHARDS for row in shard]
    assert read == [row.tokens[row.supervised].tolist() for row in rows]


def test_local_states_are_views_of_the_file(folder: Path) -> None:
    """bf16 states are mapped, not copied: two reads of a row share their memory."""
    cache = Cache.open(folder)
    assert cache.row(3).states[1].data_ptr() == cache.row(3).states[1].data_ptr()
    cache.row(3).states[1].zero_()  # private to this process
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


def test_writer_keeps_whole_shards_only(folder: Path, toy_rows: Rows) -> None:
    """After a kill: shards with their key stay, everything else goes with a message."""
    whole = (folder / "shard-00000.safetensors").read_bytes()
    (folder / f".shard-00003.safetensors.{NOBODY}.tmp").write_bytes(b"half")
    second = folder / "shard-00001.safetensors"
    data = bytearray(second.read_bytes())
    data[-10:] = bytes(10)
    second.write_bytes(bytes(data))
    shutil.copy(folder / "shard-00002.safetensors", folder / "shard-00005.safetensors")
    shutil.copy(folder / "shard-00002.safetensors", folder / "shard-00003.safetensors")
    with CacheWriter(Store(folder), [*KEYS, "key-3"], (1, 2), H) as writer:
        assert sorted(writer.kept) == [0, 2]
        assert writer.missing() == [1, 3]
    assert (folder / "shard-00000.safetensors").read_bytes() == whole
    told = "\n".join(writer.messages)
    assert f"removed .shard-00003.safetensors.{NOBODY}.tmp: it is unfinished" in told
    assert "removed shard-00001.safetensors" in told
    assert "data differ from the checksum in its header" in told
    assert "removed shard-00003.safetensors: inside it is shard 2" in told
    assert "removed shard-00005.safetensors: the plan has no such shard" in told
    assert sorted(path.name for path in folder.iterdir()) == [
        "shard-00000.safetensors",
        "shard-00002.safetensors",
    ]


def test_writer_removes_shards_of_other_content(folder: Path) -> None:
    """A shard whose key is another is made anew, its neighbours stay."""
    with CacheWriter(Store(folder), ["key-0", "other", "key-2"], (1, 2), H) as writer:
        assert sorted(writer.kept) == [0, 2]
    assert writer.messages == [
        "removed shard-00001.safetensors: it was made of other rows or settings"
    ]


def test_a_second_rank_touches_its_own_shards_alone(folder: Path) -> None:
    """Another rank's shards, its temporary files and the manifest are left to their owners."""
    foreign = folder / f".shard-00002.safetensors.{NOBODY}.tmp"
    others = {folder / "shard-00000.safetensors", foreign}
    foreign.write_bytes(b"half")
    (folder / f".shard-00001.safetensors.{NOBODY}.tmp").write_bytes(b"half")
    others |= {folder / name for name in ("manifest.json", "index.parquet")}
    with CacheWriter(Store(folder), ["a", "b", "c"], (1, 2), H, rank=1, world_size=2) as writer:
        assert list(writer.own) == [1]
    assert len(writer.messages) == 2
    assert set(folder.iterdir()) == {*others, folder / "shard-00002.safetensors"}


def test_a_file_that_another_process_writes_stays(folder: Path) -> None:
    """A second dump of the same rank, started by mistake, leaves the first one's temporary file,
    until it is an hour old; that of a process which had this one's number is left over."""
    young = folder / f".shard-00000.safetensors.{os.getppid()}.tmp"
    old = folder / f".shard-00001.safetensors.{os.getppid()}.tmp"
    mine = folder / f".shard-00002.safetensors.{os.getpid()}.tmp"
    for path in (young, old, mine):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 4000, time.time() - 4000))
    with CacheWriter(Store(folder), KEYS, (1, 2), H) as writer:
        assert len(writer.kept) == 3
    assert {path for path in (young, old, mine) if path.exists()} == {young}


def test_waiting_names_the_missing_shards(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first rank says which shards it waits for, and goes on when they are there."""
    path = folder / "shard-00001.safetensors"
    away = path.rename(folder / "away")
    with CacheWriter(Store(folder), KEYS, (1, 2), H, world_size=2) as writer:
        monkeypatch.setattr(writer_module, "_TELL_EVERY", 0.0)
        monkeypatch.setattr(writer_module.time, "sleep", lambda pause: away.rename(path))
        writer.wait()
    assert "waiting for 1 shards of other ranks: 1" in caplog.text


def test_forecast_is_what_is_written(folder: Path) -> None:
    """Case 64: 2·H bytes for each boundary, 5 more for each token; headers are the rest."""
    assert forecast_bytes(1000, 576, 4) == 1000 * (4 * 576 * 2 + 5)
    assert forecast_bytes(1000, 576, 4, "fp8") == 1000 * (4 * (576 + 4) + 5)
    tokens = Cache.open(folder).manifest["counts"]["tokens"]
    size = headers = 0
    for path in folder.glob("shard-*"):
        size += path.stat().st_size
        headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert size - headers == forecast_bytes(tokens, H, 2)


def test_no_room_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 64: before the first byte, also for a folder that does not exist yet."""
    usage = shutil.disk_usage(tmp_path)._replace(free=2_000_000_000)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage)
    place = Store(tmp_path / "a" / "b")
    check_free_space(place, 1_900_000_000)
    with pytest.raises(ValueError, match=r"needs 1\.990 GB more and .* has 2\.000 GB free; lower"):
        check_free_space(place, 1_990_000_000)


def test_room_of_a_remote_store_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    """Case 64: an object store is not asked; the forecast is said all the same."""
    check_free_space(Store("memory://somewhere"), 1_990_000_000)
    assert "1.990 GB will be written; its free space cannot be asked for" in caplog.text


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
