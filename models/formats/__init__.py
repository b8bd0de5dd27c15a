"""Foreign checkpoint layouts, one file each; the only place that knows their names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..heads.checkpoint import LoadedHead
from .deepseek_mtp import DEEPSEEK_MTP
from .eagle import EAGLE
from .eagle3 import EAGLE3
from .eagle_layout import EagleLayout
from .ernie_mtp import ERNIE_MTP
from .glm_mtp import GLM_MTP
from .medusa import MEDUSA
from .medusa_layout import MedusaLayout
from .mimo_mtp import MIMO_MTP
from .mtp_layout import MTPLayout
from .qwen_mtp import QWEN_MTP
from .sglang_eagle import SGLANG_EAGLE
from .sglang_eagle3 import SGLANG_EAGLE3
from .speculators import SPECULATORS
from .trtllm_eagle3 import TRTLLM_EAGLE3
from .vllm_eagle import VLLM_EAGLE
from .vllm_eagle3 import VLLM_EAGLE3
from .vllm_medusa import VLLM_MEDUSA

Exporter = Callable[[LoadedHead, Path | str, Path | str], dict[str, str]]
"""(head, target's folder, folder to write) -> tensor name -> where it is from."""


class Importer(Protocol):
    """Reads a layout; the target's folder where it is at hand."""

    def __call__(self, folder: Path | str, target_folder: Path | str | None = None) -> LoadedHead:
        """The head in `folder`."""
        ...


# The first whose tensors a target holds is its own; DeepSeek's names are GLM's, too.
MTP_LAYOUTS: tuple[MTPLayout, ...] = (QWEN_MTP, MIMO_MTP, ERNIE_MTP, GLM_MTP, DEEPSEEK_MTP)
EAGLE_LAYOUTS: tuple[EagleLayout, ...] = (
    EAGLE,
    VLLM_EAGLE,
    SGLANG_EAGLE,
    EAGLE3,
    VLLM_EAGLE3,
    SGLANG_EAGLE3,
    TRTLLM_EAGLE3,
    SPECULATORS,
)
MEDUSA_LAYOUTS: tuple[MedusaLayout, ...] = (MEDUSA, VLLM_MEDUSA)

LAYOUTS: dict[str, tuple[Exporter, Importer]] = {
    one.name: (one.write, one.read)
    for one in (*reversed(MTP_LAYOUTS), *EAGLE_LAYOUTS, *MEDUSA_LAYOUTS)
}


def layout(name: str) -> tuple[Exporter, Importer]:
    """Exporter and importer of a layout; ValueError names the nearest known one."""
    if name not in LAYOUTS:
        near = difflib.get_close_matches(name, LAYOUTS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"layout {name!r} is not known{hint}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
