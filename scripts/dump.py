"""`draftsmith dump`: token rows -> the target's hidden states, in a sharded cache."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping

import torch

from ..conf.schema import Config
from ..data.dump import DumpConfig, Dumped, dump
from ..data.rowfile import SPLITS, Rows
from ..data.store import Store
from ..models.heads import training_boundaries
from ..models.provenance import provenance
from ..models.target import Target, torch_device
from .app import Invocation, Verb
from .artifacts import Artifacts
from .progress import progress
from .source import head_shape


def run(config: Config, invocation: Invocation) -> None:
    """Write the caches of the training and of the held-out rows, or find them there."""
    done = caches(config, invocation)
    names = ("cache", "cache_heldout")
    invocation.wrote(**{name: place.folder for name, place in zip(names, done, strict=False)})
    invocation.next("train")


def caches(config: Config, invocation: Invocation) -> list[Dumped]:
    """The caches of a run, made or found. The held-out one is left out where nothing is held
    out."""
    artifacts = Artifacts.of(config)
    settings = config.data.dump
    settings = dataclasses.replace(settings, overwrite=settings.overwrite or config.overwrite)
    if settings.rank is None:
        settings = dataclasses.replace(settings, **_launched(os.environ))
    if config.target.spread and (settings.world_size or 1) > 1:
        raise ValueError(
            f"target.spread=true on {settings.world_size} ranks: one process lays the layers over "
            "all devices; start `draftsmith dump` without a launcher"
        )
    if torch_device(config.target.device).type == "cuda":
        torch.cuda.set_device(_local_rank(os.environ))
    rows = {split: Rows.open(artifacts.learned, split) for split in SPLITS}
    target = Target.load(config.target)
    shape = head_shape(config, invocation.overrides)
    boundaries = settings.boundaries or training_boundaries(shape, target.num_layers)
    settings = dataclasses.replace(settings, boundaries=boundaries)
    done = [_cache(settings, rows["train"], artifacts.cache, target, invocation)]
    if len(rows["heldout"]):
        # Held-out rows are few, and all of them are wanted.
        whole = dataclasses.replace(settings, max_tokens=None)
        place = artifacts.heldout_cache
        done.append(_cache(whole, rows["heldout"], place, target, invocation))
    return done


def _cache(
    settings: DumpConfig,
    rows: Rows,
    out: str,
    target: Target,
    invocation: Invocation,
) -> Dumped:
    start = time.perf_counter()
    name = out.rpartition("/")[2]
    with progress(invocation.console, name, "tokens") as report:
        done = dump(settings, rows, target, out, report)
    if done.changed:
        invocation.say(f"changed since the cache was made: {'; '.join(done.changed)}")
    if not done.manifest:
        invocation.say(f"{name}: {done.shards} shards are written; rank 0 finishes the cache")
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


def _launched(environment: Mapping[str, str]) -> dict[str, int]:
    """rank and world_size as torchrun or srun announces them; those of a process alone else."""
    # SLURM_NTASKS stands in a batch script, too, which is one process: a step has its own count
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if rank in environment and size in environment:
            return {"rank": int(environment[rank]), "world_size": int(environment[size])}
    return {"rank": 0, "world_size": 1}


def _local_rank(environment: Mapping[str, str]) -> int:
    """Which GPU of this machine."""
    return int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))


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
    ),
    kept="whole shards are kept, and the same command goes on from them",
)


def main() -> int:
    """`python -m draftsmith.scripts.dump`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
