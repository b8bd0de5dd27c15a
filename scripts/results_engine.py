"""What the heads of scripts/results_bench.py do in the engine: chains, trees, draft lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..inference.acceptance import PromptSet, RunResult, measure
from ..inference.config import EngineConfig, SamplingParams
from ..inference.drafters import Drafter, NgramDrafter
from ..inference.head_drafter import HeadDrafter
from ..inference.tree import TreeConfig
from ..inference.tree_drafter import TreeHeadDrafter
from ..models.heads import load_head
from ..models.target import Target, TargetConfig
from .results_bench import Bench, append, made, read

TREES = {
    "static": (5, TreeConfig(kind="static")),
    "dynamic": (4, TreeConfig(kind="dynamic", top_k=8, nodes=32)),
}
"""Name -> levels and shape."""
LENGTHS = (0, 1, 2, 3, 5)
BATCHES = (1, 4, 16)


@dataclasses.dataclass(frozen=True)
class Answers:
    """How much is decoded: heads whose names start with `only`; prompts of a set, tokens of an
    answer, requests together."""

    only: str
    temperatures: tuple[float, ...]
    limit: int
    length: int
    batch: int


def accept(bench: Bench, asked: Answers, trees: bool = False) -> None:
    """Each kept head, and prompt look-up, K = 3, to OUT/acceptance.jsonl; or each head's trees, as
    HEAD+TREE."""
    path, target = bench.out / "acceptance.jsonl", None
    done = {(r["head"], r["prompts"], r["temperature"]) for r in read(path)}
    sets = bench.prompts(asked.limit)
    for name in _names(bench, asked.only, trees):
        for prompts in sets:
            for temperature in asked.temperatures:
                if (name, prompts.name, temperature) in done:
                    continue
                target = target or Target.load(TargetConfig(source=str(bench.target)))
                params = SamplingParams(max_new_tokens=asked.length, temperature=temperature)
                drafter, depth, tree = _drafter(bench, name)
                config = EngineConfig(draft_tokens=depth, max_batch=asked.batch, tree=tree)
                result = measure(target, drafter, prompts, config, params)
                append(path, {"head": name, **_counts(result), **made()})
                calls = result.metrics.tokens_per_target_call
                print(name, prompts.name, temperature, f"{calls:.3f}", flush=True)


def lengths(bench: Bench, asked: Answers) -> None:
    """The first head whose name starts with `only`, greedy, by draft length and by how many run
    together, each in turn, to OUT/lengths.jsonl; length 0 is plain decoding."""
    path = bench.out / "lengths.jsonl"
    (name, *_) = [n for n in _names(bench, asked.only, trees=False) if n != "ngram"]
    done = {(r["head"], r["batch"], r["draft_tokens"]) for r in read(path)}
    target = Target.load(TargetConfig(source=str(bench.target)))
    sets = bench.prompts(asked.limit)
    every = PromptSet(
        "all",
        "; ".join(f"{one.name}: {one.form}" for one in sets),
        [f"{one.name}/{i}" for one in sets for i in one.ids],
        [tokens for one in sets for tokens in one.prompts],
    )
    params = SamplingParams(max_new_tokens=asked.length)
    for batch in BATCHES:
        for count in LENGTHS:
            if (name, batch, count) in done:
                continue
            drafter = _drafter(bench, name)[0] if count else None
            config = EngineConfig(draft_tokens=count, max_batch=batch)
            result = measure(target, drafter, every, config, params)
            record = {"head": name, "draft_tokens": count, **_counts(result), **made()}
            append(path, record)
            print(name, batch, count, f"{result.tokens_per_second:.1f} tokens/s", flush=True)


def _names(bench: Bench, only: str, trees: bool) -> Iterator[str]:
    heads = [folder.parent.name for folder in sorted(bench.out.glob("*/head"))]
    for name in heads if trees else ["ngram", *heads]:
        if name.startswith(only):
            yield from (f"{name}+{tree}" for tree in TREES) if trees else (name,)


def _drafter(bench: Bench, name: str) -> tuple[Drafter, int, TreeConfig]:
    """The drafter, its draft length or levels, its trees."""
    if name == "ngram":
        return NgramDrafter(), 3, TreeConfig()
    name, _, shape = name.partition("+")
    loaded = load_head(bench.out / name / "head", bench.marks)
    if not shape:
        return HeadDrafter(loaded.head, loaded.draft_ids), 3, TreeConfig()
    depth, tree = TREES[shape]
    return TreeHeadDrafter(loaded.head, loaded.draft_ids, tree), depth, tree


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
