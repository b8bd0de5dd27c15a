"""Answers on disk: found again by content, and never lost unasked."""

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


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_answers_of_other_settings_stay_unless_asked(tmp_path: Path) -> None:
    """The refusal has the field, both values and the rows; `overwrite` removes them, and says so
    once for all parts. Answers of the present settings among them are kept."""
    filled(tmp_path)
    before, other = content(tmp_path), {**SETTINGS, "max_new_tokens": 9}
    with pytest.raises(ValueError, match=r"3 rows .*\(max_new_tokens 8 -> 9\).*overwrite=true"):
        AnswerStore(tmp_path, other, 0)
    assert content(tmp_path) == before
    store = AnswerStore(tmp_path, other, 0, overwrite=True)
    assert held(store) == {} and not content(tmp_path)
    assert store.messages == ["earlier answers are made anew: max_new_tokens 8 -> 9"]
    store.add("a", [[9]])
    filled(tmp_path / "more")
    (tmp_path / "more" / "answers-00001.parquet").rename(tmp_path / "answers-00001.parquet")
    assert held(AnswerStore(tmp_path, other, 0, overwrite=True)) == {"a": [[9]]}


def test_a_damaged_part_is_made_anew(tmp_path: Path) -> None:
    """The others stay, and it stays, too, until the answers are gathered."""
    filled(tmp_path)
    part = tmp_path / "answers-00000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    store = AnswerStore(tmp_path, SETTINGS, 0)
    assert held(store) == {"b": [], "c": [[4, 5, 6]]}
    assert "answers-00000.parquet are made anew: damaged" in store.messages[0]
    assert len(part.read_bytes()) == 100
    store.add("a", ANSWERS["a"])
    assert len(part.read_bytes()) == 100
    store.gather()
    assert list(content(tmp_path)) == ["answers.parquet"]
    assert held(AnswerStore(tmp_path, SETTINGS, 0)) == ANSWERS


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path: Path) -> None:
    """A disk or a right that fails for a moment costs no answer, not even with `overwrite`."""
    filled(tmp_path)
    (tmp_path / "answers-00007.parquet").symlink_to("/proc/self/mem")  # EIO at its first byte
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"answers-00007.parquet cannot be opened \(Input/out"):
            AnswerStore(tmp_path, SETTINGS, 0, overwrite)
    assert len(list(tmp_path.iterdir())) == 4


def test_files_of_other_names_are_not_ours(tmp_path: Path) -> None:
    """A copy that a user made is neither read nor removed."""
    filled(tmp_path)
    for name in ("answers-backup.parquet", "answers-00001-old.parquet", "answers2.parquet"):
        (tmp_path / name).write_bytes(b"mine")
    store = AnswerStore(tmp_path, SETTINGS, 0)
    assert held(store) == ANSWERS and not store.messages
    store.gather()
    assert len(content(tmp_path)) == 4
    assert (tmp_path / "answers-backup.parquet").read_bytes() == b"mine"


def test_a_key_is_ids_and_mask(tmp_path: Path) -> None:
    """Name, place and messages are not part of it."""

    def key(ids: list[int], mask: list[bool], name: str = "x", index: int = 0) -> str:
        tokens = np.array(ids, np.int32)
        return row_key(Row(name, index, tokens, np.array(mask, np.bool_), token_hash(tokens)))

    first = key([1, 2, 3], [False, True, True])
    assert key([1, 2, 3], [False, True, True], "y", 7) == first
    assert key([1, 2, 3], [False, False, True]) != first
    assert key([1, 2, 4], [False, True, True]) != first
