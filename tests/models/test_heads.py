"""The MTP head: its equation, its start, its folder, its foreign layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftsmith.models.attention import PackedContext
from draftsmith.models.formats import layout
from draftsmith.models.heads import (
    Head,
    HeadConfig,
    InitConfig,
    MTPHead,
    NormConfig,
    build_head,
    load_head,
    save_head,
)
from draftsmith.models.heads.checkpoint import LoadedHead, read_vocabulary, vocabulary_maps

FINGERPRINT = {"config": "a", "tokenizer": "b", "chat_template": "c", "weights": "d"}


@pytest.fixture
def folder(tiny_llama_folder: Callable[..., Path]) -> Path:
    """A tiny target."""
    return tiny_llama_folder()


def save(head: Head, out: Path, draft_ids: torch.Tensor | None = None) -> Path:
    """A native folder of `head`."""
    save_head(
        out, head, target_fingerprint=FINGERPRINT, draft_ids=draft_ids, trained_length=40, config={}
    )
    return out


def trained_like(folder: Path, norms: NormConfig | None = None, modules: int = 1) -> Head:
    """A head whose every weight differs from its start."""
    head = build_head(HeadConfig(modules=modules, norms=norms or NormConfig()), folder, 2.0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


def test_each_norm_switch_removes_its_tensor_and_changes_the_result(folder: Path):
    """The ablation is real: four switches, four different functions."""
    names = {
        "embedding": "blocks.0.enorm.weight",
        "hidden": "blocks.0.hnorm.weight",
        "attention_input": "blocks.0.layer.input_layernorm.weight",
        "output": "blocks.0.norm.weight",
    }
    whole = build_head(HeadConfig(), folder, 2.0)
    embeds, hidden = torch.randn(4, 64), torch.randn(4, 64) * 3
    reference = whole(embeds, hidden, torch.arange(4), PackedContext([0, 4])).drafted
    for switch, tensor in names.items():
        head = build_head(HeadConfig(norms=NormConfig(**{switch: False})), folder, 2.0)
        assert set(whole.state_dict()) - set(head.state_dict()) == {tensor}
        out = head(embeds, hidden, torch.arange(4), PackedContext([0, 4])).drafted
        assert float((out - reference).detach().abs().max()) > 1e-3, switch


def test_a_head_starts_from_the_target(folder: Path):
    """Layer and output norm are the target's; the projection passes the normed state and half the
    embedding."""
    head = build_head(HeadConfig(modules=2), folder, 3.0).state_dict()
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.2."
    for name in (name for name in tensors if name.startswith(last)):
        for module in range(2):
            ours = head[f"blocks.{module}.layer.{name.removeprefix(last)}"]
            assert torch.equal(ours, tensors[name]), name
    assert torch.equal(head["blocks.1.norm.weight"], tensors["model.norm.weight"] * 0.4)
    identity = torch.eye(64)
    assert torch.equal(
        head["blocks.0.eh_proj.weight"], torch.cat([1.5 * identity, 3 * identity], 1)
    )
    random = build_head(HeadConfig(init=InitConfig("random", "random")), folder, 3.0)
    assert not torch.equal(
        random.state_dict()["blocks.0.layer.mlp.up_proj.weight"],
        tensors["model.layers.2.mlp.up_proj.weight"],
    )


@pytest.mark.parametrize(
    ("config", "rms", "message"),
    [
        (HeadConfig(kind="mpt"), 1.0, "did you mean 'mtp'"),
        (HeadConfig(init=InitConfig(layer="last")), 1.0, "target-last or random"),
        (HeadConfig(init=InitConfig(projection="eye")), 1.0, "pass-through or random"),
        (HeadConfig(), 0.0, "state_rms 0.0"),
        (HeadConfig(kind="eagle3"), 1.0, r"\[2, 1, 0\].*3 layers is too shallow.*among 0 to 3"),
        (HeadConfig(kind="eagle3", boundaries=(1, 4)), 1.0, "among 0 to 3"),
    ],
)
def test_a_wrong_choice_is_refused(folder: Path, config: HeadConfig, rms: float, message: str):
    """The message names the value and the known ones."""
    with pytest.raises(ValueError, match=message):
        build_head(config, folder, rms)


def test_a_head_folder_round_trips(folder: Path, tmp_path: Path):
    """Every tensor bit for bit, the draft vocabulary, the facts."""
    head, ids = trained_like(folder), torch.tensor([0, 2, 3, 77, 511])
    loaded = load_head(save(head, tmp_path / "head", ids), FINGERPRINT)
    assert loaded.draft_ids is not None and torch.equal(loaded.draft_ids, ids)
    assert loaded.meta["trained_length"] == 40 and loaded.meta["draft_vocab_size"] == 5
    for (name, ours), theirs in zip(
        head.state_dict().items(), loaded.head.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_damage_is_noticed(folder: Path, tmp_path: Path):
    """A flipped byte, a missing tensor, another format, another tokenizer; another template only
    warns."""
    good = save(trained_like(folder), tmp_path / "good")

    def broken(name: str) -> Path:
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name

    flipped = broken("flipped")
    data = bytearray((flipped / "head.safetensors").read_bytes())
    data[-1] ^= 1
    (flipped / "head.safetensors").write_bytes(bytes(data))
    with pytest.raises(ValueError, match="checksum"):
        load_head(flipped)
    other = broken("format")
    meta = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load_head(other)
    with pytest.raises(ValueError, match="another tokenizer"):
        load_head(good, FINGERPRINT | {"tokenizer": "x"})
    with pytest.warns(UserWarning, match="chat_template"):
        load_head(good, FINGERPRINT | {"chat_template": "x"})
    with pytest.raises(ValueError, match="does not exist"):
        load_head(tmp_path / "nowhere")


@pytest.mark.parametrize("part", ["", "norms", "init"])
def test_settings_of_another_version_are_refused(folder: Path, tmp_path: Path, part: str):
    """With folder, name and remedy; a setting that the folder does not have yet is a default."""
    out = save(trained_like(folder), tmp_path / "head")
    meta = json.loads((out / "config.json").read_text())
    section = meta["head"][part] if part else meta["head"]
    section.pop("hidden" if part == "norms" else "layer" if part == "init" else "modules")
    (out / "config.json").write_text(json.dumps(meta))
    assert load_head(out).head.config == HeadConfig()
    section["depth"] = 3
    (out / "config.json").write_text(json.dumps(meta))
    name = f"head.{part}.depth" if part else "head.depth"
    with pytest.raises(ValueError, match=rf"head: .*{name}.*use the version that trained it"):
        load_head(out)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_scale", 0.0),
        ("output_scale", -0.4),
        ("output_scale", float("nan")),
        ("output_scale", float("inf")),
        ("embedding_share", float("nan")),
        ("embedding_share", -1.0),
        ("embedding_share", float("inf")),
    ],
)
def test_a_start_out_of_range_is_refused(name: str, value: Any):
    """By its name on the command line and the value; no embedding at all is a choice."""
    with pytest.raises(ValueError, match=rf"head\.init\.{name}={value}"):
        InitConfig(**{name: value})
    assert InitConfig(embedding_share=0).embedding_share == 0


def test_vocabulary_maps_are_offsets():
    """i + d2t[i] gives the ids; absolute ids, a lone map and two maps that disagree are refused."""
    ids = torch.tensor([1, 4, 5, 9])
    maps = vocabulary_maps(ids, 10)
    assert maps["d2t"].tolist() == [1, 3, 3, 6]
    assert torch.equal(read_vocabulary(dict(maps), 10, "file"), ids)  # type: ignore[arg-type]
    assert read_vocabulary({}, 10, "file") is None
    with pytest.raises(ValueError, match="offsets, not absolute"):
        read_vocabulary({"d2t": torch.tensor([1, 4, 5, 9]), "t2d": maps["t2d"]}, 10, "file")
    with pytest.raises(ValueError, match="belong together"):
        read_vocabulary({"d2t": maps["d2t"]}, 10, "file")
    with pytest.raises(ValueError, match="two vocabularies"):
        read_vocabulary({"d2t": maps["d2t"], "t2d": maps["t2d"].flip(0)}, 10, "file")


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("draft_ids", [None, torch.tensor([0, 2, 9, 400])], ids=["full", "reduced"])
def test_deepseek_layout_round_trips_bit_for_bit(
    folder: Path, tmp_path: Path, draft_ids: torch.Tensor | None, modules: int
):
    """Export names the target's layers from L on, and reading them back gives the same head."""
    head = trained_like(folder, modules=modules)
    native = load_head(save(head, tmp_path / "native", draft_ids))
    write, read = layout("deepseek-mtp")
    origin = write(native, folder, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "mtp.safetensors")
    assert set(origin) == set(tensors)
    fixed = ["enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"]
    for layer in range(3, 3 + modules):
        assert {f"model.layers.{layer}.{name}.weight" for name in fixed} <= set(tensors)
    assert tensors["model.layers.3.eh_proj.weight"].shape == (64, 128)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == modules
    back = read(tmp_path / "out")
    for name, value in native.head.state_dict().items():
        assert torch.equal(back.head.state_dict()[name], value), name
    if draft_ids is None:
        assert back.draft_ids is None
    else:
        assert back.draft_ids is not None and torch.equal(back.draft_ids, draft_ids)


