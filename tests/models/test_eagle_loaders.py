"""What each engine's loader makes of the classic mistakes in an EAGLE or EAGLE-3 folder (CASES 7,
8, 39, 40, 92, 130)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.formats.eagle_layout import EagleLayout
from draftsmith.models.formats.loaders import Report
from draftsmith.models.heads import HeadConfig, NormConfig

from .eagle_toys import BY_NAME, IDS, NONE, head_for, target_config

AI_O = NormConfig(False, False, True, True)
E_H_AI = NormConfig(True, True, True, False)

Harm = Callable[[dict[str, Tensor], dict[str, Any]], None]


def report_of(
    one: EagleLayout,
    folder: Path,
    harm: Harm,
    config: HeadConfig | None = None,
    ids: Tensor | None = IDS,
) -> Report:
    """The emulated loader's report on a harmed export."""
    if config is None:
        config = HeadConfig("eagle3") if one.kind == "eagle3" else HeadConfig("eagle", norms=NONE)
    loaded = head_for(folder, config, ids if one.kind == "eagle3" else None)
    planned = one.plan(loaded, folder)
    assert not planned.report.faults()
    tensors, written = dict(planned.tensors), json.loads(json.dumps(planned.config))
    harm(tensors, written)
    return one.engine.load(written, tensors, loaded.head.target_config)


EAGLES = ("eagle", "vllm-eagle", "sglang-eagle")
EAGLE3S = ("eagle3", "vllm-eagle3", "sglang-eagle3", "trtllm-eagle3", "speculators")


def first(tensors: dict[str, Tensor]) -> str:
    """How this folder calls its first layer."""
    return "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."


