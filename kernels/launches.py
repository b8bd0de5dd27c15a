"""Launch settings that were measured on a card, for the launches of one shape class.

An op chooses its blocks, warps and stages by rule. Where `launches.json` beside this file has an
entry for a kernel, the constants that its op asks for, which are the powers of two over the widths
at hand, and the card's compute capability, what is written there is used instead. The table is
written by `scripts/tune.py` on a GPU and read at the first launch; without one the rules hold.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("launches.json")
LAUNCH = ("num_warps", "num_stages")
"""Settings of a launch that are no constants of the kernel."""


def shape_class(kernel: str, asked: dict[str, Any]) -> str:
    """How the table names the launches of a kernel with such constants; `LAUNCH` does not count."""
    constants = (f"{name}={int(asked[name])}" for name in sorted(asked) if name not in LAUNCH)
    return " ".join([kernel, *constants])


def tuned(kernel: str, asked: dict[str, Any], capability: int) -> dict[str, int]:
    """What to launch with instead of what is asked; empty where nothing was measured.

    Args:
        asked: constants and `LAUNCH` settings by name. capability: 80, 90, …
    """
    table = _read().get(str(capability))
    return table.get(shape_class(kernel, asked), {}) if table else {}


def tuned_here(kernel: str, asked: dict[str, Any]) -> dict[str, int]:
    """`tuned` for the card of this process; nothing where there is none."""
    return tuned(kernel, asked, _capability()) if _read() else {}


@functools.cache
def _read() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@functools.cache
def _capability() -> int:
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
