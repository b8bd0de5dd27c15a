"""`draftsmith combine`: several caches, or a part of one, as one cache; no state is copied."""

from __future__ import annotations

import sys

from ..conf.schema import Config
from ..data.combine import combine
from ..data.store import Store
from ..models.provenance import provenance
from .app import Invocation, Verb


def run(config: Config, invocation: Invocation) -> None:
    """Write the combination and say what it holds."""
    done = combine(config.combine, config.overwrite)
    Store(done.folder).write_json("provenance.json", provenance(invocation.resolved))
    counts = done.manifest["counts"]
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(done.left_out.items()))
    invocation.say(
        f"{counts['rows']:,} rows, {counts['tokens']:,} tokens in {len(done.manifest['shards'])} "
        f"shards of {len(config.combine.caches)} caches; left out: {left_out or 'none'}"
    )
    invocation.wrote(combination=done.folder)
    invocation.next("train", f"data.dump.folder={done.folder}")


VERB = Verb(
    name="combine",
    task=run,
    reads="index and manifest of finished caches (combine.caches)",
    writes="combine.out: index.parquet, manifest.json, provenance.json; shards stay where they are",
    sections=("overwrite", "combine"),
    examples=(
        "draftsmith combine combine.caches=[work/a/cache,work/b/cache] combine.out=work/both",
        "draftsmith combine combine.caches=[work/a/cache] combine.out=work/short "
        "combine.max_length=1024 combine.max_tokens=1000000",
    ),
    kept="nothing is half-written: the manifest comes last",
)


def main() -> int:
    """`python -m draftsmith.scripts.combine`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
