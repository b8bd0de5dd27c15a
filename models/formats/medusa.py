"""The Medusa folder as its authors' code reads it (FasterDecoding/Medusa, e2a5d20).

    medusa_lm_head.pt    {i}.0.linear.{weight [H, H], bias [H]}    the block of head i
                         {i}.1.weight [V, H]                       its lm_head
    config.json          medusa_num_heads, medusa_num_layers, base_model_name_or_path

The state fed is the target's after its final norm; head i drafts x_{p+2+i}. The code makes five
heads whatever config.json says and loads with strict=False: of more it drops the rest, of fewer it
leaves the others random. Several blocks of a head are one block there, applied again: the last of
their tensors wins. It knows Llama and Mistral targets. safetensors of the same names are read, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .loaders import Engine, Keys, Loader, Made, Parameter, Stopped
from .medusa_layout import MedusaLayout

VERSION = "FasterDecoding Medusa e2a5d20"
_HEADS = 5


def _made(keys: Keys, target: Any) -> Made:
    size, blocks = int(target.hidden_size), int(keys.get("medusa_num_layers", 1, guess=True))
    made: Made = {}
    for head in range(_HEADS):
        for block in range(blocks):
            made[f"{head}.{block}.linear.weight"] = Parameter((size, size))
            made[f"{head}.{block}.linear.bias"] = Parameter((size,))
        made[f"{head}.{blocks}.weight"] = Parameter((int(target.vocab_size), size))
    return made


def _runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    keys.need("base_model_name_or_path")
    if str(target.model_type) not in ("llama", "mistral"):
        raise Stopped(f"a {target.model_type} target: it knows llama and mistral alone")
    blocks = int(keys.get("medusa_num_layers", 1, guess=True))
    if blocks > 1:
        raise Stopped(
            "a head's further blocks are the first one, applied again: train with head.num_layers=1"
        )
    keys.get("medusa_num_heads", _HEADS)
    return {
        "modules": _HEADS,
        "layers": blocks,
        "vocabulary": int(target.vocab_size),
        "draft_ids": None,
    }


def _configure(loaded: LoadedHead, target: Path) -> dict[str, Any]:
    return {
        "medusa_num_heads": loaded.head.config.modules,
        "medusa_num_layers": loaded.head.config.num_layers,
        "base_model_name_or_path": str(target.absolute()),
    }


AUTHORS = Engine(
    VERSION,
    lambda keys: "MedusaModel",
    (Loader("MedusaModel", "MedusaModel", _made, _runs, unexpected="drop"),),
)
MEDUSA = MedusaLayout(
    "medusa",
    AUTHORS,
    "medusa_lm_head.pt",
    "{head}.{block}.linear",
    "{head}.{blocks}.weight",
    _configure,
)
