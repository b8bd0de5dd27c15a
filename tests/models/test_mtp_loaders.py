"""What the engines' MTP classes make of the classic mistakes (CASES 7, 39, 47, 92), and what the
exporter makes of heads that they would run otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.formats import MTP_LAYOUTS
from draftsmith.models.formats.loaders import Report
from draftsmith.models.formats.mtp_loaders import CLASSES, SGLANG, TRTLLM, VLLM, engines
from draftsmith.models.heads import LoadedHead, MTPHead

from .test_mtp_layouts import FAMILIES

BY_NAME = {one.name: one for one in MTP_LAYOUTS}
READ = ("deepseek", "glm", "qwen3-next", "qwen3.5", "mimo")
DECODER = "self_attn.o_proj.weight"

Tensors = dict[str, Tensor]
Harm = Callable[[Tensors, dict[str, Any]], None]


def head_of(family: str, modules: int = 1) -> LoadedHead:
    """A head without data of the family's own kind, of one module unless more are asked for."""
    one = FAMILIES[family]
    shape = {name: value for name, value in vars(one.head).items() if name != "modules"}
    config = type(one.head)(**shape, modules=modules)
    with torch.device("meta"):
        head = MTPHead(config, BY_NAME[one.layout].layer_as(one.config))
    return LoadedHead(head, None, {})


def reports(
    family: str, harm: Harm, modules: int = 1, of: tuple[str, ...] = (VLLM, SGLANG)
) -> list[Report]:
    """These engines' reports on a harmed checkpoint."""
    one, loaded = BY_NAME[FAMILIES[family].layout], head_of(family, modules)
    config, tensors = one.described(loaded)
    if family == "mimo":  # the family's layers are Qwen2's, and its model_type its own
        config["model_type"] = "mimo"
    harm(tensors, config)
    target = loaded.head.target_config
    known = engines(one.name, one.names(config))
    return [engine.load(config, tensors, target) for engine in known if engine.name in of]


