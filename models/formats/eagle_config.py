"""Between a head's layer as transformers describes it and the Llama-shaped config.json of an EAGLE
folder."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from ..heads.protocol import Head
from .facts import LAYER_FACTS, layer_facts
from .loaders import Loader


def written_config(head: Head, loader: Loader, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A configuration for the class that transformers 4 and 5 read alike; biases as the tensors
    have them."""
    target = head.target_config
    layer = layer_facts(target)
    rope = layer["rope"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    if scaling.get("rope_type") == "default" and len(scaling) == 1:
        scaling = None
    else:  # transformers 4 called it `type`, and counted in integers
        scaling = {"type": rope["rope_type"], **scaling}
    biased = {name.split(".")[-2] for name in tensors if name.endswith("_proj.bias")}
    heads, kv_heads, head_dim = layer["heads"]
    dtype = getattr(target, "dtype", None) or torch.bfloat16
    config: dict[str, Any] = {
        "architectures": [loader.architecture],
        "model_type": "qwen3" if layer["layer"] == "query-norm" else "llama",
        "hidden_size": int(target.hidden_size),
        "intermediate_size": layer["width"],
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": layer["activation"],
        "rms_norm_eps": layer["eps"],
        "max_position_embeddings": int(target.max_position_embeddings),
        "vocab_size": int(target.vocab_size),
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "attention_bias": "o_proj" in biased
        or ("q_proj" in biased and layer["layer"] == "query-norm"),
        "mlp_bias": "up_proj" in biased,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if "q_proj" in biased and not config["attention_bias"]:
        config["qkv_bias"] = True
    return config | loader.writes


def layer_config(runs: dict[str, Any], tensors: dict[str, Tensor], target: Any) -> Any:
    """transformers' configuration of a target with the layer that the folder has: the target's own
    where that is the same, else one of Llama's shape."""
    names = {name.split(".")[-2] for name in tensors if name.endswith("_proj.bias")}
    outer = [value for name, value in tensors.items() if name.endswith("o_proj.bias")]
    biased = names - ({"o_proj"} if not any(bool(value.any()) for value in outer) else set())
    own, family = layer_facts(target), str(target.model_type)
    expected = {"q_proj", "o_proj"} if getattr(target, "attention_bias", False) else set()
    expected = {"q_proj"} if family == "qwen2" else expected
    looked = {"q_proj", "o_proj"}
    if all(own[name] == runs[name] for name in LAYER_FACTS) and expected in (
        names & looked,
        biased & looked,
    ):
        return copy.deepcopy(target)
    heads, kv_heads, head_dim = runs["heads"]
    made = LlamaConfig
    if runs["layer"] == "query-norm":
        made = Qwen3Config
    elif "q_proj" in biased and "o_proj" not in biased:
        made = Qwen2Config
    extra: dict[str, Any] = {} if made is Qwen2Config else {"attention_bias": "q_proj" in biased}
    if made is LlamaConfig:
        extra["mlp_bias"] = "up_proj" in biased
    return cast("Any", made)(
        hidden_size=int(target.hidden_size),
        intermediate_size=runs["width"],
        num_hidden_layers=int(target.num_hidden_layers),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=runs["activation"],
        rms_norm_eps=runs["eps"],
        rope_parameters=runs["rope"],
        max_position_embeddings=int(target.max_position_embeddings),
        vocab_size=int(target.vocab_size),
        tie_word_embeddings=False,
        **extra,
    )
