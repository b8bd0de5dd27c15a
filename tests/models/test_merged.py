"""MTP modules merged into a target's checkpoint, and into the quantised ones' lists."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models.formats.merged import merge
from draftsmith.models.formats.quantised import leave_plain
from draftsmith.models.trunk import tensor_files

STALE = "model.layers.2."


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint of three shards: one of the trunk, a mixed one, one of old modules alone."""
    folder = tmp_path / "target"
    folder.mkdir()
    shards = {
        "a.safetensors": ["lm_head.weight", "model.norm.weight"],
        "b.safetensors": ["model.layers.1.x.weight", f"{STALE}old.weight"],
        "c.safetensors": [f"{STALE}older.weight"],
    }
    index = {name: file for file, names in shards.items() for name in names}
    for file, names in shards.items():
        save_file({name: torch.full((2, 2), float(len(name))) for name in names}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("tokens")
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    return folder


def new() -> dict[str, Tensor]:
    """The modules that are written."""
    return {f"{STALE}new.weight": torch.ones(3, 2)}


def stale(name: str) -> bool:
    """Of the target's own modules."""
    return name.startswith(STALE)


def test_shards_are_linked_and_old_modules_are_gone(target: Path, tmp_path: Path) -> None:
    """What an engine reads, file by file: each tensor once, no old module, the target untouched;
    written a second time it is the same."""
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    out = tmp_path / "out"
    for _ in range(2):
        merge(target, out, new(), stale)
    assert (out / "a.safetensors").samefile(target / "a.safetensors")
    files = tensor_files(out)
    read: dict[str, Tensor] = {}
    for path in set(files.values()):
        found = load_file(path)
        assert not set(found) & set(read)
        read |= found
    assert set(read) == set(files)
    assert set(read) == {
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.x.weight",
        f"{STALE}new.weight",
    }
    assert float(read["model.layers.1.x.weight"][0, 0]) == len("model.layers.1.x.weight")
    assert not (out / "c.safetensors").exists() and not (out / "pytorch_model.bin").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (4 + 4 + 4 + 6)
    (out / "tokenizer.json").write_text("edited")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_another_filesystem_gets_symbolic_links(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so; the target's own folder is refused."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(UserWarning, match="symbolic link .* keep the target where it is"):
        merge(target, tmp_path / "out", new(), stale)
    assert (tmp_path / "out" / "a.safetensors").is_symlink()
    with pytest.raises(ValueError, match="is the target's own folder"):
        merge(target, target, new(), stale)


PREFIXES = {"model.layers.2.": "model.layers.2.", "model.decoder.": "model.layers.2."}
MODULES = [
    "model.layers.2.eh_proj",
    "model.layers.2.self_attn.o_proj",
    "model.layers.2.mlp.experts.0.up_proj",
    "model.layers.2.mlp.experts.1.up_proj",
]


def plain(config: dict[str, Any], name: str) -> bool:
    """Whether an engine makes this module without quantising it: vLLM's and SGLang's rules."""
    settings = config["quantization_config"]
    method = settings["quant_method"]
    if method == "fp8":
        first = "ignored_layers" if "ignored_layers" in settings else "modules_to_not_convert"
        return name in settings[first]
    if method == "compressed-tensors":
        return any(
            re.match(one[3:], name) if one.startswith("re:") else one == name
            for one in settings["ignore"]
        )
    if method == "gptq":
        return any(re.match(one[2:], name) for one in settings["dynamic"] if one[:2] == "-:")
    return any(one in name for one in settings["modules_to_not_convert"])


HELD: list[dict[str, Any]] = [
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
    {"quant_method": "awq", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "gptq", "dynamic": {"-:lm_head": {}}},
]


@pytest.mark.parametrize("settings", HELD, ids=lambda one: one["quant_method"])
def test_modules_are_on_the_list_of_what_is_not_quantised(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each in every engine's name; what was on it stays; other layers are none of it."""
    before = {"quantization_config": settings}
    changed = leave_plain(before, PREFIXES, MODULES, tmp_path)
    for start in ("model.layers.2.", "model.decoder."):
        for inside in ("self_attn.o_proj", "mlp.experts"):
            assert plain(changed, start + inside), inside
    assert not plain(changed, "model.layers.1.self_attn.o_proj")
    assert not plain(changed, "model.layers.21.self_attn.o_proj")
    assert plain(changed, "lm_head") == ("lm_head" in str(settings))
    assert before == {"quantization_config": settings} and "decoder" not in str(before)
    assert leave_plain(changed, PREFIXES, MODULES, tmp_path) == changed


def test_an_awq_list_that_is_begun_holds_what_was_plain(tmp_path: Path) -> None:
    """Where there is none, vLLM finds the plain modules by their tensors, and stops doing so when
    there is one."""
    tensors = {
        "lm_head.weight": torch.ones(4, 2),
        "model.norm.weight": torch.ones(2),
        "model.layers.0.mlp.gate.weight": torch.ones(4, 2).half(),
        "model.layers.0.mlp.up_proj.qweight": torch.ones(4, 2, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.scales": torch.ones(4, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    for held in (None, []):
        before = {"quantization_config": {"quant_method": "awq", "modules_to_not_convert": held}}
        listed = leave_plain(before, PREFIXES, MODULES, tmp_path)["quantization_config"]
        assert listed["modules_to_not_convert"] == [
            "lm_head",
            "model.layers.0.mlp.gate",
            *PREFIXES,
        ]


def test_a_way_of_quantising_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """By its name, and a plain target keeps its configuration."""
    with pytest.raises(ValueError, match="quantised by 'modelopt'"):
        leave_plain(
            {"quantization_config": {"quant_method": "modelopt"}}, PREFIXES, MODULES, tmp_path
        )
    assert leave_plain({"a": 1}, PREFIXES, MODULES, tmp_path) == {"a": 1}
