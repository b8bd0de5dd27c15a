"""A marked text cut to length."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .marks import Part
from .runs import supervised_spans


def cut_part(
    part: Part, limit: int, mid_answer: str, min_supervised: int, notes: Counter[str]
) -> tuple[np.ndarray, np.ndarray] | str:
    """Cut at `limit` tokens, then behind the last supervised one: what follows teaches nothing.

    Args:
        mid_answer: keep, trim or drop, for a cut within an answer.
        min_supervised: what one answer must hold at least.
        notes: counts `truncated` and `cut_mid_answer`.
    Returns:
        tokens [n] int32 and supervised [n] bool, or why nothing is left.
    """
    tokens = np.array(part.tokens[:limit], np.int32)
    supervised = np.array(part.supervised[:limit], np.bool_)
    if not supervised.any():
        return "emptied_by_truncation"
    truncated = len(part.tokens) > limit
    within = truncated and bool(supervised[-1]) and part.supervised[limit]
    if within and mid_answer == "drop":
        return "cut_mid_answer"
    if within and mid_answer == "trim":
        whole = int(np.flatnonzero(~supervised)[-1]) + 1 if not supervised.all() else 0
        supervised[whole:] = False
        if not supervised.any():
            return "no_whole_answer"
    longest = max(end - start for start, end in supervised_spans(supervised))
    if longest < min_supervised:
        return "too_short"
    notes["truncated"] += truncated
    notes["cut_mid_answer"] += within
    end = int(np.flatnonzero(supervised)[-1]) + 1
    return tokens[:end], supervised[:end]
