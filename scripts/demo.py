"""`draftsmith demo`: prepare, dump, train, evaluate and export on a small real model, on a CPU, in
minutes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ..conf.schema import Config
from .app import Invocation, Verb
from .artifacts import Artifacts
from .dump import caches
from .evaluate import evaluate, reusable
from .export import export
from .prepare import rows
from .report_shown import show
from .train import train


def run(config: Config, invocation: Invocation) -> None:
    """The whole way; each stage reuses what is valid and says so."""
    stages: list[tuple[str, Callable[[], object]]] = [
        ("prepare", lambda: rows(config, invocation)),
        ("dump", lambda: caches(config, invocation)),
        ("train", lambda: train(config, invocation)),
        ("evaluate", lambda: _report(config, invocation)),
        ("export", lambda: export(config, invocation)),
    ]
    spent: list[tuple[str, float]] = []
    for number, (name, work) in enumerate(stages, 1):
        invocation.console.rule(f"{number}/{len(stages)} {name}", align="left")
        start = time.perf_counter()
        work()
        spent.append((name, time.perf_counter() - start))
        invocation.say(f"[dim]{name}: {spent[-1][1]:.0f} s[/]")
    invocation.console.rule("report", align="left")
    artifacts = Artifacts.of(config)
    report = reusable(config)
    assert report is not None
    show(report, invocation)
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent)
    invocation.say(f"times: {times}; {sum(seconds for _, seconds in spent):.0f} s in all")
    plots = sorted(artifacts.work.glob("*.png"))
    invocation.wrote(
        report=artifacts.work / "report.html",
        markdown=artifacts.work / "report.md",
        numbers=artifacts.work / "report.json",
        head=artifacts.head,
        export=artifacts.exported(config.export.layouts[0], config.export.folder),
        **{plot.stem: plot for plot in plots},
    )
    invocation.next("generate")


def _report(config: Config, invocation: Invocation) -> None:
    """The acceptance report, measured unless the one that is there has the same key."""
    if reusable(config) is None:
        evaluate(config, invocation)
    else:
        invocation.say("reused: report (key matches)")


VERB = Verb(
    name="demo",
    task=run,
    reads="packages alone: SmolLM2-135M-Instruct, ShareGPT, HumanEval, MT-bench",
    writes="work/demo: rows/, cache/, train/, export/, report.json, report.md, report.html, *.png",
    sections=(
        "work",
        "data.rows.max_records",
        "data.dump.max_tokens",
        "train",
        "evaluate",
        "engine",
    ),
    examples=(
        "draftsmith demo",
        "draftsmith demo train.max_steps=2000",
        "draftsmith demo experiment=smollm2-long",
    ),
    kept=(
        "finished stages, whole shards and checkpoints are kept, and the same command goes on "
        "from them"
    ),
    defaults=("experiment=demo",),
)


def main() -> int:
    """`python -m draftsmith.scripts.demo`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
