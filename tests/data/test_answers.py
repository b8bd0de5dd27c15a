"""Answers on disk: found again by content, removed by name when their settings differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftsmith.data.answers import AnswerStore, row_key
from draftsmith.data.rowfile import Row, token_hash

SETTINGS = {"max_new_tokens": 8, "target": {"weights": "w"}}
ANSWERS = {"a": [[1, 2], [3]], "b": [], "c": [[4, 5, 6]]}


def filled(folder: Path) -> AnswerStore:
    """A store whose rows are written as they come."""
    store = AnswerStore(folder, SETTINGS, 0)
    for key, answers in ANSWERS.items():
        store.add(key, answers)
    return store


def held(store: AnswerStore) -> dict[str, list[list[int]]]:
    return {key: [a.tolist() for a in store[key]] for key in ANSWERS if key in store}


@pytest.mark.parametrize("gathered", [False, True])
def test_answers_are_found_again(tmp_path: Path, gathered: bool) -> None:
    """From parts as from the one file; rows without any answer are remembered, too."""
    store = filled(tmp_path)
    names = [f"answers-0000{n}.parquet" for n in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    if gathered:
        store.gather()
        assert [path.name for path in tmp_path.iterdir()] == ["answers.parquet"]
    again = AnswerStore(tmp_path, dict(SETTINGS), 0)
    assert held(again) == ANSWERS
    assert all(answer.dtype == np.int32 for answer in again["a"])
    again.add("d", [[7]])
    assert AnswerStore(tmp_path, SETTINGS, 0)["d"][0].tolist() == [7]


def test_parts_are_written_when_it_is_time(tmp_path: Path) -> None:
    """And by flush."""
    store = AnswerStore(tmp_path, SETTINGS, 1e6)
    store.add("a", [[1]])
    assert not list(tmp_path.iterdir())
    store.flush()
    store.flush()
    assert len(list(tmp_path.iterdir())) == 1


def test_other_settings_remove_what_is_there_and_say_why(tmp_path: Path) -> None:
    """Once for all parts, with both values."""
    filled(tmp_path)
    store = AnswerStore(tmp_path, {**SETTINGS, "max_new_tokens": 9}, 0)
    assert held(store) == {}
    assert store.messages == ["earlier answers are made anew: max_new_tokens 8 -> 9"]
    assert not list(tmp_path.iterdir())


def test_a_damaged_part_is_made_anew(tmp_path: Path) -> None:
    """The others stay."""
    filled(tmp_path)
    part = tmp_path / "answers-00000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    store = AnswerStore(tmp_path, SETTINGS, 0)
    assert held(store) == {"b": [], "c": [[4, 5, 6]]}
    assert "cannot be read" in store.messages[0]


def test_a_key_is_ids_and_mask(tmp_path: Path) -> None:
    """Name, place and messages are not part of it."""

    def key(ids: list[int], mask: list[bool], name: str = "x", index: int = 0) -> str:
        tokens = np.array(ids, np.int32)
        return row_key(Row(name, index, tokens, np.array(mask, np.bool_), token_hash(tokens)))

    first = key([1, 2, 3], [False, True, True])
    assert key([1, 2, 3], [False, True, True], "y", 7) == first
    assert key([1, 2, 3], [False, False, True]) != first
    assert key([1, 2, 4], [False, True, True]) != first
