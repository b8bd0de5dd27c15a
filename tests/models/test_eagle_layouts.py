"""The EAGLE and EAGLE-3 layouts: written, read again, and what each engine's loader would make of
them and of the classic mistakes (CASES 7, 8, 39 to 42, 47, 92, 113, 116, 130, 131)."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.models.formats import EAGLE_LAYOUTS, layout
from draftsmith.models.formats.eagle_layout import EagleLayout
from draftsmith.models.formats.loaders import Report
from draftsmith.models.formats.source import layout_of
from draftsmith.models.heads import HeadConfig, LoadedHead, NormConfig
from draftsmith.models.skeleton import text_config
from draftsmith.models.trunk import Trunk
from draftsmith.scripts.proof import largest_difference

from .eagle_toys import IDS, NONE, TARGETS, random_head, target_config

BY_NAME = {one.name: one for one in EAGLE_LAYOUTS}
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A maker of toy targets."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(target_config(name)).save_pretrained(made[name])
        return made[name]

    return make


@pytest.fixture(scope="module")
def trunks(folders: Callable[[str], Path]) -> Callable[[str], Trunk]:
    """Their trunks in float32."""
    return cache(lambda name: Trunk.load(folders(name), torch.float32))


def head_for(target: Path, config: HeadConfig, ids: Tensor | None = None) -> LoadedHead:
    """A random head for a target on disk."""
    return random_head(config, text_config(target), ids)


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


def test_a_missing_norm(folders: Callable[[str], Path]) -> None:
    """Left random without a word everywhere but in vLLM's classes that report what they loaded."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors[first(tensors) + "post_attention_layernorm.weight"]

    for name in EAGLES + EAGLE3S:
        report = report_of(BY_NAME[name], folders("llama"), harm)
        assert not report.raised and len(report.random) == 1, name
        assert report.random[0].endswith("post_attention_layernorm.weight")

    def harm_model(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors["model.norm.weight"]

    strict = BY_NAME["vllm-eagle"]
    for norms in (AI_O, E_H_AI):
        config = HeadConfig("eagle", norms=norms)
        report = report_of(strict, folders("llama"), harm_model, config)
        assert report.raised == ("there is no tensor model.norm.weight",)


def test_a_norm_too_many(folders: Callable[[str], Path]) -> None:
    """Restored norms in a class without them: vLLM raises, the others drop them (vllm#11672)."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["layers.0.input_layernorm.weight"] = torch.ones(32)
        tensors["norm.weight"] = torch.ones(32)

    extra = {"layers.0.input_layernorm.weight", "norm.weight"}
    assert len(report_of(BY_NAME["vllm-eagle"], folders("llama"), harm).raised) == 2
    for name in ("eagle", "sglang-eagle"):
        assert set(report_of(BY_NAME[name], folders("llama"), harm).dropped) == extra


def test_a_bias_of_the_projection(folders: Callable[[str], Path]) -> None:
    """vLLM drops one that was trained, SGLang and the authors' code invent one that is missing."""

    def give(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["fc.bias"] = torch.ones(32)

    def take(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors.pop("fc.bias", None)
        config.pop("bias", None)

    folder = folders("llama")
    assert report_of(BY_NAME["vllm-eagle"], folder, give).dropped == ("fc.bias",)
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


def test_an_lm_head_in_an_eagle_folder(folders: Callable[[str], Path]) -> None:
    """vLLM raises, SGLang skips it, the authors' code drops it."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = torch.zeros(96, 32)

    folder = folders("llama")
    assert report_of(BY_NAME["vllm-eagle"], folder, harm).raised
    assert not report_of(BY_NAME["sglang-eagle"], folder, harm).faults()
    assert report_of(BY_NAME["eagle"], folder, harm).dropped == ("lm_head.weight",)


def test_a_prefix(folders: Callable[[str], Path]) -> None:
    """`model.` before every name: vLLM raises for each, the others drop all and start random."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    for name in ("eagle", "vllm-eagle", "sglang-eagle", "vllm-eagle3"):
        report = report_of(BY_NAME[name], folders("llama"), harm)
        assert report.random and (bool(report.raised) != bool(report.dropped)), name
        assert bool(report.raised) == name.startswith("vllm")


def test_absolute_ids_in_the_map(folders: Callable[[str], Path]) -> None:
    """CASE 39: every loader takes them for offsets and would draft other tokens (id i becomes
    2i)."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(IDS))

    for name in EAGLE3S:
        report = report_of(BY_NAME[name], folders("llama"), harm)
        assert not report.faults()
        assert report.runs["draft_ids"] == tuple((IDS + torch.arange(len(IDS))).tolist())


def test_no_map(folders: Callable[[str], Path]) -> None:
    """CASE 40: the first ids are drafted; TensorRT-LLM alone raises."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors["d2t"]

    for name in EAGLE3S:
        report = report_of(BY_NAME[name], folders("llama"), harm)
        found = report.raised if name == "trtllm-eagle3" else report.zeros
        assert len(found) == 1 and "d2t" in found[0], name


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


def test_a_tied_head(folders: Callable[[str], Path]) -> None:
    """CASE 47: SGLang then drafts with the embedding and drops the trained lm_head."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True

    report = report_of(BY_NAME["sglang-eagle3"], folders("llama"), harm)
    assert report.dropped == ("lm_head.weight",)


def test_the_embedding_is_shared_where_it_is_missing(folders: Callable[[str], Path]) -> None:
    """By every class but one, which gets a copy; with a width of its own the authors' code leaves
    it random."""

    def harm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if "embed_tokens" in name]:
            del tensors[name]

    for name in EAGLES + EAGLE3S:
        report = report_of(BY_NAME[name], folders("llama"), harm)
        assert not report.faults() and "embed_tokens.weight" in report.shared, name
    minicpm = report_of(
        BY_NAME["vllm-eagle"], folders("llama"), harm, HeadConfig("eagle", norms=E_H_AI)
    )
    assert minicpm.raised == ("there is no tensor model.embed_tokens.weight",)

    def widen(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["target_hidden_size"] = 32

    report = report_of(BY_NAME["eagle3"], folders("llama"), widen)
    assert report.random == ("embed_tokens.weight",)


def test_another_engines_class_name(folders: Callable[[str], Path]) -> None:
    """CASE 130: no EAGLE config.json serves both vLLM and SGLang."""
    vllm, sglang = BY_NAME["vllm-eagle"], BY_NAME["sglang-eagle"]
    for one, other in ((vllm, sglang), (sglang, vllm)):
        plan = other.plan(
            head_for(folders("llama"), HeadConfig("eagle", norms=NONE)), folders("llama")
        )
        report = one.engine.load(plan.config, plan.tensors, target_config("llama"))
        assert "architectures name the class" in report.raised[0]


@pytest.mark.parametrize("name", BY_NAME)
def test_removing_any_one_thing_is_noticed_by_name(
    folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """CASES 8, 131: any tensor's absence is refused on reading by its name; any key's is refused,
    or told with the value that stands in, or changes nothing."""
    folder = folders("llama")
    one = BY_NAME[name]
    config = HeadConfig("eagle3") if one.kind == "eagle3" else HeadConfig("eagle", norms=NONE)
    loaded = head_for(folder, config, IDS if one.kind == "eagle3" else None)
    one.write(loaded, folder, tmp_path)
    (tmp_path / "draftsmith.json").unlink()
    written = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    for tensor in tensors:
        rest = {key: value for key, value in tensors.items() if key != tensor}
        save_file(rest, tmp_path / "model.safetensors")
        if tensor in ("t2d", "embed_tokens.weight"):  # no engine needs them
            assert one.read(tmp_path, folder).draft_ids is not None
            continue
        with pytest.raises(ValueError) as refusal:
            one.read(tmp_path, folder)
        assert tensor in str(refusal.value)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = written.get("transformer_layer_config", written)
    for key in list(layer):
        if layer is written:
            changed = {k: v for k, v in written.items() if k != key}
        else:
            changed = written | {
                "transformer_layer_config": {k: v for k, v in layer.items() if k != key}
            }
        (tmp_path / "config.json").write_text(json.dumps(changed))
        _notice(one, tmp_path, folder, key, loaded)


def _notice(one: EagleLayout, path: Path, folder: Path, key: str, loaded: LoadedHead) -> None:
    """Refused with the key's name, warned of it, or the very same head."""
    import warnings

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            back = one.read(path, folder)
        except ValueError as refusal:  # by its name, or by what the class then makes otherwise
            words = str(refusal)
            assert key in words or "the class makes" in words or "fc.bias" in words, (key, words)
            return
    if any(key in str(one.message) for one in told):
        return
    assert back.head.recycle == loaded.head.recycle, key
    assert back.head.boundaries == loaded.head.boundaries, key
    ours, theirs = (one.target_config.to_dict() for one in (loaded.head, back.head))
    assert ours == theirs, key


@pytest.fixture
def foreign(folders: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path, LoadedHead]:
    """An EAGLE-3 folder as published, without our note; the target; the head."""
    target = folders("llama")
    loaded = head_for(target, HeadConfig("eagle3"), IDS)
    BY_NAME["vllm-eagle3"].write(loaded, target, tmp_path / "in")
    (tmp_path / "in" / "draftsmith.json").unlink()
    return tmp_path / "in", target, loaded


def harmed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_absolute_ids_are_mended_where_it_is_proven(
    foreign: tuple[Path, Path, LoadedHead],
) -> None:
    """CASE 39: t2d shows what d2t means; without it the map is refused."""
    folder, target, _ = foreign
    harmed(folder, lambda t: t.update(d2t=IDS.clone()))
    with pytest.warns(UserWarning, match="d2t holds absolute ids, as t2d shows"):
        back = BY_NAME["vllm-eagle3"].read(folder, target)
    assert back.draft_ids is not None and torch.equal(back.draft_ids, IDS)
    harmed(folder, lambda t: t.__delitem__("t2d"))
    with pytest.raises(ValueError, match="d2t holds offsets, not absolute ids"):
        BY_NAME["vllm-eagle3"].read(folder, target)


@pytest.mark.parametrize("maps", ["none", "zeros", "arange"])
def test_maps_of_a_whole_vocabulary(
    folders: Callable[[str], Path], tmp_path: Path, maps: str
) -> None:
    """CASE 41: none and zeros are the identity, absolute ids are refused."""
    target, one = folders("llama"), BY_NAME["eagle3"]
    one.write(head_for(target, HeadConfig("eagle3")), target, tmp_path)
    if maps != "none":
        d2t = torch.zeros(96, dtype=torch.int64) if maps == "zeros" else torch.arange(96)
        harmed(tmp_path, lambda t: t.update(d2t=d2t, t2d=torch.ones(96, dtype=torch.bool)))
    if maps == "arange":
        with pytest.raises(ValueError, match="d2t holds offsets"):
            one.read(tmp_path, target)
    else:
        assert one.read(tmp_path, target).draft_ids is None


def test_three_sizes_are_named_apart(foreign: tuple[Path, Path, LoadedHead]) -> None:
    """CASE 42: rows of lm_head, entries of the map and the target's vocabulary."""
    folder, target, _ = foreign
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    with pytest.raises(ValueError, match="vocab_size=90, the target has 96"):
        BY_NAME["vllm-eagle3"].read(folder, target)
    (folder / "config.json").write_text(json.dumps(config))
    harmed(folder, lambda t: t.update({"lm_head.weight": torch.zeros(12, 32)}))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \[12, 32\]"):
        BY_NAME["vllm-eagle3"].read(folder, target)


def test_a_pickle_of_tensors_is_read_and_any_other_refused(
    foreign: tuple[Path, Path, LoadedHead],
) -> None:
    """Nothing in it is run."""
    folder, target, loaded = foreign
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert layout_of(folder) == "vllm-eagle3"
    back = BY_NAME["vllm-eagle3"].read(folder, target)
    for name, value in loaded.head.state_dict().items():
        assert torch.equal(back.head.state_dict()[name], value)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Path}, 2))
    with pytest.raises(ValueError, match="holds more than tensors"):
        BY_NAME["vllm-eagle3"].read(folder, target)


