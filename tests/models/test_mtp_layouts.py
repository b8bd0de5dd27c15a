"""The MTP layouts: toy targets of each family with MTP weights in their checkpoint, read, started
from, written again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from draftsmith.models.attention import PackedContext
from draftsmith.models.formats import layout
from draftsmith.models.formats.source import find_source, own_layout
from draftsmith.models.heads import (
    Head,
    HeadConfig,
    LoadedHead,
    MTPHead,
    NormConfig,
    build_head,
    load_head,
    save_head,
    take_shape,
)

MARKS = {"config": "a", "tokenizer": "b", "chat_template": "c", "weights": "d"}
_EXTRA = "extra.safetensors"
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_DEEPSEEK_MOE: dict[str, Any] = {**_MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_QWEN_MOE: dict[str, Any] = {
    **_MOE,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
}
_FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
_DEEPSEEK_NAMES = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "norm": "shared_head.norm",
}
_QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "norm": "norm",
}
_ERNIE_NAMES = {"enorm": "emb_norm.0", "hnorm": "hidden_norm.0", "eh_proj": "linear_proj.0"}
_MIMO_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
}


class Family:
    """How a family spells its MTP modules; written out here once more, by hand."""

    def __init__(
        self,
        layout: str,
        config: PretrainedConfig,
        modules: int,
        prefix: str,
        names: dict[str, str],
        count: str,
        layer: str = "",
        copies: bool = False,
        like: int = 1,
        **shape: Any,
    ) -> None:
        self.layout, self.config, self.modules, self.names = layout, config, modules, names
        self.prefix, self.layer, self.count, self.copies = prefix, layer, count, copies
        self.like = f"model.layers.{like}."
        self.head = HeadConfig("mtp", modules, **shape)

    def tensors(self, target: dict[str, Tensor]) -> dict[str, Tensor]:
        """Random MTP modules: the shapes of the target's layer `like`, as its checkpoint spells
        it."""
        generator = torch.Generator().manual_seed(7)
        size = self.config.hidden_size
        shapes = {name: (size,) for name in self.names} | {"eh_proj": (size, 2 * size)}
        found: dict[str, Tensor] = {}
        for module in range(self.modules):
            prefix = self.prefix.format(module, 2 + module)
            for name, shape in shapes.items():
                value = torch.randn(shape, generator=generator)
                found[f"{prefix}{self.names[name]}.weight"] = value
            for name, value in target.items():
                if name.startswith(self.like):
                    inside = prefix + self.layer + name.removeprefix(self.like)
                    found[inside] = torch.randn(value.shape, generator=generator)
            if self.copies:
                found[prefix + "embed_tokens.weight"] = target["model.embed_tokens.weight"]
                found[prefix + "shared_head.head.weight"] = target["lm_head.weight"]
        return found


FAMILIES = {
    "deepseek": Family(
        "deepseek-mtp",
        DeepseekV3Config(**{**_SMALL, **_MLA}, **_DEEPSEEK_MOE, first_k_dense_replace=1),
        2,
        "model.layers.{1}.",
        _DEEPSEEK_NAMES,
        "num_nextn_predict_layers",
        copies=True,
    ),
    "glm": Family(
        "glm-mtp",
        Glm4MoeConfig(**{**_SMALL, "head_dim": 8}, **_DEEPSEEK_MOE, first_k_dense_replace=1),
        1,
        "model.layers.{1}.",
        _DEEPSEEK_NAMES,
        "num_nextn_predict_layers",
        copies=True,
        recycle_raw=True,
    ),
    "qwen3-next": Family(
        "qwen-mtp",
        Qwen3NextConfig(**_SMALL, **_QWEN_MOE, **_FULL),
        1,
        "mtp.",
        _QWEN_NAMES,
        "num_nextn_predict_layers",
        layer="layers.0.",
    ),
    "qwen3.5": Family(
        "qwen-mtp",
        Qwen3_5TextConfig(**_SMALL, head_dim=8, **_FULL),
        1,
        "mtp.",
        _QWEN_NAMES,
        "mtp_num_hidden_layers",
        layer="layers.0.",
    ),
    "ernie": Family(
        "ernie-mtp",
        Ernie4_5_MoeConfig(
            **_SMALL, moe_intermediate_size=16, moe_k=2, moe_num_experts=4, moe_num_shared_experts=1
        ),
        1,
        "model.mtp_",
        _ERNIE_NAMES,
        "num_nextn_predict_layers",
        layer="block.0.",
        like=0,  # a dense layer, while the last has experts
        mask_position_zero=True,
        norms=NormConfig(output=False),
    ),
    # transformers has no MiMo; its layers are those of Qwen2
    "mimo": Family(
        "mimo-mtp",
        Qwen2Config(**_SMALL),
        2,
        "model.mtp_layers.{0}.",
        _MIMO_NAMES,
        "num_nextn_predict_layers",
        hidden_first=True,
        mask_position_zero=True,
    ),
}


def shard(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Put MTP weights beside a target's, in a file of their own and in the index."""
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    names |= dict.fromkeys(tensors, _EXTRA)
    save_file({name: value.clone() for name, value in tensors.items()}, folder / _EXTRA)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict]]:
    """A maker of toy targets that bring MTP weights: the folder, and those weights."""
    done: dict[str, tuple[Path, dict[str, Tensor]]] = {}

    def make(name: str) -> tuple[Path, dict[str, Tensor]]:
        if name not in done:
            family, folder = FAMILIES[name], tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(family.config).save_pretrained(folder)
            tensors = family.tensors(load_file(folder / "model.safetensors"))
            shard(folder, tensors)
            config = json.loads((folder / "config.json").read_text())
            config[family.count] = family.modules
            (folder / "config.json").write_text(json.dumps(config))
            done[name] = folder, tensors
        return done[name]

    return make


