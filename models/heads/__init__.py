"""Heads by name. `build_head` starts one, `load_head` and `save_head` (checkpoint.py) keep one on
disk."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from .checkpoint import LoadedHead, load_head, save_head
from .config import HeadConfig, InitConfig, NormConfig, RecycleSpec
from .initialise import initialise
from .mtp import HeadFunction, MTPHead

HEADS = {"mtp": MTPHead}

__all__ = [
    "HEADS",
    "HeadConfig",
    "HeadFunction",
    "InitConfig",
    "LoadedHead",
    "MTPHead",
    "NormConfig",
    "RecycleSpec",
    "build_head",
    "head_class",
    "load_head",
    "save_head",
]


def head_class(kind: str) -> type[MTPHead]:
    """The class of a head's name; ValueError lists the known names and the nearest."""
    if kind not in HEADS:
        near = difflib.get_close_matches(kind, HEADS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"head.kind {kind!r} is not known{hint}; known: {', '.join(HEADS)}")
    return HEADS[kind]


def build_head(
    config: HeadConfig,
    target_folder: Path | str,
    state_rms: float,
    target_config: Any | None = None,
) -> MTPHead:
    """A new head for the target in `target_folder`, in float32 on the CPU, initialised as
    `config.init` says.

    Args:
        state_rms: root mean square of the target's raw states at boundary L (for the pass-through
            projection).
        target_config: transformers' configuration; read from the folder when not given.
    """
    if target_config is None:
        target_config = AutoConfig.from_pretrained(target_folder)
    head = head_class(config.kind)(config, target_config)
    initialise(head, Path(target_folder), state_rms)
    return head
