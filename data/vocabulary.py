"""A draft vocabulary: the ids a head may propose, chosen by how often the assistant writes them.

`d2t` holds offsets, as the engines read it: draft id i means target id i + d2t[i]. `t2d` is true
for the target ids that have a draft id. A full vocabulary has offsets of zero everywhere (the
identity). Legend: V target, Vd draft.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class SupervisedTokens(Protocol):
    """Prepared rows, or a cache of them."""

    def supervised_tokens(self) -> Iterator[np.ndarray]:
        """The supervised ids, [m] int32 a piece."""
        ...


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

    def coverage_of(self, source: SupervisedTokens) -> float:
        """The share of the supervised tokens of other rows that can be drafted (NaN where there are
        none).

        Raises:
            ValueError: the rows use ids beyond V.
        """
        counts = _count(source, self.vocab_size)
        total = int(counts.sum())
        return float(counts[self.ids.numpy()].sum() / total) if total else float("nan")

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
    source: SupervisedTokens, size: int, forced_ids: Collection[int], vocab_size: int
) -> DraftVocabulary:
    """The `size` ids that supervised tokens use most; ties go to the smaller id.

    Args:
        forced_ids: always included: the ids that end a turn, and those of single bytes
            (`byte_token_ids`), so that any text can be drafted.
        vocab_size: V of the target.
    Raises:
        ValueError: size does not hold the forced ids or passes V, or the rows use ids beyond V.
    """
    forced = sorted(set(forced_ids))
    if forced and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise ValueError(
            f"the ids {forced[:8]} that must be inside do not lie inside the vocabulary of "
            f"{vocab_size}"
        )
    if not max(len(forced), 1) <= size <= vocab_size:
        raise ValueError(
            f"draft vocabulary size {size}: must lie between {max(len(forced), 1)} (the ids that "
            "end a turn and those of single bytes) and "
            f"{vocab_size} (the target's vocabulary)"
        )
    counts = _count(source, vocab_size)
    total = int(counts.sum())
    if not total:
        raise ValueError(f"{_name(source)}: no supervised token to count; run prepare again")
    wanted = counts.copy()
    wanted[forced] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-wanted, kind="stable")[:size])
    return DraftVocabulary(
        torch.from_numpy(chosen), float(counts[chosen].sum() / total), vocab_size
    )


def _count(source: SupervisedTokens, vocab_size: int) -> np.ndarray:
    """[V] int64: how often each id is supervised."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens in source.supervised_tokens():
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise ValueError(
                f"{_name(source)}: token {int(tokens.max())} lies beyond the vocabulary of "
                f"{vocab_size}; the rows belong to another tokenizer: run prepare with this target"
            )
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def _name(source: SupervisedTokens) -> str:
    return str(getattr(source, "folder", type(source).__name__))
