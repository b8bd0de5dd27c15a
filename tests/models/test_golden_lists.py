"""Names, shapes and configurations of the layouts at the sizes that they are asked for most,
written out by hand from the engines' lists; {a,b} stands for two names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.models.formats import LAYOUTS
from draftsmith.models.heads import HeadConfig

from .test_real_sizes import BY_NAME, MTP, NONE, real_head

EAGLE = HeadConfig("eagle", norms=NONE)
MEDUSA = HeadConfig("medusa", modules=5, norms=NONE)
LLAMA_8B_EAGLE = """
fc.weight 4096 8192
layers.0.self_attn.{q,o}_proj.weight 4096 4096
layers.0.self_attn.{k,v}_proj.weight 1024 4096
layers.0.mlp.{gate,up}_proj.weight 14336 4096
layers.0.mlp.down_proj.weight 4096 14336
layers.0.post_attention_layernorm.weight 4096
"""
LLAMA_70B_EAGLE = """
fc.weight 8192 16384
layers.0.self_attn.{q,o}_proj.weight 8192 8192
layers.0.self_attn.{k,v}_proj.weight 1024 8192
layers.0.mlp.{gate,up}_proj.weight 28672 8192
layers.0.mlp.down_proj.weight 8192 28672
layers.0.post_attention_layernorm.weight 8192
"""
LLAMA_8B_EAGLE3 = """
fc.weight 4096 12288
midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight 4096
midlayer.self_attn.q_proj.weight 4096 8192
midlayer.self_attn.{k,v}_proj.weight 1024 8192
midlayer.self_attn.o_proj.weight 4096 4096
midlayer.mlp.{gate,up}_proj.weight 14336 4096
midlayer.mlp.down_proj.weight 4096 14336
norm.weight 4096
lm_head.weight 32000 4096
d2t 32000
t2d 128256
"""
LLAMA_70B_EAGLE3 = """
fc.weight 8192 24576
midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight 8192
midlayer.self_attn.q_proj.weight 8192 16384
midlayer.self_attn.{k,v}_proj.weight 1024 16384
midlayer.self_attn.o_proj.weight 8192 8192
midlayer.mlp.{gate,up}_proj.weight 28672 8192
midlayer.mlp.down_proj.weight 8192 28672
norm.weight 8192
lm_head.weight 32000 8192
d2t 32000
t2d 128256
"""
QWEN3_8B_EAGLE3 = """
fc.weight 4096 12288
midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight 4096
midlayer.self_attn.q_proj.weight 4096 8192
midlayer.self_attn.{k,v}_proj.weight 1024 8192
midlayer.self_attn.o_proj.weight 4096 4096
midlayer.self_attn.{q,k}_norm.weight 128
midlayer.mlp.{gate,up}_proj.weight 12288 4096
midlayer.mlp.down_proj.weight 4096 12288
norm.weight 4096
lm_head.weight 32000 4096
d2t 32000
t2d 151936
"""
LLAMA_8B_MTP = """
model.layers.32.{enorm,hnorm,shared_head.norm}.weight 4096
model.layers.32.eh_proj.weight 4096 8192
model.layers.32.{embed_tokens,shared_head.head}.weight 128256 4096
model.layers.32.self_attn.{q,o}_proj.weight 4096 4096
model.layers.32.self_attn.{k,v}_proj.weight 1024 4096
model.layers.32.mlp.{gate,up}_proj.weight 14336 4096
model.layers.32.mlp.down_proj.weight 4096 14336
model.layers.32.{input,post_attention}_layernorm.weight 4096
"""
LLAMA_70B_MTP = """
model.layers.80.{enorm,hnorm,shared_head.norm}.weight 8192
model.layers.80.eh_proj.weight 8192 16384
model.layers.80.{embed_tokens,shared_head.head}.weight 128256 8192
model.layers.80.self_attn.{q,o}_proj.weight 8192 8192
model.layers.80.self_attn.{k,v}_proj.weight 1024 8192
model.layers.80.mlp.{gate,up}_proj.weight 28672 8192
model.layers.80.mlp.down_proj.weight 8192 28672
model.layers.80.{input,post_attention}_layernorm.weight 8192
"""
QWEN3_8B_MTP = """
model.layers.36.{enorm,hnorm,shared_head.norm}.weight 4096
model.layers.36.eh_proj.weight 4096 8192
model.layers.36.{embed_tokens,shared_head.head}.weight 151936 4096
model.layers.36.self_attn.{q,o}_proj.weight 4096 4096
model.layers.36.self_attn.{k,v}_proj.weight 1024 4096
model.layers.36.self_attn.{q,k}_norm.weight 128
model.layers.36.mlp.{gate,up}_proj.weight 12288 4096
model.layers.36.mlp.down_proj.weight 4096 12288
model.layers.36.{input,post_attention}_layernorm.weight 4096
"""
LLAMA_8B_MEDUSA = """
{0,1,2,3,4}.0.linear.weight 4096 4096
{0,1,2,3,4}.0.linear.bias 4096
{0,1,2,3,4}.1.weight 128256 4096
"""
LLAMA_70B_MEDUSA = """
{0,1,2,3,4}.0.linear.weight 8192 8192
{0,1,2,3,4}.0.linear.bias 8192
{0,1,2,3,4}.1.weight 128256 8192
"""
BLOCKS = """
blocks.{0,1,2,3,4}.layers.0.weight H H
blocks.{0,1,2,3,4}.layers.0.bias H
lm_head.weight V H
"""
BIAS_8B, BIAS_70B = "fc.bias 4096", "fc.bias 8192"
EMBED_8B, EMBED_70B = "embed_tokens.weight 128256 4096", "embed_tokens.weight 128256 8192"
EMBED_QWEN = "embed_tokens.weight 151936 4096"


def blocks(size: str, vocabulary: str) -> str:
    """Of vLLM's Medusa folder."""
    return BLOCKS.replace("H", size).replace("V", vocabulary)


