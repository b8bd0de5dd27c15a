"""Reading hidden states back in the order of training: rows at random, each copied into a batch.

One cache of random states (H = 2,048, one boundary, bf16, rows of 64 to 1,024 tokens), kept in each
of the ways that trainers keep theirs. All take turns in one process; figures are the best of the
repeats, `cold` after the kernel was told to forget the files' pages:

    ours          `Cache.row`: slices of mapped shards; the hashes of the row's ids and mask and the
                  finiteness of its states are checked
    torch.load    a pickled file a row (ids, mask, states), as SpecForge and EAGLE keep them
    safetensors   `load_file` of the whole shard of a row, then a slice of it
    datasets      an Arrow table of `datasets`, a row by its number; bf16 goes in as uint16, which
                  Arrow has
    ours, remote  the same cache behind fsspec (memory://), each row by byte ranges
    whole shard, remote   the shard fetched by fsspec, then loaded, then sliced

    python -m draftsmith.scripts.bench.cache [OUT.json]
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import torch
from safetensors.torch import load, load_file
from torch import Tensor

from ...data.cache import Cache
from ...data.cache_writer import CacheWriter
from ...data.rowfile import token_hash
from ...data.runs import supervised_runs
from ...data.shards import ShardRows, boundary_name, mask_hash, shard_name
from ...data.store import Store
from ...models.files import atomic_write_json

HIDDEN, BOUNDARY = 2048, 16
SHARDS, SHARD_TOKENS = 4, 8192
SHORT, LONG = 64, 1024
REPEATS = 3
FEWER = {"safetensors": 12, "whole shard, remote": 12}  # rows: all would take them minutes

Row = tuple[Tensor, Tensor, Tensor]
"""ids [n], mask [n], states [n, H] bf16."""
Form = Callable[[int], Row]


def write_cache(folder: Path) -> None:
    """SHARDS shards of random rows."""
    rng, torch_rng = random.Random(0), torch.Generator().manual_seed(0)
    keys = [f"{number:064x}" for number in range(SHARDS)]
    row = 0
    with CacheWriter(Store(folder), keys, (BOUNDARY,), HIDDEN) as writer:
        for number in range(SHARDS):
            lengths: list[int] = []
            while sum(lengths) < SHARD_TOKENS:
                lengths.append(min(rng.randint(SHORT, LONG), SHARD_TOKENS - sum(lengths)))
            ids = torch.randint(0, 128_000, (SHARD_TOKENS,), generator=torch_rng).int()
            mask = (torch.arange(SHARD_TOKENS) % 512 >= 128).to(torch.uint8)
            states = torch.randn(SHARD_TOKENS, HIDDEN, generator=torch_rng).bfloat16()
            columns = []
            parts = zip(ids.split(lengths), mask.split(lengths), strict=True)
            for place, (own, marks) in enumerate(parts, row):
                flags = marks.numpy().astype(bool)
                hashes = (token_hash(own.numpy()), mask_hash(flags), int(flags.sum()))
                columns.append((place, f"row-{place}", len(own), *hashes, supervised_runs(flags)))
            row += len(lengths)
            content = ShardRows(*zip(*columns, strict=True), quarantined=())
            tensors = {"tokens": ids, "supervised": mask, boundary_name(BOUNDARY): states}
            writer.submit(number, content, tensors)
        about = {"engine": "", "target": {}, "target_dtype": "", "dtype": "bf16", "rows_key": ""}
        about |= {"split": "train", "num_layers": BOUNDARY, "identity": {}, "probes": {}}
        writer.finish("", about)


def write_others(cache: Cache, folder: Path) -> datasets.Dataset:
    """The same rows as pickled files in folder/rows and as an Arrow table in folder/arrow."""
    (folder / "rows").mkdir()

    def rows() -> Any:
        for index in range(len(cache)):
            tokens, mask, states = cache.row(index)
            named = {"ids": tokens, "mask": mask, "states": states[BOUNDARY].clone()}
            torch.save(named, folder / "rows" / f"{index}.pt")
            codes = states[BOUNDARY].view(torch.uint16).flatten().numpy()
            yield {"ids": tokens.numpy(), "mask": mask.numpy(), "states": codes}

    features = datasets.Features(
        {
            "ids": datasets.Sequence(datasets.Value("int64")),
            "mask": datasets.Sequence(datasets.Value("bool")),
            "states": datasets.Sequence(datasets.Value("uint16")),
        }
    )
    writing = {"features": features, "cache_dir": str(folder / "made"), "writer_batch_size": 16}
    made: Any = datasets.Dataset.from_generator(rows, **writing)
    made.save_to_disk(folder / "arrow")
    shutil.rmtree(folder / "made")
    found = datasets.Dataset.load_from_disk(str(folder / "arrow"))
    return found.with_format("arrow")  # numpy's format would widen every integer to int64


def forms_of(folder: Path) -> tuple[Cache, dict[str, Form]]:
    """The cache, and every way to read row i of it."""
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    write_cache(folder / "cache")
    cache = Cache.open(folder / "cache", verify=False)
    table = write_others(cache, folder)
    files = fsspec.filesystem("memory")
    for path in (folder / "cache").iterdir():
        files.pipe(f"/bench/{path.name}", path.read_bytes())
    remote = Cache.open("memory://bench", verify=False)

    def ours(source: Cache, index: int) -> Row:
        tokens, mask, states = source.row(index)
        return tokens, mask, states[BOUNDARY]

    def pickled(index: int) -> Row:
        read = torch.load(folder / "rows" / f"{index}.pt", weights_only=True)
        return read["ids"], read["mask"], read["states"]

    def arrow(index: int) -> Row:
        read: Any = table[index]
        ids, mask, codes = (
            torch.from_numpy(read[name].combine_chunks().flatten().to_numpy(zero_copy_only=False))
            for name in ("ids", "mask", "states")
        )
        return ids, mask, codes.view(torch.bfloat16).view(-1, HIDDEN)

    def sliced(named: dict[str, Tensor], index: int) -> Row:
        start = int(cache._start[index])
        part = slice(start, start + int(cache.lengths[index]))
        ids, mask = named["tokens"][part].long(), named["supervised"][part].bool()
        return ids, mask, named[boundary_name(BOUNDARY)][part]

    def name(index: int) -> str:
        return shard_name(int(cache._shard[index]))

    return cache, {
        "ours": lambda index: ours(cache, index),
        "torch.load": pickled,
        "safetensors": lambda index: sliced(load_file(folder / "cache" / name(index)), index),
        "datasets": arrow,
        "ours, remote": lambda index: ours(remote, index),
        "whole shard, remote": lambda index: sliced(
            load(files.cat_file(f"/bench/{name(index)}")), index
        ),
    }


def forget(folder: Path) -> None:
    """Have the kernel drop the pages of every file below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(place: Path) -> dict[str, Any]:
    """Tokens per second of every form, warm and cold, and the ratios."""
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        folder = Path(scratch)
        cache, forms = forms_of(folder)
        order = list(range(len(cache)))
        random.Random(1).shuffle(order)
        batch = torch.empty(LONG, HIDDEN, dtype=torch.bfloat16)
        right = {index: forms["torch.load"](index) for index in order[:4]}

        def read(form: Form, rows: list[int]) -> float:
            began = time.perf_counter()
            for index in rows:
                _, _, states = form(index)
                batch[: len(states)].copy_(states)
            return int(cache.lengths[rows].sum()) / (time.perf_counter() - began)

        speeds: dict[str, dict[str, float]] = {}
        for name, form in forms.items():
            for index, row in right.items():
                assert all(map(torch.equal, form(index), row)), name
        for temperature in ("warm", "cold"):
            best = speeds[temperature] = dict.fromkeys(forms, 0.0)
            for _ in range(REPEATS):
                for name, form in forms.items():
                    if temperature == "cold":
                        if "remote" in name:
                            continue
                        cache._files.clear()  # no map of theirs may hold the pages
                        forget(folder)
                    best[name] = max(best[name], read(form, order[: FEWER.get(name)]))
        whole = _whole(cache, folder)
        bytes_a_token = HIDDEN * 2 + 5
        tokens = int(cache.lengths.sum())
    ratios = [
        {
            "what": f"a row read at random, {temperature}",
            "ratio": found["ours"] / found[rival],
            "against": rival,
        }
        for temperature, found in speeds.items()
        for rival in ("torch.load", "safetensors", "datasets")
    ]
    remote = speeds["warm"]["ours, remote"] / speeds["warm"]["whole shard, remote"]
    ratios.append(
        {"what": "a row by byte ranges", "ratio": remote, "against": "the whole shard fetched"}
    )
    return {
        "tokens": tokens,
        "rows": len(order),
        "bytes_a_token": bytes_a_token,
        "threads": torch.get_num_threads(),
        "tokens_per_second": speeds,
        "checksums_bytes_per_second": whole,
        "ratios": ratios,
    }


def _whole(cache: Cache, folder: Path) -> float:
    """Bytes a second of opening the cache with every checksum compared, which training begins
    with."""
    began = time.perf_counter()
    Cache.open(folder / "cache", verify=True)
    seconds = time.perf_counter() - began
    return sum(line["bytes"] for line in cache.manifest["shards"]) / seconds


def main() -> int:
    """Print the table; write JSON where a path is given."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    place = out.parent if out else Path("work")
    place.mkdir(parents=True, exist_ok=True)
    result = measure(place)
    print(f"{result['tokens']:,} tokens in {result['rows']} rows, {result['threads']} threads")
    for temperature, speeds in result["tokens_per_second"].items():
        for name, speed in speeds.items():
            if speed:
                rate = speed * result["bytes_a_token"] / 1e9
                print(f"{temperature:<6}{name:<22}{speed:>12,.0f} tokens/s {rate:>7.2f} GB/s")
    print(f"all checksums at once: {result['checksums_bytes_per_second'] / 1e9:.2f} GB/s")
    for one in result["ratios"]:
        print(f"{one['what']:<36}{one['ratio']:>7.2f}x of {one['against']}")
    if out:
        atomic_write_json(out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