def test_a_missing_lm_head_is_the_targets(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """For a whole vocabulary, and told; rows for a draft vocabulary cannot be made up."""
    target, one = folders("llama"), BY_NAME["vllm-eagle3"]
    one.write(head_for(target, HeadConfig("eagle3")), target, tmp_path)
    harmed(tmp_path, lambda t: t.__delitem__("lm_head.weight"))
    with pytest.warns(UserWarning, match="no lm_head.weight; the target's own is taken"):
        back = one.read(tmp_path, target)
    own = load_file(target / "model.safetensors")["lm_head.weight"]
    assert back.head.lm_head is not None and torch.equal(back.head.lm_head, own)


def test_an_own_embedding_is_told(foreign: tuple[Path, Path, LoadedHead]) -> None:
    """CASE 92: a copy of the target's is taken out, another one warns."""
    folder, target, _ = foreign
    own = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    harmed(folder, lambda t: t.update({"embed_tokens.weight": own.to(torch.bfloat16)}))
    BY_NAME["vllm-eagle3"].read(folder, target)
    harmed(folder, lambda t: t.update({"embed_tokens.weight": own + 1}))
    with pytest.warns(UserWarning, match="embed_tokens.weight differs from the target's own"):
        BY_NAME["vllm-eagle3"].read(folder, target)


def test_a_llama_head_of_another_family_and_rope_comes_in(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Published heads of Qwen3 targets have Llama layers, and many a plain rope of base 10000,
    which is told: config.json leaves it out (CASE 116)."""
    qwen3, one = folders("qwen3"), BY_NAME["vllm-eagle3"]
    shape = target_config("llama", num_attention_heads=8, intermediate_size=40)
    loaded = random_head(HeadConfig("eagle3"), shape, IDS)
    one.write(loaded, qwen3, tmp_path)
    (tmp_path / "draftsmith.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_theta", "rope_parameters", "rope_scaling"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="config.json has no rope_theta; .* takes 10000.0"):
        back = one.read(tmp_path, qwen3)
    read = back.head.target_config
    assert (read.model_type, read.num_attention_heads, read.intermediate_size) == ("llama", 8, 40)
    assert read.num_hidden_layers == 8
    assert largest_difference(loaded, back, Trunk.load(qwen3, torch.float32)) == 0.0


def test_a_trained_bias_of_the_projection_comes_in(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """The authors' older heads have one; zeros are none."""
    target, one = folders("llama"), BY_NAME["eagle"]
    one.write(head_for(target, HeadConfig("eagle", norms=NONE)), target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for value, held in ((torch.zeros(32), False), (torch.ones(32), True)):
        harmed(tmp_path, lambda t, value=value: t.update({"fc.bias": value}))
        back = one.read(tmp_path, target).head
        assert back.config.projection_bias == held
        assert not held or torch.equal(back.state_dict()["blocks.0.eh_proj.bias"], value)


def test_ids_that_contradict_are_refused(foreign: tuple[Path, Path, LoadedHead]) -> None:
    """CASE 7: never guessed from the ids themselves."""
    folder, _, _ = foreign
    config = json.loads((folder / "config.json").read_text())
    key = "eagle_aux_hidden_state_layer_ids"
    config["eagle_config"][key] = config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="which are not the same states"):
        layout_of(folder)
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    assert layout_of(folder) == "sglang-eagle3"


def test_norms_of_one_name_must_be_one_norm(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Engines read one or the other of a further layer's two."""
    target, one = folders("llama"), BY_NAME["vllm-eagle3"]
    loaded = head_for(target, HeadConfig("eagle3", num_layers=2), IDS)
    one.write(loaded, target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    twins = [tensors[f"layers.1.{name}.weight"] for name in ("input_layernorm", "hidden_norm")]
    assert torch.equal(*twins)
    harmed(tmp_path, lambda t: t.update({"layers.1.hidden_norm.weight": twins[0] + 1}))
    with pytest.raises(ValueError, match="differs from the input_layernorm beside it"):
        one.read(tmp_path, target)


def test_toys_stay_as_they_were(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """A layout that nothing tells is refused."""
    assert set(TARGETS) >= {"llama", "qwen3"}
    shutil.copytree(folders("llama"), tmp_path / "plain")
    with pytest.raises(ValueError, match="tell a layout that is known"):
        layout_of(tmp_path / "plain")