def without(end: str) -> Harm:
    """Take out the tensor whose name ends so; of several the first."""

    def harm(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors[next(name for name in tensors if name.endswith(end))]

    return harm


def beside(*ends: str) -> Harm:
    """Put tensors into the first module that no class has."""

    def harm(tensors: Tensors, config: dict[str, Any]) -> None:
        name = next(name for name in tensors if name.endswith(DECODER))
        for end in ends:
            tensors[name.replace(DECODER, end)] = torch.empty(32, device="meta")

    return harm


NAMED = {
    "deepseek": ["DeepSeekMTPModel", "DeepseekV3ForCausalLMNextN", "DeepseekV3MTP"],
    "glm": ["Glm4MoeMTPModel", "Glm4MoeForCausalLMNextN", "Glm4MTP"],
    "qwen3-next": ["Qwen3NextMTP", "Qwen3NextForCausalLMMTP", "Qwen3NextMTP"],
    "qwen3.5": ["Qwen3_5MTP", "Qwen3_5ForCausalLMMTP", "Qwen3NextMTP"],
    "mimo": ["MiMoMTPModel", "MiMoMTP"],
    "ernie": ["ErnieMTP", "Ernie4_5_MoeForCausalLMMTP"],
}


@pytest.mark.parametrize("family", NAMED)
def test_what_is_whole_loads_in_all(family: str) -> None:
    """By the engine's own class, with nothing dropped, random or raised."""
    whole = reports(family, lambda tensors, config: None, of=(VLLM, SGLANG, TRTLLM))
    assert [report.loader for report in whole] == NAMED[family]
    assert not any(report.faults() for report in whole)


@pytest.mark.parametrize("family", READ)
def test_a_missing_norm_or_projection(family: str) -> None:
    """vLLM raises by the norm's name, and by the projection's but in Qwen's classes; SGLang leaves
    a norm at one (of style gemma: zero) and a matrix random, without a word."""
    one = FAMILIES[family]
    norm, matrix = (f"{one.names[name]}.weight" for name in ("enorm", "eh_proj"))
    vllm, sglang = reports(family, without(norm))
    assert len(vllm.raised) == 1 and norm in vllm.raised[0]
    left = sglang.zeros if family.startswith("qwen") else sglang.ones
    assert not sglang.raised and len(left) == 1 and left[0].endswith(norm)
    vllm, sglang = reports(family, without(matrix))
    told = vllm.random if family.startswith("qwen") else vllm.raised
    assert len(told) == 1 and matrix in told[0]
    assert not sglang.raised and len(sglang.random) == 1


@pytest.mark.parametrize("family", READ)
def test_matrices_of_the_layer(family: str) -> None:
    """Neither engine tells of one that is missing, nor of all that it packs together: vLLM compares
    what it loaded with what it made, and passes over its own layers."""
    part = "q_a_proj" if family == "deepseek" else "k_proj"
    ends = [DECODER, f"{part}.weight"]
    if family in ("deepseek", "glm", "qwen3-next"):
        ends += ["mlp.gate.weight", "experts.3.down_proj.weight"]
    for end in ends:
        vllm, sglang = reports(family, without(end))
        assert not vllm.raised and len(vllm.random) == 1 and end in vllm.random[0]
        assert sglang.random == vllm.random

    def all_of_it(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if re.search("(q|q_a|k|kv_a|v)_proj", name)]:
            del tensors[name]

    for report in reports(family, all_of_it):
        assert not report.raised and len(report.random) >= 2


@pytest.mark.parametrize("family", READ)
def test_quantised_targets_are_not_held_to_it(family: str) -> None:
    """vLLM compares what it loaded with what it made in targets that are not quantised; in the
    others a missing norm is one (of style gemma: zero) there, too, and a matrix random."""
    for part in ("enorm", "eh_proj"):
        name = f"{FAMILIES[family].names[part]}.weight"

        def harm(tensors: Tensors, config: dict[str, Any], name: str = name) -> None:
            config["quantization_config"] = {"quant_method": "fp8"}
            without(name)(tensors, config)

        vllm, _ = reports(family, harm)
        norms = vllm.zeros if family.startswith("qwen") else vllm.ones
        left = norms if part == "enorm" else vllm.random
        assert not vllm.raised and len(left) == 1 and left[0].endswith(name)


@pytest.mark.parametrize(
    ("family", "drops"),
    [("deepseek", True), ("glm", True), ("qwen3-next", False), ("qwen3.5", True), ("mimo", False)],
)
def test_a_norm_too_many_and_a_bias(family: str, drops: bool) -> None:
    """vLLM raises on the norm; of SGLang's classes two do, the others drop it. All drop a bias,
    trained or not."""
    vllm, sglang = reports(family, beside("extra_layernorm.weight"))
    assert len(vllm.raised) == 1 and "extra_layernorm" in vllm.raised[0]
    assert (len(sglang.dropped), len(sglang.raised)) == ((1, 0) if drops else (0, 1))
    for report in reports(family, beside("self_attn.o_proj.bias")):
        assert not report.raised and len(report.dropped) == 1


@pytest.mark.parametrize("family", READ)
def test_a_map_of_draft_ids(family: str) -> None:
    """No class reads one: it is dropped, and all ids are drafted. None is ever written."""

    def harm(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors["d2t"] = torch.empty(8, device="meta")

    for report in reports(family, harm):
        assert report.dropped == ("d2t",) and not report.raised


@pytest.mark.parametrize("family", READ)
def test_a_prefix_too_many(family: str) -> None:
    """`model.` before every name: nothing is looked at. vLLM then raises for what is missing,
    SGLang drafts with random weights, but that two of its classes find the names all the same and
    raise."""

    def harm(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    vllm, sglang = reports(family, harm)
    assert vllm.raised and sglang.random
    assert bool(sglang.raised) == (family in ("qwen3-next", "mimo"))
    assert sglang.dropped or family in ("deepseek", "glm", "qwen3-next")


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_modules_at_the_wrong_layer(family: str) -> None:
    """The other way to count: the first module one layer too low or too high."""
    for shift in (-1, 1):

        def harm(tensors: Tensors, config: dict[str, Any], shift: int = shift) -> None:
            for name in list(tensors):
                moved = name.replace("layers.2.", f"layers.{2 + shift}.")
                tensors[moved] = tensors.pop(name)

        vllm, sglang = reports(family, harm)
        assert vllm.raised and sglang.random and not sglang.raised


def test_a_missing_embedding_or_lm_head() -> None:
    """Copies inside the modules are the target's to both, whatever they hold."""
    for family in ("deepseek", "glm"):
        for end in ("embed_tokens.weight", "shared_head.head.weight"):
            for report in reports(family, without(end)):
                assert not report.faults()


def test_a_tied_target() -> None:
    """Its lm_head is the embedding; classes that make one of their own take the target's for it."""
    for family in READ:
        for report in reports(family, lambda _, config: config.update(tie_word_embeddings=True)):
            assert not report.faults()


def test_numbers_of_modules() -> None:
    """More than config.json counts are never looked at, fewer raise in vLLM; SGLang takes one, and
    loads MiMo's over each other; without the number DeepSeek's classes stop."""

    def counted(number: int | None) -> Harm:
        def harm(tensors: Tensors, config: dict[str, Any]) -> None:
            config.pop("num_nextn_predict_layers", None)
            if number is not None:
                config["num_nextn_predict_layers"] = number

        return harm

    vllm, sglang = reports("deepseek", counted(1), 2)
    assert vllm.dropped and all(".layers.3." in name for name in vllm.dropped) and not vllm.raised
    assert sglang.dropped and not sglang.raised
    vllm, sglang = reports("deepseek", counted(3), 2)
    assert "the weights of MTP module model.layers.4 are missing" in vllm.raised[0]
    assert "takes 1 module alone" in sglang.raised[0]
    for report in reports("deepseek", counted(None)):
        assert report.raised == ("config.json has no 'num_nextn_predict_layers'",)
    vllm, sglang = reports("mimo", counted(2), 2)
    assert not vllm.faults() and not sglang.faults()
    assert vllm.runs["modules"] == sglang.runs["modules"] == 1


def test_ernies_classes() -> None:
    """SGLang's raises on what it does not know, a bias too, and where the module is missing; what
    is missing inside it stays one or random. vLLM's is as its others."""
    vllm, sglang = reports("ernie", without("emb_norm.0.weight"))
    assert sglang.ones == ("model.mtp_emb_norm.0.weight",) and not sglang.raised
    assert vllm.raised == ("there is no tensor model.mtp_emb_norm.0.weight",)
    vllm, sglang = reports("ernie", without("q_proj.weight"))
    assert vllm.random == sglang.random == ("model.mtp_block.0.self_attn.q_proj.weight",)
    for end, drops in (("extra_layernorm.weight", False), ("self_attn.o_proj.bias", True)):
        vllm, sglang = reports("ernie", beside(end))
        assert len(sglang.raised) == 1 and end in sglang.raised[0]
        assert (len(vllm.dropped), len(vllm.raised)) == ((1, 0) if drops else (0, 1))
    vllm, sglang = reports("ernie", lambda tensors, config: tensors.clear())
    assert "are missing" in sglang.raised[0] and vllm.raised
    (judged, faults), (_, none) = BY_NAME["ernie-mtp"].judge(head_of("ernie"))
    assert judged.loader == "ErnieMTP" and not none
    assert len(faults) == 1 and "the rope turned by halves, this head has by pairs" in faults[0]


@pytest.mark.parametrize("family", ["deepseek", "glm", "qwen3-next", "qwen3.5"])
def test_tensorrt_llms_classes(family: str) -> None:
    """Unknown names are never looked at, with a prefix too many none is; missing ones raise, but in
    Qwen's classes those alone that are packed; copies are the target's, a tied lm_head too."""
    names, qwen = FAMILIES[family].names, family.startswith("qwen")

    def prefixed(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    def report(harm: Harm, modules: int = 1) -> Report:
        return reports(family, harm, modules, of=(TRTLLM,))[0]

    for end in (f"{names['enorm']}.weight", f"{names['eh_proj']}.weight"):
        found = report(without(end))
        assert (len(found.raised), len(found.random)) == ((0, 1) if qwen else (1, 0))
        assert end in (*found.raised, *found.random)[0]
    part = "q_a_proj" if family == "deepseek" else "k_proj"
    found = report(without(f"{part}.weight"))
    assert len(found.raised) == 1 and not found.random
    for end in ("extra_layernorm.weight", "self_attn.o_proj.bias", "d2t"):
        found = report(beside(end))
        assert len(found.dropped) == 1 and not found.raised
    found = report(prefixed)
    assert found.raised and found.dropped
    assert not report(lambda tensors, config: config.update(tie_word_embeddings=True)).faults()
    if family in ("deepseek", "glm"):
        for end in ("embed_tokens.weight", "shared_head.head.weight"):
            assert not report(without(end)).faults()
        assert report(lambda tensors, config: None, 2).runs["modules"] == 2


def test_the_exporter_refuses_what_no_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told for each engine; where one runs the head, the layout holds it."""
    one, two = BY_NAME["deepseek-mtp"], head_of("deepseek", 2)
    (vllm, told), (sglang, refused), (trtllm, _) = one.judge(two)
    assert (vllm.loader, told) == ("DeepSeekMTPModel", []) and not trtllm.faults()
    assert "takes 1 module alone" in refused[0] and sglang.raised
    one.check(two)
    # A target that no engine has a class for keeps its heads here.
    assert not one.judge(head_of("mimo"))
    for engine in (VLLM, TRTLLM):
        monkeypatch.setitem(CLASSES["deepseek-mtp"], engine, CLASSES["deepseek-mtp"][SGLANG])
    with pytest.raises(ValueError, match="takes 1 module alone; SGLang .* keep the native folder"):
        one.check(two)
