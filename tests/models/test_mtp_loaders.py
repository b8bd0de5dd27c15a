"""What vLLM's and SGLang's MTP classes make of the classic mistakes (CASES 7, 39, 47, 92), and what
the exporter makes of heads that they would run otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.formats import MTP_LAYOUTS
from draftsmith.models.formats.loaders import Report
from draftsmith.models.formats.mtp_loaders import CLASSES, SGLANG, VLLM, engines
from draftsmith.models.formats.runs import MTP_CLASSES
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


def reports(family: str, harm: Harm, modules: int = 1) -> list[Report]:
    """vLLM's and SGLang's report on a harmed checkpoint, of ERNIE's SGLang's alone."""
    one, loaded = BY_NAME[FAMILIES[family].layout], head_of(family, modules)
    config, tensors = one.described(loaded)
    if family == "mimo":  # the family's layers are Qwen2's, and its model_type its own
        config["model_type"] = "mimo"
    harm(tensors, config)
    target = loaded.head.target_config
    known = engines(one.name, one.names(config))
    return [engine.load(config, tensors, target) for engine in known]


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


@pytest.mark.parametrize("family", READ)
def test_what_is_whole_loads_in_both(family: str) -> None:
    """By the class that the page names, with nothing dropped, random or raised."""
    named = {
        engine: name
        for start, classes in MTP_CLASSES[FAMILIES[family].layout]
        if ("mimo" if family == "mimo" else FAMILIES[family].config.model_type).startswith(start)
        for engine, name in classes.items()
    }
    for report in reports(family, lambda tensors, config: None):
        assert not report.faults(), report.title
        assert named[report.engine.split()[0]] == report.loader


@pytest.mark.parametrize("family", READ)
def test_a_missing_norm_or_matrix(family: str) -> None:
    """vLLM raises by its name; SGLang leaves a norm at one (of style gemma: zero) and a matrix
    random, without a word."""
    one = FAMILIES[family]
    norm = f"{one.names['enorm']}.weight"
    vllm, sglang = reports(family, without(norm))
    assert len(vllm.raised) == 1 and norm in vllm.raised[0]
    left = sglang.zeros if family.startswith("qwen") else sglang.ones
    assert not sglang.raised and len(left) == 1 and left[0].endswith(norm)
    vllm, sglang = reports(family, without(f"{one.names['eh_proj']}.weight"))
    assert len(vllm.raised) == 1 and not sglang.raised and len(sglang.random) == 1


@pytest.mark.parametrize("family", READ)
def test_one_of_a_packed_projection(family: str) -> None:
    """vLLM takes all of it for loaded where one part is there: the missing one stays random, and
    only the whole of it missing raises. SGLang never tells."""
    part, other = ("q_a_proj", "kv_a_proj") if family == "deepseek" else ("k_proj", "[qv]_proj")
    vllm, sglang = reports(family, without(f"{part}.weight"))
    assert not vllm.raised and len(vllm.random) == 1 and f"{part}.weight" in vllm.random[0]
    assert sglang.random == vllm.random

    def all_of_it(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if re.search(f"({part}|{other})", name)]:
            del tensors[name]

    vllm, sglang = reports(family, all_of_it)
    assert len(vllm.raised) >= 2 and not vllm.random
    assert not sglang.raised and len(sglang.random) >= 2


@pytest.mark.parametrize("family", READ)
def test_quantised_targets_are_not_held_to_it(family: str) -> None:
    """vLLM compares what it loaded with what it made in targets that are not quantised; in the
    others a missing norm is random there, too."""
    norm = f"{FAMILIES[family].names['enorm']}.weight"

    def harm(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "fp8"}
        without(norm)(tensors, config)

    vllm, _ = reports(family, harm)
    assert not vllm.raised and len(vllm.random) == 1 and vllm.random[0].endswith(norm)


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
    SGLang drafts with random weights."""

    def harm(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    vllm, sglang = reports(family, harm)
    assert vllm.raised and sglang.random and not sglang.raised
    assert sglang.dropped or family in ("deepseek", "glm")


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
    """Copies inside the modules are the target's to SGLang whatever they hold; vLLM takes the
    target's for GLM, and of DeepSeek's raises without the copy of the lm_head."""
    for family in ("deepseek", "glm"):
        for report in reports(family, without("embed_tokens.weight")):
            assert not report.faults()
        vllm, sglang = reports(family, without("shared_head.head.weight"))
        assert bool(vllm.raised) == (family == "deepseek") and not sglang.faults()


def test_a_tied_target() -> None:
    """Two classes of vLLM make an lm_head of their own and find none in such a checkpoint."""

    def harm(tensors: Tensors, config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True

    for family in READ:
        vllm, sglang = reports(family, harm)
        assert bool(vllm.raised) == (family in ("qwen3-next", "mimo")) and not sglang.faults()


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


def test_ernies_class() -> None:
    """SGLang's raises on what it does not know, a bias too, and where the module is missing; what
    is missing inside it stays one or random."""
    (whole,) = reports("ernie", lambda tensors, config: None)
    assert not whole.faults() and whole.loader == "Ernie4_5_MoeForCausalLMMTP"
    (report,) = reports("ernie", without("emb_norm.0.weight"))
    assert report.ones == ("model.mtp_emb_norm.0.weight",) and not report.raised
    for end in ("extra_layernorm.weight", "self_attn.o_proj.bias"):
        (report,) = reports("ernie", beside(end))
        assert len(report.raised) == 1 and end in report.raised[0]
    (report,) = reports("ernie", lambda tensors, config: tensors.clear())
    assert "are missing" in report.raised[0]


def test_the_exporter_refuses_what_no_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told for each engine; where one runs the head, the layout holds it."""
    one, two = BY_NAME["deepseek-mtp"], head_of("deepseek", 2)
    (vllm, told), (sglang, refused) = one.judge(two)
    assert (vllm.loader, told) == ("DeepSeekMTPModel", [])
    assert "takes 1 module alone" in refused[0] and sglang.raised
    one.check(two)
    # A target that no engine has a class for keeps its heads here.
    assert not one.judge(head_of("mimo"))
    monkeypatch.setitem(CLASSES["deepseek-mtp"], VLLM, CLASSES["deepseek-mtp"][SGLANG])
    with pytest.raises(ValueError, match="takes 1 module alone; SGLang .* keep the native folder"):
        one.check(two)


def test_every_layout_of_an_engine_is_described() -> None:
    """The page's classes of vLLM and SGLang are those that are run here."""
    for layout, by_engine in CLASSES.items():
        ours = {
            (one.family, engine.split()[0], one.name)
            for engine, classes in by_engine.items()
            for one in classes
        }
        theirs = {
            (start, engine, name)
            for start, classes in MTP_CLASSES[layout]
            for engine, name in classes.items()
            if engine in ("vLLM", "SGLang")
        }
        assert ours == theirs
