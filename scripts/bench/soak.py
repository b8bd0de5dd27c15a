"""The engine under constant want of pages: thousands of requests that join, are cancelled, forked,
preempted and begin where others began, on a toy target whose pool holds few of them.

Every drafter has its share of the requests. All free pages are NaN. Each answer is held against
that of a plain engine with room for all and no reuse (float64; greedy, or coupled to its seed), a
cancelled one against the beginning of it; at the end no page may be in use.

    python -m draftsmith.scripts.bench.soak [REQUESTS [OUT.json]]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...inference.config import EngineConfig, SamplingParams
from ...inference.draft_lm import DraftLM, DraftLMDrafter
from ...inference.drafters import Drafter, NgramDrafter
from ...inference.engine import Engine
from ...inference.head_drafter import HeadDrafter
from ...inference.sequence import Sequence
from ...models.files import atomic_write_json
from ...models.heads import HeadConfig, build_head
from ...models.target import Target, TargetConfig

VOCABULARY = 96
LIMITED = EngineConfig(
    draft_tokens=3, max_batch=6, max_step_tokens=24, page_size=4, pool_tokens=176, poison=True
)
ROOMY = EngineConfig(
    draft_tokens=0, max_batch=32, max_step_tokens=1024, pool_tokens=8192, prefix_reuse=False
)
DRAFTERS = ("mtp", "mtp of 3 modules", "eagle3", "draft-lm", "ngram", "none")


@dataclass(frozen=True)
class Wish:
    """A request before it is made."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    cancel_after: int | None
    """Steps it is given."""
    fork: bool
    """Made from the request before it, with its prompt, where that one is alive."""


def wishes(count: int, chance: random.Random) -> list[Wish]:
    """Random requests, most of which begin with one of a few texts."""
    shared = [_text(chance, chance.randint(3, 60)) for _ in range(6)]
    found: list[Wish] = []
    for index in range(count):
        fork = bool(found) and chance.random() < 0.08
        begin = chance.choice(shared)
        begin = begin[: chance.randint(0, len(begin))] if chance.random() < 0.3 else begin
        prompt = found[-1].prompt if fork else begin + _text(chance, chance.randint(1, 16))
        sampled = chance.random() < 0.4
        params = SamplingParams(
            max_new_tokens=chance.randint(1, 40),
            temperature=0.8 if sampled else 0.0,
            seed=index,
            coupled=True,
            ignore_eos=chance.random() < 0.5,
            stop_ids=(chance.randrange(VOCABULARY),) if chance.random() < 0.3 else (),
        )
        cancel = chance.randint(0, 30) if chance.random() < 0.1 else None
        found.append(Wish(prompt, params, chance.choice((0, 0, 0, 1, 2)), cancel, fork))
    return found


def soak(name: str, target: Target, count: int, seed: int) -> dict[str, Any]:
    """Run `count` requests with one drafter and check them.

    Raises:
        AssertionError: an answer differs, or a page is not given back.
    """
    chance = random.Random(seed)
    asked = wishes(count, chance)
    engine = Engine(target, LIMITED, drafter(name, target))
    start = time.perf_counter()
    made = _serve(engine, asked, chance)
    seconds = time.perf_counter() - start
    _require_all_free(engine)
    roomy = Engine(target, ROOMY)
    right = [roomy.add(wish.prompt, wish.params) for wish in asked]
    while not roomy.scheduler.idle:
        roomy.step()
    for ours, plain in zip(made, right, strict=True):
        assert ours.finish_reason is not None
        told = (
            plain.output[: len(ours.output)] if ours.finish_reason == "cancelled" else plain.output
        )
        assert ours.output == told, (name, ours.id, ours.output, plain.output)
    counts = engine.scheduler.counts
    return {
        "drafter": name,
        "requests": count,
        "requests_per_second": count / seconds,
        "tokens": sum(len(sequence.output) for sequence in made),
        "cancelled": sum(sequence.finish_reason == "cancelled" for sequence in made),
        "tokens_per_target_call": engine.metrics.tokens_per_target_call,
        "admissions": counts.admissions,
        "preemptions": counts.preemptions,
        "prefix_hits": counts.hits,
        "reused_tokens": counts.reused_tokens,
    }


def _serve(engine: Engine, asked: list[Wish], chance: random.Random) -> list[Sequence]:
    """Make the requests as room comes, so that some always wait; cancel those that are to be."""
    made: list[Sequence] = []
    leaving: dict[int, list[Sequence]] = {}
    step = 0
    while len(made) < len(asked) or not engine.scheduler.idle:
        while len(made) < len(asked) and len(engine.scheduler.waiting) < chance.randint(0, 12):
            wish = asked[len(made)]
            if wish.fork:
                made.append(engine.fork(made[-1], wish.params, priority=wish.priority))
            else:
                made.append(engine.add(wish.prompt, wish.params, priority=wish.priority))
            if wish.cancel_after is not None:
                leaving.setdefault(step + wish.cancel_after, []).append(made[-1])
        for sequence in leaving.pop(step, []):
            engine.cancel(sequence)
        engine.step()
        step += 1
        held = sum(len(sequence.pages) for sequence in engine.scheduler.running)
        assert sum(engine.scheduler.allocator.users) == held
    return made


def _require_all_free(engine: Engine) -> None:
    """Every page without users, NaN where it keeps no prefix, and no drafter's memory left."""
    scheduler, size = engine.scheduler, engine.config.page_size
    assert not any(scheduler.allocator.users)
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages
    assert not getattr(engine.drafter, "_carried", None)
    for page in range(scheduler.allocator.num_pages):
        if page not in scheduler.cache:
            for tensor in [*engine.pool.keys, *engine.pool.values]:
                slots = None if tensor is None else tensor[:, page * size : (page + 1) * size]
                assert slots is None or bool(slots.isnan().all()), page


def toy_target(folder: Path, seed: int, layers: int = 2) -> Target:
    """A random Llama in float64."""
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(shape).save_pretrained(folder)
    return Target.load(TargetConfig(source=str(folder), dtype="float64", device="cpu"))


def drafter(name: str, target: Target) -> Drafter | None:
    """A drafter for the toy; heads as they start, and the target itself as a draft LM."""
    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter()
    if name == "draft-lm":
        return DraftLMDrafter(DraftLM.paired(target, target))
    config = {
        "mtp": HeadConfig(),
        "mtp of 3 modules": HeadConfig(modules=3),
        "eagle3": HeadConfig("eagle3", boundaries=(0, 1, 2)),
    }[name]
    return HeadDrafter(build_head(config, target.folder, 1.0).double(), None)


def _text(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(VOCABULARY - 1) for _ in range(length)]


def main() -> int:
    """Print a line for each drafter; write JSON where a path is given."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    shares = [count * (i + 1) // len(DRAFTERS) - count * i // len(DRAFTERS) for i in range(6)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        target = toy_target(Path(folder) / "target", 0)
        for index, (name, share) in enumerate(zip(DRAFTERS, shares, strict=True)):
            results.append(result := soak(name, target, share, index))
            print(
                f"{name:<17} {result['requests']} requests, "
                f"{result['requests_per_second']:.1f} a second, "
                f"{result['preemptions']} preemptions, {result['prefix_hits']} prefix hits of "
                f"{result['admissions']} admissions ({result['reused_tokens']} rows), "
                f"{result['cancelled']} cancelled, "
                f"{result['tokens_per_target_call']:.2f} tokens a call",
                flush=True,
            )
    print("all answers are those of a pool without limit; every page was given back")
    if len(sys.argv) > 2:
        atomic_write_json(sys.argv[2], {"drafters": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
