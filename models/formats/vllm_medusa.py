"""Medusa folders for vLLM's `MedusaModel`, which versions before 0.33 have (read at 09cddad8).

    blocks.{i}.layers.{j}.{weight [H, H], bias [H]}    the blocks of head i
    lm_heads.{i}.weight [V or Vd, H]                   its lm_head, or
    lm_head.weight [V or Vd, H]                        that of all (`original_lm_head`)
    token_map int64 [Vd]                               the ids of its rows

Blocks have no bias unless `medusa_fc_bias` is true. A draft vocabulary needs `truncated_vocab_size`
and `token_map` (absolute ids). A name that is not known is dropped, a parameter without a tensor
raises. Every key of config.json that says `num` and `heads` is read as the number of heads, every
one that says `num` and `layers` as that of blocks. One draft is the argmax of one head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .loaders import Engine, Keys, Loader, Made, Parameter, Stopped
from .medusa_layout import MedusaLayout

VERSION = "vLLM before 0.33 (09cddad8)"


def _counts(keys: Keys) -> tuple[int, int]:
    """Heads, blocks of each."""
    heads = int(keys.get("num_heads", 5, guess=True))
    return heads, int(keys.get("num_hidden_layers", 1, guess=True))


def _rows(keys: Keys) -> tuple[int, int]:
    """Rows of an lm_head, ids of the vocabulary."""
    vocabulary = int(keys.get("vocab_size", 32001, guess=True))
    return int(keys.get("truncated_vocab_size") or vocabulary), vocabulary


def _made(keys: Keys, target: Any) -> Made:
    size, (heads, blocks) = int(keys.get("hidden_size", 4096, guess=True)), _counts(keys)
    rows, vocabulary = _rows(keys)
    made: Made = {}
    for head in range(heads):
        for block in range(blocks):
            name = f"blocks.{head}.layers.{block}"
            made[f"{name}.weight"] = Parameter((size, size), "raise")
            if keys.get("medusa_fc_bias", False):
                made[f"{name}.bias"] = Parameter((size,), "raise")
    if keys.get("original_lm_head", False):
        made["lm_head.weight"] = Parameter((rows, size), "raise")
    else:
        for head in range(heads):
            made[f"lm_heads.{head}.weight"] = Parameter((rows, size), "raise")
    if rows < vocabulary:
        made["token_map"] = Parameter((rows,), "raise")
    return made


def _runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    (heads, blocks), (rows, vocabulary) = _counts(keys), _rows(keys)
    if keys.get("logit_scale", 1.0) != 1.0:
        raise Stopped("logit_scale: a factor of the logits, which no head here has")
    ids = tensors.get("token_map") if rows < vocabulary else None
    return {
        "modules": heads,
        "layers": blocks,
        "vocabulary": vocabulary,
        "draft_ids": None if ids is None or ids.is_meta else tuple(sorted(ids.tolist())),
    }


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as the class renames its keys."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if "num" in name and ("heads" in name or "layers" in name):
            name = "num_heads" if "heads" in name else "num_hidden_layers"
        flat[name] = value
    return flat


def _resolve(keys: Keys) -> str:
    (architecture, *_) = keys.get("architectures", ["MedusaModel"])
    if keys.need("model_type") != "medusa":
        raise Stopped("model_type must be 'medusa'")
    return architecture


def _configure(loaded: LoadedHead, target: Path) -> dict[str, Any]:
    head, settings = loaded.head, loaded.head.target_config
    dtype = str(getattr(settings, "dtype", None) or "bfloat16").removeprefix("torch.")
    vocabulary = int(settings.vocab_size)
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": int(settings.hidden_size),
        "vocab_size": vocabulary,
        "num_heads": head.config.modules,
        "num_hidden_layers": head.config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not head.config.own_lm_heads,
        "truncated_vocab_size": vocabulary if loaded.draft_ids is None else len(loaded.draft_ids),
        "torch_dtype": dtype,
    }


VLLM = Engine(
    VERSION,
    _resolve,
    (
        Loader(
            "MedusaModel",
            "MedusaModel",
            _made,
            _runs,
            rename=lambda name: name.replace("medusa_heads.", ""),
            unexpected="drop",
        ),
    ),
    flat=_flat,
)
VLLM_MEDUSA = MedusaLayout(
    "vllm-medusa",
    VLLM,
    "model.safetensors",
    "blocks.{head}.layers.{block}",
    "lm_heads.{head}.weight",
    _configure,
    shared="lm_head.weight",
    token_map="token_map",
)
