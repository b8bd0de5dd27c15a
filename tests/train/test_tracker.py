"""A tracker's failure is a warning, never the end of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.train.tracker import Tracker, TrackerConfig, flatten


class _Run:
    def __init__(self, fails: str = "") -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.fails = fails
        self.finished = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self.fails == "log":
            raise ConnectionError("server gone")
        self.logged.append((step, metrics))

    def finish(self) -> None:
        if self.fails == "finish":
            raise ConnectionError("server gone")
        self.finished = True


def _use(monkeypatch: pytest.MonkeyPatch, run: _Run) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def init(**options: Any) -> _Run:
        seen.update(options)
        if run.fails == "init":
            raise RuntimeError("no key")
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return seen


def test_metrics_reach_wandb_flat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options are handed on; nested figures get names with slashes; finish closes the run."""
    run = _Run()
    seen = _use(monkeypatch, run)
    tracker = Tracker(TrackerConfig(kind="wandb", project="p", name="n"), tmp_path / "w", {"lr": 1})
    tracker.log(7, {"train": {"loss": 1.5, "agreement": [0.5, 0.25], "note": "text"}})
    tracker.finish()
    assert seen == {
        "project": "p",
        "name": "n",
        "mode": "offline",
        "dir": str(tmp_path / "w"),
        "config": {"lr": 1},
    }
    assert run.logged == [
        (7, {"train/loss": 1.5, "train/agreement/0": 0.5, "train/agreement/1": 0.25})
    ]
    assert run.finished


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_an_error_of_the_tracker_warns_once_and_ends_tracking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str
) -> None:
    """Whatever wandb raises, the caller goes on; later calls are silent."""
    _use(monkeypatch, _Run(fails))
    with pytest.warns(UserWarning, match="tracking ends here") as caught:
        tracker = Tracker(TrackerConfig(kind="wandb"), tmp_path, {})
        tracker.log(1, {"loss": 1.0})
        tracker.log(2, {"loss": 1.0})
        tracker.finish()
    assert len(caught) == 1


@pytest.mark.parametrize(
    "cfg", [TrackerConfig(kind="none"), TrackerConfig(kind="wandb", mode="disabled")]
)
def test_no_tracker_never_imports_wandb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cfg: TrackerConfig
) -> None:
    """Off is off."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = Tracker(cfg, tmp_path, {})
    tracker.log(1, {"loss": 1.0})
    tracker.finish()


def test_flatten_keeps_numbers_only() -> None:
    """Booleans, text and None are no metrics."""
    assert flatten({"a": {"b": 1, "c": [2, {"d": 3.5}]}, "e": True, "f": None, "g": "x"}) == {
        "a/b": 1,
        "a/c/0": 2,
        "a/c/1/d": 3.5,
    }


@pytest.mark.parametrize(("option", "value"), [("kind", "tensorboard"), ("mode", "later")])
def test_unknown_choices_are_refused(option: str, value: str) -> None:
    """The refusal lists what there is."""
    with pytest.raises(ValueError, match=rf"tracker\.{option}='{value}': must be one of"):
        TrackerConfig(**{option: value})
