"""An outside tracker beside metrics.jsonl: Weights & Biases, or none. It never stops a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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

    def log_validation(self, step: int, figures: dict[str, Any]) -> None:
        """figures: those of one validation, as metrics.jsonl has them. Beside the numbers go the
        tables and histograms of `media`."""
        if self.run is not None:
            self._try(
                lambda: self.run.log(
                    {**flatten({"validation": figures}), **media(figures)}, step=step
                )
            )

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


def media(figures: dict[str, Any]) -> dict[str, Any]:
    """The wandb tables and histograms of one validation; of the engine only where it was asked.

    validation/positions/SET                  a row for each temperature and draft position
    validation/tokens_per_step/SET/T=…        histogram over the steps of one sequence
    validation/engine_by_context              a row for each set, temperature and bucket
    validation/held_out_by_context            a row for each bucket and draft step
    validation/samples                        prompts and answers, accepted drafts marked
    """
    import wandb

    acceptance = figures.get("acceptance", {})
    runs: dict[str, dict[str, Any]] = acceptance.get("runs", {})
    found: dict[str, Any] = {}
    contexts = []
    for prompts, by_temperature in runs.items():
        positions = []
        for temperature, run in by_temperature.items():
            raw = ("drafted_per_position", "accepted_per_position")
            shares = ("unconditional", "conditional")
            lists = (run[name] for name in (*raw, *shares))
            for position, row in enumerate(zip(*lists, strict=True), 1):
                positions.append([float(temperature), position, *row])
            contexts += [
                [
                    prompts,
                    float(temperature),
                    int(low),
                    counts["target_calls"],
                    counts["tokens"],
                    counts["tokens"] / counts["target_calls"],
                ]
                for low, counts in run["by_context"].items()
            ]
            steps = run["tokens_per_step_histogram"]
            if steps:
                edges = np.arange(len(steps) + 1) - 0.5
                found[f"validation/tokens_per_step/{prompts}/T={temperature}"] = wandb.Histogram(
                    np_histogram=(np.array(steps), edges)
                )
        found[f"validation/positions/{prompts}"] = wandb.Table(
            ["temperature", "position", "drafted", "accepted", "unconditional", "conditional"],
            positions,
        )
    if contexts:
        found["validation/engine_by_context"] = wandb.Table(
            ["prompts", "temperature", "context", "target calls", "tokens", "tokens per call"],
            contexts,
        )
    held_out: list[Any] = [
        [int(low), depth, rows, agreed, share, bucket["loss"]]
        for low, bucket in figures.get("by_context", {}).items()
        for depth, (rows, agreed, share) in enumerate(
            zip(
                bucket["rows_per_step"],
                bucket["agreed_per_step"],
                bucket["agreement"],
                strict=True,
            ),
            1,
        )
    ]
    if held_out:
        found["validation/held_out_by_context"] = wandb.Table(
            ["context", "draft", "rows", "agreed", "agreement", "loss of the bucket"], held_out
        )
    if acceptance.get("samples"):
        columns: list[Any] = ["prompts", "id", "prompt", "answer"]
        answers: list[Any] = [[one[name] for name in columns] for one in acceptance["samples"]]
        found["validation/samples"] = wandb.Table(columns, answers)
    return found
