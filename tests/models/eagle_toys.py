"""Toy targets and random EAGLE and EAGLE-3 heads for the tests of their layouts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from draftsmith.models.formats import EAGLE_LAYOUTS
from draftsmith.models.heads import HeadConfig, LoadedHead, NormConfig, head_class
from draftsmith.models.skeleton import text_config

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "biased": {"model_type": "llama", "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}
BY_NAME = {one.name: one for one in EAGLE_LAYOUTS}
NONE = NormConfig(False, False, False, False)
IDS = torch.tensor([1, 4, 5, 9, 30, 31, 77, 95])
MARKS = {"config": "a", "tokenizer": "b", "chat_template": "c", "weights": "d"}


def target_config(name: str, **changes: Any) -> Any:
    """transformers' configuration of a toy target."""
    settings = SMALL | TARGETS[name] | changes
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def random_head(config: HeadConfig, target: Any, ids: torch.Tensor | None = None) -> LoadedHead:
    """A head whose every value is drawn."""
    head = head_class(config.kind)(config, target, None if ids is None else len(ids))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return LoadedHead(head, ids, {"head": {}, "target_fingerprint": MARKS, "trained_length": 9})


def head_for(target: Path, config: HeadConfig, ids: torch.Tensor | None = None) -> LoadedHead:
    """A random head for a target on disk; the same one for all who ask, who leave it as it is."""
    assert ids is None or ids is IDS
    return _head_for(target, config, ids is not None)


@cache
def _head_for(target: Path, config: HeadConfig, reduced: bool) -> LoadedHead:
    return random_head(config, text_config(target), IDS if reduced else None)