def beside(end: str, size: int) -> Harm:
    """A vector in the first layer that no class of a plain layer has."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[first(tensors) + end] = torch.ones(size)

    return harm


def test_a_norm_too_many(folders: Callable[[str], Path]) -> None:
    """Restored norms in a class without them: vLLM raises, the others drop them (vllm#11672)."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["layers.0.input_layernorm.weight"] = torch.ones(32)
        tensors["norm.weight"] = torch.ones(32)

    extra = {"layers.0.input_layernorm.weight", "norm.weight"}
    assert len(report_of(BY_NAME["vllm-eagle"], folders("llama"), harm).raised) == 2
    for name in ("eagle", "sglang-eagle"):
        assert set(report_of(BY_NAME[name], folders("llama"), harm).dropped) == extra
    for name in EAGLE3S:
        report = report_of(BY_NAME[name], folders("llama"), beside("self_attn.q_norm.weight", 8))
        found = report.raised if name in ("vllm-eagle3", "speculators") else report.dropped
        assert len(found) == 1 and "q_norm.weight" in found[0], name


def test_a_bias_of_the_projection(folders: Callable[[str], Path]) -> None:
    """vLLM drops one that was trained, SGLang and the authors' code invent one that is missing."""

    def give(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["fc.bias"] = torch.ones(32)

    def take(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors.pop("fc.bias", None)
        config.pop("bias", None)

    folder = folders("llama")
    for name in ("vllm-eagle", *EAGLE3S):
        assert report_of(BY_NAME[name], folder, give).dropped == ("fc.bias",)
        report = report_of(BY_NAME[name], folder, beside("self_attn.q_proj.bias", 32))
        assert len(report.dropped) == 1 and not report.raised, name
    assert report_of(BY_NAME["sglang-eagle"], folder, take).random == ("fc.bias",)
    assert report_of(BY_NAME["eagle"], folder, take).random == ("fc.bias",)
    planned = BY_NAME["sglang-eagle"].plan(
        head_for(folder, HeadConfig("eagle", norms=NONE)), folder
    )
    assert not planned.tensors["fc.bias"].any() and "filler" in planned.origin["fc.bias"]


def test_attention_bias_by_the_wrong_key(folders: Callable[[str], Path]) -> None:
    """`bias` is fc's to the authors' code and attention's to vLLM, which then allocates four."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["bias"] = True

    assert len(report_of(BY_NAME["vllm-eagle"], folders("llama"), harm).random) == 4


def test_boundaries_in_the_other_convention(folders: Callable[[str], Path]) -> None:
    """CASES 7, 8, 51: vLLM reads the layers that are entered at the top, SGLang those that are left
    in eagle_config, neither the other's; where they are absent, all take the same three."""
    key = "eagle_aux_hidden_state_layer_ids"
    config = HeadConfig("eagle3", boundaries=(1, 4, 6))

    def swap(tensors: dict[str, Tensor], written: dict[str, Any]) -> None:
        if key in written:
            written[key] = [k - 1 for k in written[key]]
        if "eagle_config" in written:
            written["eagle_config"][key] = [k + 1 for k in written["eagle_config"][key]]

    def drop(tensors: dict[str, Tensor], written: dict[str, Any]) -> None:
        written.pop(key, None)
        written.pop("eagle_config", None)

    for name, swapped in (
        ("vllm-eagle3", (0, 3, 5)),
        ("speculators", (0, 3, 5)),
        ("sglang-eagle3", (2, 5, 7)),
        ("trtllm-eagle3", (2, 5, 7)),
    ):
        one = BY_NAME[name]
        plan = one.plan(head_for(folders("llama"), config), folders("llama"))
        assert plan.report.runs["boundaries"] == (1, 4, 6)
        assert report_of(one, folders("llama"), swap, config).runs["boundaries"] == swapped
        report = report_of(one, folders("llama"), drop, config)
        assert report.runs["boundaries"] == (2, 4, 5)
        assert any(key in guess for guess in report.guessed), name


def test_an_embedding_of_another_width(folders: Callable[[str], Path]) -> None:
    """Every class shares the target's where the folder has none; told of a width of its own, the
    authors' code makes one and leaves it random."""

    def widen(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["target_hidden_size"] = 32

    report = report_of(BY_NAME["eagle3"], folders("llama"), widen)
    assert report.random == ("embed_tokens.weight",)


def test_names_that_vllm_passes_over(folders: Callable[[str], Path]) -> None:
    """Biases of modules that it has, tables of the rope, norms and masks that the configuration
    does not ask for; a bias of a module that it has not raises. Mistral's class takes the layers
    and the norm without `model.`, too."""
    table = "self_attn.rotary_emb.inv_freq"
    for name in ("vllm-eagle", "vllm-eagle3", "speculators"):
        assert not report_of(BY_NAME[name], folders("llama"), beside(table, 4)).faults()
        for end, raises in (("mlp.down_proj.bias", False), ("mlp.side_proj.bias", True)):
            report = report_of(BY_NAME[name], folders("llama"), beside(end, 32))
            assert bool(report.raised) == raises, name

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors |= {"input_norm.weight": torch.ones(96), "mask_hidden": torch.ones(96)}

    assert not report_of(BY_NAME["vllm-eagle3"], folders("llama"), harm).raised

    def bare(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if not name.startswith("model.fc")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    config = HeadConfig("eagle", norms=AI_O)
    assert not report_of(BY_NAME["vllm-eagle"], folders("llama"), bare, config).faults()


def test_another_engines_class_name(folders: Callable[[str], Path]) -> None:
    """CASE 130: no EAGLE config.json serves both vLLM and SGLang."""
    vllm, sglang = BY_NAME["vllm-eagle"], BY_NAME["sglang-eagle"]
    for one, other in ((vllm, sglang), (sglang, vllm)):
        plan = other.plan(
            head_for(folders("llama"), HeadConfig("eagle", norms=NONE)), folders("llama")
        )
        report = one.engine.load(plan.config, plan.tensors, target_config("llama"))
        assert "architectures name the class" in report.raised[0]
