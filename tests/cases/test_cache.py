"""Field faults of the cache: injuries are found before the first optimiser step, naming file and
row; sizes, keys, versions and ranks are what they are said to be.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from draftsmith.data import prefill as prefill_module
from draftsmith.data import store as store_module
from draftsmith.data.cache import Cache
from draftsmith.data.cache_index import sealed
from draftsmith.data.cache_writer import forecast_bytes
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.plan import plan_shards, shard_keys, states_identity
from draftsmith.data.probes import probe_source, state_rms
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.data.store import Store
from draftsmith.models.target import Target, fingerprint, load_tokenizer
from draftsmith.models.trunk import Trunk

SMALL = DumpConfig(shard_tokens=300, tokens_per_batch=128)


def open_for_training(
    folder: Path, target: Path, rows: Rows, boundaries: tuple[int, ...] = (2,), verify: bool = True
) -> Cache:
    """What `draftsmith train` does before its first step: target, rows, cache, probes, scale."""
    marks = fingerprint(target)
    rows.require_tokenizer(marks)
    expect = {**marks, "boundaries": boundaries, "rows_key": rows.key}
    cache = Cache.open(folder, expect, verify)
    probe_source(cache, Trunk.load(target, torch.float32, torch.device("cpu"))).refuse_faults(
        str(folder)
    )
    assert state_rms(cache) > 0
    return cache


@pytest.fixture(scope="module")
def sound(
    toy_rows: Rows, toy_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A cache of each dtype."""
    folder = tmp_path_factory.mktemp("sound")
    for dtype in ("bf16", "fp8"):
        config = replace(SMALL, dtype=dtype, max_tokens=1000)
        dump(config, toy_rows, toy_target, folder / dtype)
    return {dtype: folder / dtype for dtype in ("bf16", "fp8")}


