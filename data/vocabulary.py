"""A draft vocabulary: the ids a head may propose, chosen by how often the assistant writes them.

`d2t` holds offsets, as the engines read it: draft id i means target id i + d2t[i]. `t2d` is true
for the target ids that have a draft id. A full vocabulary has offsets of zero everywhere (the
identity). Legend: V target, Vd draft.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .rowfile import Rows


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """ids: [Vd] int64, ascending target ids. coverage: share of supervised tokens among them.
    vocab_size: V.
    """

    ids: Tensor
    coverage: float
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.ids
        if (
            not len(ids)
            or int(ids[0]) < 0
            or int(ids[-1]) >= self.vocab_size
            or bool((ids.diff() <= 0).any())
        ):
            raise ValueError(
                f"draft vocabulary of {len(ids)} ids: they must be strictly ascending inside 0 .. "
                f"{self.vocab_size - 1}; offsets (d2t[i] = id - i) were perhaps taken for ids, or "
                "the reverse"
            )

    @property
    def d2t(self) -> Tensor:
        """[Vd] int64 offsets: target id = i + d2t[i]."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """[V] bool: whether a target id can be drafted."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    @classmethod
    def from_offsets(
        cls, d2t: Tensor, vocab_size: int, coverage: float = float("nan")
    ) -> DraftVocabulary:
        """Rebuild from d2t [Vd].

        Raises:
            ValueError: i + d2t[i] is not strictly ascending inside the vocabulary (ids instead of
                offsets).
        """
        return cls(d2t.long() + torch.arange(len(d2t)), coverage, vocab_size)


def draft_vocabulary(
    rows: Rows, size: int, tokenizer_special_ids: Collection[int], vocab_size: int
) -> DraftVocabulary:
    """The `size` ids that supervised tokens use most; ties go to the smaller id.

    Args:
        tokenizer_special_ids: always included (the ids that end a turn).
        vocab_size: V of the target.
    Raises:
        ValueError: size does not hold the special ids or passes V, or the rows use ids beyond V.
    """
    special = sorted(set(tokenizer_special_ids))
    if special and not 0 <= special[0] <= special[-1] < vocab_size:
        raise ValueError(f"special ids {special} do not lie inside the vocabulary of {vocab_size}")
    if not max(len(special), 1) <= size <= vocab_size:
        raise ValueError(
            f"draft vocabulary size {size}: must lie between {max(len(special), 1)} (the special "
            "ids) and "
            f"{vocab_size} (the target's vocabulary)"
        )
    counts = np.zeros(vocab_size, np.int64)
    for tokens in rows.supervised_tokens():
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise ValueError(
                f"{rows.folder}: token {int(tokens.max())} lies beyond the vocabulary of "
                f"{vocab_size}; the rows "
                "belong to another tokenizer: run prepare with this target"
            )
        counts += np.bincount(tokens, minlength=vocab_size)
    total = int(counts.sum())
    if not total:
        raise ValueError(f"{rows.folder}: the rows hold no supervised token to count")
    wanted = counts.copy()
    wanted[special] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-wanted, kind="stable")[:size])
    return DraftVocabulary(
        torch.from_numpy(chosen), float(counts[chosen].sum() / total), vocab_size
    )
