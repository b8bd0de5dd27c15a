"""The EAGLE and EAGLE-3 layouts: written and read again, and what is refused (CASES 39, 41, 47, 92,
113, 116, 123, 130, 131)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.models.formats import EAGLE_LAYOUTS, layout
from draftsmith.models.formats.source import layout_of
from draftsmith.models.heads import HeadConfig, NormConfig
from draftsmith.models.trunk import Trunk
from draftsmith.scripts.proof import largest_difference

from .eagle_toys import BY_NAME, IDS, NONE, head_for, random_head, target_config

AI = NormConfig(False, False, True, False)
AI_O = NormConfig(False, False, True, True)
E_H_AI = NormConfig(True, True, True, False)
HELD = [
    ("llama", HeadConfig("eagle", norms=NONE), "eagle vllm-eagle sglang-eagle"),
    ("llama3", HeadConfig("eagle", norms=NONE), "vllm-eagle sglang-eagle"),
    ("qwen2", HeadConfig("eagle", norms=NONE), "eagle vllm-eagle sglang-eagle"),
    ("biased", HeadConfig("eagle", norms=NONE), "vllm-eagle sglang-eagle"),
    ("llama", HeadConfig("eagle", projection_bias=True, norms=NONE), "eagle sglang-eagle"),
    ("llama", HeadConfig("eagle", norms=AI), "sglang-eagle"),
    ("llama3", HeadConfig("eagle", norms=AI_O), "vllm-eagle"),
    ("llama", HeadConfig("eagle", norms=E_H_AI), "vllm-eagle"),
    (
        "llama",
        HeadConfig("eagle3"),
        "eagle3 vllm-eagle3 sglang-eagle3 trtllm-eagle3 speculators",
    ),
    ("llama3", HeadConfig("eagle3"), "vllm-eagle3 sglang-eagle3 trtllm-eagle3 speculators"),
    ("qwen2", HeadConfig("eagle3"), "vllm-eagle3 trtllm-eagle3 speculators"),
    ("qwen3", HeadConfig("eagle3", norm_before_fc="each"), "vllm-eagle3 speculators"),
    (
        "llama3",
        HeadConfig("eagle3", norm_before_fc="all", norm_output=True),
        "vllm-eagle3 sglang-eagle3 speculators",
    ),
    (
        "llama",
        HeadConfig("eagle3", num_layers=2, norm_output=True, boundaries=(1, 3, 6, 7)),
        "vllm-eagle3 sglang-eagle3 trtllm-eagle3 speculators",
    ),
    (
        "llama",
        HeadConfig("eagle3", norm_before_residual=True, boundaries=(0, 8)),
        "vllm-eagle3 speculators",
    ),
]
PAIRS = [(t, head, name) for t, head, names in HELD for name in names.split()]


@pytest.mark.parametrize(("target", "config", "name"), PAIRS)
def test_native_to_layout_to_native_is_bit_exact(
    folders: Callable[[str], Path],
    trunks: Callable[[str], Trunk],
    tmp_path: Path,
    target: str,
    config: HeadConfig,
    name: str,
) -> None:
    """Tensors, shape, what is fed and recycled, rope, draft ids; logits over prompts and steps; the
    layout is found from the files; no warning."""
    folder = folders(target)
    loaded = head_for(folder, config, IDS if config.kind == "eagle3" else None)
    write, read = layout(name)
    origin = write(loaded, folder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(origin) == set(tensors)
    back = read(tmp_path, folder)
    ours, theirs = loaded.head.state_dict(), back.head.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert back.head.recycle == loaded.head.recycle
    assert back.head.boundaries == loaded.head.boundaries
    assert back.head.target_config.to_dict() == loaded.head.target_config.to_dict()
    assert back.meta["trained_length"] == 9
    if loaded.draft_ids is not None:
        assert back.draft_ids is not None and torch.equal(back.draft_ids, loaded.draft_ids)
    assert largest_difference(loaded, back, trunks(target)) <= 1e-6
    assert layout_of(tmp_path) == name
    if name == "trtllm-eagle3":  # tells nothing that SGLang's does not
        return
    (tmp_path / "draftsmith.json").unlink()
    other = layout(layout_of(tmp_path))[1](tmp_path, folder)  # the same weights by the files alone
    assert all(torch.equal(ours[key], other.head.state_dict()[key]) for key in ours)
    assert other.head.boundaries == loaded.head.boundaries


@pytest.mark.parametrize("name", BY_NAME)
def test_every_tensor_has_an_origin_that_is_true(
    folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """CASE 123: copied tensors are the target's bit for bit, trained ones the head's, maps
    consistent (CASE 39)."""
    folder, kind = folders("llama"), BY_NAME[name].kind
    norms = E_H_AI if name == "vllm-eagle" else NONE
    config = HeadConfig("eagle3") if kind == "eagle3" else HeadConfig("eagle", norms=norms)
    loaded = head_for(folder, config, IDS if kind == "eagle3" else None)
    origin = layout(name)[0](loaded, folder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    target = load_file(folder / "model.safetensors")
    trained = [value for key, value in tensors.items() if origin[key] == "trained"]
    ours = list(loaded.head.state_dict().values())
    assert len(trained) == len(ours)
    assert all(any(torch.equal(one, value) for one in ours) for value in trained)
    for key, value in tensors.items():
        if origin[key] == "copied from the target":
            own = next(k for k in target if k.endswith(key.removeprefix("model.")))
            assert torch.equal(value, target[own])
        elif origin[key] == "map":
            assert value.dtype == (torch.int64 if key == "d2t" else torch.bool)
    if kind == "eagle3":
        ids = tensors["d2t"] + torch.arange(len(IDS))
        assert torch.equal(ids, IDS) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)


def test_a_whole_vocabulary_has_no_map(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """CASES 41, 92: vLLM raises on a map there, so none is written."""
    folder = folders("llama")
    for one in EAGLE_LAYOUTS:
        if one.kind == "eagle3":
            planned = one.plan(head_for(folder, HeadConfig("eagle3")), folder)
            assert not {"d2t", "t2d"} & set(planned.tensors)
    vllm = BY_NAME["vllm-eagle3"]
    planned = vllm.plan(head_for(folder, HeadConfig("eagle3")), folder)
    zero = {**planned.tensors, "d2t": torch.zeros(96, dtype=torch.int64)}
    report = vllm.engine.load(planned.config, zero, target_config("llama"))
    assert report.raised == ("there is no parameter for d2t",)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_configuration_is_the_targets(folders: Callable[[str], Path], name: str) -> None:
    """CASES 47, 113, 116, 131: never tied, positions of the target, the rope that the module in
    memory has, in both spellings; biases as the tensors have them."""
    from transformers import LlamaConfig

    folder, kind = folders("qwen2"), BY_NAME[name].kind
    if name in ("eagle3", "sglang-eagle3"):
        folder = folders("llama")
    config = HeadConfig("eagle3") if kind == "eagle3" else HeadConfig("eagle", norms=NONE)
    planned = BY_NAME[name].plan(head_for(folder, config), folder)
    written = planned.config.get("transformer_layer_config", planned.config)
    assert written["tie_word_embeddings"] is False
    assert written["max_position_embeddings"] == 128 and written["vocab_size"] == 96
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 10000.0
    assert written["rope_scaling"] is None
    biased = {key.split(".")[-2] for key in planned.tensors if key.endswith("_proj.bias")}
    assert bool(written["attention_bias"]) == ("o_proj" in biased)
    modern: Any = LlamaConfig(**written)
    assert modern.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_quantised_targets_settings_do_not_get_into_the_folder(kind: str) -> None:
    """The head is not quantised, and its engine reads its own config.json alone."""
    settings = target_config("llama", quantization_config={"quant_method": "fp8"})
    config = HeadConfig("eagle", norms=NONE) if kind == "eagle" else HeadConfig("eagle3")
    loaded = random_head(config, settings)
    for one in EAGLE_LAYOUTS:
        if one.kind == kind and one.name != "speculators":  # which copies the embedding from disk
            assert "quantization_config" not in one.plan(loaded, Path()).config


def test_a_scaled_rope_reads_the_same_in_both_spellings(folders: Callable[[str], Path]) -> None:
    """CASE 92: by rope_parameters, and by rope_theta and rope_scaling alone."""
    from transformers import LlamaConfig

    folder = folders("llama3")
    loaded = head_for(folder, HeadConfig("eagle3"))
    written = BY_NAME["vllm-eagle3"].plan(loaded, folder).config
    right = loaded.head.target_config.rope_parameters
    for drop in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        read: Any = LlamaConfig(**{key: value for key, value in written.items() if key not in drop})
        for key, value in right.items():
            assert read.rope_parameters[key] == value, (drop, key)


REFUSED: list[tuple[str, HeadConfig, str, str]] = [
    (
        "llama",
        HeadConfig("eagle"),
        "vllm-eagle",
        "EagleMistralForCausalLM: attention_input, output",
    ),
    ("llama", HeadConfig("eagle"), "sglang-eagle", "MistralForCausalLMEagle: attention_input"),
    ("llama", HeadConfig("eagle", norms=AI), "eagle", "cnets1.Model: none"),
    ("llama3", HeadConfig("eagle", norms=NONE), "eagle", "linear and dynamic"),
    ("qwen3", HeadConfig("eagle", norms=NONE), "vllm-eagle", "norms on queries and keys"),
    ("qwen3", HeadConfig("eagle3"), "sglang-eagle3", "norms on queries and keys"),
    ("qwen2", HeadConfig("eagle3"), "sglang-eagle3", "drops midlayer.self_attn.q_proj.bias"),
    ("llama", HeadConfig(), "vllm-eagle", "holds eagle heads, this one is of kind mtp"),
    (
        "llama",
        HeadConfig("eagle", modules=2, norms=NONE),
        "vllm-eagle",
        "holds one module, this head has 2: train with head.modules=1",
    ),
    (
        "llama",
        HeadConfig("eagle", hidden_first=True, norms=NONE),
        "vllm-eagle",
        "order embedding, hidden, this head has hidden, embedding",
    ),
    (
        "llama",
        HeadConfig("eagle", mask_position_zero=True, norms=NONE),
        "sglang-eagle",
        "train with head.mask_position_zero=false",
    ),
    (
        "llama",
        HeadConfig("eagle", recycle_raw=True, norms=AI_O),
        "vllm-eagle",
        "recycling its output after the norm, this head has its output before the norm",
    ),
    ("llama", HeadConfig("eagle3", norm_before_residual=True), "sglang-eagle3", "norm_before_r"),
    ("llama", HeadConfig("eagle3", norm_before_residual=True), "trtllm-eagle3", "norm_before_r"),
    ("llama", HeadConfig("eagle3", norm_output=True), "eagle3", "recycling its output before"),
    ("llama", HeadConfig("eagle3", boundaries=(1, 2, 3)), "eagle3", "states at 2, 4, 5"),
    ("llama", HeadConfig("eagle3", boundaries=(0, 2, 3)), "sglang-eagle3", "layers 1 to 7"),
    ("llama", HeadConfig("eagle3", boundaries=(3,)), "sglang-eagle3", "it skips fc"),
    ("llama", HeadConfig("eagle3", boundaries=(3,)), "trtllm-eagle3", "drops fc.weight"),
    ("llama", HeadConfig("eagle3", num_layers=2), "eagle3", "drops layers.0"),
    ("llama", HeadConfig("eagle3", norm_before_fc="all"), "eagle3", "drops input_norm.weight"),
    ("llama", HeadConfig("eagle3", norm_before_fc="each"), "trtllm-eagle3", "fc_norm=true"),
    ("llama", HeadConfig("eagle3", projection_bias=True), "vllm-eagle3", "drops fc.bias"),
    ("llama", HeadConfig("eagle", projection_bias=True, norms=NONE), "vllm-eagle", "drops fc.bias"),
    (
        "llama",
        HeadConfig("eagle3", norms=NormConfig(hidden=False)),
        "vllm-eagle3",
        "has the norms embedding, attention_input, output",
    ),
]


@pytest.mark.parametrize(("target", "config", "name", "words"), REFUSED)
def test_what_an_engine_would_run_otherwise_is_refused(
    folders: Callable[[str], Path],
    tmp_path: Path,
    target: str,
    config: HeadConfig,
    name: str,
    words: str,
) -> None:
    """With the reason, and nothing is written."""
    folder = folders(target)
    with pytest.raises(ValueError) as refusal:
        layout(name)[0](head_for(folder, config), folder, tmp_path / "out")
    assert words in str(refusal.value)
    assert "keep the native folder" in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_window_and_a_family_of_its_own_are_refused(folders: Callable[[str], Path]) -> None:
    """Plain classes know neither a window nor another family's layer (CASE 124 says which)."""
    windowed = random_head(
        HeadConfig("eagle3"),
        target_config("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2),
    )
    with pytest.raises(ValueError, match="an attention window of none, this head has 5"):
        BY_NAME["vllm-eagle3"].plan(windowed, folders("qwen2"))
    other = random_head(HeadConfig("eagle3"), target_config("llama", model_type="granite"))
    with pytest.raises(ValueError, match=r"that of granite \(its own\)"):
        BY_NAME["vllm-eagle3"].plan(other, folders("llama"))