@pytest.fixture
def copied(
    made: Callable[[str], tuple[Path, dict]], tmp_path: Path
) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """The same, to be damaged."""

    def copy(name: str) -> tuple[Path, dict[str, Tensor]]:
        folder, tensors = made(name)
        shutil.copytree(folder, tmp_path / "target")
        return tmp_path / "target", dict(tensors)

    return copy


def expected(family: Family, tensors: dict[str, Tensor], name: str) -> Tensor:
    """What the head's tensor of this name holds, from the checkpoint's own."""
    _, module, rest = name.split(".", 2)
    prefix = family.prefix.format(int(module), 2 + int(module))
    if not rest.startswith("layer."):
        return tensors[f"{prefix}{family.names[rest.removesuffix('.weight')]}.weight"]
    inside = prefix + family.layer + rest.removeprefix("layer.")
    base = inside.rpartition(".")[0]
    if inside.endswith("experts.gate_up_proj"):
        parts = ("gate_proj", "up_proj")
    elif inside.endswith("experts.down_proj"):
        parts = ("down_proj",)
    else:
        return tensors[inside]
    return torch.stack(
        [torch.cat([tensors[f"{base}.{e}.{part}.weight"] for part in parts]) for e in range(4)]
    )


def started(folder: Path, **config: Any) -> tuple[Head, LoadedHead]:
    """A head that starts from the target's own weights, and what was read."""
    source = find_source("target-mtp", folder, MARKS)
    assert source is not None
    base = HeadConfig(**config)
    shape = take_shape(
        replace(base, init=replace(base.init, source="target-mtp")), source.head.config, "x"
    )
    return build_head(shape, folder, 2.0, source=source), source


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_is_the_targets_own(made: Callable[[str], tuple[Path, dict]], name: str):
    """Bit for bit, all of them and nothing random; the shape and what is recycled are the
    family's."""
    (folder, tensors), family = made(name), FAMILIES[name]
    head, source = started(folder)
    found = own_layout(folder)
    assert found is not None and found.name == family.layout
    assert source.head.config == family.head and head.num_modules == family.modules
    read = 0
    for tensor, value in head.state_dict().items():
        right = expected(family, tensors, tensor)
        assert torch.equal(value, right), tensor
        read += right.numel()
    copies = 2 * family.modules * 96 * 32 * family.copies
    assert read == sum(value.numel() for value in tensors.values()) - copies
    gemma = name.startswith("qwen")
    assert head.recycle.norm_style == ("gemma" if gemma else "rms")


