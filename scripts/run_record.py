"""What a work folder says of its run: settings, training, and the report where there is one."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..data.store import expanded
from ..inference import bootstrap
from ..inference.tables import BASELINES
from ..models.files import read_json
from ..train.metrics import best_validation, read_metrics

Measurement = dict[str, Any]
_ASIDE = ("work", "inputs", "overwrite", "tracker", "compare", "generate", "export", "import_head")
"""Settings that name places or other commands, and make no run another."""
_REPORT = "report.json"


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, read from its work folder.

    Attributes:
        settings: dotted key -> value. metrics: the lines of metrics.jsonl. report: report.json.
    """

    folder: Path
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    report: dict[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read what is there; of a report under a name of its own, that alone.

        Raises:
            ValueError: neither a training run nor a report, or a damaged file.
        """
        if folder.is_file():
            told = _report(folder)
            settings = _flat({**told.get("settings", {}), "head": told.get("head", {})})
            return cls(folder, settings, [], told)
        if not holds_run(folder):
            raise ValueError(
                f"{folder} holds neither train/metrics.jsonl nor report.json: name the work folder "
                "of a run"
            )
        lines, report = folder / "train" / "metrics.jsonl", folder / "report.json"
        return cls(
            folder,
            _settings(folder),
            list(read_metrics(lines)) if lines.exists() else [],
            read_json(report) if report.exists() else None,
        )

    @cached_property
    def validation(self) -> dict[str, Any] | None:
        """The best validation, whose weights are the head; the later of two that are equal."""
        return best_validation(self.metrics)

    @property
    def scored_in_engine(self) -> bool:
        """Whether the score is tokens per target call; else it is the held-out loss, negative."""
        return self.validation is not None and "acceptance" in self.validation

    def training(self) -> dict[str, Any]:
        """Steps, tokens, tokens per second, the best validation's figures, bytes of the head; empty
        where nothing was trained."""
        rows = [row for row in self.metrics if row["kind"] == "train"]
        if not rows:
            return {}
        tokens = sum(row["tokens"] for row in rows)
        seconds = sum(
            row["tokens"] / row["tokens_per_second"] for row in rows if row["tokens_per_second"]
        )
        weights = self.folder / "train" / "head" / "head.safetensors"
        best = self.validation or {}
        return {
            "steps": rows[-1]["step"],
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else None,
            "best_step": best.get("step"),
            "heldout_loss": best.get("loss"),
            "agreement": best.get("agreement"),
            "score": best.get("score"),
            "tokens_per_target_call": best.get("acceptance", {}).get("tokens_per_target_call"),
            "head_bytes": weights.stat().st_size if weights.exists() else None,
        }

    def curve(self, kind: str, name: str) -> list[tuple[float, float]]:
        """(step, value) of a figure over training; of one that is a list, its first."""
        points = []
        for row in self.metrics:
            if row["kind"] == kind and row.get(name) is not None:
                value = row[name]
                points.append((row["step"], value[0] if isinstance(value, list) else value))
        return points

    def measurements(self, first: RunRecord | None = None) -> list[Measurement]:
        """The report's runs with intervals, and paired differences from those of `first`."""
        theirs = {} if first is None or first is self else first.counted()
        found = []
        for entry in (self.report or {}).get("runs", []):
            key, counts = _key(entry), _counts(entry)
            one: Measurement = {
                **dict(zip(_SETTING, key, strict=True)),
                "drafter": entry["drafter"],
                "num_prompts": entry["num_prompts"],
                "tokens_per_target_call": entry["tokens_per_target_call"],
                "interval": None,
                "tokens_per_second": entry["tokens_per_second"],
                "speedup": entry.get("speedup"),
                "difference": None,
            }
            if counts is not None:
                interval = bootstrap.ratio(np.array(list(counts.values())))
                one["interval"] = list(interval[1:]) if interval else None
                other = theirs.get(key)
                if other is not None and set(other) == set(counts):
                    pairs = [(counts[prompt], other[prompt]) for prompt in counts]
                    change = bootstrap.difference(*map(np.array, zip(*pairs, strict=True)))
                    one["difference"] = change._asdict() if change else None
            found.append(one)
        return found

    def counted(self) -> dict[tuple[Any, ...], dict[str, tuple[int, int]]]:
        """(role, prompts, temperature, dtype, batch, K) -> prompt -> (tokens, target calls)."""
        entries = (self.report or {}).get("runs", [])
        pairs = ((_key(entry), _counts(entry)) for entry in entries)
        return {key: counts for key, counts in pairs if counts is not None}


_SETTING = ("role", "prompts", "temperature", "dtype", "batch", "draft_tokens")
"""What two measurements have in common where they are compared. A head's role is head, whatever its
kind."""


def find_runs(patterns: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Work folders (or reports) by name or pattern, each once, in the order given (those of a
    pattern sorted); and the folders that a pattern found but that hold no run.

    Raises:
        ValueError: a pattern that finds no run.
    """
    found: dict[Path, None] = {}
    others: list[Path] = []
    for pattern in map(expanded, patterns):
        if not glob.has_magic(pattern) or Path(pattern).exists():
            found[_run_of(Path(pattern))] = None
            continue
        paths = [Path(path) for path in sorted(glob.glob(pattern))]
        folders = [_run_of(path) for path in paths if path.is_dir() or path.name == _REPORT]
        runs = [folder for folder in folders if holds_run(folder)]
        if not runs:
            raise ValueError(
                f"{pattern}: no folder of that pattern holds train/metrics.jsonl or report.json "
                f"({len(folders)} folders looked at)"
            )
        found |= dict.fromkeys(runs)
        others += [folder for folder in folders if folder not in found]
    return list(found), others


def _run_of(path: Path) -> Path:
    """A run's folder, where its report.json is named."""
    return path.parent if path.name == _REPORT and path.is_file() else path


def holds_run(folder: Path) -> bool:
    """Whether something was trained or measured in a folder."""
    return any((folder / name).exists() for name in ("train/metrics.jsonl", "report.json"))


def below(key: str, names: Sequence[str]) -> bool:
    """Whether a dotted key is one of `names`, or lies in a section that is."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def differing(records: Sequence[RunRecord]) -> list[str]:
    """The settings that are not the same in all runs, sorted; one that a run does not tell counts
    as different."""
    keys = sorted({key for record in records for key in record.settings})
    told = [[str(record.settings.get(key)) for record in records] for key in keys]
    return [key for key, values in zip(keys, told, strict=True) if len(set(values)) > 1]


def _report(path: Path) -> dict[str, Any]:
    """A file as a report.

    Raises:
        ValueError: it is another file.
    """
    told = read_json(path) if path.suffix == ".json" else None
    if not isinstance(told, dict) or not isinstance(told.get("runs"), list):
        raise ValueError(f"{path} is no report: name a report.json, or the work folder of a run")
    return told


def _settings(folder: Path) -> dict[str, Any]:
    """Training's own configuration; of a run that is not finished, what identifies it. How a report
    was measured is told by the command that wrote it."""
    settings: dict[str, Any] = {}
    train = folder / "train"
    written = [train / "provenance.json", train / "best" / "provenance.json"]
    trained = next((path for path in written if path.exists()), None)
    if trained is not None:
        settings |= _flat(read_json(trained)["config"])
    elif (train / "run.json").exists():
        settings |= _flat(read_json(train / "run.json")["identity"])
    measured = folder / "provenance.json"
    if (folder / "report.json").exists() and measured.exists():
        told = _flat(read_json(measured)["config"])
        of_report = ("evaluate", "engine", "ngram", "draft_lm")
        settings = {key: value for key, value in settings.items() if not below(key, of_report)}
        wanted = of_report if settings else tuple({key.split(".")[0] for key in told})
        settings |= {key: value for key, value in told.items() if below(key, wanted)}
    return {key: value for key, value in settings.items() if not below(key, _ASIDE)}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    role = entry["drafter"] if entry["drafter"] in BASELINES else "head"
    return (role, *(entry.get(name) for name in _SETTING[1:]))


def _counts(entry: dict[str, Any]) -> dict[str, tuple[int, int]] | None:
    """Prompt -> (tokens, target calls); None in a report that does not hold them."""
    if "per_prompt" not in entry:
        return None
    return {
        str(one["id"]): (int(one["decode_tokens"]), int(one["target_calls"]))
        for one in entry["per_prompt"]
    }
