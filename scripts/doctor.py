"""`draftsmith doctor`: checks a cache for the classic faults and says which one it has."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from ..conf.schema import Config
from ..data.alignment import HeadRow, draw, head_rows
from ..data.cache import Cache
from ..data.examine import Examination, Finding, examine_cache
from ..models.files import atomic_write_json
from ..models.target import Target, fingerprint, load_tokenizer, prepare_folder, torch_device
from ..models.trunk import Trunk
from .app import Invocation, Verb
from .artifacts import Artifacts

_COLOURS = {"ok": "green", "note": "yellow", "fault": "bold red"}


def run(config: Config, invocation: Invocation) -> None:
    """Examine the cache; a fault ends the command with exit code 2.

    Raises:
        ValueError: the faults found, each with its remedy.
    """
    settings = config.doctor
    artifacts = Artifacts.of(config)
    place = settings.cache or artifacts.cache
    folder = prepare_folder(config.target)
    if settings.target:
        target = Target.load(config.target)
        trunk = target.trunk
    else:
        dtype = getattr(torch, config.target.dtype)
        target, trunk = None, Trunk.load(folder, dtype, torch_device(config.target.device))
    found = examine_cache(
        place, target, trunk, fingerprint(folder), rows=settings.rows, seed=settings.seed
    )
    _tell(found.findings, invocation)
    out = artifacts.work / "doctor"
    record = {
        "cache": place,
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
        "sample": list(found.sample),
        "probes": found.probes.to_json() if found.probes else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    atomic_write_json(out / "findings.json", record)
    wrote = {"findings": out / "findings.json"}
    if found.cache is not None and found.probes is not None:
        wrote["picture"] = _picture(found, found.cache, trunk, folder, out, invocation)
    invocation.wrote(**wrote)
    if found.faults:
        told = "; ".join(f"{fault.check}: {fault.told}" for fault in found.faults)
        remedies = "; ".join(dict.fromkeys(f.remedy for f in found.faults if f.remedy))
        raise ValueError(f"{place}: {told}. {remedies}".rstrip(". "))
    invocation.say(f"[green]{escape(place)} is sound[/]")


def _tell(findings: tuple[Finding, ...], invocation: Invocation) -> None:
    table = Table("check", "", "what was looked at", box=None, pad_edge=False)
    for finding in findings:
        told = escape(finding.told)
        if finding.remedy:
            told += f"\n[dim]{escape(finding.remedy)}[/]"
        colour = _COLOURS[finding.verdict]
        table.add_row(finding.check, f"[{colour}]{finding.verdict}[/]", told)
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
    reads="a cache (WORK/cache, or cache=…), and the target to extract sampled rows again",
    writes="WORK/doctor: findings.json, alignment.png; exit code 2 where there is a fault",
    sections=("work", "doctor", "target"),
    examples=(
        "draftsmith doctor",
        "draftsmith doctor cache=work/mine/cache-heldout doctor.rows=64",
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
