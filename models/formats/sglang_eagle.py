"""EAGLE folders for SGLang 0.5.23 (`--speculative-algorithm EAGLE`): two classes, by the norms that
they run.

    LlamaForCausalLMEagle     none               names of the EAGLE folder (`eagle.py`)
    MistralForCausalLMEagle   attention_input    `model.` before the names

Both warn of a name that they do not know and leave what is missing random, a norm one and an
attention's bias zero. The first makes `fc` with a bias, so the folder holds one of zeros; the
second makes a `norm` that it never runs. Embedding and lm_head are the target's. vLLM looks for
another class name, so one folder cannot serve both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle import eagle_made, eagle_runs
from .eagle_layout import EagleLayout
from .loaders import ALL_FOUR, Engine, Keys, Loader, Made, Parameter, read_rope

VERSION = "SGLang 0.5.23"


def biases(keys: Keys) -> tuple[str, ...]:
    """Of a Llama layer: all four or none."""
    return ALL_FOUR if keys.get("attention_bias", False) or keys.get("bias", False) else ()


def _llama(keys: Keys, target: Any) -> Made:
    made = eagle_made(keys, biases=biases(keys), bias="zeros")
    made["fc.bias"] = Parameter((int(keys.need("hidden_size")),))
    return made


def _llama_runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return eagle_runs(read_rope(keys), keys)


def _mistral(keys: Keys, target: Any) -> Made:
    norms = ("input_layernorm", "post_attention_layernorm")
    made = eagle_made(keys, "model.", norms=norms, biases=biases(keys), bias="zeros")
    made["model.norm.weight"] = Parameter((int(keys.need("hidden_size")),), "unused")
    return made


def _mistral_runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return _llama_runs(keys, target, tensors) | {"norms": ("attention_input",)}


SGLANG = Engine(
    VERSION,
    lambda keys: keys.need("architectures")[0],
    (
        Loader(
            "LlamaForCausalLMEagle",
            "LlamaForCausalLMEagle",
            _llama,
            _llama_runs,
            rename=lambda name: None if "lm_head" in name else name,
            unexpected="drop",
            fills={"fc.bias": "zeros"},
            all_biases=True,
        ),
        Loader(
            "MistralForCausalLMEagle",
            "MistralForCausalLMEagle",
            _mistral,
            _mistral_runs,
            rename=lambda name: None if name.startswith("lm_head.") else name,
            unexpected="drop",
            prefix="model.",
            norms=("attention_input",),
            all_biases=True,
        ),
    ),
)


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    if config.pop("qkv_bias", False):
        config["attention_bias"] = True
    return config


SGLANG_EAGLE = EagleLayout("sglang-eagle", "eagle", SGLANG, _configure)
