"""One cache, one target, one process: where the trainings of scripts/results_runs.py happen."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.backend import byte_token_ids
from ..data.batches import BatchPlan, RowSource
from ..data.cache import Cache
from ..data.probes import state_rms
from ..data.prompts import load_prompts
from ..data.rows import Rows
from ..data.vocabulary import draft_vocabulary
from ..inference.acceptance import PromptSet
from ..models.heads import build_head, save_head
from ..models.provenance import provenance
from ..models.skeleton import folder_config
from ..models.target import eos_ids, fingerprint, load_tokenizer
from ..models.trunk import Trunk
from ..train.config import TrainConfig
from ..train.loop import Trainer
from ..train.validation import Validator
from .results_runs import Run

VOCABULARY = 8192
TOKENS = 1536
"""Of a batch."""
PROMPTS = ("humaneval", "mt_bench", "heldout")


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
        made()  # of the code that runs, whatever is checked out meanwhile
        self.config = folder_config(target)
        self.marks = fingerprint(target)
        self.trunk = Trunk.load(target, torch.bfloat16)
        self.caches = {"found": self._cache("rows", "cache", "train")}
        held = self._cache("rows", "cache-heldout", "heldout")
        plan = BatchPlan(held, tokens_per_batch=TOKENS)
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
        cache, epoch = self.source(run.answers), {}
        if run.tokens is not None:
            cache = First(cache, run.tokens)
            batches = run.epochs * BatchPlan(cache, tokens_per_batch=TOKENS).num_batches()
            epoch = {"max_steps": batches, "unroll_warmup": batches // 10}
        cfg = TrainConfig(
            **{
                "draft_vocab_size": VOCABULARY,
                "tokens_per_batch": TOKENS,
                "validate_every": 0,
                "checkpoint_every": 0,
                **run.train,
                **epoch,
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
        told = {**run.train, **epoch, **({"loss": cfg.loss.kind} if "loss" in run.train else {})}
        settings = dataclasses.asdict(run) | {"train": told}
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
            **made(),
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


@functools.cache
def made() -> dict[str, Any]:
    """What a line says of its making: command, commit, threads, processor, when the process
    began to ask."""
    record = provenance({})
    return {
        "command": record["command"],
        "git": record["git"],
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "time": record["time"],
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none where it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, record: dict[str, Any]) -> None:
    """One line more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
