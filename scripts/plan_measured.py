"""What a finished run came to, beside what `plan` forecasts for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.store import Store
from ..models.files import read_json
from ..train.metrics import read_metrics
from .artifacts import Artifacts

if TYPE_CHECKING:
    from .plan import Forecast


@dataclass(frozen=True)
class Beside:
    """One figure. unit: bytes, seconds or tokens/s."""

    name: str
    unit: str
    measured: float
    forecast: float


def beside(found: Forecast, artifacts: Artifacts) -> list[Beside]:
    """Everything that a finished run in the work folder left a measurement of; else empty.

    Memory is the most that any rank held (run.json); time and tokens per second are those of
    training without validation and checkpoints (metrics.jsonl); bytes are those of the files that
    are there.
    """
    record = read_json(artifacts.run) if artifacts.run.exists() else {}
    if record.get("finished") is None:
        return []
    told: dict[str, Any] = record.get("measured") or {}
    rows: list[Beside] = []

    def add(name: str, unit: str, measured: float | None, forecast: float | None) -> None:
        if measured and forecast:
            rows.append(Beside(name, unit, measured, forecast))

    memory = [found.memory[name].total for name in ("train", "validate") if name in found.memory]
    add("most memory of a rank", "bytes", told.get("peak_memory_bytes"), max(memory))
    rate = found.facts["train_tokens_per_second"] * found.facts["gpus"]
    add("training, all ranks", "tokens/s", told.get("tokens_per_second"), rate)
    add("training", "seconds", _training_seconds(artifacts.metrics), found.seconds["train"])
    caches = (Store(place) for place in (artifacts.cache, artifacts.heldout_cache))
    size = sum(store.size(name) for store in caches for name in store.names())
    add("cache", "bytes", size, found.disk.get("cache"))
    add("checkpoints", "bytes", _size(artifacts.train / "checkpoints"), found.disk["checkpoints"])
    add("head", "bytes", _size(artifacts.head), found.disk["head"])
    return rows


def _training_seconds(metrics: Path) -> float:
    if not metrics.exists():
        return 0.0
    lines = [line for line in read_metrics(metrics) if line["kind"] == "train"]
    return sum(
        line["tokens"] / line["tokens_per_second"] for line in lines if line["tokens_per_second"]
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
