"""Heads by name. `build_head` starts one, `load_head` and `save_head` (checkpoint.py) keep one on
disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..skeleton import text_config
from .checkpoint import LoadedHead, compare_shapes, compare_targets, load_head, save_head
from .config import HeadConfig, InitConfig, NormConfig, RecycleSpec, recycle_spec
from .families import HEADS, head_class
from .mtp import MTPHead
from .protocol import Head, HeadFunction, HeadStep
from .start import Start
from .warm import take_shape, take_weights

__all__ = [
    "HEADS",
    "Head",
    "HeadConfig",
    "HeadFunction",
    "HeadStep",
    "InitConfig",
    "LoadedHead",
    "MTPHead",
    "NormConfig",
    "RecycleSpec",
    "build_head",
    "compare_shapes",
    "compare_targets",
    "head_class",
    "load_head",
    "recycle_spec",
    "save_head",
    "take_shape",
    "training_boundaries",
]


def training_boundaries(config: HeadConfig, target_layers: int) -> tuple[int, ...]:
    """The boundaries that training such a head reads, ascending: its own, and L for the teacher.

    Raises:
        ValueError: an unknown kind, or a target without one of them.
    """
    own = head_class(config.kind).reads(config, target_layers)
    return tuple(sorted({*own, target_layers}))


def build_head(
    config: HeadConfig,
    target_folder: Path | str,
    state_rms: float,
    target_config: Any | None = None,
    draft_ids: Tensor | None = None,
    source: LoadedHead | None = None,
) -> Head:
    """A new head for the target in `target_folder`, in float32 on the CPU, started as `config.init`
    says.

    Args:
        state_rms: root mean square of the target's raw states at boundary L (for the pass-through
            projection).
        target_config: transformers' configuration; read from the folder when not given.
        draft_ids: int64 [Vd] of a reduced draft vocabulary, None for all; a head with an lm_head of
            its own has a row for each.
        source: the head that `config.init.source` names (`formats.find_source`); None where it
            names none.
    Raises:
        ValueError: a head that does not fit, or an unknown choice.
    """
    named = config.init.source
    if (named is None) != (source is None):
        raise ValueError(
            f"head.init.source={named} and {'a' if source else 'no'} head to start from: read the "
            "one that it names"
        )
    if target_config is None:
        target_config = text_config(target_folder)
    if source is not None and _same_sizes(source.head.target_config, target_config):
        target_config = source.head.target_config  # its layer may be of another kind
    family = head_class(config.kind)
    head = family(config, target_config, None if draft_ids is None else len(draft_ids))
    if source is not None:
        take_weights(head, source, draft_ids, str(named))
        return head
    start = Start(config.init, Path(target_folder), target_config, state_rms, draft_ids)
    with torch.no_grad():
        head.start(start)
    return head


def _same_sizes(one: Any, other: Any) -> bool:
    """Whether two configurations describe targets that feed the same heads."""
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    return all(getattr(one, name) == getattr(other, name) for name in names)
