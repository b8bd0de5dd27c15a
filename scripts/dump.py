"""`draftsmith dump`: token rows -> the target's hidden states, in a sharded cache."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from ..conf.schema import Config
from ..data.dump import DumpConfig, Dumped, dump
from ..data.rows import Rows
from ..models.heads import training_boundaries
from ..models.provenance import write_provenance
from ..models.target import Target
from .app import Invocation, Verb
from .artifacts import Artifacts
from .progress import progress


def run(config: Config, invocation: Invocation) -> None:
    """Write the caches of the training and of the held-out rows, or find them there."""
    done = caches(config, invocation)
    invocation.wrote(**{place.folder.name.replace("-", "_"): place.folder for place in done})
    invocation.next("train")


def caches(config: Config, invocation: Invocation) -> list[Dumped]:
    """The caches of a run, made or found. The held-out one is left out where nothing is held
    out."""
    artifacts = Artifacts.of(config)
    target = Target.load(config.target)
    settings = config.data.dump
    settings = dataclasses.replace(
        settings,
        overwrite=settings.overwrite or config.overwrite,
        boundaries=settings.boundaries or training_boundaries(config.head, target.num_layers),
    )
    done = [_cache(settings, "train", artifacts.cache, target, config, invocation)]
    if len(Rows.open(artifacts.rows, "heldout")):
        # Held-out rows are few, and all of them are wanted.
        whole = dataclasses.replace(settings, max_tokens=None)
        done.append(_cache(whole, "heldout", artifacts.heldout_cache, target, config, invocation))
    return done


def _cache(
    settings: DumpConfig,
    split: str,
    out: Path,
    target: Target,
    config: Config,
    invocation: Invocation,
) -> Dumped:
    rows = Rows.open(Artifacts.of(config).rows, split)
    start = time.perf_counter()
    with progress(invocation.console, out.name, "tokens") as report:
        done = dump(settings, rows, target, out, report)
    counts = done.manifest["counts"]
    if done.reused:
        invocation.say(f"reused: {out.name} (key matches; {counts['tokens']:,} tokens)")
        return done
    write_provenance(out, invocation.resolved)
    seconds = time.perf_counter() - start
    resumed = f", {done.resumed} shards of an earlier run kept" if done.resumed else ""
    size = sum(shard["bytes"] for shard in done.manifest["shards"])
    invocation.say(
        f"{out.name}: {counts['rows']:,} rows, {counts['tokens']:,} tokens, {size / 1e6:,.0f} MB "
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
    return done


VERB = Verb(
    name="dump",
    task=run,
    reads="WORK/rows and the target",
    writes=(
        "WORK/cache and WORK/cache-heldout: shard-*.safetensors, index.parquet, manifest.json, "
        "provenance.json"
    ),
    sections=("work", "overwrite", "target", "data.dump", "head.kind", "head.boundaries"),
    examples=(
        "draftsmith dump",
        "draftsmith dump work=work/mine data.dump.max_tokens=2000000",
        "draftsmith dump head=eagle3",
        "draftsmith dump target=llama-3.1-8b data.dump.tokens_per_batch=16384",
    ),
    kept="whole shards are kept, and the same command goes on from them",
)


def main() -> int:
    """`python -m draftsmith.scripts.dump`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
