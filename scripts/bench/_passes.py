"""A decode or verify pass against the target's linear layers alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...inference.batch import Batch, PagedContext
from ...inference.config import SamplingParams
from ...inference.engine import Engine
from ...kernels.packed_linear import PackedLinear
from ...models.target import Target

REPEATS = 9
SHAPES = ((1, 1), (1, 4), (16, 1), (16, 4), (64, 1))  # sequences x rows of each
CONTEXTS = {"short": (64, 64), "long": (200, 256)}  # the least tokens, and how many more


def take_turns(
    forms: dict[str, Callable[[], Any]], repeats: int, warm: bool = True
) -> dict[str, float]:
    """The best seconds of every form; where it is to be warm, a turn of each goes before,
    uncounted."""
    best = dict.fromkeys(forms, float("inf"))
    for turn in range(repeats + warm):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            if turn >= warm:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def passes(
    target: Target, model: Any, make_engine: Callable[[int], Engine]
) -> list[dict[str, Any]]:
    """Milliseconds of passes and of their floors, by context and shape.

    Args:
        model: transformers' own, whose linear layers are the floors. make_engine: an engine of
            `target` for so many requests.
    """
    size, inner = int(target.config.hidden_size), int(target.config.intermediate_size)
    weights = [
        module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    packed = [PackedLinear(weight) for weight in weights]
    found = []
    for kind, (least, more) in CONTEXTS.items():
        engine = make_engine(64)
        lengths = [least + (37 * i) % more for i in range(64)]
        running = [
            engine.add(
                [5 + (i * 31 + j * 7) % 40_000 for j in range(n)],
                SamplingParams(max_new_tokens=150, ignore_eos=True),
            )
            for i, n in enumerate(lengths)
        ]
        while not all(sequence.decoding for sequence in running):
            engine.step()
        for sequences, rows in SHAPES:
            # The newest rows once more: their slots are theirs already.
            parts = [
                (one, one.num_computed + 1 - rows, one.tokens[-rows:])
                for one in running[:sequences]
            ]
            width = {w: torch.randn(sequences * rows, w).bfloat16() for w in (size, inner)}

            def whole(parts: Any = parts, pool: Any = engine.pool) -> None:
                batch = Batch.build(parts, target.device)
                context = PagedContext(pool, batch)
                raw = target.forward(batch.tokens, batch.positions, context)
                target.logits(target.trunk.norm(raw[target.num_layers]))

            def floor(xs: Any = width) -> None:
                for linear in packed:
                    linear(xs[linear.in_features])

            def plain(xs: Any = width) -> None:
                for weight in weights:
                    F.linear(xs[weight.shape[1]], weight)

            forms = {"pass": whole, "own_linears": floor, "torch_linears": plain}
            with torch.inference_mode():
                best = take_turns(forms, REPEATS)
            pool = engine.pool.keys[0]
            assert pool is not None
            held = 4 * target.num_layers * pool.shape[0] * pool.shape[2]  # of a token
            tokens = sum(len(one.tokens) for one in running[:sequences])
            found.append(
                {
                    "what": f"{sequences} x {rows} rows, {kind}",
                    "sequences": sequences,
                    "rows": rows,
                    "context": f"{kind}, {tokens / sequences:.0f} tokens",
                    "megabytes_of_keys": held * tokens / 1e6,
                    "milliseconds": {name: 1e3 * seconds for name, seconds in best.items()},
                    "ratio_to_own_linears": best["pass"] / best["own_linears"],
                    "ratio_to_torch_linears": best["pass"] / best["torch_linears"],
                }
            )
    return found