@pytest.mark.parametrize("name", FAMILIES)
def test_written_tensors_are_those_that_were_read(
    made: Callable[[str], tuple[Path, dict]], tmp_path: Path, name: str
):
    """native -> layout: the names, shapes and bits of the family's own checkpoint, no tensor more;
    -> native: the same head."""
    (folder, tensors), family = made(name), FAMILIES[name]
    head, _ = started(folder)
    save_head(
        tmp_path / "native",
        head,
        target_fingerprint=MARKS,
        draft_ids=None,
        trained_length=9,
        config={},
    )
    write, read = layout(family.layout)
    origin = write(load_head(tmp_path / "native"), folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / "mtp.safetensors")
    assert set(written) == set(tensors) == set(origin)
    for tensor, value in tensors.items():
        assert torch.equal(written[tensor], value), tensor
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[family.count] == family.modules
    linked = tmp_path / "out" / "model.safetensors"
    assert linked.samefile(folder / "model.safetensors") and not linked.is_symlink()
    assert not (tmp_path / "out" / _EXTRA).exists()  # held the target's own modules alone
    again = own_layout(tmp_path / "out")  # as it lies, without our note
    assert again is not None and again.name == family.layout
    back = read(tmp_path / "out", folder)
    assert back.head.config == family.head
    for tensor, value in head.state_dict().items():
        assert torch.equal(back.head.state_dict()[tensor], value), tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unread_tensor_and_a_missing_one_are_named(
    copied: Callable[[str], tuple[Path, dict[str, Tensor]]], name: str
):
    """Each tensor has its place or the checkpoint is refused."""
    folder, tensors = copied(name)
    lacking = next(key for key in tensors if key.endswith("down_proj.weight"))
    odd = lacking.rsplit(".", 2)[0] + ".side_proj.weight"
    tensors[odd] = tensors.pop(lacking)
    shard(folder, tensors)
    with pytest.raises(ValueError) as refusal:
        find_source("target-mtp", folder, MARKS)
    assert f"lack {lacking} and" in str(refusal.value)
    assert f"unknown {odd}" in str(refusal.value)


