"""`draftsmith prepare`: conversations -> token rows, loss mask, ledger."""

from __future__ import annotations

import sys

from rich.table import Table

from ..conf.schema import Config
from ..data.rows import Prepared, prepare
from ..models.provenance import write_provenance
from ..models.target import fingerprint, load_tokenizer, prepare_folder
from .app import Invocation, Verb
from .artifacts import Artifacts
from .progress import progress


def run(config: Config, invocation: Invocation) -> None:
    """Write token rows, or say that those there are the ones asked for."""
    done = rows(config, invocation)
    invocation.wrote(rows=done.folder, ledger=done.folder / "ledger.json")
    invocation.next("dump")


def rows(config: Config, invocation: Invocation) -> Prepared:
    """The rows of a run, made or found."""
    artifacts = Artifacts.of(config)
    folder = prepare_folder(config.target)
    with progress(invocation.console, "records", "records") as report:
        done = prepare(
            config.data.rows, load_tokenizer(folder), fingerprint(folder), artifacts.rows, report
        )
    if done.reused:
        invocation.say("reused: rows (key matches)")
    else:
        if done.changed:
            invocation.say(f"made anew: rows ({', '.join(done.changed)} changed)")
        write_provenance(done.folder, invocation.resolved)
    _show(done, invocation)
    return done


def _show(done: Prepared, invocation: Invocation) -> None:
    """The ledger: what was read, kept, dropped, and for what reason."""
    records, tokens = done.ledger["records"], done.ledger["tokens"]
    table = Table("records", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name in ("read", "torn", "kept"):
        table.add_row(name, f"{records[name]:,}")
    for reason, count in records["dropped"].items():
        if count:
            table.add_row(f"dropped: {reason}", f"{count:,}")
    invocation.console.print(table)
    share = tokens["supervised"] / max(tokens["total"], 1)
    invocation.say(
        f"{tokens['total']:,} tokens, {tokens['supervised']:,} of them supervised ({share:.1%})"
    )


VERB = Verb(
    name="prepare",
    task=run,
    reads="conversations (data.rows.source) and the target's tokenizer and chat template",
    writes="WORK/rows: train.parquet, heldout.parquet, ledger.json, manifest.json, provenance.json",
    sections=("work", "target.source", "target.folder", "data.rows"),
    examples=(
        "draftsmith prepare",
        "draftsmith prepare work=work/mine data.rows.source=chats.jsonl data.rows.max_length=4096",
        "draftsmith prepare target=qwen3-8b +data.rows.template_kwargs.enable_thinking=false",
    ),
    kept=(
        "rows are written whole or not at all, so nothing of this call is left and older rows are"
        " untouched"
    ),
)


def main() -> int:
    """`python -m draftsmith.scripts.prepare`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
