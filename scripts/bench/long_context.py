"""Memory and time of a training step on one long row, by its length and by how the unroll is run.

The head is that of a 135M target (H = 576, 9 query heads, 3 key-value heads, intermediate size
1536), its draft vocabulary 8,192 of 49,152 ids; states are random, three tokens of four supervised,
bf16 autocast, AdamW. Each case runs in a process of its own: one step on a short row, then one on
the long row.

    peak    growth of the resident set over that step: ru_maxrss less what was resident before
    a token peak over the row's tokens
    seconds of that step, forward, backward and optimiser

`whole` keeps the activations of all rows, `chunks` those of CHUNK rows (train.chunk_tokens). With a
window, the head's layer has a sliding window of so many tokens, without which a row of 64k tokens
is hours of attention on a CPU; everything else is computed as without.

python -m draftsmith.scripts.bench.long_context [out=FILE.json] [lengths=4096,16384] [steps=1,3]
    [window=4096]
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from functools import partial
from pathlib import Path

import torch
from transformers import MistralConfig

from ...models.files import atomic_write_json
from ...models.heads.config import HeadConfig
from ...models.heads.mtp import MTPHead
from ...train.row_chunks import unroll_in_chunks
from ...train.unroll import unroll
from .train import DRAFT_VOCABULARY, VOCABULARY, Case

CHUNK = 1024
FORMS = {"whole": unroll, "chunks": partial(unroll_in_chunks, rows=CHUNK)}
_WARM = 256


def measure(form: str, length: int, steps: int, window: int | None) -> dict[str, float]:
    """Peak growth in MiB (Linux counts ru_maxrss in KiB), and seconds."""
    case = Case(length, DRAFT_VOCABULARY)
    shape = MistralConfig(  # Llama's layer, and the window
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        sliding_window=window,
    )
    case.head = MTPHead(HeadConfig(), shape)
    case.optimizer = torch.optim.AdamW(case.head.parameters(), lr=1e-4)
    case.objective.unroll = FORMS[form]
    long, case.batch = case.batch, Case(_WARM, DRAFT_VOCABULARY).batch
    _step(case, steps)
    case.batch = long
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    began = time.perf_counter()
    _step(case, steps)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - resident / 2**20
    return {"peak_mib": peak, "seconds": seconds}


def _step(case: Case, steps: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = case.objective(case.head, case.batch, steps)
    case.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    case.optimizer.step()


def main(arguments: list[str]) -> int:
    """Measure every length, K and form, print a table, and write it as JSON where a path is
    given."""
    given = dict(argument.split("=", 1) for argument in arguments)
    lengths = [int(x) for x in given.get("lengths", "4096,16384").split(",")]
    window = int(given["window"]) if "window" in given else None
    title = f"one row, chunks of {CHUNK}, window {window}; {torch.get_num_threads()} threads"
    print(f"{title}, torch {torch.__version__}")
    print(f"{'K':>2} {'tokens':>7}  {'form':<7}{'peak MiB':>9}{'KiB a token':>12}{'seconds':>9}")
    results = []
    context = multiprocessing.get_context("fork")
    for steps in [int(x) for x in given.get("steps", "1,3").split(",")]:
        for length in lengths:
            for form in FORMS:
                with context.Pool(1) as pool:
                    found = pool.apply(measure, (form, length, steps, window))
                token = found["peak_mib"] * 1024 / length
                figures = f"{found['peak_mib']:>9.0f}{token:>12.1f}{found['seconds']:>9.1f}"
                print(f"{steps:>2} {length:>7}  {form:<7}{figures}", flush=True)
                case = {"steps": steps, "length": length, "window": window, "form": form}
                results.append(case | found)
    if "out" in given:
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        atomic_write_json(Path(given["out"]), machine | {"chunk": CHUNK, "cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