def test_deepseek_layout_refuses_what_it_cannot_hold(folder: Path, tmp_path: Path):
    """A head without a norm; a folder without the layer; a tensor too few."""
    write, read = layout("deepseek-mtp")
    partial = load_head(save(trained_like(folder, NormConfig(output=False)), tmp_path / "partial"))
    with pytest.raises(ValueError, match="output"):
        write(partial, folder, tmp_path / "out")
    other = build_head(HeadConfig("eagle"), folder, 2.0)
    with pytest.raises(ValueError, match="of kind eagle"):
        write(load_head(save(other, tmp_path / "eagle")), folder, tmp_path / "out")
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        read(folder)
    write(load_head(save(trained_like(folder), tmp_path / "whole")), folder, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "mtp.safetensors")
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, tmp_path / "out" / "mtp.safetensors")
    with pytest.raises(ValueError, match="hnorm.weight"):
        read(tmp_path / "out")
    with pytest.raises(ValueError, match="did you mean 'deepseek-mtp'"):
        layout("deepseek_mtp")


def test_the_frozen_trunk_is_no_part_of_a_head(folder: Path):
    """Neither embedding nor lm_head nor rotary tables are among a head's tensors."""
    head = MTPHead(HeadConfig(), AutoConfig.from_pretrained(folder))
    sizes = {tuple(value.shape) for value in head.state_dict().values()}
    assert (512, 64) not in sizes
    assert not any("rotary" in name or "inv_freq" in name for name in head.state_dict())
    assert LoadedHead(head, None, {}).head is head
