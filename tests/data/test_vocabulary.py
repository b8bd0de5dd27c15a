"""A draft vocabulary holds what the assistant writes most, as offsets that engines can read."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from draftsmith.data.rows import Rows
from draftsmith.data.vocabulary import DraftVocabulary, draft_vocabulary

V = 49152


def counted(rows: Rows) -> Counter[int]:
    return Counter(token for row in rows for token in row.tokens[row.supervised].tolist())


def test_most_frequent_ids_and_their_coverage(toy_rows: Rows) -> None:
    """Case 38: the ids are the most used ones, ties by id, and the share they express is right."""
    counts = counted(toy_rows)
    expected = sorted(counts, key=lambda token: (-counts[token], token))[:12]
    vocabulary = draft_vocabulary(toy_rows, 12, {2}, V)
    assert vocabulary.ids.tolist() == sorted(expected)
    assert 2 in expected
    share = sum(counts[token] for token in expected) / sum(counts.values())
    assert vocabulary.coverage == pytest.approx(share, abs=1e-12)
    assert 0 < share < 1


def test_special_ids_are_always_there(toy_rows: Rows) -> None:
    """Ids that end a turn are included although nobody wrote them."""
    vocabulary = draft_vocabulary(toy_rows, 4, {2, 0, 40000}, V)
    assert {0, 2, 40000} < set(vocabulary.ids.tolist())
    assert len(vocabulary.ids) == 4


def test_maps_agree(toy_rows: Rows) -> None:
    """Case 39: i + d2t[i] ascends strictly inside the vocabulary, and t2d marks that very set."""
    vocabulary = draft_vocabulary(toy_rows, 100, {2}, V)
    ids = torch.arange(100) + vocabulary.d2t
    assert torch.equal(ids, vocabulary.ids)
    assert (ids.diff() > 0).all()
    assert vocabulary.t2d.shape == (V,)
    assert torch.equal(vocabulary.t2d.nonzero()[:, 0], ids)
    again = DraftVocabulary.from_offsets(vocabulary.d2t, V)
    assert torch.equal(again.ids, vocabulary.ids)
    assert math.isnan(again.coverage)


def test_full_vocabulary_is_the_identity(toy_rows: Rows) -> None:
    """Case 41: offsets of zero are the identity; absolute ids in their place are refused."""
    vocabulary = draft_vocabulary(toy_rows, V, {2}, V)
    assert not vocabulary.d2t.any()
    assert vocabulary.t2d.all()
    assert vocabulary.coverage == 1.0
    with pytest.raises(ValueError, match="offsets .* were perhaps taken for ids"):
        DraftVocabulary.from_offsets(torch.arange(V), V)


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 2], [7, V]])
def test_impossible_ids_are_refused(ids: list[int]) -> None:
    """Empty, repeated, descending, negative, too large."""
    with pytest.raises(ValueError, match="strictly ascending"):
        DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 1.0, V)


@pytest.mark.parametrize(
    ("size", "special", "vocab", "message"),
    [
        (0, [2], V, "between 1"),
        (1, [0, 2], V, "between 2 .the special ids."),
        (V + 1, [2], V, "and 49152 .the target's vocabulary."),
        (8, [V], V, r"special ids \[49152\] do not lie inside"),
        (8, [2], 100, "lies beyond the vocabulary of 100"),
    ],
)
def test_impossible_sizes_are_refused(
    toy_rows: Rows, size: int, special: list[int], vocab: int, message: str
) -> None:
    """Each names the numbers."""
    with pytest.raises(ValueError, match=message):
        draft_vocabulary(toy_rows, size, special, vocab)