def layers(listed: str) -> str:
    """As `speculators` spells the layer."""
    return listed.replace("midlayer.", "layers.0.")


LLAMA_8B, LLAMA_70B, QWEN3_8B = "llama-3.1-8b", "llama-3.3-70b", "qwen3-8b"
LISTS: dict[tuple[str, str], str] = {
    (LLAMA_8B, "vllm-eagle"): LLAMA_8B_EAGLE,
    (LLAMA_8B, "sglang-eagle"): LLAMA_8B_EAGLE + BIAS_8B,
    (LLAMA_8B, "vllm-eagle3"): LLAMA_8B_EAGLE3,
    (LLAMA_8B, "sglang-eagle3"): LLAMA_8B_EAGLE3,
    (LLAMA_8B, "trtllm-eagle3"): LLAMA_8B_EAGLE3,
    (LLAMA_8B, "speculators"): layers(LLAMA_8B_EAGLE3) + EMBED_8B,
    (LLAMA_8B, "deepseek-mtp"): LLAMA_8B_MTP,
    (LLAMA_8B, "glm-mtp"): LLAMA_8B_MTP,
    (LLAMA_8B, "medusa"): LLAMA_8B_MEDUSA,
    (LLAMA_8B, "vllm-medusa"): blocks("4096", "128256"),
    (LLAMA_70B, "vllm-eagle"): LLAMA_70B_EAGLE,
    (LLAMA_70B, "sglang-eagle"): LLAMA_70B_EAGLE + BIAS_70B,
    (LLAMA_70B, "vllm-eagle3"): LLAMA_70B_EAGLE3,
    (LLAMA_70B, "sglang-eagle3"): LLAMA_70B_EAGLE3,
    (LLAMA_70B, "trtllm-eagle3"): LLAMA_70B_EAGLE3,
    (LLAMA_70B, "speculators"): layers(LLAMA_70B_EAGLE3) + EMBED_70B,
    (LLAMA_70B, "deepseek-mtp"): LLAMA_70B_MTP,
    (LLAMA_70B, "glm-mtp"): LLAMA_70B_MTP,
    (LLAMA_70B, "medusa"): LLAMA_70B_MEDUSA,
    (LLAMA_70B, "vllm-medusa"): blocks("8192", "128256"),
    (QWEN3_8B, "vllm-eagle3"): QWEN3_8B_EAGLE3,
    (QWEN3_8B, "speculators"): layers(QWEN3_8B_EAGLE3) + EMBED_QWEN,
    (QWEN3_8B, "deepseek-mtp"): QWEN3_8B_MTP,
    (QWEN3_8B, "glm-mtp"): QWEN3_8B_MTP,
    (QWEN3_8B, "vllm-medusa"): blocks("4096", "151936"),
    ("deepseek-v3", "vllm-medusa"): blocks("7168", "129280"),
}
"""Target, layout -> its list; every other layout refuses such a head. DeepSeek's own MTP module is
in test_real_sizes."""
LAYER = {"num_hidden_layers": 1, "mlp_bias": False, "attention_bias": False, "head_dim": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = LAYER | {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3 | {"type": "llama3"},
    "rope_parameters": LLAMA3 | {"rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    LLAMA_8B: LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    LLAMA_70B: LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    QWEN3_8B: LLAMA
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "use_sliding_window": False,
    },
}
ENTERED = {LLAMA_8B: [2, 16, 29], LLAMA_70B: [2, 40, 77], QWEN3_8B: [2, 18, 33]}
LEFT = {LLAMA_8B: [1, 15, 28], LLAMA_70B: [1, 39, 76], QWEN3_8B: [1, 17, 32]}
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = dict.fromkeys(("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"), False)
ARCHITECTURES = {
    "vllm-eagle": "LlamaForCausalLM",
    "sglang-eagle": "LlamaForCausalLMEagle",
    "vllm-eagle3": "LlamaForCausalLMEagle3",
    "sglang-eagle3": "LlamaForCausalLMEagle3",
    "trtllm-eagle3": "LlamaForCausalLMEagle3",
}


def listed(text: str) -> dict[str, list[int]]:
    """A list as names and shapes."""
    found: dict[str, list[int]] = {}
    for line in text.split("\n"):
        name, *shape = line.split() or [""]
        before, _, rest = name.partition("{")
        inside, _, after = rest.partition("}")
        for part in inside.split(",") if rest else [""] if name else []:
            found[f"{before}{part}{after}"] = [int(size) for size in shape]
    return found


def config_of(name: str, layout: str) -> dict[str, Any]:
    """What config.json must be, whole."""
    shape = CONFIGS[name]
    if layout.endswith("eagle"):
        return shape | {"architectures": [ARCHITECTURES[layout]]}
    rows = {"draft_vocab_size": 32000}
    if layout == "speculators":
        method = {"proposal_type": "greedy", "speculative_tokens": 3}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": {"name_or_path": "/models/target", "architectures": []},
            },
            **FLAGS,
            **rows,
            IDS: ENTERED[name],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformer_layer_config": shape | {"num_aux_hidden_states": 3},
        }
    one = "Eagle3Qwen3ForCausalLM" if name == QWEN3_8B else ARCHITECTURES[layout]
    nested = {"use_aux_hidden_state": True, IDS: LEFT[name]}
    more = {"architectures": [one], "num_aux_hidden_states": 3, "eagle_config": nested}
    top = {} if layout == "trtllm-eagle3" else {IDS: ENTERED[name]}
    return shape | FLAGS | rows | more | top


