"""Where a run keeps what, by `data.answers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.conf.compose import composed, to_config
from draftsmith.scripts.artifacts import Artifacts


def names(*overrides: str) -> list[str]:
    """The folders that a head is trained from."""
    found = Artifacts.of(to_config(composed(["work=w", "inputs=i", *overrides])))
    assert found.rows == Path("i/rows") and found.regenerated == Path("i/rows-regenerated")
    return [str(path) for path in (found.learned, found.cache, found.heldout_cache)]


def test_answers_choose_rows_and_caches() -> None:
    """Found and regenerated answers lie side by side; prompts come from the prepared rows."""
    assert names() == ["i/rows", "i/cache", "i/cache-heldout"]
    assert names("data.answers=regenerated") == [
        "i/rows-regenerated",
        "i/cache-regenerated",
        "i/cache-regenerated-heldout",
    ]


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """~ stands for the home folder in every name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ['work="~/w"', 'inputs="~/i"', 'data.dump.folder="~/c"']
    found = Artifacts.of(to_config(composed(words)))
    assert (found.train, found.rows) == (tmp_path / "w/train", tmp_path / "i/rows")
    assert (found.cache, found.heldout_cache) == (f"{tmp_path}/c", f"{tmp_path}/c-heldout")
    assert found.exported("vllm", "~/e") == tmp_path / "e"
    assert Artifacts.of(to_config(composed(words[:1]))).rows == tmp_path / "w/rows"
    with pytest.raises(ValueError, match="/h holds no head"):
        found.head_or("~/h")
    with pytest.raises(ValueError, match="~nosuchuser/w: "):
        Artifacts.of(to_config(composed(['work="~nosuchuser/w"'])))


def test_other_answers_are_refused() -> None:
    """With the choices."""
    with pytest.raises(ValueError, match="data.answers=new is not known"):
        names("data.answers=new")
