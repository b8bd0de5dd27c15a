"""Rows as a picture: what the head learns from in green, the rest dim."""

from __future__ import annotations

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .rowfile import Rows

_SHOWN_TOKENS = 160  # of a run; what lies between its ends is left out and counted


def show(rows: Rows, tokenizer: PreTrainedTokenizerBase, n: int, ids: bool = False) -> Text:
    """The first n rows, each behind a line with its record, part and counts.

    Args:
        ids: write every token as its id, too.
    """
    shown = Text()
    for row in (rows[index] for index in range(min(n, len(rows)))):
        part = f", part {row.part}" if row.part else ""
        shown.append(f"── {row.id}", "bold")
        shown.append(
            f" (record {row.index}{part}): {len(row.tokens)} tokens, "
            f"{int(row.supervised.sum())} supervised ──\n"
        )
        borders = np.flatnonzero(np.diff(row.supervised.astype(np.int8))) + 1
        for run in np.split(np.arange(len(row.tokens)), borders):
            style = "green" if row.supervised[run[0]] else "dim"
            hidden = len(run) - _SHOWN_TOKENS
            pieces = (
                [run] if hidden <= 0 else [run[: _SHOWN_TOKENS // 2], run[-_SHOWN_TOKENS // 2 :]]
            )
            for place, piece in enumerate(pieces):
                if place:
                    shown.append(f" … {hidden} tokens … ", "italic")
                shown.append(_words(row.tokens[piece].tolist(), tokenizer, ids), style)
        shown.append("\n")
    return shown


def _words(tokens: list[int], tokenizer: PreTrainedTokenizerBase, ids: bool) -> str:
    if not ids:
        return str(tokenizer.decode(tokens))
    return "".join(f"{tokenizer.decode([token])}[{token}]" for token in tokens)
