"""What a comparison comes to, in sentences: which differences are larger than chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..inference import bootstrap
from ..inference.plots import number
from .run_record import RunRecord

Counts = dict[tuple[str, str], tuple[int, int]]
"""(prompt set, prompt) -> decoded tokens, target calls."""


def verdicts(names: Sequence[str], records: Sequence[RunRecord]) -> list[str]:
    """A sentence for each run but the first, and drafter, temperature, dtype, batch and K that it
    has in common with the first: the paired difference over all prompts of both, or why there is
    none."""
    first = _pooled(records[0])
    found = []
    for name, record in zip(names[1:], records[1:], strict=True):
        for key, counts in _pooled(record).items():
            if key[0] != "none" and key in first:
                told = _judged(counts, first[key], names[0])
                found.append(f"{name}, {_setting(key)}: {told}")
    return found


def _judged(ours: Counts, theirs: Counts, first: str) -> str:
    shared = [prompt for prompt in ours if prompt in theirs]
    if not shared:
        return f"no prompt in common with {first}, so nothing is said of the difference."
    pairs = [(ours[prompt], theirs[prompt]) for prompt in shared]
    change = bootstrap.difference(*map(np.array, zip(*pairs, strict=True)))
    over = f"over {len(shared)} prompts"
    if len(shared) < max(len(ours), len(theirs)):
        over += f" that both have (of {len(ours)} and {len(theirs)})"
    if change is None:
        return f"too few prompts or no target calls {over}: no interval."
    figures = f"{change.value:+.3f} tokens per target call [{change.low:+.3f}, {change.high:+.3f}]"
    if change.holds_zero:
        return f"within noise of {first}: {figures} {over}."
    word = "more" if change.value > 0 else "less"
    return f"{word} than {first}, beyond noise: {figures} {over}."


def _pooled(record: RunRecord) -> dict[tuple[Any, ...], Counts]:
    """Counts by prompt of all sets together, by role, temperature, dtype, batch and K."""
    found: dict[tuple[Any, ...], Counts] = {}
    for (role, prompts, *setting), counts in record.counted().items():
        pooled = found.setdefault((role, *setting), {})
        pooled |= {(prompts, prompt): pair for prompt, pair in counts.items()}
    return found


def _setting(key: tuple[Any, ...]) -> str:
    role, temperature, dtype, batch, drafts = key
    return f"{role}, T={number(temperature)}, K={drafts}, {dtype}, batch {batch}"
