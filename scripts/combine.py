"""`draftsmith combine`: several caches, or a part of one, as one cache; no state is copied."""

from __future__ import annotations

import dataclasses
import sys

from ..conf.schema import Config
from ..data.combine import CombineConfig, combine, heldout_caches
from ..data.store import Store
from ..models.provenance import provenance
from .app import Invocation, Verb
from .artifacts import Artifacts


def run(config: Config, invocation: Invocation) -> None:
    """Write the combination, and that of the held-out caches beside the given ones."""
    out = (config.combine.out or Artifacts.of(config).cache).rstrip("/")
    _write(config.combine, out, config.overwrite, invocation)
    written = {"combination": out}
    if heldout := heldout_caches(config.combine.caches):
        # Held-out rows are few, and all of them are wanted.
        whole = CombineConfig(caches=heldout)
        written["heldout"] = f"{out}-heldout"
        _write(whole, written["heldout"], config.overwrite, invocation)
    invocation.wrote(**written)
    invocation = dataclasses.replace(invocation, overrides=_kept(invocation.overrides))
    invocation.next("train", *_further(config, out))


def _write(choice: CombineConfig, out: str, overwrite: bool, invocation: Invocation) -> None:
    done = combine(choice, out, overwrite)
    Store(out).write_json("provenance.json", provenance(invocation.resolved))
    counts = done.manifest["counts"]
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(done.left_out.items()))
    invocation.say(
        f"{out.rpartition('/')[2]}: {counts['rows']:,} rows, {counts['tokens']:,} tokens in "
        f"{len(done.manifest['shards'])} shards of {len(choice.caches)} caches; left out: "
        f"{left_out or 'none'}"
    )


def _further(config: Config, out: str) -> list[str]:
    """What the next command must be told: where the combination lies, and the rows of its first
    part, where they are found beside it."""
    named = [] if config.combine.out is None else [f"data.dump.folder={out}"]
    first = Store(config.combine.caches[0]).local
    if config.inputs or first is None or not (first.parent / "rows" / "manifest.json").exists():
        return named
    named = [f"inputs={first.parent}", f"data.dump.folder={out}"]
    if first.name == "cache-regenerated":
        named.append("data.answers=regenerated")
    return named


def _kept(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """What the next command needs of this one's line."""
    return tuple(word for word in overrides if not word.startswith("combine."))


VERB = Verb(
    name="combine",
    task=run,
    reads="index and manifest of finished caches (combine.caches, and CACHE-heldout beside them)",
    writes=(
        "WORK/cache and WORK/cache-heldout (or combine.out and OUT-heldout): index.parquet, "
        "manifest.json, provenance.json; shards stay where they are"
    ),
    sections=("work", "overwrite", "combine"),
    examples=(
        "draftsmith combine 'combine.caches=[work/a/cache,work/b/cache]' combine.out=work/both",
        "draftsmith combine 'combine.caches=[work/a/cache]' combine.out=work/short "
        "combine.max_length=1024 combine.max_tokens=1000000",
    ),
    kept="the manifest comes last; nothing counts as whole before it",
)


def main() -> int:
    """`python -m draftsmith.scripts.combine`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
