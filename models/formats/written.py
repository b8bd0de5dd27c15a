"""An export before it is on disk, and what every layout writes beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .loaders import Report

NOTE = "draftsmith.json"
"""Keeps what a layout has no place for: the target's fingerprint, training facts, draft ids."""
KEEP = "keep the native folder, which this engine runs"


@dataclass(frozen=True)
class Written:
    """Tensors by name, config.json, where each tensor is from, and what the loader makes of it."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    origin: dict[str, str]
    report: Report
