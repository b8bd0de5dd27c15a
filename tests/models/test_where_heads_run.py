"""The page that says where a head runs, and exports of heads as large as real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftsmith.models.formats import EAGLE_LAYOUTS
from draftsmith.models.formats.matrix import MTP_CLASSES, head_of, page, where
from draftsmith.models.heads import HeadConfig, LoadedHead, NormConfig, head_class

BY_NAME = {one.name: one for one in EAGLE_LAYOUTS}
NONE = NormConfig(False, False, False, False)
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
    },
}


def real_head(name: str, config: HeadConfig, drafted: int | None = None) -> LoadedHead:
    """A head without data for a target of real size."""
    settings = dict(REAL[name])
    target = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        head = head_class(config.kind)(config, target, drafted)
    return LoadedHead(head, None if drafted is None else torch.arange(drafted) * 3, {})


def test_the_page_is_that_of_the_code() -> None:
    """docs/where-heads-run.md, written by `python -m draftsmith.models.formats.matrix`."""
    root = Path(__file__).resolve().parents[2]
    assert (root / "docs" / "where-heads-run.md").read_text() == page()


@pytest.mark.parametrize("layout", ["vllm-eagle3", "sglang-eagle3", "trtllm-eagle3", "speculators"])
@pytest.mark.parametrize(("name", "sizes"), [("llama-3.1-8b", 4096), ("llama-3.3-70b", 8192)])
def test_eagle3_names_and_shapes_at_real_sizes(layout: str, name: str, sizes: int) -> None:
    """Written out by hand from the engines' lists."""
    size, wide = sizes, REAL[name]["intermediate_size"]
    first = "layers.0." if layout == "speculators" else "midlayer."
    queries, keys = REAL[name]["num_attention_heads"] * 128, 8 * 128
    loaded = real_head(name, HeadConfig("eagle3"), 32000)
    if layout == "speculators":
        planned = BY_NAME[layout].plan(loaded, Path("/models/target"))
    else:
        planned = BY_NAME[layout].plan(loaded, Path())
    right = {
        "fc.weight": [size, 3 * size],
        f"{first}input_layernorm.weight": [size],
        f"{first}hidden_norm.weight": [size],
        f"{first}self_attn.q_proj.weight": [queries, 2 * size],
        f"{first}self_attn.k_proj.weight": [keys, 2 * size],
        f"{first}self_attn.v_proj.weight": [keys, 2 * size],
        f"{first}self_attn.o_proj.weight": [size, queries],
        f"{first}post_attention_layernorm.weight": [size],
        f"{first}mlp.gate_proj.weight": [wide, size],
        f"{first}mlp.up_proj.weight": [wide, size],
        f"{first}mlp.down_proj.weight": [size, wide],
        "norm.weight": [size],
        "lm_head.weight": [32000, size],
        "d2t": [32000],
        "t2d": [128256],
    }
    if layout == "speculators":
        right["embed_tokens.weight"] = [128256, size]
    assert {key: list(value.shape) for key, value in planned.tensors.items()} == right
    assert planned.tensors["d2t"].dtype == torch.int64
    config = planned.config
    layers = REAL[name]["num_hidden_layers"]
    entered = [2, layers // 2, layers - 3]
    key = "eagle_aux_hidden_state_layer_ids"
    if layout == "speculators":
        assert config["speculators_model_type"] == "eagle3" and config[key] == entered
        assert config["norm_before_residual"] is False and config["draft_vocab_size"] == 32000
        verifier = config["speculators_config"]["verifier"]
        assert verifier["name_or_path"] == "/models/target"
        config = config["transformer_layer_config"]
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"][key] == [k - 1 for k in entered]
        assert (config.get(key) == entered) == (layout != "trtllm-eagle3")
        assert config["draft_vocab_size"] == 32000
    assert config["vocab_size"] == 128256 and config["max_position_embeddings"] == 131072
    assert config["rope_theta"] == 500000.0 and config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["type"] == "llama3" and config["tie_word_embeddings"] is False
    assert (config["num_hidden_layers"], config["model_type"]) == (1, "llama")


def test_a_qwen3_head_at_real_size() -> None:
    """Norms on queries and keys go to vLLM's Qwen3 class, with a head width of its own."""
    planned = BY_NAME["vllm-eagle3"].plan(real_head("qwen3-8b", HeadConfig("eagle3")), Path())
    shapes = {key: list(value.shape) for key, value in planned.tensors.items()}
    assert shapes["midlayer.self_attn.q_norm.weight"] == [128]
    assert shapes["lm_head.weight"] == [151936, 4096] and "d2t" not in shapes
    assert planned.config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert planned.config["model_type"] == "qwen3" and planned.config["head_dim"] == 128


@pytest.mark.parametrize(
    ("layout", "architecture", "more"),
    [
        ("vllm-eagle", "LlamaForCausalLM", {}),
        ("sglang-eagle", "LlamaForCausalLMEagle", {"fc.bias": [8192]}),
    ],
)
def test_eagle_names_and_shapes_at_real_sizes(
    layout: str, architecture: str, more: dict[str, list[int]]
) -> None:
    """Written out by hand; no norm but the second, no embedding, no lm_head."""
    loaded = real_head("llama-3.3-70b", HeadConfig("eagle", norms=NONE))
    planned = BY_NAME[layout].plan(loaded, Path())
    assert {key: list(value.shape) for key, value in planned.tensors.items()} == {
        "fc.weight": [8192, 16384],
        "layers.0.self_attn.q_proj.weight": [8192, 8192],
        "layers.0.self_attn.k_proj.weight": [1024, 8192],
        "layers.0.self_attn.v_proj.weight": [1024, 8192],
        "layers.0.self_attn.o_proj.weight": [8192, 8192],
        "layers.0.mlp.gate_proj.weight": [28672, 8192],
        "layers.0.mlp.up_proj.weight": [28672, 8192],
        "layers.0.mlp.down_proj.weight": [8192, 28672],
        "layers.0.post_attention_layernorm.weight": [8192],
        **more,
    }
    assert planned.config["architectures"] == [architecture]
    assert "bias" not in planned.config


def test_what_is_said_of_an_export() -> None:
    """The class that runs it, or that there is none."""
    llama = {"model_type": "llama"}
    assert "no engine has a class" in where(head_of(HeadConfig(), llama), "deepseek-mtp")
    told = where(head_of(HeadConfig("eagle3"), llama), "trtllm-eagle3")
    assert "Eagle3ForCausalLM" in told and "eagle3_layers_to_capture={1, 3, 4}" in told
    assert set(MTP_CLASSES) == {"deepseek-mtp", "glm-mtp", "qwen-mtp", "mimo-mtp"}
