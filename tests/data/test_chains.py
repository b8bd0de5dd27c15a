"""Chains of prompts worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.data.chains import Chain
from draftsmith.data.rowfile import Row, token_hash
from draftsmith.data.runs import supervised_spans

END, OTHER = 9, 8


def chain(tokens: list[int], mask: str, limit: int = 100) -> Chain:
    """A chain over ids whose supervised places are marked A."""
    ids = np.array(tokens, np.int32)
    supervised = np.array([mark == "A" for mark in mask], np.bool_)
    return Chain(Row("r", 0, ids, supervised, token_hash(ids)), {END, OTHER}, limit)


@pytest.fixture
def two() -> Chain:
    """Two questions and answers."""
    return chain([1, 2, 3, 4, END, 5, 6, 7, END], "ccAAAccAA")


def test_spans() -> None:
    """Unbroken runs, whether at the start, inside or at the end."""
    assert supervised_spans(np.array([1, 1, 0, 0, 1, 0, 1], np.bool_)) == [(0, 2), (4, 5), (6, 7)]
    assert supervised_spans(np.zeros(3, np.bool_)) == []


def test_prompts_are_the_context_with_the_generated_ids(two: Chain) -> None:
    """Nothing of a found answer is left; what stands between answers stays."""
    assert two.prompt == [1, 2]
    two.answers.append([30, 31, 32, 33, END])
    assert two.prompt == [1, 2, 30, 31, 32, 33, END, 5, 6]
    two.answers.append([40, END])
    assert two.prompt is None
    ids, supervised = two.written()
    assert ids == [1, 2, 30, 31, 32, 33, END, 5, 6, 40, END]
    assert supervised == [False] * 2 + [True] * 5 + [False] * 2 + [True] * 2
    assert two.unanswered == 0


def test_a_cut_answer_ends_the_conversation(two: Chain) -> None:
    """There is no id that closes the turn, so nothing can follow."""
    two.answers.append([30, 31])
    assert two.cut and two.prompt is None and two.unanswered == 1
    assert two.written(whole_only=True) == ([], [])
    assert two.written()[0] == [1, 2, 30, 31]


def test_another_end_id_ends_the_conversation(two: Chain) -> None:
    """The template goes on behind its own end of turn alone; the answer itself is whole."""
    two.answers.append([30, OTHER])
    assert two.other_end and not two.cut and two.prompt is None
    assert two.written(whole_only=True)[0] == [1, 2, 30, OTHER]


def test_no_room_ends_the_conversation(two: Chain) -> None:
    """A prompt that fills the limit leaves no place for an answer."""
    two.limit = 7
    two.answers.append([30, 31, END])
    assert two.prompt is None and not two.cut and not two.other_end and two.unanswered == 1
    two.limit = 8
    assert two.prompt is not None and len(two.prompt) == 7


def test_a_last_answer_that_preparing_cut_is_asked_for_whole() -> None:
    """Its prompt is whole; that it has no end says nothing about how turns are closed."""
    cut = chain([1, 2, 3, 4], "ccAA")
    assert cut.prompt == [1, 2]
    cut.answers.append([5, OTHER])
    assert not cut.other_end and cut.written()[0] == [1, 2, 5, OTHER]


def test_context_that_was_not_supervised_stays() -> None:
    """An earlier turn of the assistant without a provable span is context like any other."""
    later = chain([1, 2, 50, END, 3, 4, END], "cccccAA")
    assert later.prompt == [1, 2, 50, END, 3]
