"""How a head must be run, beside its weights: one flat record, the same from a trained head and
from an engine's class, so that every difference between the two can be named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .loaders import Engine, Report, few, plain_rope

PLAIN = ("llama", "mistral", "qwen2")
"""Families whose layers are Llama's, but for biases and a window."""
_QUERY_NORMS = ("qwen3",)
_BY_PAIRS = ("deepseek_v3", "ernie4_5_moe")
"""Families with an MTP layout whose rope turns neighbours together, not the halves of a head."""

LAYER_FACTS = ("layer", "activation", "heads", "width", "eps", "rope", "window")
"""What a decoder layer is."""

_WORDS = {
    "layer": "a {} layer",
    "heads": "query heads, key-value heads and head width {}",
    "rope": "the rope {}",
    "window": "an attention window of {}",
    "norms": "the norms {}",
    "boundaries": "the target's states at {}",
    "residual": "a residual that starts {}",
    "recycled": "recycling {}",
    "order": "the projection's parts in the order {}",
    "masked": "the embedding at position 0 zeroed: {}",
    "style": "norms of the style {}",
    "turned": "the rope turned {}",
    "fed": "a norm before fc: {}",
    "modules": "{} separate modules",
    "layers": "{} layers",
    "draft_ids": "a vocabulary of {}",
    "positions": "positions up to {}",
    "factors": "factors of embedding, branches and output {}",
}
_REMEDIES = {
    "layer": "train an mtp head and export it in its family's layout, or stay in this engine",
    "norms": "train with the norms of a class above, or stay in this engine",
    "boundaries": "train with head.boundaries as the engine reads them",
    "residual": "train with head.norm_before_residual=false",
    "recycled": "train with head.norm_output or head.recycle_raw as the engine recycles",
    "order": "train with head.hidden_first=false",
    "fed": "train with head.norm_before_fc as the engine has it",
    "masked": "train with head.mask_position_zero=false",
    "modules": "train with head.modules=1",
    "layers": "train with head.num_layers=1",
    "rope": "choose an engine that knows this rope",
}


def layer_facts(config: Any) -> dict[str, Any]:
    """Of a target family's last decoder layer, from transformers' configuration."""
    kind = str(config.model_type)
    heads = int(config.num_attention_heads)
    types = getattr(config, "layer_types", None)
    sliding = types[-1] == "sliding_attention" if types else kind == "mistral"
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    flat = "rope_theta" in rope
    return {
        "layer": "plain"
        if kind in PLAIN
        else "query-norm"
        if kind in _QUERY_NORMS
        else f"{kind} (its own)",
        "activation": getattr(config, "hidden_act", None),
        "heads": (
            heads,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or int(config.hidden_size) // heads),
        ),
        "width": int(getattr(config, "intermediate_size", 0) or 0),
        "eps": float(getattr(config, "rms_norm_eps", 0.0)),
        "rope": plain_rope(rope) if flat else dict(rope),
        "window": getattr(config, "sliding_window", None) if sliding else None,
    }


def facts(loaded: LoadedHead) -> dict[str, Any]:
    """Of a trained head."""
    head, config = loaded.head, loaded.head.config
    # Of a single eagle3 layer the two norms of its halves stand for the input norm.
    implied = head.kind == "eagle3" and head.num_layers == 1
    norms = tuple(
        name
        for name, on in vars(config.norms).items()
        if on or (implied and name == "attention_input")
    )
    return layer_facts(head.target_config) | {
        "norms": norms,
        "boundaries": head.boundaries if head.kind == "eagle3" else "post-final-norm",
        "residual": head.recycle.residual if head.kind == "eagle3" else None,
        "recycled": recycled(norms, head.recycle.recycled == "post-output-norm"),
        "order": head.recycle.fusion_order,
        "fed": config.norm_before_fc if head.kind == "eagle3" else None,
        "masked": head.recycle.mask_position_zero,
        "style": head.recycle.norm_style,
        "turned": "by pairs"
        if str(head.target_config.model_type).startswith(_BY_PAIRS)
        else "by halves",
        "modules": head.num_modules,
        "layers": head.num_layers,
        "draft_ids": identity(loaded.draft_ids) if head.kind == "eagle3" else None,
        "positions": int(getattr(head.target_config, "max_position_embeddings", 0) or 0),
        "vocabulary": int(head.target_config.vocab_size),
        "factors": (1.0, 1.0, 1.0),
    }


def recycled(norms: tuple[str, ...], after: bool) -> str:
    """What the next step is fed; one thing where there is no output norm."""
    if "output" not in norms:
        return "its output"
    return "its output after the norm" if after else "its output before the norm"


def identity(draft_ids: Tensor | None) -> tuple[int, ...] | None:
    """Draft ids to be compared; None for the whole vocabulary."""
    return None if draft_ids is None else tuple(draft_ids.tolist())


def mapped(tensors: dict[str, Tensor]) -> tuple[int, ...] | None:
    """The ids that a folder's `d2t` offsets reach."""
    offsets = tensors.get("d2t")
    if offsets is None or offsets.is_meta:
        return None
    return tuple((offsets.to(torch.int64) + torch.arange(len(offsets))).tolist())


def differences(title: str, runs: dict[str, Any], trained: dict[str, Any]) -> list[str]:
    """A clause for each fact in which a class differs from the head, with its remedy. More
    positions than the head's target has do no harm."""
    told = []
    for name, value in runs.items():
        ours = trained.get(name)
        if value == ours or (name == "positions" and value >= ours):
            continue
        words = _WORDS.get(name, f"{name} {{}}")
        clause = f"{title} runs {words.format(_shown(value))}, this head has {_shown(ours)}"
        remedy = _REMEDIES.get(name)
        told.append(f"{clause}: {remedy}" if remedy else clause)
    return told


def judge(
    engine: Engine,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: Any,
    trained: dict[str, Any],
) -> tuple[Report, list[str]]:
    """What an engine does with a head as written, and what is wrong with that, a clause each.

    Args:
        config, tensors: the folder's. target: transformers' configuration. trained: the head's
            facts.
    """
    report = engine.load(config, tensors, target)
    faults = [f"{report.title} {fault}" for fault in report.faults()]
    return report, faults + differences(report.title, report.runs, trained)


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 8:
        return f"{len(value):,} ids"
    if isinstance(value, tuple):
        return few(map(str, value)) or "none"
    return "none" if value is None else str(value)
