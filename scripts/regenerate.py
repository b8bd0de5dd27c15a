"""`draftsmith regenerate`: token rows -> the same conversations, answered by the target itself."""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from functools import partial

from rich.markup import escape
from rich.table import Table

from ..conf.schema import Config
from ..data.regenerate import Regenerated, regenerate
from ..inference.drafters import Drafter
from ..models.heads import load_head
from ..models.provenance import write_provenance
from ..models.target import Target, load_tokenizer
from .acceptance import drafter
from .app import Invocation, Verb
from .artifacts import Artifacts
from .progress import progress
from .shares import over_ray, take_gpu, this_share


def run(config: Config, invocation: Invocation) -> None:
    """Write rows of the target's own answers, or find them there."""
    if config.ray.workers:
        over_ray(config, invocation, partial(_share, finish=False), _share)
        folder = Artifacts.of(config).regenerated
    else:
        folder = answers(config, invocation).folder
    invocation.wrote(rows=folder, ledger=folder / "ledger.json")
    invocation.next("dump", "data.answers=regenerated")


def _share(
    config: Config, invocation: Invocation, number: int, count: int, finish: bool = True
) -> None:
    """A rank's answers, and of rank 0 the rows of all, on a worker."""
    settings = dataclasses.replace(config.regenerate, rank=number, world_size=count)
    answers(dataclasses.replace(config, regenerate=settings), invocation, finish)


def answers(config: Config, invocation: Invocation, finish: bool = True) -> Regenerated:
    """The regenerated rows of a run, made or found.

    Args:
        finish: as for `regenerate`.
    """
    artifacts = Artifacts.of(config)
    settings = config.regenerate
    if settings.rank is None:
        settings = dataclasses.replace(settings, **this_share(config))
    take_gpu(config)
    target = Target.load(config.target)
    start = time.perf_counter()
    with progress(invocation.console, "answers", "tokens") as report:
        done = regenerate(
            settings,
            artifacts.rows,
            target,
            config.engine,
            load_tokenizer(target.folder),
            artifacts.regenerated,
            _drafter(config, target),
            config.overwrite,
            report,
            finish,
        )
    seconds = time.perf_counter() - start
    for message in done.messages:
        invocation.say(escape(message))
    if not done.manifest:
        invocation.say(
            f"{done.generated:,} tokens generated in {seconds:.0f} s; rank 0 writes the rows"
        )
        return done
    if done.reused:
        invocation.say("reused: rows-regenerated (key matches)")
    else:
        write_provenance(done.folder, invocation.resolved)
        resumed = f"; the answers of {done.resumed:,} rows were there" if done.resumed else ""
        invocation.say(
            f"{done.generated:,} tokens generated in {seconds:.0f} s "
            f"({done.generated / seconds:,.0f}/s){resumed}"
        )
    _show(done, invocation)
    return done


def _drafter(config: Config, target: Target) -> Drafter | None:
    settings = config.regenerate
    if settings.drafter != "mtp":
        if settings.head is not None:
            warnings.warn(
                "regenerate.head is not used: regenerate.drafter is not mtp", stacklevel=2
            )
        return drafter(settings.drafter, None, target)
    folder = Artifacts.of(config).head_or(settings.head)
    loaded = load_head(folder, target.fingerprint)
    return drafter("mtp", loaded, target, tree=config.engine.tree)


def _show(done: Regenerated, invocation: Invocation) -> None:
    """What became of the rows and of the answers."""
    records, found, tokens = (done.ledger[name] for name in ("records", "answers", "tokens"))
    table = Table("rows", "", "answers", "", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[3].justify = "right"
    left = [("read", records["read"]), ("kept", records["kept"])]
    left += [(f"dropped: {reason}", count) for reason, count in records["dropped"].items()]
    right = [(name.replace("_", " "), count) for name, count in found.items()]
    for place in range(max(len(left), len(right))):
        cells = [side[place] if place < len(side) else ("", "") for side in (left, right)]
        table.add_row(
            *(f"{cell:,}" if isinstance(cell, int) else cell for pair in cells for cell in pair)
        )
    invocation.console.print(table)
    supervised = tokens["supervised"]
    invocation.say(
        f"{tokens['total']:,} tokens, {supervised:,} of them supervised "
        f"({supervised / max(tokens['total'], 1):.1%}), {tokens['on_policy']:,} of those by the "
        f"target itself ({tokens['on_policy'] / max(supervised, 1):.1%})"
    )


VERB = Verb(
    name="regenerate",
    task=run,
    reads="WORK/rows and the target; with regenerate.drafter=mtp a head (WORK/train/head)",
    writes=(
        "WORK/rows-regenerated: train.parquet, heldout.parquet, answers.parquet, ledger.json, "
        "manifest.json, provenance.json"
    ),
    sections=("work", "overwrite", "target", "regenerate", "ray", "engine"),
    examples=(
        "draftsmith regenerate",
        "draftsmith regenerate regenerate.temperature=0.7 regenerate.max_new_tokens=1024",
        "draftsmith regenerate regenerate.drafter=ngram regenerate.max_rows=2000",
        "draftsmith regenerate target=llama-3.1-8b ray.workers=16 ray.address=auto",
    ),
    kept="the answers of finished rows are kept, and the same command goes on from them",
)


def main() -> int:
    """`python -m draftsmith.scripts.regenerate`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
