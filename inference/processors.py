"""What acts on a row's logits before the temperature: mask, bias, penalties, each row with its own
text.

    mask         -infinity where the token may not follow
    logit_bias   z + bias
    repetition   z / r where z > 0, z r elsewhere, of tokens in prompt or output
    frequency    z - f * (occurrences in the output)
    presence     z - p where it occurs in the output

The order and the formulae are vLLM's (repetition as in transformers). A speculated row's output is
the request's own and the drafts in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .sequence import Sequence
from .upload import upload


class Row(NamedTuple):
    """What a row of logits follows: a request's tokens, then drafts that nobody judged yet."""

    sequence: Sequence
    drafts: list[int]


def row_logits(logits: Tensor, rows: Rows[Row], ids: Tensor | None = None) -> Tensor:
    """Mask, bias and penalties.

    Args:
        logits: [n, W] float32 or float64. rows: [n]. ids: [W] ascending target ids of a drafter's
            columns, None when the columns are 0 .. W-1.
    Returns:
        [n, W]; `logits` itself where no request asks for anything.
    Raises:
        ValueError: a mask of the wrong shape, or one that lets nothing follow.
    """
    if not any(row.sequence.params.edits_logits for row in rows):
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    _mask(logits, rows, ids)
    _bias(logits, rows, ids)
    _penalise(logits, rows, ids)
    return logits


def _mask(logits: Tensor, rows: Rows[Row], ids: Tensor | None) -> None:
    asked = _Masks(None if ids is None else ids.cpu())
    found = [(index, asked.columns(row, logits.shape[1])) for index, row in enumerate(rows)]
    masked = [(index, columns) for index, columns in found if columns is not None]
    if masked:
        at = upload([index for index, _ in masked], logits.device)
        allowed = torch.stack([columns for _, columns in masked]).to(logits.device)
        logits[at] = logits[at].masked_fill(~allowed, float("-inf"))


class _Masks:
    """The answers of the requests' masks, each text asked once."""

    def __init__(self, ids: Tensor | None) -> None:
        self.ids = ids
        self._known: dict[tuple[Sequence, tuple[int, ...]], Tensor] = {}

    def columns(self, row: Row, width: int) -> Tensor | None:
        """[W] bool: what may follow a row; None where everything may, and behind a draft that the
        mask forbids, for that row is never reached."""
        if row.sequence.params.mask is None:
            return None
        for step, token in enumerate(row.drafts):
            if not self._allowed(row, step)[token]:
                return None
        allowed = self._allowed(row, len(row.drafts))
        if self.ids is not None:
            allowed = allowed[self.ids]
            # A drafter that knows no token that may follow drafts one that will be refused.
            return allowed if bool(allowed.any()) else None
        if len(allowed) != width:
            raise ValueError(
                f"request {row.sequence.id!r}: its mask has {len(allowed)} tokens, the target "
                f"{width}: give one flag for every row of the lm_head, padding too"
            )
        return allowed

    def _allowed(self, row: Row, drafts: int) -> Tensor:
        sequence, prefix = row.sequence, row.drafts[:drafts]
        key = sequence, tuple(prefix)
        if key not in self._known:
            mask = sequence.params.mask
            assert mask is not None
            allowed = mask.allowed(sequence.tokens[: sequence.num_prompt], sequence.output + prefix)
            if allowed.dtype != torch.bool or allowed.dim() != 1:
                raise ValueError(
                    f"request {sequence.id!r}: its mask gave {list(allowed.shape)} "
                    f"{allowed.dtype}; give [V] bool"
                )
            if not bool(allowed.any()):
                raise ValueError(
                    f"request {sequence.id!r}: its mask lets nothing follow {len(key[1])} drafts "
                    f"behind {len(sequence.output)} tokens of output; let the end token follow "
                    "where a text is whole"
                )
            self._known[key] = allowed.cpu()
        return self._known[key]


def _bias(logits: Tensor, rows: Rows[Row], ids: Tensor | None) -> None:
    found = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.sequence.params.logit_bias
    ]
    if found:
        at, tokens, biases = (np.array(values) for values in zip(*found, strict=True))
        flat, chosen = _places(logits, at, tokens, ids)
        added = torch.from_numpy(biases[chosen]).to(logits.device, logits.dtype)
        logits.view(-1)[flat] += added


def _penalise(logits: Tensor, rows: Rows[Row], ids: Tensor | None) -> None:
    penalised = [index for index, row in enumerate(rows) if row.sequence.params.penalises]
    if not penalised:
        return
    for sequence in {rows[index].sequence for index in penalised}:
        sequence.tally.read(sequence.tokens, sequence.num_prompt)
    tallies = [rows[index].sequence.tally for index in penalised]
    text = (
        np.repeat(penalised, [len(tally.ids) for tally in tallies]),
        np.concatenate([tally.ids for tally in tallies]),
        np.concatenate([tally.counts for tally in tallies]),
    )
    # Tokens that a row's drafts hold, counted with them, take the place of the text's own count.
    drafted = [
        (index, token, rows[index].sequence.tally.count(token) + rows[index].drafts.count(token))
        for index in penalised
        for token in set(rows[index].drafts)
    ]
    parts = [text, tuple(np.array(values) for values in zip(*drafted, strict=True))]
    settings = upload(
        [
            (
                row.sequence.params.repetition_penalty,
                row.sequence.params.frequency_penalty,
                row.sequence.params.presence_penalty,
            )
            for row in rows
        ],
        logits.device,
        logits.dtype,
    )
    before = logits.view(-1)
    results = []
    for at, tokens, counts in parts if drafted else parts[:1]:
        flat, chosen = _places(logits, at, tokens, ids)
        repetition, frequency, presence = settings[flat // logits.shape[1]].unbind(1)
        count = torch.from_numpy(counts[chosen]).to(logits.device, logits.dtype)
        value = before[flat]
        value = torch.where(value > 0, value / repetition, value * repetition)
        results.append((flat, value - frequency * count - presence * (count > 0)))
    for flat, value in results:
        before[flat] = value


def _places(
    logits: Tensor, at: np.ndarray, tokens: np.ndarray, ids: Tensor | None
) -> tuple[Tensor, np.ndarray]:
    """Where (row, token) pairs lie in the flat logits, and which pairs have a column."""
    columns, chosen = tokens, np.ones(len(tokens), bool)
    if ids is not None:
        known = ids.cpu().numpy()
        columns = np.searchsorted(known, tokens).clip(max=len(known) - 1)
        chosen = known[columns] == tokens
    flat = (at * logits.shape[1] + columns)[chosen]
    return torch.from_numpy(flat).to(logits.device), chosen