def test_a_second_qwen_layer_is_refused_by_name(
    copied: Callable[[str], tuple[Path, dict[str, Tensor]]],
):
    """It would share `fc` with the first; nothing is dropped."""
    folder, tensors = copied("qwen3.5")
    tensors["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32)
    shard(folder, tensors)
    with pytest.raises(ValueError, match="unknown mtp.layers.1.mlp.up_proj.weight"):
        find_source("target-mtp", folder, MARKS)


def test_a_number_of_modules_that_the_files_contradict_is_refused(
    copied: Callable[[str], tuple[Path, dict[str, Tensor]]],
):
    """Both are told; where config.json is silent, the files are right."""
    folder, tensors = copied("deepseek")
    shard(folder, {name: value for name, value in tensors.items() if ".3." not in name[:15]})
    with pytest.raises(ValueError, match="num_nextn_predict_layers=2, the files hold 1"):
        find_source("target-mtp", folder, MARKS)
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    source = find_source("target-mtp", folder, MARKS)
    assert source is not None and source.head.num_modules == 1


def test_fused_experts_and_float8_are_read(
    copied: Callable[[str], tuple[Path, dict[str, Tensor]]],
):
    """Qwen3.5-MoE stores experts fused; DeepSeek stores float8 with a scale for each block."""
    folder, tensors = copied("deepseek")
    base = "model.layers.2.mlp.experts"
    experts = [
        {part: tensors.pop(f"{base}.{e}.{part}.weight") for part in ("gate_proj", "up_proj")}
        for e in range(4)
    ]
    fused = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in experts])
    tensors[f"{base}.gate_up_proj"] = fused
    name = "model.layers.2.self_attn.o_proj.weight"
    small = tensors[name].to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
    tensors |= {name: small, name + "_scale_inv": scale}
    shard(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [20, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    head, _ = started(folder)
    state = head.state_dict()
    assert torch.equal(state["blocks.0.layer.mlp.experts.gate_up_proj"], fused)
    right = small.float()
    for rows, a in ((slice(0, 20), 0), (slice(20, 32), 1)):
        for columns, b in ((slice(0, 16), 0), (slice(16, 32), 1)):
            right[rows, columns] *= scale[a, b]
    assert torch.equal(state["blocks.0.layer.self_attn.o_proj.weight"], right)


@pytest.mark.parametrize(
    ("name", "spelt"),
    [
        ("deepseek", ["model.layers.2.", "model.decoder.", "model.layers.3."]),
        ("glm", ["model.layers.2.", "model.decoder."]),
        ("qwen3-next", ["mtp.layers.0."]),
        ("mimo", ["model.mtp_layers.0.", "model.layers.2."]),
        ("ernie", ["model.mtp_block.0.", "model.mtp_block."]),
    ],
)
def test_modules_of_a_quantised_target_are_said_to_be_plain(
    copied: Callable[[str], tuple[Path, dict[str, Tensor]]],
    tmp_path: Path,
    name: str,
    spelt: list[str],
):
    """In every engine's names, beside what the target's list has; they are written as trained."""
    folder, _ = copied(name)
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    config["quantization_config"] = {**fp8, "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    head, _ = started(folder)
    write, read = layout(FAMILIES[name].layout)
    write(LoadedHead(head, None, {"head": {}}), folder, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for key in ("ignored_layers", "modules_to_not_convert"):
        assert written[key][0] == "lm_head"
        assert {f"{start}self_attn.o_proj" for start in spelt} <= set(written[key])
        assert not any(".experts." in one for one in written[key])
    back = read(tmp_path / "out", folder).head.state_dict()
    assert all(torch.equal(back[key], value) for key, value in head.state_dict().items())


def test_a_copy_that_is_none_is_told(copied: Callable[[str], tuple[Path, dict[str, Tensor]]]):
    """The MTP module's own lm_head differs from the target's, which every engine reads."""
    folder, tensors = copied("glm")
    name = "model.layers.2.shared_head.head.weight"
    tensors[name] = tensors[name] + 1
    shard(folder, tensors)
    with pytest.warns(UserWarning, match=f"{name} differs from the target's own lm_head.weight"):
        find_source("target-mtp", folder, MARKS)


def test_what_a_layout_cannot_hold_is_refused(
    made: Callable[[str], tuple[Path, dict]], tmp_path: Path
):
    """Another order, recycled state, mask, norm style, norm or number of modules: each by name."""

    def refused(family: str, name: str, words: str, **config: Any) -> None:
        head = MTPHead(HeadConfig(**config), FAMILIES[family].config)
        write, _ = layout(name)
        with pytest.raises(ValueError, match=words):
            write(LoadedHead(head, None, {"head": {}}), made(family)[0], tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused("mimo", "mimo-mtp", "head.hidden_first=true, this head was trained with false")
    refused("mimo", "mimo-mtp", "head.mask_position_zero=true", hidden_first=True)
    refused("mimo", "glm-mtp", "head.recycle_raw=true, this head was trained with false")
    refused("mimo", "deepseek-mtp", "head.recycle_raw=false", recycle_raw=True)
    refused("mimo", "deepseek-mtp", "a norm hidden", norms=NormConfig(hidden=False))
    refused("ernie", "ernie-mtp", "no norm output, which this head was trained with")
    masked = {"mask_position_zero": True, "norms": NormConfig(output=False)}
    refused("ernie", "ernie-mtp", "another decoder layer .* start from head.init.source", **masked)
    refused("mimo", "qwen-mtp", "style gemma, those of this head's target rms")
    refused("qwen3.5", "qwen-mtp", "holds 1 module, this head has 2", modules=2)
    refused("qwen3.5", "deepseek-mtp", "style rms, those of this head's target gemma")


def test_a_masked_deepseek_head_comes_back_masked(
    made: Callable[[str], tuple[Path, dict]], tmp_path: Path
):
    """Engines differ there, so the layout holds both and our note says which."""
    folder, _ = made("deepseek")
    config = HeadConfig(mask_position_zero=True)
    head = MTPHead(config, FAMILIES["deepseek"].config)
    save_head(
        tmp_path / "native",
        head,
        target_fingerprint=MARKS,
        draft_ids=None,
        trained_length=9,
        config={},
    )
    write, read = layout("deepseek-mtp")
    write(load_head(tmp_path / "native"), folder, tmp_path / "out")
    assert read(tmp_path / "out").head.config == config


def test_a_target_without_mtp_weights_is_refused(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
):
    """And one with weights of a layout that is not known, whose tensors are named."""
    folder = tiny_llama_folder()
    assert own_layout(folder) is None
    with pytest.raises(ValueError, match="holds no MTP weights of a known layout"):
        find_source("target-mtp", folder, MARKS)
    shutil.copytree(folder, tmp_path / "odd")
    shard(tmp_path / "odd", {"model.mtp_block.0.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="it has .'model.mtp_block.0.mlp.up_proj.weight'."):
        find_source("target-mtp", tmp_path / "odd", MARKS)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_runs_in_the_engines_form(made: Callable[[str], tuple[Path, dict]], name: str):
    """The started head's module and its inference form are one function, step for step."""
    head, _ = started(made(name)[0])
    function = head.for_inference(torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    embeds, hidden = torch.randn(2, 5, 32, generator=generator)
    with torch.no_grad():
        for step in range(2):
            inputs = (embeds, hidden, torch.arange(5) + step)
            ours = function(*inputs, PackedContext([0, 5]), step)
            right = head(*inputs, PackedContext([0, 5]), step)
            assert torch.isfinite(right.drafted).all()
            torch.testing.assert_close(ours.drafted, right.drafted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.recycled, right.recycled, rtol=1e-5, atol=1e-5)
            hidden = right.recycled
