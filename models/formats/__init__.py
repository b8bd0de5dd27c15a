"""Foreign checkpoint layouts, one file each; the only place that knows their names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from ..heads.checkpoint import LoadedHead
from .deepseek_mtp import export_deepseek_mtp, import_deepseek_mtp

Exporter = Callable[[LoadedHead, Path | str, Path | str], dict[str, str]]
Importer = Callable[[Path | str], LoadedHead]

LAYOUTS: dict[str, tuple[Exporter, Importer]] = {
    "deepseek-mtp": (export_deepseek_mtp, import_deepseek_mtp),
}


def layout(name: str) -> tuple[Exporter, Importer]:
    """Exporter and importer of a layout; ValueError names the nearest known one."""
    if name not in LAYOUTS:
        near = difflib.get_close_matches(name, LAYOUTS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"layout {name!r} is not known{hint}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
