"""An outside tracker beside metrics.jsonl: Weights & Biases, or none. It never stops a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("wandb", "none")
MODES = ("offline", "online", "disabled")


@dataclass(frozen=True)
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    kind: str = "none"
    """wandb or none."""
    mode: str = "offline"
    """wandb's mode: offline (files beside the run, `wandb sync` later), online, disabled."""
    project: str = "draftsmith"
    name: str | None = None
    """Name of the run; None lets wandb choose."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"tracker.kind={self.kind!r}: must be one of {', '.join(KINDS)}")
        if self.mode not in MODES:
            raise ValueError(f"tracker.mode={self.mode!r}: must be one of {', '.join(MODES)}")


class Tracker:
    """Sends metrics on. A tracker's error is warned about once and ends the tracking, not the run.

    Args:
        cfg: see `TrackerConfig`. folder: where an offline run is written. run_config: shown beside
            the run.
    """

    def __init__(self, cfg: TrackerConfig, folder: Path, run_config: dict[str, Any]) -> None:
        self.run: Any = None
        if cfg.kind == "wandb" and cfg.mode != "disabled":
            self._try(lambda: self._start(cfg, folder, run_config))

    def _start(self, cfg: TrackerConfig, folder: Path, run_config: dict[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = cfg.mode
        self.run = wandb.init(
            project=cfg.project, name=cfg.name, mode=mode, dir=str(folder), config=run_config
        )

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """metrics: nested dicts of numbers and lists of numbers; names are joined by "/", list
        places counted from 0."""
        if self.run is not None:
            self._try(lambda: self.run.log(flatten(metrics), step=step))

    def finish(self) -> None:
        """Close the tracker's run."""
        if self.run is not None:
            self._try(lambda: self.run.finish())
            self.run = None

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # a tracker may fail in any way; none of them is worth the run
            self.run = None
            warnings.warn(
                f"tracking ends here ({type(error).__name__}: {error}); training goes on and "
                "metrics.jsonl is complete",
                stacklevel=3,
            )


def flatten(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """{"a": {"b": 1}, "c": [2, 3]} -> {"a/b": 1, "c/0": 2, "c/1": 3}; what is no number is left
    out."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (list, tuple)):
            flat |= flatten({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat
