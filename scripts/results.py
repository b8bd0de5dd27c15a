"""The comparisons of docs/comparisons.md: many short trainings over one cache, in one process.

    python -m draftsmith.scripts.results OUT PHASE... [--work WORK] [--target FOLDER]

A phase is a set of runs that differ in one thing. Each run trains over WORK's cache, is validated
on all of its held-out rows, and adds one line to OUT/results.jsonl; a run that has its line is left
out, so the same command goes on where it was stopped. `accept` lets every kept head draft in the
engine and writes OUT/acceptance.jsonl; `page` prints the tables. `WORK` needs rows and caches with
the boundaries that eagle3 reads as well:

    draftsmith prepare work=WORK && draftsmith dump work=WORK data.dump.boundaries=[2,15,27,30]

    select    norms x two starts x three rates, one unrolled step, short: which setting suits which
    norms     each choice of norms at its best setting
    families  every kind of head                    context  engine or causal, 3 and 5 steps
    losses    what is minimised                     answers  the source's, or the target's
                                                             own; as many tokens of either
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from ..data.backend import byte_token_ids
from ..data.batches import BatchPlan, RowSource
from ..data.cache import Cache
from ..data.probes import state_rms
from ..data.prompts import load_prompts
from ..data.rows import Rows
from ..data.vocabulary import draft_vocabulary
from ..inference.acceptance import PromptSet, RunResult, measure
from ..inference.config import EngineConfig, SamplingParams
from ..inference.drafters import Drafter, NgramDrafter
from ..inference.head_drafter import HeadDrafter
from ..kernels.losses import LossConfig
from ..models.heads import HeadConfig, InitConfig, NormConfig, build_head, load_head, save_head
from ..models.target import Target, TargetConfig, eos_ids, fingerprint, load_tokenizer
from ..models.trunk import Trunk
from ..train.config import TrainConfig
from ..train.loop import Trainer
from ..train.validation import Validator
from .results_page import curves, page

VOCABULARY = 8192
NONE = NormConfig(embedding=False, hidden=False, attention_input=False, output=False)
NORMS = {
    "published": NONE,
    **{
        field.name: dataclasses.replace(NONE, **{field.name: True})
        for field in dataclasses.fields(NormConfig)
    },
    "all": NormConfig(),
}
STARTS = {
    "target": InitConfig(),
    "random": InitConfig(layer="random", projection="random"),
}
RATES = (2e-3, 5e-4, 6e-3)
SHORT = {"steps": 1, "max_steps": 80}
LONG = {"steps": 3, "max_steps": 160, "unroll_warmup": 50}
LOSSES = ("ce", "tv", "lk-lambda")
PROMPTS = ("humaneval", "mt_bench", "heldout")


@dataclass(frozen=True)
class Run:
    """One training. train: what differs from `Bench.train`'s settings. answers: see `Bench.source`.
    kept: whether its head is written, for the engine."""

    name: str
    head: HeadConfig
    train: dict[str, Any]
    answers: str = "found"
    kept: bool = True


def runs(phase: str, done: list[dict[str, Any]]) -> Iterator[Run]:
    """The runs of a phase; `done` are the lines of results.jsonl, from which `norms` takes each
    choice's best setting."""
    mtp = HeadConfig(kind="mtp")
    if phase == "select":
        for rate in RATES:
            for start, init in STARTS.items():
                for norms, chosen in NORMS.items():
                    head = HeadConfig(kind="eagle", norms=chosen, init=init)
                    name = f"sel-{norms}-{start}-{rate}"
                    yield Run(name, head, {**SHORT, "lr": rate}, kept=False)
    elif phase == "norms":
        for norms, chosen in NORMS.items():
            start, rate = best_setting(norms, done)
            head = HeadConfig(kind="eagle", norms=chosen, init=STARTS[start])
            yield Run(f"abl-{norms}", head, {**LONG, "lr": rate})
    elif phase == "families":
        alone = {**LONG, "unroll_warmup": 0}
        yield Run("fam-mtp", mtp, LONG)
        yield Run("fam-mtp-modules", HeadConfig(kind="mtp", modules=3), alone)
        yield Run("fam-eagle3", HeadConfig(kind="eagle3"), LONG)
        yield Run("fam-medusa", HeadConfig(kind="medusa", modules=3, norms=NONE), alone)
    elif phase == "context":
        for context, steps in (("causal", 3), ("engine", 5), ("causal", 5)):  # engine, 3: fam-mtp
            settings = {**LONG, "steps": steps, "context": context}
            yield Run(f"ctx-{context}-{steps}", mtp, settings)
    elif phase == "losses":
        for kind in LOSSES:
            yield Run(f"loss-{kind}", mtp, {**LONG, "loss": LossConfig(kind=kind)})
    elif phase == "answers":
        for answers in ("equal", "regenerated"):
            yield Run(f"ans-{answers}", mtp, LONG, answers=answers)
    else:
        raise ValueError(
            f"phase {phase!r}: choose select, norms, families, context, losses, "
            "answers, accept or page"
        )


