"""EAGLE-3 folders for TensorRT-LLM's PyTorch path (00679c66); names as in `eagle3.py`.

`Eagle3ForCausalLM` for any Llama-shaped head, its attention with four biases or none. Names that it
does not know are never looked at; a norm, `fc`, o_proj or down_proj that is missing stays random; a
missing part of q, k, v or gate, up, and a missing map where Vd differs from V, raise. The states
are not read from the folder: give `eagle3_layers_to_capture` (layers that a state *leaves*; without
it 1, L//2-1 and L-4), which `plan` says where it is needed. `norm_before_residual` is not known,
`fc` is made for two states and more, further layers read `hidden_norm`, and of a rope `rope_theta`
and `rope_scaling` are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle3 import FOUR_NORMS, eagle3_made, eagle3_runs, to_first, usual, with_vocabulary
from .eagle_layout import EagleLayout
from .loaders import (
    ALL_FOUR,
    Engine,
    Keys,
    Loader,
    Made,
    Parameter,
    Stopped,
    layer_made,
    read_rope,
)
from .vllm_eagle3 import IDS, NESTED, all_or_none, with_flags, with_ids

VERSION = "TensorRT-LLM 00679c66"


def _made(keys: Keys, target: Any) -> Made:
    kind: dict[str, Any] = {"packed": "raise", "unset": "random"}
    kind["biases"] = ALL_FOUR if keys.need("attention_bias") else ()
    if keys.get("mlp_bias", False):
        kind["biases"] += ("gate_proj", "up_proj", "down_proj")
    reduced = keys.get("draft_vocab_size") not in (None, keys.need("vocab_size"))
    made = eagle3_made(keys, len(_captured(keys, target)), "raise" if reduced else None, **kind)
    if len(_captured(keys, target)) == 1:
        del made["fc.weight"]
    for index in range(1, int(keys.need("num_hidden_layers"))):
        prefix, size = f"layers.{index}.", int(keys.need("hidden_size"))
        norms = ("hidden_norm", "post_attention_layernorm")
        made |= layer_made(keys, prefix, norms=norms, **kind)
        made[f"{prefix}input_layernorm.weight"] = Parameter((size,), "unused")
    return made


def _captured(keys: Keys, target: Any) -> tuple[int, ...]:
    """What `eagle3_layers_to_capture` must be told, as the folder notes it for the user."""
    ids = keys.get(NESTED, "usual", guess=True)
    return usual(target) if ids in ("usual", None) else tuple(sorted(k + 1 for k in ids))


def _runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    for name in ("next_layer_regular", "eh_proj_before_attn", "norm_before_fc"):
        if keys.get(f"eagle_config.{name}", name == "next_layer_regular") != (
            name == "next_layer_regular"
        ):
            raise Stopped(f"eagle_config.{name} makes another head of it than any here")
    if keys.get("fc_norm", False):
        raise Stopped("fc_norm=true: a norm before fc, which the class has in a way of its own")
    keys.need("torch_dtype")
    boundaries = _captured(keys, target)
    if boundaries[0] < 1:
        raise Stopped("it captures what layers leave, and the embedding's output is asked for")
    runs = eagle3_runs(keys, read_rope(keys, modern=False), boundaries, tensors)
    if keys.get("norm_output", False) or keys.get("eagle_config.return_hidden_post_norm", False):
        runs["recycled"] = "its output after the norm"
    return runs


def _resolve(keys: Keys) -> str:
    kind = keys.need("model_type")
    if kind != "llama":
        raise Stopped(f"model_type {kind!r}: it makes an EAGLE-3 layer of Llama's kind alone")
    return "Eagle3ForCausalLM"


TRTLLM3 = Engine(
    VERSION,
    _resolve,
    (
        Loader(
            "Eagle3ForCausalLM",
            "LlamaForCausalLMEagle3",
            _made,
            _runs,
            to_first,
            unexpected="drop",
            norms=FOUR_NORMS,
            all_biases=True,
        ),
    ),
)


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    config = with_flags(with_ids(with_vocabulary(all_or_none(config), loaded), loaded), loaded)
    del config[IDS]  # another engine's way of counting
    return config


TRTLLM_EAGLE3 = EagleLayout("trtllm-eagle3", "eagle3", TRTLLM3, _configure)
