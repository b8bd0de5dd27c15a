"""A draft vocabulary holds what the assistant writes most, as offsets that engines can read."""

from __future__ import annotations

import pytest
import torch

from draftsmith.data.rows import Rows
from draftsmith.data.vocabulary import DraftVocabulary, draft_vocabulary

V = 49152


def test_special_ids_are_always_there(toy_rows: Rows) -> None:
    """Ids that end a turn are included although nobody wrote them."""
    vocabulary = draft_vocabulary(toy_rows, 4, {2, 0, 40000}, V)
    assert {0, 2, 40000} < set(vocabulary.ids.tolist())
    assert len(vocabulary.ids) == 4


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 2], [7, V]])
def test_impossible_ids_are_refused(ids: list[int]) -> None:
    """Empty, repeated, descending, negative, too large."""
    with pytest.raises(ValueError, match="strictly ascending"):
        DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 1.0, V)


@pytest.mark.parametrize(
    ("size", "special", "vocab", "message"),
    [
        (0, [2], V, "between 1"),
        (1, [0, 2], V, "between 2 .the ids that end a turn"),
        (V + 1, [2], V, "and 49152 .the target's vocabulary."),
        (8, [V], V, r"the ids \[49152\] that must be inside"),
        (8, [2], 100, "lies beyond the vocabulary of 100"),
    ],
)
def test_impossible_sizes_are_refused(
    toy_rows: Rows, size: int, special: list[int], vocab: int, message: str
) -> None:
    """Each names the numbers."""
    with pytest.raises(ValueError, match=message):
        draft_vocabulary(toy_rows, size, special, vocab)