def best_setting(norms: str, done: list[dict[str, Any]]) -> tuple[str, float]:
    """Start and rate of the lowest held-out loss among the short runs of a choice of norms."""
    tried = [r for r in done if r["name"].startswith(f"sel-{norms}-") and "figures" in r]
    if len(tried) < len(STARTS) * len(RATES):
        raise ValueError(f"{norms}: {len(tried)} of its short runs are done; run `select` first")
    best = min(tried, key=lambda record: record["figures"]["loss"])
    return best["name"].split("-")[2], best["train"]["lr"]


class First:
    """The first rows of a source, as many as hold `tokens` tokens; see `data.batches.RowSource`."""

    def __init__(self, source: RowSource, tokens: int) -> None:
        self.source = source
        self.count = int((source.lengths.cumsum() <= tokens).sum())
        self.lengths = source.lengths[: self.count]
        self.ids = source.ids[: self.count]
        self.boundaries = source.boundaries

    def supervised_counts(self, steps: int) -> np.ndarray:
        """See `RowSource`."""
        return self.source.supervised_counts(steps)[: self.count]

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """See `RowSource`."""
        return self.source.gather(indices)


class Bench:
    """Cache, target and held-out rows that all runs share."""

    def __init__(self, work: Path, target: Path, out: Path) -> None:
        self.work, self.target, self.out = work, target, out
        self.config = AutoConfig.from_pretrained(target)
        self.marks = fingerprint(target)
        self.trunk = Trunk.load(target, torch.bfloat16)
        self.caches = {"found": self._cache("rows", "cache", "train")}
        held = self._cache("rows", "cache-heldout", "heldout")
        plan = BatchPlan(held, tokens_per_batch=1536)
        self.held = [plan.batch(index) for index in range(plan.num_batches())]
        self.rms = state_rms(self.caches["found"])
        forced = eos_ids(target, self.config) | byte_token_ids(load_tokenizer(target))
        rows = Rows.open(work / "rows")
        self.ids = draft_vocabulary(rows, VOCABULARY, forced, self.trunk.vocab_size).ids

    def source(self, answers: str) -> RowSource:
        """The rows to learn from; `equal` are those of the source's own answers, as many tokens as
        the regenerated cache has."""
        if answers != "found" and "regenerated" not in self.caches:
            self.caches["regenerated"] = self._cache(
                "rows-regenerated", "cache-regenerated", "train"
            )
        if answers != "equal":
            return self.caches[answers]
        return First(self.caches["found"], int(self.caches["regenerated"].lengths.sum()))

    def _cache(self, rows: str, cache: str, split: str) -> Cache:
        expect = {**self.marks, "rows_key": Rows.open(self.work / rows, split).key, "split": split}
        return Cache.open(self.work / cache, expect)

    def train(self, run: Run) -> dict[str, Any]:
        """The line of one run: its settings and figures, or the error that ended it."""
        cache = self.source(run.answers)
        cfg = TrainConfig(
            **{
                "draft_vocab_size": VOCABULARY,
                "tokens_per_batch": 1536,
                "validate_every": 0,
                "checkpoint_every": 0,
                **run.train,
            }
        )
        torch.manual_seed(cfg.seed)
        head = build_head(run.head, self.target, self.rms, self.config, self.ids)
        folder = self.out / run.name
        plan = BatchPlan(cache, tokens_per_batch=cfg.tokens_per_batch, seed=cfg.seed)
        trainer = Trainer(
            head,
            self.trunk,
            plan,
            cfg,
            folder,
            boundaries=cache.boundaries,
            draft_ids=self.ids,
            progress=sys.stderr.isatty(),
        )
        trainer.validate = Validator(trainer.objective, self.held)
        began = time.perf_counter()
        settings = dataclasses.asdict(run) | {
            "train": {**run.train, **({"loss": cfg.loss.kind} if "loss" in run.train else {})}
        }
        try:
            result = trainer.run()
        except ValueError as error:  # a loss that is not finite is a result, too
            return settings | {"error": str(error)}
        if run.kept:
            save_head(
                folder / "head",
                trainer.head,
                target_fingerprint=self.marks,
                draft_ids=self.ids,
                trained_length=int(cache.lengths.max()),
                config={},
                training={"state_rms": self.rms, "seed": cfg.seed},
            )
        return settings | {
            "figures": result.validation,
            "tokens": result.tokens,
            "seconds": time.perf_counter() - began,
            "params": sum(p.numel() for p in trainer.head.parameters()),
        }

    def prompts(self, limit: int) -> list[PromptSet]:
        """The three sets, through the chat template."""
        tokenizer, sets = load_tokenizer(self.target), []
        for name in PROMPTS:
            rows = self.work / "rows" if name == "heldout" else None
            found = load_prompts(name, limit=limit, tokenizer=tokenizer, rows=rows)
            ids, tokens = [p.id for p in found], [p.tokens for p in found]
            sets.append(PromptSet(name, found[0].form, ids, tokens))
        return sets


