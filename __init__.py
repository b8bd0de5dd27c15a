"""draftsmith: train the small heads that let a language model emit several tokens per pass, and
prove them.

One way leads through the package: conversations -> token rows -> hidden-state cache -> head ->
acceptance report -> export; each arrow is one command (`draftsmith --help`), each artifact a
documented format. The names below are those of the way from Python (docs/python-api.md); each is
imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "data.batches": ("BatchPlan",),
    "data.cache": ("Cache",),
    "data.dump": ("DumpConfig", "dump"),
    "data.probes": ("state_rms",),
    "data.prompts": ("load_prompts",),
    "data.rows": ("Rows", "RowsConfig", "prepare"),
    "inference.acceptance": ("PromptSet", "measure"),
    "inference.config": ("EngineConfig", "SamplingParams"),
    "inference.engine": ("Engine",),
    "inference.head_drafter": ("HeadDrafter",),
    "models.heads": ("HeadConfig", "build_head", "load_head", "save_head"),
    "models.target": ("Target", "TargetConfig", "load_tokenizer"),
    "train.config": ("TrainConfig",),
    "train.loop": ("Trainer",),
}


def __getattr__(name: str) -> Any:
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(name for names in _PUBLIC.values() for name in names)])
