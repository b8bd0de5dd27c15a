"""An export before it is on disk, what every layout writes beside it, and what every reader of a
folder of its own asks of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import atomic_write_json, read_json
from ..heads.checkpoint import LoadedHead, read_vocabulary, vocabulary_maps
from .loaders import Report

NOTE = "draftsmith.json"
KEEP = "keep the native folder, which this engine runs"


@dataclass(frozen=True)
class Written:
    """Tensors by name, config.json, where each tensor is from, and what the loader makes of it."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    origin: dict[str, str]
    report: Report


def write_note(out: Path, loaded: LoadedHead, layout: str, ids: bool, **more: Any) -> None:
    """Keep what a layout has no place for: the target's fingerprint, training facts.

    Args:
        ids: the draft ids are such, too. more: further entries.
    """
    note = {key: value for key, value in loaded.meta.items() if key != "sha256"} | more
    if ids and loaded.draft_ids is not None:
        note["draft_ids"] = loaded.draft_ids.tolist()
    atomic_write_json(out / NOTE, note | {"layout": layout})


def read_note(folder: Path, vocab_size: int) -> tuple[dict[str, Any], Tensor | None]:
    """What stands in such a note, and the draft ids in it; nothing where there is none."""
    note = read_json(folder / NOTE) if (folder / NOTE).exists() else {}
    note.pop("layout", None)
    noted = note.pop("draft_ids", None)
    if noted is None:
        return note, None
    maps = vocabulary_maps(torch.tensor(noted), vocab_size)
    return note, read_vocabulary(maps, vocab_size, str(folder / NOTE))


def faults_of(report: Report, target: Any) -> list[str]:
    """What is wrong with a folder of its own: what its class does silently, and sizes that are not
    the target's."""
    faults = report.faults()
    for name in ("hidden_size", "vocab_size"):
        taken, wanted = report.guessed.get(name, report.read.get(name)), int(getattr(target, name))
        if taken is not None and taken != wanted:
            lacks = " (config.json has none)" if name in report.guessed else ""
            faults.append(f"config.json says {name}={taken}{lacks}, the target has {wanted}")
    return faults


def settle(
    folder: Path, report: Report, faults: list[str], told: Callable[[Any], str] = str
) -> None:
    """ValueError with the faults of a folder; else a warning for each key that the class takes a
    decisive default for, its value as `told` shows it."""
    if faults:
        if report.assumed:
            faults = [*faults, f"config.json has no {', '.join(report.assumed)}"]
        raise ValueError(f"{folder}, as {report.title} loads it: {'; '.join(faults)}")
    for name, value in report.guessed.items():
        warnings.warn(
            f"{folder}: config.json has no {name}; {report.title} takes {told(value)}",
            stacklevel=3,
        )
