"""`draftsmith compare A B …`: runs side by side, or the best of each group of a sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..conf.schema import Config
from ..inference import page
from ..inference.bootstrap import Interval
from ..inference.comparison_plot import comparison, setting_of, settings_of
from ..inference.plots import png
from ..inference.report import markdown_table
from ..inference.tables import cell
from ..models.files import atomic_write_bytes, atomic_write_json, atomic_write_text
from ..models.provenance import write_provenance
from .acceptance import TRAINED
from .app import Invocation, Verb
from .compare_verdicts import verdicts
from .run_groups import grouped
from .run_record import Measurement, RunRecord, differing, find_runs

DEFINITIONS = {
    "held-out loss, agreement": (
        "of the validation whose weights became the head (the best score): soft cross-entropy, and "
        "the share of rows whose argmax is the target's, by draft step, true tokens fed."
    ),
    "tok/call": (
        "tokens per target call in the report, the bonus token included; in brackets the 95 % "
        "interval of 10,000 bootstrap resamples of the prompts."
    ),
    "less the first run": (
        "difference in tok/call from the first run on the same prompts, with its paired 95 % "
        "interval; * where that leaves zero out, else the difference is within noise."
    ),
    "verdicts": (
        "the same over all prompt sets together, of the prompts that both runs have; the interval "
        "is over prompts, and says nothing of other seeds in training."
    ),
    "training tok/s": "tokens of all ranks / seconds, without validation and checkpoints.",
    "head bytes": "size of head.safetensors (float32).",
}


def run(config: Config, invocation: Invocation) -> None:
    """Read, select, compare, write and show."""
    settings = config.compare
    folders, others = find_runs(settings.runs or (config.work,))
    records = [RunRecord.read(folder) for folder in folders]
    if others:
        invocation.say(
            f"left out: {len(others)} folders that hold no run: {escape(_listed(others))}"
        )
    groups = grouped(records, settings) if settings.group else []
    for group in groups:
        invocation.say(escape(str(group)))
    kept = [group.best for group in groups if group.best] if groups else records
    if not kept:
        raise ValueError(
            f"none of the {len(records)} runs was validated, so compare.group has nothing to "
            "choose by: hold out rows, or leave compare.group out"
        )
    compared = compare(kept)
    compared["groups"] = [group.to_json() for group in groups]
    out = Path(settings.out)
    written = write(compared, kept, out)
    write_provenance(out, invocation.resolved)
    for title, header, rows in tables(compared):
        invocation.console.print(_shown(title, header, rows))
    for line in compared["verdicts"]:
        invocation.say(f"- {escape(line)}")
    _say_what_lacks(compared, invocation)
    invocation.wrote(**{path.suffix[1:]: path for path in written})


def compare(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything that compare.json holds of the runs, the first of which is compared with."""
    keys = differing(records)
    return {
        "differing": keys,
        "runs": [
            {
                "name": name,
                "folder": str(record.folder),
                "settings": {key: record.settings.get(key) for key in keys},
                "training": record.training(),
                "measurements": record.measurements(records[0]),
            }
            for name, record in zip(names(records), records, strict=True)
        ],
        "verdicts": verdicts(names(records), records),
        "definitions": DEFINITIONS,
    }


def names(records: Sequence[RunRecord]) -> list[str]:
    """What tells the folders apart: their paths below the folder that holds them all."""
    paths = [os.path.abspath(record.folder) for record in records]
    shared = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    return [os.path.relpath(path, shared) for path in paths]


