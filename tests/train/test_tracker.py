"""A tracker's failure is a warning, never the end of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.train.tracker import Tracker, TrackerConfig, flatten, media


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


RUN = {
    "tokens_per_target_call": 1.5,
    "drafted_per_position": [10, 10],
    "accepted_per_position": [5, 0],
    "unconditional": [0.5, 0.0],
    "conditional": [0.5, None],
    "tokens_per_step_histogram": [0, 5, 5],
    "by_context": {"0": {"target_calls": 4, "tokens": 6}, "256": {"target_calls": 6, "tokens": 9}},
}
FIGURES = {
    "loss": 2.5,
    "by_context": {
        "0": {
            "loss": 2.5,
            "rows_per_step": [8, 0],
            "agreed_per_step": [4, 0],
            "agreement": [0.5, None],
        }
    },
    "acceptance": {
        "score": 1.5,
        "runs": {"heldout": {"0": RUN, "1": RUN}, "code": {"0": RUN}},
        "samples": [{"prompts": "heldout", "id": "a/0", "prompt": "Q", "answer": "a\u27e6b\u27e7"}],
    },
}


@pytest.mark.slow
def test_tables_of_a_validation_are_written_by_wandb_itself(tmp_path: Path) -> None:
    """Offline, with the real package: one file a table, with the rows that were measured."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # wandb's own imports
        tracker = Tracker(TrackerConfig(kind="wandb"), tmp_path, {"lr": 1})
        tracker.log(5, {"train": {"loss": 3.0}})
        tracker.log_validation(5, FIGURES)
        tracker.log_validation(9, {"loss": 2.0})
        assert tracker.run is not None
        tracker.finish()
    tables = {
        str(path.relative_to(media)).rsplit("_", 2)[0]: json.loads(path.read_text())
        for media in tmp_path.glob("wandb/offline-run-*/files/media/table")
        for path in media.rglob("*.table.json")
    }
    assert set(tables) == {
        "validation/positions/heldout",
        "validation/positions/code",
        "validation/engine_by_context",
        "validation/held_out_by_context",
        "validation/samples",
    }
    assert tables["validation/positions/heldout"]["data"] == [
        [0, 1, 10, 5, 0.5, 0.5],
        [0, 2, 10, 0, 0.0, None],
        [1, 1, 10, 5, 0.5, 0.5],
        [1, 2, 10, 0, 0.0, None],
    ]
    assert tables["validation/engine_by_context"]["data"][:2] == [
        ["heldout", 0, 0, 4, 6, 1.5],
        ["heldout", 0, 256, 6, 9, 1.5],
    ]
    assert tables["validation/held_out_by_context"]["data"] == [
        [0, 1, 8, 4, 0.5, 2.5],
        [0, 2, 0, 0, None, 2.5],
    ]
    assert tables["validation/samples"]["data"] == [["heldout", "a/0", "Q", "a\u27e6b\u27e7"]]


def test_the_histogram_is_centred_on_whole_tokens() -> None:
    """Steps of one and of two tokens, five each; none of zero."""
    found = media(FIGURES)["validation/tokens_per_step/heldout/T=1"]
    assert found.histogram == [0, 5, 5] and found.bins == [-0.5, 0.5, 1.5, 2.5]


def test_figures_that_cannot_be_drawn_end_tracking_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A validation of unknown shape is a warning, not the end of the run."""
    _use(monkeypatch, _Run())
    tracker = Tracker(TrackerConfig(kind="wandb"), tmp_path, {})
    with pytest.warns(UserWarning, match="tracking ends here"):
        tracker.log_validation(1, {"acceptance": {"runs": {"heldout": {"0": {}}}}})
    tracker.log_validation(2, FIGURES)
