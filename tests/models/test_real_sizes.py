"""Names, shapes and configurations of exports as large as real ones, written out by hand from the
engines' lists; heads without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftsmith.models.formats import EAGLE_LAYOUTS, MEDUSA_LAYOUTS, MTP_LAYOUTS
from draftsmith.models.formats.ernie_mtp import dense
from draftsmith.models.heads import HeadConfig, LoadedHead, NormConfig, head_class

BY_NAME = {one.name: one for one in (*EAGLE_LAYOUTS, *MEDUSA_LAYOUTS)}
MTP = {one.name: one for one in MTP_LAYOUTS}
NONE = NormConfig(False, False, False, False)
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Sizes from: Llama, Lightning-AI/litgpt litgpt/config.py (which names the published config.json);
# Qwen3-8B, sgl-project/SpecForge configs/qwen3-8b-dspark.json; Qwen3-Next and MiMo, THUDM/slime
# scripts/models (qwen3-next-80B-A3B.sh, mimo-7B-rl.sh); GLM-4.5-Air, its glm4.5-106B-A12B and the
# defaults of transformers' Glm4MoeConfig; DeepSeek-V3 and ERNIE-4.5, those of DeepseekV3Config and
# Ernie4_5_MoeConfig ("ERNIE-4.5-21B-A3B style"); DeepSeek's names also from its README_WEIGHTS.md.
REAL: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
    },
    "llama-3.3-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "attention_bias": True,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "qwen3-next-80b": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    },
    "mimo-7b": {
        "model_type": "qwen2",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 11008,
        "vocab_size": 151680,
    },
    "ernie-4.5-21b": {
        "model_type": "ernie4_5_moe",
        "hidden_size": 2560,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "vocab_size": 103424,
    },
}


def real_head(name: str, config: HeadConfig, drafted: int | None = None) -> LoadedHead:
    """A head without data for a target of real size."""
    settings = dict(REAL[name])
    target = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if name.startswith("ernie"):
        target = dense(target)
    with torch.device("meta"):
        head = head_class(config.kind)(config, target, drafted)
    return LoadedHead(head, None if drafted is None else torch.arange(drafted) * 3, {})


def experts(prefix: str, size: int, wide: int, count: int, shared: str) -> dict[str, list[int]]:
    """Of a layer with routed experts and one that is always on."""
    made = {f"{prefix}mlp.gate.weight": [count, size]}
    for one in [*(f"experts.{index}" for index in range(count)), shared]:
        for part in ("gate_proj", "up_proj"):
            made[f"{prefix}mlp.{one}.{part}.weight"] = [wide, size]
        made[f"{prefix}mlp.{one}.down_proj.weight"] = [size, wide]
    return made


def attention(prefix: str, size: int, queries: int, keys: int) -> dict[str, list[int]]:
    """Projections and the two norms of a layer."""
    return {
        f"{prefix}self_attn.q_proj.weight": [queries, size],
        f"{prefix}self_attn.k_proj.weight": [keys, size],
        f"{prefix}self_attn.v_proj.weight": [keys, size],
        f"{prefix}self_attn.o_proj.weight": [size, queries],
        f"{prefix}input_layernorm.weight": [size],
        f"{prefix}post_attention_layernorm.weight": [size],
    }


def mlp(prefix: str, size: int, wide: int) -> dict[str, list[int]]:
    """Of a dense layer."""
    return {
        f"{prefix}mlp.gate_proj.weight": [wide, size],
        f"{prefix}mlp.up_proj.weight": [wide, size],
        f"{prefix}mlp.down_proj.weight": [size, wide],
    }


def own(prefix: str, size: int, *names: str) -> dict[str, list[int]]:
    """What a module has beside its layer; the last name is the projection's."""
    *norms, projection = names
    return {f"{prefix}{name}.weight": [size] for name in norms} | {
        f"{prefix}{projection}.weight": [size, 2 * size]
    }