def tables(compared: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows: the settings that differ, training, and what was measured."""
    runs, keys = compared["runs"], compared["differing"]
    labels, found = _labels(compared), []
    if labels != [run["name"] for run in runs]:
        rows = [[label, run["name"]] for label, run in zip(labels, runs, strict=True)]
        found.append(("Runs", ["run", "folder"], rows))
    if keys:
        columns = [[cell(run["settings"][key]) for key in keys] for run in runs]
        header, rows = ["", *labels], [list(row) for row in zip(keys, *columns, strict=True)]
        if len(runs) > _SIDE_BY_SIDE:
            header = ["run", *keys]
            rows = [[label, *told] for label, told in zip(labels, columns, strict=True)]
        found.append(("Settings that differ", header, rows))
    named = list(zip(labels, runs, strict=True))
    trained = [_trained(label, run["training"]) for label, run in named if run["training"]]
    if trained:
        found.append(("Training", _TRAINED, trained))
    order: dict[tuple[Any, ...], list[list[str]]] = {}
    for label, run in named:
        for one in run["measurements"]:
            if one["role"] != "none":
                key = (one["prompts"], one["temperature"], one["dtype"], one["role"])
                order.setdefault(key, []).append(_measured(label, one))
    if order:
        measured = [row for rows in order.values() for row in rows]
        found.append(("Tokens per target call", _MEASURED, measured))
    return found


def _labels(compared: dict[str, Any]) -> list[str]:
    """What stands for the runs in tables: their names, or numbers where those are long."""
    known = [run["name"] for run in compared["runs"]]
    short = max(map(len, known)) <= _LONGEST_LABEL
    return known if short else [str(number) for number in range(1, len(known) + 1)]


_LONGEST_LABEL, _SIDE_BY_SIDE = 12, 4
"""Characters of a run's name, and runs whose settings stand side by side; more stand below each
other."""
_TRAINED = [
    "run",
    "steps",
    "tokens",
    "training tok/s",
    "best step",
    "held-out loss",
    "agreement",
    "tok/call then",
    "head bytes",
]
_MEASURED = [
    "prompts",
    "T",
    "dtype",
    "drafter",
    "K",
    "run",
    "n",
    "tok/call",
    "less the first run",
    "tok/s",
    "speed-up",
]


def _trained(name: str, figures: dict[str, Any]) -> list[str]:
    agreed = figures["agreement"] or []
    return [
        name,
        f"{figures['steps']:,}",
        f"{figures['tokens']:,}",
        _number(figures["tokens_per_second"], ",.0f"),
        _number(figures["best_step"], ","),
        _number(figures["heldout_loss"], ".4f"),
        " ".join(f"{share:.1%}" for share in agreed) or "-",
        _number(figures["tokens_per_target_call"], ".3f"),
        _number(figures["head_bytes"], ","),
    ]


def _measured(name: str, one: Measurement) -> list[str]:
    value, less = f"{one['tokens_per_target_call']:.3f}", "-"
    if one["interval"]:
        value += " [{:.3f}, {:.3f}]".format(*one["interval"])
    if one["difference"]:
        change = Interval(**one["difference"])
        less = f"{change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
        less += " within noise" if change.holds_zero else " *"
    return [
        one["prompts"],
        cell(one["temperature"]),
        one["dtype"],
        one["drafter"],
        str(one["draft_tokens"]),
        name,
        str(one["num_prompts"]),
        value,
        less,
        f"{one['tokens_per_second']:.1f}",
        "-" if one["speedup"] is None else f"{one['speedup']:.2f}×",
    ]


def write(compared: dict[str, Any], records: Sequence[RunRecord], out: Path) -> list[Path]:
    """compare.json, compare.md, compare.html and, where there is something to draw,
    compare.png."""
    told = [
        run["name"] if label == run["name"] else f"{label}: {run['name']}"
        for label, run in zip(_labels(compared), compared["runs"], strict=True)
    ]
    measurements = {
        name: [one for one in run["measurements"] if one["role"] in TRAINED]
        for name, run in zip(told, compared["runs"], strict=True)
    }
    curves = {
        title: {name: record.curve(kind, key) for name, record in zip(told, records, strict=True)}
        for title, kind, key in (
            ("training loss (nats)", "train", "loss"),
            ("held-out loss (nats)", "validation", "loss"),
            ("held-out agreement, draft 1", "validation", "agreement"),
        )
    }
    figure = comparison(measurements, curves)
    blocks = ["# Runs side by side"]
    blocks += [f"- {line}" for line in compared["verdicts"]]
    for group in compared["groups"]:
        blocks.append(f"- {group['told']}")
    if figure is not None:
        blocks.append("![the same as bars and curves](compare.png)")
    for title, header, rows in tables(compared):
        blocks += [f"## {title}", markdown_table(header, rows)]
    blocks += ["## Definitions"]
    blocks.append("\n".join(f"- **{name}**: {text}" for name, text in DEFINITIONS.items()))
    written = [out / "compare.json", out / "compare.md", out / "compare.html"]
    atomic_write_json(written[0], compared)
    atomic_write_text(written[1], "\n\n".join(blocks) + "\n")
    atomic_write_text(written[2], to_html(compared, measurements, curves))
    if figure is not None:
        written.append(out / "compare.png")
        atomic_write_bytes(written[3], png(figure))
    return written


def to_html(
    compared: dict[str, Any],
    measurements: dict[str, list[Measurement]],
    curves: dict[str, dict[str, list[tuple[float, float]]]],
) -> str:
    """All of it as one file that loads nothing; every panel is a figure of its own."""
    figures = [
        comparison(
            {
                name: [one for one in told if setting_of(one) == setting]
                for name, told in measurements.items()
            },
            {},
        )
        for setting in settings_of(measurements)
    ]
    figures += [comparison({}, {title: told}) for title, told in curves.items()]
    drawn = [one for one in figures if one is not None]
    for one in drawn:
        one.suptitle("")
    shown = [(one.axes[0].get_title(), one) for one in drawn]
    groups = [group["told"] for group in compared["groups"]]
    blocks = [page.sentences([*groups, *compared["verdicts"]]), page.panels(shown)]
    for title, header, rows in tables(compared):
        blocks += [page.heading(title), page.table(header, rows)]
    blocks += [page.heading("Definitions"), page.definitions(DEFINITIONS)]
    return page.page("Runs side by side", blocks)


def _say_what_lacks(compared: dict[str, Any], invocation: Invocation) -> None:
    for run in compared["runs"]:
        found = run["measurements"]
        if not found:
            invocation.say(f"{escape(run['name'])}: no report; `draftsmith evaluate` writes one")
        elif any(one["interval"] is None and one["role"] != "none" for one in found):
            invocation.say(
                f"{escape(run['name'])}: no interval where a set has a single prompt, its answers "
                "called no target, or the report has no counts by prompt (evaluate again)"
            )


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders[:4])) + (", …" if len(folders) > 4 else "")


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _shown(title: str, header: list[str], rows: list[list[str]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for name in header:
        table.add_column(name, overflow="fold", min_width=max(map(len, name.split()), default=0))
    for row in rows:
        table.add_row(*row)
    return table


VERB = Verb(
    name="compare",
    task=run,
    reads=(
        "work folders of runs (train/metrics.jsonl, train/provenance.json, report.json), or reports"
    ),
    writes="compare.json, compare.md, compare.html, compare.png and provenance.json in compare.out",
    sections=("work", "compare"),
    examples=(
        "draftsmith compare work/norms-true work/norms-false",
        "draftsmith compare work/a/report.json kept/other.json",
        "draftsmith compare 'runs=work/sweep-*' compare.group=[head.norms] compare.by=loss",
    ),
    kept="each file is written whole or not at all; run the command again",
    flags={"runs": "compare.runs"},
    listed="compare.runs",
)


def main() -> int:
    """`python -m draftsmith.scripts.compare`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
