"""The comparisons of docs/comparisons.md: many short trainings over one cache, in one process.

    python -m draftsmith.scripts.results OUT PHASE... [--work WORK] [--target FOLDER]

A phase is a set of runs that differ in one thing. Each run trains over WORK's cache, is validated
on all of its held-out rows, and adds one line to OUT/results.jsonl, which also names the commit,
the command and the machine; a run that has its line is left out, so the same command goes on where
it was stopped. `page` prints the tables. `WORK` needs rows and caches with the boundaries that
eagle3 reads as well:

    draftsmith prepare work=WORK && draftsmith dump work=WORK data.dump.boundaries=[2,15,27,30]

    select    norms x two starts x three rates, one unrolled step, short: which setting suits which
    norms     each choice of norms at its best setting
    families  every kind of head                    context  engine or causal, 3 and 5 steps
    losses    what is minimised                     answers  the source's, or the target's
                                                             own; as many tokens of either
    data      eagle3 on an eighth, a quarter, a half million tokens once, and on the half four times

and in the engine, with every head that is kept (or those that --only names):

    accept    chains of three drafts                trees    EAGLE's tree and EAGLE-2's
    lengths   tokens per second of one head by draft length and batch size
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .results_bench import Bench, append, read
from .results_engine import Answers, accept, lengths
from .results_page import curves, page
from .results_runs import runs


def main(arguments: list[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("phases", nargs="+")
    parser.add_argument("--work", type=Path, default=Path("work/comparisons"))
    parser.add_argument("--target", type=Path, default=Path("work/target/smollm2"))
    parser.add_argument("--only", default="", help="heads whose names start so")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=16, help="prompts of a set")
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--batch", type=int, default=8, help="requests together")
    asked = parser.parse_args(arguments)
    results, bench = asked.out / "results.jsonl", None
    for phase in asked.phases:
        if phase == "page":
            found = (read(asked.out / f"{name}.jsonl") for name in ("acceptance", "lengths"))
            print(page(read(results), *found))
            for prefix in ("abl-", "fam-", "data-"):
                curves(asked.out, read(results), prefix)
            continue
        bench = bench or Bench(asked.work, asked.target, asked.out)
        if phase in ("accept", "trees", "lengths"):
            answers = Answers(
                asked.only, tuple(asked.temperatures), asked.limit, asked.length, asked.batch
            )
            if phase == "lengths":
                lengths(bench, answers)
            else:
                accept(bench, answers, trees=phase == "trees")
            continue
        for run in runs(phase, read(results)):
            if run.name not in {record["name"] for record in read(results)}:
                record = bench.train(run)
                append(results, record)
                print(
                    run.name, record.get("error") or f"{record['figures']['loss']:.4f}", flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
