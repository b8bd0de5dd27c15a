"""A random toy of every target family, and arithmetic in float64 throughout.

Each has what makes its family special, and a last layer that differs in kind from its first where
the family has kinds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

BASE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_SLIDING = ["full_attention", "full_attention", "sliding_attention"]
_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_theta": 1000.0, "rope_type": kind, **more}


def _yarn(**more: Any) -> dict[str, Any]:
    return _rope("yarn", factor=4.0, original_max_position_embeddings=64, **more)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama linear": {
        "model_type": "llama",
        "head_dim": 32,
        "rope_parameters": _rope("linear", factor=2.0),
    },
    "llama wide heads": {"model_type": "llama", "head_dim": 32, "attention_bias": True},
    "llama3 rope": {
        "model_type": "llama",
        "rope_parameters": _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    },
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_parameters": _yarn()},
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 16},
    "gemma": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "layer_types": _SLIDING,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "layer_types": _SLIDING,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": _rope("linear", factor=8.0),
            "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
    },
    "olmo2": {"model_type": "olmo2"},
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": True},
    "phi3": {
        "model_type": "phi3",
        "sliding_window": 5,
        "rope_parameters": _rope("default", partial_rotary_factor=0.5),
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **_EXPERTS,
        "topk_method": "group_limited_greedy",
        "q_lora_rank": None,
        "rope_parameters": _yarn(mscale=0.707, mscale_all_dim=0.707),
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_EXPERTS,
        "q_lora_rank": 24,
        "norm_topk_prob": True,
        "rope_parameters": _yarn(mscale=1.0, mscale_all_dim=1.0),
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}
"""What differs from `BASE`."""


def save_toy(name: str, folder: Path, **overrides: Any) -> Path:
    """Write the family's toy as a float32 checkpoint folder, the files' names as the hub's."""
    settings = BASE | FAMILIES[name] | overrides
    kind = settings.pop("model_type")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
        move_all(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def move_all(module: nn.Module, spread: float = 0.3, seed: int = 5) -> None:
    """Move every vector (norms, biases, the router's correction) off its start, which would hide a
    missing one; matrices keep what they were drawn as."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if value.dim() == 1 and value.is_floating_point():
            assert "inv_freq" not in name
            value += spread * (torch.rand(value.shape, generator=generator) - 0.5).to(value.dtype)


class Exact(TorchFunctionMode):
    """float64 stays float64 where the families step down to float32 (softmax, router, rotary): both
    sides of a comparison then differ by float64's rounding alone. float32 is left alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        steps = func in (torch.Tensor.to, torch.Tensor.type, nn.functional.softmax)
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if steps and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        # The second is what DeepSpeed puts in place of the first where ZeRO-3 ran in this process.
        products = (nn.functional.linear, torch.Tensor.matmul)
        if func in products and args[1].dtype != args[0].dtype:
            args = (args[0], args[1].to(args[0].dtype), *args[2:])  # a router kept in float32
        return func(*args, **kwargs)