def accept(
    bench: Bench, only: str, temperatures: list[float], limit: int, length: int, batch: int
) -> None:
    """Each kept head (and prompt look-up) whose name starts with `only` in the engine, K = 3."""
    path, target = bench.out / "acceptance.jsonl", None
    done = {(r["head"], r["prompts"], r["temperature"]) for r in read(path)}
    heads = ["ngram", *(folder.parent.name for folder in sorted(bench.out.glob("*/head")))]
    sets = bench.prompts(limit)
    for name in (name for name in heads if name.startswith(only)):
        for prompts in sets:
            for temperature in temperatures:
                if (name, prompts.name, temperature) in done:
                    continue
                target = target or Target.load(TargetConfig(source=str(bench.target)))
                params = SamplingParams(max_new_tokens=length, temperature=temperature)
                config = EngineConfig(draft_tokens=3, max_batch=batch)
                result = measure(target, _drafter(bench, name), prompts, config, params)
                append(path, {"head": name, **_counts(result)})
                print(name, prompts.name, temperature, f"{_calls(result):.3f}", flush=True)


def _drafter(bench: Bench, name: str) -> Drafter:
    if name == "ngram":
        return NgramDrafter()
    loaded = load_head(bench.out / name / "head", bench.marks)
    return HeadDrafter(loaded.head, loaded.draft_ids)


def _calls(result: RunResult) -> float:
    return result.metrics.tokens_per_target_call


def _counts(result: RunResult) -> dict[str, Any]:
    kept = (
        "prompts",
        "temperature",
        "batch",
        "tokens_per_target_call",
        "accepted_per_position",
        "drafted_per_position",
        "by_context",
        "per_prompt",
        "tokens",
        "seconds",
    )
    report = result.to_json()
    return {name: report[name] for name in kept}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none where it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, record: dict[str, Any]) -> None:
    """One line more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def main(arguments: list[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("phases", nargs="+")
    parser.add_argument("--work", type=Path, default=Path("work/comparisons"))
    parser.add_argument("--target", type=Path, default=Path("work/target/smollm2"))
    parser.add_argument("--only", default="", help="accept: heads whose names start so")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=16, help="prompts of a set")
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--batch", type=int, default=8, help="requests together")
    asked = parser.parse_args(arguments)
    results, bench = asked.out / "results.jsonl", None
    for phase in asked.phases:
        if phase == "page":
            print(page(read(results), read(asked.out / "acceptance.jsonl")))
            for prefix in ("abl-", "fam-"):
                curves(asked.out, read(results), prefix)
            continue
        bench = bench or Bench(asked.work, asked.target, asked.out)
        if phase == "accept":
            sizes = asked.limit, asked.length, asked.batch
            accept(bench, asked.only, asked.temperatures, *sizes)
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
