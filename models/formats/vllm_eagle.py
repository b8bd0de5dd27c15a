"""EAGLE folders for vLLM 0.33.0 (`speculative_config={"method": "eagle", …}`): three classes, by
the norms that they run.

    EagleLlamaForCausalLM    none             names of the EAGLE folder (`eagle.py`)
    EagleMistralForCausalLM  attention_input, output      `model.` before the names, `norm.weight`
    EagleMiniCPMForCausalLM  embedding, hidden, attention_input      `model.input_norm1`,
                             `model.input_norm2`, `model.eagle_layers.0.`

All raise on a name that they do not know, but for a `.bias` of a module that they have and the
rope's tables. A missing matrix stays random, but that the last raises where `fc` is missing; a
missing norm stays one in the first and raises in the others. Embedding and lm_head are the
target's. EagleMistralForCausalLM takes Mistral's own names for `model.layers` and `model.norm`,
too. The last makes a `norm` that it never runs, so the folder holds a filler. A Llama-shaped layer
runs in all three (MiniCPM's three factors are written as 1). Cohere's and Llama-4's classes have
layers of their own.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle import eagle_made, eagle_runs
from .eagle_layout import EagleLayout
from .loaders import QKV, Engine, Keys, Loader, Made, Parameter, read_rope

VERSION = "vLLM 0.33.0"
_TABLES = ("inv_freq", "cos_cached", "sin_cached")


def attention_biases(keys: Keys) -> tuple[str, ...]:
    """Of a Llama layer: `bias` reads as `attention_bias`, and `qkv_bias` overrules both but for
    o_proj's."""
    every = bool(keys.get("attention_bias", False) or keys.get("bias", False))
    inner = bool(keys.get("qkv_bias", every))
    return (QKV if inner else ()) + (("o_proj",) if every else ())


def mlp_biases(keys: Keys) -> tuple[str, ...]:
    """Of a Llama layer."""
    return ("gate_proj", "up_proj", "down_proj") if keys.get("mlp_bias", False) else ()


def looks(name: str, made: Made) -> bool:
    """A bias that a module does not have is never looked at."""
    module, _, end = name.rpartition(".")
    return end != "bias" or f"{module}.weight" not in made


def without_tables(name: str) -> str | None:
    """Tables of the rope are skipped."""
    return None if "rotary_emb." in name and name.endswith(_TABLES) else name


def _mistral_name(name: str) -> str | None:
    own = name.startswith(("layers.", "norm."))
    return without_tables(f"model.{name}" if own else name)


def _resolve(keys: Keys) -> str:
    (architecture, *_) = keys.need("architectures")
    return architecture if architecture.startswith("Eagle") else f"Eagle{architecture}"


def _llama(keys: Keys, target: Any) -> Made:
    return eagle_made(keys, biases=attention_biases(keys) + mlp_biases(keys))


def _llama_runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return eagle_runs(read_rope(keys), keys)


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _mistral(keys: Keys, target: Any) -> Made:
    biases = attention_biases(keys) + mlp_biases(keys)
    made = eagle_made(keys, "model.", norms=_NORMS, biases=biases, unset="raise")
    made["model.norm.weight"] = Parameter((int(keys.need("hidden_size")),), "raise")
    return made


def _mistral_runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return _llama_runs(keys, target, tensors) | {
        "norms": ("attention_input", "output"),
        "recycled": "its output after the norm",
    }


def _minicpm(keys: Keys, target: Any) -> Made:
    size, vocabulary = int(keys.need("hidden_size")), int(keys.need("vocab_size"))
    made = eagle_made(keys, "model.", "eagle_layers", norms=_NORMS, square=True, unset="raise")
    made["model.fc.weight"] = Parameter((size, 2 * size), "raise")
    for name in ("input_norm1", "input_norm2", "norm"):
        made[f"model.{name}.weight"] = Parameter((size,), "raise")
    made["lm_head.weight"] = Parameter((vocabulary, size), "shared")
    return made


def _minicpm_runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    layers = int(keys.need("num_hidden_layers"))
    branch = float(keys.need("scale_depth")) / math.sqrt(keys.get("mup_denominator", layers))
    output = int(keys.need("dim_model_base")) / int(keys.need("hidden_size"))
    return eagle_runs(read_rope(keys), keys, square=True) | {
        "norms": ("embedding", "hidden", "attention_input"),
        "factors": (float(keys.need("scale_emb")), branch, output),
    }


VLLM = Engine(
    VERSION,
    _resolve,
    (
        Loader(
            "EagleLlamaForCausalLM",
            "LlamaForCausalLM",
            _llama,
            _llama_runs,
            without_tables,
            looks=looks,
        ),
        Loader(
            "EagleMistralForCausalLM",
            "MistralForCausalLM",
            _mistral,
            _mistral_runs,
            _mistral_name,
            looks=looks,
            prefix="model.",
            norms=("attention_input", "output"),
        ),
        Loader(
            "EagleMiniCPMForCausalLM",
            "MiniCPMForCausalLM",
            _minicpm,
            _minicpm_runs,
            without_tables,
            looks=looks,
            prefix="model.",
            layer="eagle_layers.0.",
            norms=("embedding", "hidden", "attention_input"),
            writes={"scale_emb": 1.0, "scale_depth": 1.0, "mup_denominator": 1},
            fills={"model.norm.weight": "ones"},
        ),
    ),
)


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    if loader.architecture == "MiniCPMForCausalLM":
        config["dim_model_base"] = config["hidden_size"]
    return config


VLLM_EAGLE = EagleLayout("vllm-eagle", "eagle", VLLM, _configure)
