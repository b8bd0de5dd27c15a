"""What each kind of head costs: a training step on the same cached rows, and decoding with it.

    python -m draftsmith.scripts.bench.families OUT [OUT.json] [work=…] [target=…] [limit=…] …

OUT holds the heads that `draftsmith.scripts.results OUT families norms` trained; further settings:
DEFAULTS. All take turns, so that what else the machine does falls on all alike:

    train     K steps over one packed batch of the cache, forward, backward and AdamW, bf16
              autocast; tokens of the batch over the median of REPEATS
    decode    `limit` prompts of every set, greedy, one request at a time, K drafts a step; tokens
              over seconds of all sets, prefill included; `plain` drafts nothing
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ...data.batches import BatchPlan
from ...inference.acceptance import measure
from ...inference.config import EngineConfig, SamplingParams
from ...inference.drafters import Drafter, NgramDrafter
from ...inference.head_drafter import HeadDrafter
from ...inference.report import markdown_table
from ...models.files import atomic_write_json
from ...models.heads import load_head
from ...models.target import Target, TargetConfig
from ...train.objective import Objective
from ..results_bench import Bench

STEPS = 3
REPEATS = 5
HEADS = ("fam-mtp", "fam-mtp-modules", "abl-all", "fam-eagle3", "fam-medusa")
DEFAULTS = {
    "work": "work/comparisons",
    "target": "work/target/smollm2",
    "limit": "4",  # prompts of a set
    "length": "48",  # tokens of an answer
    "tokens": "1536",  # of a training batch
}


def training(bench: Bench, tokens: int) -> dict[str, float]:
    """Trained tokens per second by head."""
    cache = bench.caches["found"]
    batch = BatchPlan(cache, tokens_per_batch=tokens, seed=0).batch(0)
    steps, seconds = {}, {name: [] for name in HEADS}
    for name in HEADS:
        loaded = load_head(bench.out / name / "head", bench.marks)
        head = loaded.head.train().requires_grad_(True)
        objective = Objective(
            bench.trunk,
            [0.8**k for k in range(STEPS)],
            boundaries=cache.boundaries,
            draft_ids=loaded.draft_ids,
            dtype=torch.bfloat16,
        )
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-5)

        def step(head=head, objective=objective, optimizer=optimizer) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = objective(head, batch, STEPS)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

        steps[name] = step
    for turn in range(REPEATS + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn >= 2:  # what is compiled is compiled by then
                seconds[name].append(time.perf_counter() - began)
    return {
        name: batch.tokens.shape[0] / statistics.median(times) for name, times in seconds.items()
    }


def decoding(bench: Bench, limit: int, length: int) -> dict[str, dict[str, float]]:
    """Tokens per second and per target call by drafter."""
    target = Target.load(TargetConfig(source=str(bench.target)))
    drafters: dict[str, Drafter | None] = {"plain": None, "ngram": NgramDrafter()}
    for name in HEADS:
        loaded = load_head(bench.out / name / "head", bench.marks)
        drafters[name] = HeadDrafter(loaded.head, loaded.draft_ids)
    config = EngineConfig(draft_tokens=STEPS, max_batch=1)
    params = SamplingParams(max_new_tokens=length)
    sums = {name: [0.0, 0.0, 0, 0] for name in drafters}
    for prompts in bench.prompts(limit):
        for name, drafter in drafters.items():
            run = measure(target, drafter, prompts, config, params)
            counts = run.metrics.decode_tokens, run.metrics.target_calls
            for index, amount in enumerate((run.tokens, run.seconds, *counts)):
                sums[name][index] += amount
    return {
        name: {"tokens_per_second": tokens / seconds, "tokens_per_target_call": decoded / calls}
        for name, (tokens, seconds, decoded, calls) in sums.items()
    }


def main(arguments: list[str]) -> int:
    """Print the table; write JSON where a path is given."""
    places = [word for word in arguments if "=" not in word]
    asked = DEFAULTS | dict(word.split("=", 1) for word in arguments if "=" in word)
    if not places or asked.keys() != DEFAULTS.keys():
        print(__doc__, f"\nsettings: {DEFAULTS}", file=sys.stderr)
        return 2
    bench = Bench(Path(asked["work"]), Path(asked["target"]), Path(places[0]))
    trained = training(bench, int(asked["tokens"]))
    decoded = decoding(bench, int(asked["limit"]), int(asked["length"]))
    plain, rows = decoded["plain"]["tokens_per_second"], []
    for name, figures in decoded.items():
        head = bench.out / name / "head" / "head.safetensors"
        rows.append(
            [
                name,
                f"{trained[name]:,.0f}" if name in trained else "",
                f"{figures['tokens_per_second']:.1f}",
                f"{figures['tokens_per_second'] / plain:.2f}",
                f"{figures['tokens_per_target_call']:.3f}",
                f"{head.stat().st_size / 1e6:.1f}" if head.exists() else "",
            ]
        )
    header = ["drafter", "trained tokens/s", "decoded tokens/s", "of plain", "tokens a call", "MB"]
    print(markdown_table(header, rows))
    if len(places) > 1:
        result: dict[str, Any] = {"train": trained, "decode": decoded, "settings": asked}
        atomic_write_json(places[1], result | {"threads": torch.get_num_threads()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
