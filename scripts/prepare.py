"""`draftsmith prepare`: conversations -> token rows, loss mask, ledger."""

from __future__ import annotations

import sys

from rich.markup import escape
from rich.table import Table

from ..conf.schema import Config
from ..data.rows import Prepared, Rows, prepare
from ..data.show import show
from ..models.provenance import write_provenance
from ..models.target import fingerprint, load_tokenizer, longest_text, prepare_folder
from .app import Invocation, Verb
from .artifacts import Artifacts
from .progress import progress


def run(config: Config, invocation: Invocation) -> None:
    """Write token rows, or say that those there are the ones asked for."""
    done = rows(config, invocation)
    if config.prepare.show:
        tokenizer = load_tokenizer(prepare_folder(config.target))
        shown = show(
            Rows.open(done.folder), tokenizer, config.prepare.show, config.prepare.show_ids
        )
        invocation.console.print(shown, highlight=False)
    invocation.wrote(rows=done.folder, ledger=done.folder / "ledger.json")
    invocation.next("dump")


def rows(config: Config, invocation: Invocation) -> Prepared:
    """The rows of a run, made or found."""
    artifacts = Artifacts.of(config)
    folder = prepare_folder(config.target)
    with progress(invocation.console, "records", "records") as report:
        done = prepare(
            config.data.rows,
            load_tokenizer(folder),
            fingerprint(folder),
            artifacts.rows,
            report,
            longest_text(folder),
        )
    if done.reused:
        invocation.say("reused: rows (key matches)")
    else:
        if done.changed:
            invocation.say(f"made anew: rows ({', '.join(done.changed)} changed)")
        write_provenance(done.folder, invocation.resolved)
    _tell(done, invocation)
    return done


def _tell(done: Prepared, invocation: Invocation) -> None:
    """The ledger: what was read, kept, dropped and for what reason, what to look at, and one line
    of the whole.
    """
    records, tokens, rows = (done.ledger[name] for name in ("records", "tokens", "rows"))
    table = Table("records", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name in ("read", "torn", "kept", "repeats"):
        table.add_row(name, f"{records[name]:,}")
    for reason, count in records["dropped"].items():
        if count:
            table.add_row(f"dropped: {reason}", f"{count:,}")
    for name, count in done.ledger["turns"].items():
        if name.startswith("unproven_"):
            table.add_row(f"answers: {name}", f"{count:,}")
    invocation.console.print(table)
    schemas = ", ".join(
        f"{count:,} {name.removeprefix('schema:')}"
        for name, count in done.ledger["turns"].items()
        if name.startswith("schema:")
    )
    invocation.say(f"source: {escape(done.ledger['form'])}; schemas: {schemas}")
    system = done.ledger["template"].get("default_system")
    if system:
        invocation.say(f"the template adds a system text of its own: {escape(repr(system))}")
    for warning in done.ledger["warnings"]:
        invocation.say(f"[yellow]warning:[/] {escape(warning)}")
    share = tokens["supervised"] / max(tokens["total"], 1)
    invocation.say(
        f"[bold]{rows['train'] + rows['heldout']:,} rows ({rows['heldout']:,} held out)[/] of "
        f"{records['kept']:,} of {records['read']:,} records; {share:.1%} of {tokens['total']:,} "
        f"tokens supervised; {rows['truncated']:,} rows truncated, {rows['cut_mid_answer']:,} of "
        f"them within an answer; {done.ledger['turns']['unproven']:,} answers unproven"
    )


VERB = Verb(
    name="prepare",
    task=run,
    reads="conversations (data.rows.source) and the target's tokenizer and chat template",
    writes=(
        "WORK/rows: train.parquet, heldout.parquet, ledger.json, dropped.parquet, "
        "unproven.parquet, manifest.json, provenance.json"
    ),
    sections=("work", "target.source", "target.folder", "data.rows", "prepare"),
    flags={"--show": "prepare.show"},
    examples=(
        "draftsmith prepare",
        "draftsmith prepare --show 3",
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
