"""`draftsmith doctor`: looks at whatever a work folder holds, in the order in which it was made,
and says which of the classic faults is in it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ..conf.schema import Config
from ..data.alignment import HeadRow, draw, head_rows
from ..data.cache import Cache
from ..data.examine import Examination
from ..data.findings import faults_of
from ..models.files import atomic_write_json
from ..models.target import load_tokenizer
from ..models.trunk import Trunk
from .app import Invocation, Verb
from .examination import Doctor, Examined

_COLOURS = {"ok": "green", "note": "yellow", "fault": "bold red"}


def run(config: Config, invocation: Invocation) -> None:
    """Examine; a fault ends the command with exit code 2.

    Raises:
        ValueError: the faults found, each with its remedy.
    """
    doctor = Doctor(config)
    examined = doctor.examine()
    _tell(examined, invocation)
    out = doctor.artifacts.work / "doctor"
    out.mkdir(parents=True, exist_ok=True)
    cache = doctor.cache
    record = {
        "examined": [dataclasses.asdict(one) for one in examined],
        "sample": list(cache.sample) if cache else [],
        "probes": cache.probes.to_json() if cache and cache.probes else None,
    }
    atomic_write_json(out / "findings.json", record)
    wrote: dict[str, Path | str] = {"findings": out / "findings.json"}
    if cache is not None and cache.cache is not None and cache.probes is not None:
        assert doctor.trunk is not None
        wrote["picture"] = _picture(
            cache, cache.cache, doctor.trunk, doctor.folder, out, invocation
        )
    invocation.wrote(**wrote)
    faults = [(one, fault) for one in examined for fault in faults_of(one.findings)]
    if faults:
        told = "; ".join(f"{one.place}: {fault.check}: {fault.told}" for one, fault in faults)
        remedies = "; ".join(dict.fromkeys(fault.remedy for _, fault in faults if fault.remedy))
        raise ValueError(f"{told}. {remedies}".rstrip(". "))
    invocation.say(f"[green]{', '.join(one.subject for one in examined)}: no fault found[/]")


def _tell(examined: list[Examined], invocation: Invocation) -> None:
    table = Table("", "check", "", "what was looked at", box=None, pad_edge=False)
    for one in examined:
        table.add_row(f"[bold]{one.subject}[/]", "", "", f"[dim]{escape(one.place)}[/]")
        if one.waits_for:
            waits = f"not looked at: mend {', '.join(one.waits_for)} first"
            table.add_row("", "", "", f"[yellow]{waits}[/]")
        for finding in one.findings:
            told = escape(finding.told)
            if finding.remedy:
                told += f"\n[dim]{escape(finding.remedy)}[/]"
            colour = _COLOURS[finding.verdict]
            table.add_row("", finding.check, f"[{colour}]{finding.verdict}[/]", told)
    invocation.console.print(table)


def _picture(
    found: Examination, cache: Cache, trunk: Trunk, folder: Path, out: Path, invocation: Invocation
) -> Path:
    """The alignment around the first sampled row's first answer, in the terminal and as PNG."""
    assert found.probes is not None
    last = int(cache.manifest["num_layers"])
    rows = head_rows(cache.row(found.sample[0]), trunk, load_tokenizer(folder), last)
    invocation.console.print(_drawn(rows), highlight=False)
    path = out / "alignment.png"
    draw(rows, found.probes.shift_nll).savefig(path, dpi=130)
    return path


def _drawn(rows: list[HeadRow]) -> Table:
    names = ("p", "x_p, state h_p", "fed x_(p+1)", "predicts x_(p+2)", "the target says")
    table = Table(*names, title="head rows; green ones are trained on", box=None, pad_edge=False)
    for row in rows:
        style = "green" if row.trained else "dim"
        said = f"{row.chosen} ({row.probability:.0%})"
        cells = (str(row.position), row.token, row.fed, row.predicts, said)
        table.add_row(*map(escape, cells), style=style)
    return table


VERB = Verb(
    name="doctor",
    task=run,
    reads=(
        "whatever WORK holds: the target, rows, cache, train/ (a failing run's too), its head, "
        "report.json; or a single thing, doctor.cache=…, doctor.head=…, doctor.run=…, "
        "doctor.report=…"
    ),
    writes=(
        "WORK/doctor: findings.json, alignment.png; exit code 2 where there is a fault. What would "
        "only show a fault again that came before it is not looked at"
    ),
    sections=("work", "inputs", "data.answers", "doctor", "target"),
    examples=(
        "draftsmith doctor",
        "draftsmith doctor cache=work/mine/cache-heldout doctor.rows=64",
        "draftsmith doctor doctor.head=some/eagle3 target=llama-3.1-8b",
        "draftsmith doctor doctor.run=work/mine/train doctor.head=work/mine/train/best",
        "draftsmith doctor target=llama-3.3-70b doctor.target=false",
    ),
    kept="nothing but the report is written",
    flags={"cache": "doctor.cache"},
)


def main() -> int:
    """`python -m draftsmith.scripts.doctor`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
