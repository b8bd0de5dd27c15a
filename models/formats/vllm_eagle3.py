"""EAGLE-3 folders for vLLM 0.33.0 (`speculative_config={"method": "eagle3", …}`); names as in
`eagle3.py`.

    LlamaForCausalLMEagle3     a Llama-shaped layer, with no biases or all four
    Eagle3Qwen3ForCausalLM     a Qwen3 layer (norms on queries and keys)

The ids in `eagle_aux_hidden_state_layer_ids` are those of the layers that a state *enters*. The
same key inside `eagle_config` is read for its length alone; it is written as SGLang counts (the
layer that a state leaves). A name that is not known raises, but for a
`.bias` of a module that is there, the rope's tables, and an `input_norm` or `mask_hidden` that the
configuration does not ask for. What is missing stays random, a norm one; a missing map stays zero,
so that the first ids would be drafted; a map for the whole vocabulary raises. In a multi-layer head
further layers read `input_layernorm`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle3 import (
    FOUR_NORMS,
    eagle3_made,
    eagle3_runs,
    fed_norms,
    norm_before_fc,
    to_first,
    usual,
    with_vocabulary,
)
from .eagle_layout import EagleLayout
from .loaders import (
    QKV,
    Engine,
    Keys,
    Loader,
    Made,
    Parameter,
    Stopped,
    layer_made,
    read_rope,
)
from .vllm_eagle import VERSION, looks, mlp_biases, without_tables

IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"


def _resolve(keys: Keys) -> str:
    (architecture, *_) = keys.need("architectures")
    kept = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if kept else f"Eagle3{architecture}"


def _aux_count(keys: Keys, top: bool) -> int:
    given = keys.get("num_aux_hidden_states")
    ids = (keys.get(IDS) if top else None) or keys.get(NESTED)
    return int(given) if given is not None else len(ids) if ids else 3


def _further(keys: Keys, **kind: Any) -> Made:
    made: Made = {}
    norms = ("input_layernorm", "post_attention_layernorm")
    for index in range(1, int(keys.need("num_hidden_layers"))):
        prefix, size = f"layers.{index}.", int(keys.need("hidden_size"))
        made |= layer_made(keys, prefix, norms=norms, **kind)
        made[f"{prefix}hidden_norm.weight"] = Parameter((size,), "unused")
    return made


def _map(keys: Keys, target: Any) -> str | None:
    rows = keys.get("draft_vocab_size") or keys.need("vocab_size")
    return None if rows == int(target.vocab_size) else "zeros"


def _llama(keys: Keys, target: Any) -> Made:
    # Read by the layer that the class inherits; q, k and v are made anew by attention_bias alone.
    every = bool(keys.get("attention_bias", False))
    outer = every or bool(keys.get("bias", False))
    kind = {"biases": (QKV if every else ()) + (("o_proj",) if outer else ()) + mlp_biases(keys)}
    count = _aux_count(keys, False)
    made = eagle3_made(keys, count, _map(keys, target), **kind) | _further(keys, **kind)
    return made | fed_norms(keys, count)


def _qwen3(keys: Keys, target: Any) -> Made:
    kind = {"biases": QKV if keys.get("attention_bias", False) else (), "query_norms": True}
    count = _aux_count(keys, True)
    made = eagle3_made(keys, count, _map(keys, target), **kind) | _further(keys, **kind)
    return made | fed_norms(keys, count)


def _runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    ids = keys.get(IDS, "usual", guess=True)
    boundaries = usual(target) if ids in ("usual", None, []) else tuple(sorted(set(ids)))
    runs = eagle3_runs(keys, read_rope(keys), boundaries, tensors)
    runs["fed"] = norm_before_fc(keys)
    if keys.get("norm_before_residual", False):
        runs["residual"] = "post-norm"
    if keys.get("norm_output", False):
        runs["recycled"] = "its output after the norm"
    if max(boundaries) > int(target.num_hidden_layers):
        raise Stopped(f"{IDS}={list(boundaries)}: the target has {target.num_hidden_layers} layers")
    return runs


def _qwen3_runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return _runs(keys, target, tensors) | {"layer": "query-norm"}


def _renamed(name: str) -> str | None:
    first = to_first(name)
    return None if first is None else without_tables(first)


def _looks(name: str, made: Made) -> bool:
    return looks(name, made) and not name.startswith(("input_norm.", "mask_hidden"))


def _llama_loader(name: str) -> Loader:
    return Loader(
        name, name, _llama, _runs, _renamed, looks=_looks, norms=FOUR_NORMS, all_biases=True
    )


CLASSES = (
    _llama_loader("LlamaForCausalLMEagle3"),
    _llama_loader("Eagle3LlamaForCausalLM"),
    Loader(
        "Eagle3Qwen3ForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        _qwen3,
        _qwen3_runs,
        _renamed,
        looks=_looks,
        norms=FOUR_NORMS,
        query_norms=True,
        writes={"use_sliding_window": False},
    ),
)
VLLM3 = Engine(VERSION, _resolve, CLASSES)


def with_ids(config: dict[str, Any], loaded: LoadedHead) -> dict[str, Any]:
    """The boundaries as vLLM counts them, and inside `eagle_config` as SGLang does."""
    ids = list(loaded.head.boundaries)
    nested: dict[str, Any] = {"use_aux_hidden_state": True, IDS: [k - 1 for k in ids]}
    if loaded.head.config.norm_before_fc == "all":
        nested["norm_before_fc"] = True
    return config | {IDS: ids, "num_aux_hidden_states": len(ids), "eagle_config": nested}


def with_flags(config: dict[str, Any], loaded: LoadedHead) -> dict[str, Any]:
    """What is not the same in every EAGLE-3 head, written out."""
    recycle = loaded.head.recycle
    return config | {
        "norm_before_residual": recycle.residual == "post-norm",
        "norm_output": recycle.recycled == "post-output-norm",
        "norm_before_fc": loaded.head.config.norm_before_fc == "all",
        "fc_norm": loaded.head.config.norm_before_fc == "each",
    }


def all_or_none(config: dict[str, Any]) -> dict[str, Any]:
    """Biases of q, k and v alone are written as all four, with zeros for o_proj's."""
    if config.pop("qkv_bias", False):
        config["attention_bias"] = True
    return config


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    return with_flags(with_ids(with_vocabulary(all_or_none(config), loaded), loaded), loaded)


VLLM_EAGLE3 = EagleLayout("vllm-eagle3", "eagle3", VLLM3, _configure)