class Shard:
    """The bytes of one shard, to be injured in place."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path = folder / f"shard-{number:05d}.safetensors"
        self.data = bytearray(self.path.read_bytes())
        self.start = 8 + int.from_bytes(self.data[:8], "little")
        self.header: dict[str, Any] = json.loads(self.data[8 : self.start])
        self.lengths: list[int] = json.loads(self.header["__metadata__"]["lengths"])

    def span(self, name: str, row: int) -> slice:
        """Bytes of a row of a tensor."""
        begin, end = self.header[name]["data_offsets"]
        width = (end - begin) // sum(self.lengths)
        first = self.start + begin + width * sum(self.lengths[:row])
        return slice(first, first + width * self.lengths[row])

    def put(self, name: str, row: int, value: bytes) -> None:
        """Overwrite the first bytes of a row."""
        first = self.span(name, row).start
        self.data[first : first + len(value)] = value

    def write(self) -> None:
        self.path.write_bytes(bytes(self.data))


def cut(folder: Path, number: int = 1) -> None:
    path = folder / f"shard-{number:05d}.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing(folder: Path) -> None:
    (folder / "shard-00001.safetensors").unlink()


def zeroed(folder: Path) -> None:
    shard = Shard(folder, 1)
    half = len(shard.data) // 2
    shard.data[half:] = bytes(len(shard.data) - half)
    shard.write()


def rows_swapped(folder: Path) -> None:
    """States, tokens and masks of the first two rows of the shard change places."""
    shard = Shard(folder, 1)
    for name in ("boundary_2", "tokens", "supervised"):
        first, second = shard.span(name, 0), shard.span(name, 1)
        swapped = shard.data[second] + shard.data[first]
        shard.data[first.start : second.stop] = swapped
    shard.write()


def states_swapped(folder: Path) -> None:
    """Only the states change places: tokens and masks still fit."""
    shard = Shard(folder, 1)
    first, second = shard.span("boundary_2", 0), shard.span("boundary_2", 1)
    shard.data[first.start : second.stop] = shard.data[second] + shard.data[first]
    shard.write()


def state_is_nan(folder: Path) -> None:
    shard = Shard(folder, 1)
    shard.put("boundary_2", 1, b"\xc0\x7f")
    shard.write()


def token_changed(folder: Path) -> None:
    shard = Shard(folder, 1)
    shard.put("tokens", 1, b"\x07\x00\x00\x00")
    shard.write()


def mask_changed(folder: Path) -> None:
    shard = Shard(folder, 1)
    place = shard.span("supervised", 1)
    shard.data[place] = bytes(1 - value for value in shard.data[place])
    shard.write()


def tensor_renamed(folder: Path) -> None:
    shard = Shard(folder, 1)
    shard.data = shard.data.replace(b'"boundary_2"', b'"boundary_9"')
    shard.write()


def of_another_cache(folder: Path) -> None:
    """The same shard of the cache in the other dtype."""
    name = "shard-00001.safetensors"
    shutil.copy(folder.parent / "fp8" / name, folder / name)


def out_of_order(folder: Path) -> None:
    first, second = (folder / f"shard-0000{number}.safetensors" for number in (0, 1))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def header_changed(folder: Path) -> None:
    """Another row number in the header, its length unchanged."""
    shard = Shard(folder, 1)
    rows = shard.header["__metadata__"]["rows"].encode()
    other = b"[9" + rows[2:]
    shard.data = shard.data.replace(b'"' + rows + b'"', b'"' + other + b'"')
    shard.write()


def index_damaged(folder: Path) -> None:
    path = folder / "index.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def index_missing(folder: Path) -> None:
    (folder / "index.parquet").unlink()


def manifest_cut(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:500])


def of_manifest(change: Callable[[dict[str, Any]], Any], name: str) -> Callable[[Path], None]:
    """An injury of the manifest's content that leaves it JSON."""

    def injure(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    injure.__name__ = name
    return injure


def manifest_is_a_list(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]\n")


def of_rows(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"kind": "rows", "format": 2}\n')


def unfinished(folder: Path) -> None:
    (folder / "manifest.json").unlink()


SHARD = r"shard-00001\.safetensors"
INJURIES: list[tuple[Callable[[Path], None], str]] = [
    (cut, rf"{SHARD} cannot be read .* cut or damaged"),
    (missing, rf"{SHARD} is missing although the manifest names it"),
    (zeroed, rf"{SHARD}: row \d+ \(id 'chat-\d+'\), its .* data differ from the checksum"),
    (rows_swapped, rf"{SHARD}: row \d+ \(id 'chat-\d+'\), its tokens: the data differ"),
    (states_swapped, rf"{SHARD}: row \d+ \(id 'chat-\d+'\), its states: the data differ"),
    (
        state_is_nan,
        rf"{SHARD}: row \d+ \(id 'chat-\d+'\), NaN, infinity .* in boundary_2: the data",
    ),
    (token_changed, rf"{SHARD}: row \d+ \(id 'chat-\d+'\), its tokens: the data differ"),
    (mask_changed, rf"{SHARD}: row \d+ \(id 'chat-\d+'\), its mask: the data differ"),
    (tensor_renamed, rf"{SHARD}: .* expected boundary_2 BF16.*; found boundary_9 BF16"),
    (of_another_cache, rf"{SHARD}: it is shard 1 with the key .* files of two caches are mixed"),
    (out_of_order, r"shard-00000\.safetensors: it is shard 1 .* files of two caches are mixed"),
    (header_changed, rf"{SHARD}: its header differs from what the manifest promises"),
    (index_damaged, r"index\.parquet: its \d+ bytes differ from what the manifest promises"),
    (index_missing, r"index\.parquet is missing although the manifest names it"),
    (manifest_cut, r"manifest\.json is not valid JSON at character \d+"),
    (manifest_is_a_list, r"manifest\.json holds no JSON object"),
    (of_rows, r"manifest\.json describes 'rows', not a cache"),
    (
        of_manifest(lambda manifest: manifest.pop("boundaries"), "manifest_lacks"),
        r"manifest\.json lacks boundaries; delete it and run dump again",
    ),
    (
        of_manifest(lambda manifest: manifest["shards"].pop(), "shard_not_named"),
        r"manifest\.json differs from the checksum that it holds of itself",
    ),
    (
        of_manifest(lambda manifest: manifest["shards"][1].pop("key"), "shard_without_key"),
        r"manifest\.json lacks shards\[1\]\.key",
    ),
    (
        of_manifest(lambda manifest: manifest["counts"].update(tokens=7), "count_changed"),
        r"manifest\.json differs from the checksum that it holds of itself",
    ),
    (
        of_manifest(lambda manifest: manifest.update(num_layers=3), "layers_changed"),
        r"manifest\.json differs from the checksum that it holds of itself",
    ),
    (
        of_manifest(lambda manifest: manifest.update(boundaries=None), "boundaries_null"),
        r"manifest\.json has None as boundaries, expected a list",
    ),
    (unfinished, "the dump is not finished"),
]


@pytest.fixture
def copy(sound: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the bf16 cache, the other beside it."""
    for name, folder in sound.items():
        shutil.copytree(folder, tmp_path / name)
    return tmp_path / "bf16"


def test_a_sound_cache_opens(copy: Path, toy_folder: Path, toy_rows: Rows) -> None:
    """Nothing that follows fails for another reason."""
    assert len(open_for_training(copy, toy_folder, toy_rows)) > 5
    assert len(open_for_training(copy.parent / "fp8", toy_folder, toy_rows)) > 5


@pytest.mark.parametrize(
    ("injure", "told"), INJURIES, ids=[injure.__name__ for injure, _ in INJURIES]
)
def test_injuries_are_found_before_training(
    copy: Path, toy_folder: Path, toy_rows: Rows, injure: Callable[[Path], None], told: str
) -> None:
    """Each is refused on opening, and names the file and, inside a shard, the row."""
    injure(copy)
    with pytest.raises(ValueError, match=told):
        open_for_training(copy, toy_folder, toy_rows)


@pytest.mark.parametrize("value", [-1.0, float("nan"), 0.0])
def test_a_scale_that_is_none(copy: Path, toy_folder: Path, toy_rows: Rows, value: float) -> None:
    """A negative, missing or zero scale, found on opening by its row, and on reading where nothing
    was verified."""
    folder = copy.parent / "fp8"
    shard = Shard(folder, 0)
    shard.put("scale_2", 1, np.float32(value).tobytes())
    shard.write()
    with pytest.raises(ValueError, match="shard-00000.*row 1 .*a negative scale in scale_2"):
        open_for_training(folder, toy_folder, toy_rows)
    with pytest.raises(ValueError, match="shard-00000.*: row 1 .* a scale of boundary 2 is not a"):
        open_for_training(folder, toy_folder, toy_rows, verify=False)


@pytest.mark.parametrize("foreign", ["weights", "tokenizer", "chat_template"])
def test_foreign_targets(
    copy: Path, toy_folder: Path, toy_rows: Rows, tmp_path: Path, foreign: str
) -> None:
    """Other weights, another tokenizer, a changed template: the field and both values are named."""
    other = tmp_path / "other"
    shutil.copytree(toy_folder, other)
    if foreign == "weights":
        weights = load((other / "model.safetensors").read_bytes())
        weights["model.norm.weight"] *= 1.01
        save_file(weights, other / "model.safetensors", {"format": "pt"})
    else:
        name = {"tokenizer": "tokenizer.json", "chat_template": "chat_template.jinja"}[foreign]
        (other / name).write_text((other / name).read_text() + " ")
    with pytest.raises(ValueError, match=f"{foreign} of the (cache|rows) is '.*'"):
        open_for_training(copy, other, toy_rows)
    marks = {**fingerprint(toy_folder), foreign: fingerprint(other)[foreign]}
    with pytest.raises(ValueError, match=f"{foreign} of the cache is '.*', training asks for"):
        Cache.open(copy, marks)


def test_case_08_other_boundaries_than_the_head_reads(
    copy: Path, toy_folder: Path, toy_rows: Rows
) -> None:
    """A head fed with other layers than it was made for still gives valid output, only slowly.
    A cache that holds other boundaries than asked for is refused, with both."""
    with pytest.raises(ValueError, match=r"boundaries of the cache is \[2\], .* asks for \[1, 2\]"):
        open_for_training(copy, toy_folder, toy_rows, (1, 2))


def test_case_61_rows_that_are_not_finite_are_left_out(
    toy_rows: Rows, toy_target: Target, poisoned: Callable[..., Target], tmp_path: Path
) -> None:
    """An extraction that meets NaN after hours must not be lost: the row is left out by name, its
    neighbours are unharmed, and the run goes on."""
    done = dump(SMALL, toy_rows, poisoned(20), tmp_path / "sick")
    dump(SMALL, toy_rows, toy_target, tmp_path / "sound")
    assert done.manifest["quarantined"] == [
        {"row": 20, "id": toy_rows[20].id, "tokens": len(toy_rows[20].tokens)}
    ]
    assert done.manifest["counts"]["quarantined"] == 1
    cache, sound = Cache.open(tmp_path / "sick"), Cache.open(tmp_path / "sound")
    assert cache.rows.tolist() == [row for row in range(36) if row != 20]
    for place, row in enumerate(cache.rows.tolist()):
        assert torch.equal(cache.row(place).states[2], sound.row(row).states[2])


def test_case_61_too_many_such_rows_stop_the_run(
    toy_rows: Rows, poisoned: Callable[..., Target], tmp_path: Path
) -> None:
    """More than one in a hundred is no accident."""
    with pytest.raises(ValueError, match=r"2 of 36 rows have non-finite .* more than 1%; try"):
        dump(SMALL, toy_rows, poisoned(20, 30), tmp_path)


def test_case_61_ranks_count_them_together(
    toy_rows: Rows, poisoned: Callable[..., Target], tmp_path: Path
) -> None:
    """One such row in a rank's share is let pass, one in each is not: nothing is finished."""
    plan = plan_shards(toy_rows.lengths, 300, None)
    sick = poisoned(plan[2][0], plan[3][0])
    dump(replace(SMALL, rank=1, world_size=2), toy_rows, sick, tmp_path)
    with pytest.raises(ValueError, match=r"2 of 36 rows have non-finite .* more than 1%; try"):
        dump(replace(SMALL, rank=0, world_size=2), toy_rows, sick, tmp_path)
    with pytest.raises(ValueError, match="the dump is not finished"):
        Cache.open(tmp_path)


@pytest.mark.parametrize("value", [b"\xc0\x7f", b"\x80\x7f"])
def test_case_62_states_that_are_not_finite_never_arrive(
    copy: Path, toy_folder: Path, toy_rows: Rows, value: bytes
) -> None:
    """NaN or infinity in a cached row reaches training unnoticed. Here the row is refused when it
    is read, also by a process that verified nothing; the others are read."""
    shard = Shard(copy, 1)
    shard.put("boundary_2", 1, value)
    shard.write()
    cache = Cache.open(copy, verify=False)
    row = len(Shard(copy, 0).lengths) + 1
    cache.row(row - 1)
    with pytest.raises(
        ValueError, match=rf"{SHARD}: row {row} \(id .*\): the states of boundary 2 hold NaN or inf"
    ):
        cache.gather([row - 1, row])


def test_case_63_each_change_gives_new_keys(
    toy_rows: Rows, toy_target: Target, chats_file: Path, copy: Path, tmp_path: Path
) -> None:
    """Two templates share one cache entry. A change of the template alone, of the tokenizer alone
    or of the weights alone changes every shard's key; a shorter max_length changes those that hold
    a row it cut; a cache that lacks the field is refused."""
    marks = toy_target.fingerprint

    def keys(fields: dict[str, str], rows: Rows) -> list[str]:
        states = states_identity(fields, "float32", (2,), "bf16", 128)
        return shard_keys(states, rows, plan_shards(rows.lengths, 300, None))

    before = keys(marks, toy_rows)
    assert len(set(before)) == len(before)
    for field in ("chat_template", "tokenizer", "weights", "config"):
        assert not set(before) & set(keys({**marks, field: "other"}, toy_rows))
    config = RowsConfig(str(chats_file), holdout=4, max_length=int(toy_rows.lengths.max()) - 1)
    prepare(config, load_tokenizer(toy_target.folder), marks, tmp_path / "shorter")
    after = keys(marks, Rows.open(tmp_path / "shorter"))
    assert set(before) != set(after) and set(before) & set(after)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["target"]["chat_template"]
    (copy / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(ValueError, match="the cache has no field 'chat_template' to compare"):
        open_for_training(copy, toy_target.folder, toy_rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8"])
def test_case_64_the_forecast_is_what_is_written(
    toy_rows: Rows, toy_target: Target, tmp_path: Path, dtype: str
) -> None:
    """Caches of unforeseen size. Bytes of tokens, masks, states and scales are known before, for
    several boundaries and each dtype; headers are the rest."""
    done = dump(
        replace(SMALL, boundaries=(0, 1, 2), dtype=dtype, max_tokens=600),
        toy_rows,
        toy_target,
        tmp_path,
    )
    data = sum(len(shard.data) - shard.start for shard in shards_of(tmp_path))
    assert data == forecast_bytes(done.manifest["counts"]["tokens"], 32, 3, dtype)


def shards_of(folder: Path) -> list[Shard]:
    return [Shard(folder, number) for number in range(len(list(folder.glob("shard-*"))))]


def test_case_64_no_room_is_refused_before_the_first_pass(
    toy_rows: Rows, toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are in the message."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(prefill_module, "capture", None)
    with pytest.raises(ValueError, match="the cache needs 0.000 GB more .* has 0.000 GB free"):
        dump(SMALL, toy_rows, toy_target, tmp_path)


def test_case_65_caches_of_the_format_before(
    copy: Path, toy_folder: Path, toy_rows: Rows, toy_target: Target
) -> None:
    """What a file holds changed its meaning and old readers broke. Every shard and the manifest
    carry a format version; another is refused by both numbers."""
    shard = Shard(copy, 1)
    shard.data = shard.data.replace(b'"format":"2"', b'"format":"1"')
    shard.write()
    with pytest.raises(ValueError, match=f"{SHARD} has the cache format '1', this version reads 2"):
        open_for_training(copy, toy_folder, toy_rows)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(ValueError, match="kind 'cache', format 1; this version reads .* format 2"):
        open_for_training(copy, toy_folder, toy_rows)
    with pytest.raises(ValueError, match=r"4 of 4 shards would be thrown away \(format 1 -> 2\)"):
        dump(SMALL, toy_rows, toy_target, copy)


def test_case_66_writer_and_reader_name_a_state_alike(
    copy: Path, toy_folder: Path, toy_rows: Rows
) -> None:
    """A state under another name arrives as nothing. The schema is compared on opening, before any
    data are read, and the message lists what was expected and what was found."""
    tensor_renamed(copy)
    with pytest.raises(ValueError, match="expected boundary_2 .*; found boundary_9 .*; dump again"):
        open_for_training(copy, toy_folder, toy_rows, verify=False)


def test_case_67_ranks_need_no_process_group(
    toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """Long preparation on one rank trips the timeout of a process group. A dump's ranks share the
    folder alone: they may run hours apart, and give the bytes of one."""
    before = torch.distributed.is_initialized()  # by another test of this process
    dump(SMALL, toy_rows, toy_target, tmp_path / "one")
    for rank in (2, 1, 0):
        config = replace(SMALL, rank=rank, world_size=3)
        done = dump(config, toy_rows, toy_target, tmp_path / "three")
        assert bool(done.manifest) == (rank == 0)
    assert torch.distributed.is_initialized() == before
    one, three = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "three")
    )
    assert one == three


def test_case_68_two_shards_are_in_memory(
    toy_rows: Rows, toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extraction fills the host's memory. While the disk stands still, one shard waits in the
    writer and one is computed; a third is not begun."""
    disk, seen = threading.Event(), []
    write = Store.write

    def slow(store: Store, name: str, blocks: Any) -> None:
        assert disk.wait(30)
        write(store, name, blocks)

    def release() -> None:
        while not seen or seen[-1] < int(sizes[:2].sum()):
            time.sleep(0.01)
        time.sleep(0.3)
        seen.append(-1)
        disk.set()

    sizes = np.array(
        [toy_rows.lengths[shard].sum() for shard in plan_shards(toy_rows.lengths, 300, None)]
    )
    monkeypatch.setattr(Store, "write", slow)
    threading.Thread(target=release, daemon=True).start()
    dump(SMALL, toy_rows, toy_target, tmp_path, lambda done, total: seen.append(done))
    assert max(seen[: seen.index(-1)]) == int(sizes[:2].sum())
    assert seen[-1] == int(sizes.sum())