def mtp_right(name: str) -> dict[str, list[int]]:
    """The tensors of one MTP module of a real target."""
    if name == "deepseek-v3":
        p, size = "model.layers.61.", 7168
        return (
            own(p, size, "enorm", "hnorm", "shared_head.norm", "eh_proj")
            | dict.fromkeys(
                (f"{p}embed_tokens.weight", f"{p}shared_head.head.weight"), [129280, size]
            )
            | {
                f"{p}self_attn.q_a_proj.weight": [1536, size],
                f"{p}self_attn.q_a_layernorm.weight": [1536],
                f"{p}self_attn.q_b_proj.weight": [128 * 192, 1536],
                f"{p}self_attn.kv_a_proj_with_mqa.weight": [512 + 64, size],
                f"{p}self_attn.kv_a_layernorm.weight": [512],
                f"{p}self_attn.kv_b_proj.weight": [128 * 256, 512],
                f"{p}self_attn.o_proj.weight": [size, 128 * 128],
                f"{p}input_layernorm.weight": [size],
                f"{p}post_attention_layernorm.weight": [size],
                f"{p}mlp.gate.e_score_correction_bias": [256],
            }
            | experts(p, size, 2048, 256, "shared_experts")
        )
    if name == "glm-4.5-air":
        p, size = "model.layers.46.", 4096
        return (
            own(p, size, "enorm", "hnorm", "shared_head.norm", "eh_proj")
            | dict.fromkeys(
                (f"{p}embed_tokens.weight", f"{p}shared_head.head.weight"), [151552, size]
            )
            | attention(p, size, 96 * 128, 8 * 128)
            | {
                f"{p}self_attn.q_proj.bias": [96 * 128],
                f"{p}self_attn.k_proj.bias": [8 * 128],
                f"{p}self_attn.v_proj.bias": [8 * 128],
                f"{p}mlp.gate.e_score_correction_bias": [128],
            }
            | experts(p, size, 1408, 128, "shared_experts")
        )
    if name == "qwen3-next-80b":
        p, size = "mtp.layers.0.", 2048
        return (
            own("mtp.", size, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
            | attention(p, size, 16 * 256, 2 * 256)
            | {
                f"{p}self_attn.q_proj.weight": [2 * 16 * 256, size],  # with its gate
                f"{p}self_attn.q_norm.weight": [256],
                f"{p}self_attn.k_norm.weight": [256],
                f"{p}mlp.shared_expert_gate.weight": [1, size],
            }
            | experts(p, size, 512, 512, "shared_expert")
        )
    if name == "mimo-7b":
        p, size = "model.mtp_layers.0.", 4096
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
        biases = {"q": 4096, "k": 1024, "v": 1024}
        return (
            own(p, size, *names)
            | attention(p, size, 4096, 1024)
            | {f"{p}self_attn.{key}_proj.bias": [value] for key, value in biases.items()}
            | mlp(p, size, 11008)
        )
    p, size = "model.mtp_block.0.", 2560
    names = ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    return own("model.", size, *names) | attention(p, size, 2560, 512) | mlp(p, size, 12288)


@pytest.mark.parametrize(
    ("layout", "name", "shape"),
    [
        ("deepseek-mtp", "deepseek-v3", {}),
        ("glm-mtp", "glm-4.5-air", {"recycle_raw": True}),
        ("qwen-mtp", "qwen3-next-80b", {}),
        ("mimo-mtp", "mimo-7b", {"hidden_first": True, "mask_position_zero": True}),
        (
            "ernie-mtp",
            "ernie-4.5-21b",
            {"mask_position_zero": True, "norms": NormConfig(output=False)},
        ),
    ],
)
def test_mtp_names_and_shapes_at_real_sizes(layout: str, name: str, shape: dict[str, Any]) -> None:
    """Every tensor of one module, and none beside."""
    tensors, _ = MTP[layout].plan(real_head(name, HeadConfig(**shape)), Path())
    assert {key: list(value.shape) for key, value in tensors.items()} == mtp_right(name)


def test_the_authors_eagle_folders_at_real_sizes() -> None:
    """An older Llama's rope, which their code knows."""
    plain = {**REAL["llama-3.1-8b"], "rope_parameters": None}
    settings = AutoConfig.for_model(plain.pop("model_type"), **plain)
    with torch.device("meta"):
        eagle = head_class("eagle")(HeadConfig("eagle", norms=NONE), settings)
        eagle3 = head_class("eagle3")(HeadConfig("eagle3"), settings, 32000)
    planned = BY_NAME["eagle"].plan(LoadedHead(eagle, None, {}), Path())
    right = attention("layers.0.", 4096, 4096, 1024) | mlp("layers.0.", 4096, 14336)
    del right["layers.0.input_layernorm.weight"]
    right["fc.weight"] = [4096, 8192]
    assert {key: list(value.shape) for key, value in planned.tensors.items()} == right
    assert planned.config["bias"] is False
    ids = torch.arange(32000) * 3
    planned = BY_NAME["eagle3"].plan(LoadedHead(eagle3, ids, {}), Path())
    wide = attention("midlayer.", 8192, 4096, 1024)
    right = (
        mlp("midlayer.", 4096, 14336)
        | wide
        | {
            "midlayer.self_attn.o_proj.weight": [4096, 4096],
            "midlayer.input_layernorm.weight": [4096],
            "midlayer.post_attention_layernorm.weight": [4096],
            "midlayer.hidden_norm.weight": [4096],
            "fc.weight": [4096, 3 * 4096],
            "norm.weight": [4096],
            "lm_head.weight": [32000, 4096],
            "d2t": [32000],
            "t2d": [128256],
        }
    )
    assert {key: list(value.shape) for key, value in planned.tensors.items()} == right
    assert planned.config["draft_vocab_size"] == 32000


@pytest.mark.parametrize(
    ("layout", "norms", "architecture", "layer", "more"),
    [
        (
            "vllm-eagle",
            NormConfig(False, False, True, True),
            "MistralForCausalLM",
            "model.layers.0.",
            {"model.norm.weight": [4096]},
        ),
        (
            "vllm-eagle",
            NormConfig(True, True, True, False),
            "MiniCPMForCausalLM",
            "model.eagle_layers.0.",
            {
                "model.input_norm1.weight": [4096],
                "model.input_norm2.weight": [4096],
                "model.norm.weight": [4096],
            },
        ),
        (
            "sglang-eagle",
            NormConfig(False, False, True, False),
            "MistralForCausalLMEagle",
            "model.layers.0.",
            {},
        ),
    ],
)
def test_eagle_classes_with_norms_at_real_sizes(
    layout: str,
    norms: NormConfig,
    architecture: str,
    layer: str,
    more: dict[str, list[int]],
) -> None:
    """Each spells its layer and its norms in its own way."""
    loaded = real_head("llama-3.1-8b", HeadConfig("eagle", norms=norms))
    planned = BY_NAME[layout].plan(loaded, Path())
    right = attention(layer, 4096, 4096, 1024) | mlp(layer, 4096, 14336) | more
    right["model.fc.weight"] = [4096, 8192]
    assert {key: list(value.shape) for key, value in planned.tensors.items()} == right
    assert planned.config["architectures"] == [architecture]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("all", {"input_norm.weight": [3 * 4096]}),
        ("each", {f"fc_norm.{index}.weight": [4096] for index in range(3)}),
    ],
)
def test_norms_before_fc_at_real_sizes(kind: str, more: dict[str, list[int]]) -> None:
    """Names and keys as vLLM and SGLang read them; nothing else changes."""
    plain, normed = (
        BY_NAME["vllm-eagle3"].plan(
            real_head("llama-3.1-8b", HeadConfig("eagle3", norm_before_fc=one)), Path()
        )
        for one in ("none", kind)
    )
    added = {k: list(v.shape) for k, v in normed.tensors.items() if k not in plain.tensors}
    assert added == more and set(plain.tensors) < set(normed.tensors)
    assert normed.config["norm_before_fc"] == (kind == "all")
    assert normed.config["fc_norm"] == (kind == "each")
    assert normed.config["eagle_config"].get("norm_before_fc", False) == (kind == "all")
