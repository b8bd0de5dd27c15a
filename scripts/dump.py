"""`draftsmith dump`: token rows -> the target's hidden states, in a sharded cache."""

from __future__ import annotations

import dataclasses
import sys
import time
from functools import partial

from ..conf.schema import Config
from ..data.dump import DumpConfig, Dumped, dump
from ..data.rowfile import SPLITS, Rows
from ..data.store import Store
from ..models.heads import training_boundaries
from ..models.provenance import provenance
from ..models.target import Target
from .app import Invocation, Verb
from .artifacts import Artifacts
from .progress import progress
from .shares import over_ray, take_gpu, this_share
from .source import head_shape


def run(config: Config, invocation: Invocation) -> None:
    """Write the caches of the training and of the held-out rows, or find them there."""
    if config.ray.workers:
        over_ray(config, invocation, partial(_share, finish=False), _share)
        artifacts = Artifacts.of(config)
        places = [artifacts.cache]
        if len(Rows.open(artifacts.learned, "heldout")):
            places.append(artifacts.heldout_cache)
    else:
        places = [done.folder for done in caches(config, invocation)]
    invocation.wrote(**dict(zip(("cache", "cache_heldout"), places, strict=False)))
    invocation.next("train")


def _share(
    config: Config, invocation: Invocation, number: int, count: int, finish: bool = True
) -> None:
    """A rank's part of the caches, on a worker."""
    settings = dataclasses.replace(config.data.dump, rank=number, world_size=count)
    data = dataclasses.replace(config.data, dump=settings)
    caches(dataclasses.replace(config, data=data), invocation, finish)


def caches(config: Config, invocation: Invocation, finish: bool = True) -> list[Dumped]:
    """The caches of a run, made or found. The held-out one is left out where nothing is held
    out.

    Args:
        finish: as for `dump`.
    """
    artifacts = Artifacts.of(config)
    settings = config.data.dump
    settings = dataclasses.replace(settings, overwrite=settings.overwrite or config.overwrite)
    if settings.rank is None:
        settings = dataclasses.replace(settings, **this_share(config))
    take_gpu(config)
    rows = {split: Rows.open(artifacts.learned, split) for split in SPLITS}
    target = Target.load(config.target)
    shape = head_shape(config, invocation.overrides)
    boundaries = settings.boundaries or training_boundaries(shape, target.num_layers)
    settings = dataclasses.replace(settings, boundaries=boundaries)
    make = partial(_cache, target=target, invocation=invocation, finish=finish)
    done = [make(settings, rows["train"], artifacts.cache)]
    if len(rows["heldout"]):
        # Held-out rows are few, and all of them are wanted.
        whole = dataclasses.replace(settings, max_tokens=None)
        done.append(make(whole, rows["heldout"], artifacts.heldout_cache))
    return done


def _cache(
    settings: DumpConfig,
    rows: Rows,
    out: str,
    target: Target,
    invocation: Invocation,
    finish: bool,
) -> Dumped:
    start = time.perf_counter()
    name = out.rpartition("/")[2]
    with progress(invocation.console, name, "tokens") as report:
        done = dump(settings, rows, target, out, report, finish)
    if done.changed:
        invocation.say(f"changed since the cache was made: {'; '.join(done.changed)}")
    if not done.manifest:
        kept = f", {done.resumed} of them kept" if done.resumed else ""
        invocation.say(f"{name}: {done.shards} shards are written{kept}; rank 0 finishes the cache")
        return done
    counts = done.manifest["counts"]
    if done.reused:
        invocation.say(f"reused: {name} (key matches; {counts['tokens']:,} tokens)")
        return done
    Store(out).write_json("provenance.json", provenance(invocation.resolved))
    seconds = time.perf_counter() - start
    resumed = f", {done.resumed} of {done.shards} shards kept" if done.resumed else ""
    size = sum(shard["bytes"] for shard in done.manifest["shards"])
    invocation.say(
        f"{name}: {counts['rows']:,} rows, {counts['tokens']:,} tokens, {size / 1e6:,.0f} MB "
        f"in {seconds:.0f} s"
        f"{resumed}"
    )
    if counts["quarantined"]:
        invocation.say(
            f"[yellow]{counts['quarantined']} rows with non-finite states are left out[/] "
            "(manifest.json)"
        )
    probes = done.manifest["probes"]
    told = ", ".join(f"{name} {verdict}" for name, verdict in probes["verdicts"].items())
    invocation.say(f"probes: {told}")
    if probes["dtype_nll"] is not None:
        invocation.say(
            f"{settings.dtype} against bf16: the same token at {probes['dtype_agreement']:.1%} of "
            f"the probed positions, {probes['dtype_nll']:+.4f} nats"
        )
    return done


VERB = Verb(
    name="dump",
    task=run,
    reads="WORK/rows (WORK/rows-regenerated with data.answers=regenerated) and the target",
    writes=(
        "WORK/cache and WORK/cache-heldout (cache-regenerated*, or data.dump.folder and "
        "FOLDER-heldout): shard-*.safetensors, index.parquet, manifest.json, provenance.json"
    ),
    sections=(
        "work",
        "overwrite",
        "target",
        "data.answers",
        "data.dump",
        "ray",
        "head.kind",
        "head.boundaries",
        "head.init.source",
    ),
    examples=(
        "draftsmith dump",
        "draftsmith dump work=work/mine data.dump.max_tokens=2000000",
        "draftsmith dump head=eagle3",
        "draftsmith dump target=llama-3.1-8b data.dump.tokens_per_batch=16384 data.dump.dtype=fp8",
        "torchrun --nproc-per-node 8 -m draftsmith.scripts.dump target=llama-3.1-8b "
        "data.dump.folder=s3://bucket/llama-cache",
        "draftsmith dump target=llama-3.1-8b ray.workers=16 ray.address=auto",
    ),
    kept="whole shards are kept, and the same command goes on from them",
)


def main() -> int:
    """`python -m draftsmith.scripts.dump`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