def planned(name: str, layout: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Tensors and configuration of a head without data, of the kind that the layout is for."""
    if layout in MTP:
        head = real_head(name, HeadConfig(recycle_raw=layout == "glm-mtp"))
        return MTP[layout].plan(head, Path())[0], None
    kind = BY_NAME[layout].kind
    config = {"eagle": EAGLE, "eagle3": HeadConfig("eagle3"), "medusa": MEDUSA}[kind]
    head = real_head(name, config, 32000 if kind == "eagle3" else None)
    written = BY_NAME[layout].plan(head, Path("/models/target"))
    return written.tensors, written.config


@pytest.mark.parametrize("name", [LLAMA_8B, LLAMA_70B, QWEN3_8B, "deepseek-v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_shapes_and_configurations(layout: str, name: str) -> None:
    """Every tensor and none beside, config.json whole; what is on no list is refused."""
    if (name, layout) == ("deepseek-v3", "deepseek-mtp"):
        return  # see LISTS
    if (name, layout) not in LISTS and (name, layout) != ("deepseek-v3", "glm-mtp"):
        with pytest.raises(ValueError, match=r"layout|rope|attention of|family|knows"):
            planned(name, layout)
        return
    tensors, config = planned(name, layout)
    if name == "deepseek-v3" and layout == "glm-mtp":
        assert set(tensors) == set(planned(name, "deepseek-mtp")[0])
        return
    found = {key: list(value.shape) for key, value in tensors.items()}
    assert found == listed(LISTS[name, layout])
    if config is None or "medusa" in layout:
        return
    assert config == config_of(name, layout)
    sizes = re.findall(r"original_max_position_embeddings': ([0-9.]+)", str(config))
    assert not any("." in size for size in sizes)  # transformers warns of a float
