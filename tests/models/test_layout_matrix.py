"""Every layout against every family and kind of head: native -> layout -> native is bit-exact or
refused, and of what was written nothing can be taken away unnoticed (CASES 8, 131)."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.models import layer
from draftsmith.models.files import sha256_file
from draftsmith.models.formats import LAYOUTS, layout, mtp_layout, mtp_loaders
from draftsmith.models.formats.ernie_mtp import ERNIE_MTP
from draftsmith.models.formats.source import NATIVE, find_source, read_head
from draftsmith.models.heads import (
    HeadConfig,
    InitConfig,
    LoadedHead,
    NormConfig,
    build_head,
    save_head,
    take_shape,
)
from draftsmith.models.skeleton import skeleton, text_config

from .eagle_toys import IDS, MARKS, NONE, random_head, target_config
from .test_mtp_layouts import FAMILIES

EAGLE = HeadConfig("eagle", norms=NONE)
EAGLE3 = HeadConfig("eagle3")
MEDUSA = HeadConfig("medusa", modules=5, norms=NONE)
ATTENTION = NormConfig(False, False, True, False)
# Family, head, the layouts that hold it; every other one must refuse it.
HELD: list[tuple[str, HeadConfig, str]] = [
    ("llama", EAGLE, "eagle vllm-eagle sglang-eagle"),
    ("llama3", EAGLE, "vllm-eagle sglang-eagle"),
    ("biased", EAGLE, "vllm-eagle sglang-eagle"),
    ("qwen2", EAGLE, "eagle vllm-eagle sglang-eagle"),
    ("qwen3", EAGLE, ""),
    ("llama", replace(EAGLE, norms=ATTENTION), "sglang-eagle"),
    ("llama", replace(EAGLE, norms=replace(ATTENTION, output=True)), "vllm-eagle"),
    ("llama", replace(EAGLE, norms=NormConfig(output=False)), "vllm-eagle"),
    ("llama", HeadConfig("eagle"), ""),
    ("llama", EAGLE3, "eagle3 vllm-eagle3 sglang-eagle3 trtllm-eagle3 speculators"),
    ("llama3", EAGLE3, "vllm-eagle3 sglang-eagle3 trtllm-eagle3 speculators"),
    ("qwen2", EAGLE3, "vllm-eagle3 trtllm-eagle3 speculators"),
    ("qwen3", EAGLE3, "vllm-eagle3 speculators"),
    (
        "llama",
        replace(EAGLE3, num_layers=2, norm_output=True, boundaries=(1, 3, 6, 7)),
        "vllm-eagle3 sglang-eagle3 trtllm-eagle3 speculators",
    ),
    (
        "llama",
        replace(EAGLE3, norm_before_residual=True, boundaries=(0, 8)),
        "vllm-eagle3 speculators",
    ),
    ("llama", HeadConfig(), "deepseek-mtp"),
    ("qwen3", HeadConfig(modules=2), "deepseek-mtp"),
    ("llama", HeadConfig(recycle_raw=True), "glm-mtp"),
    ("deepseek", HeadConfig(modules=2), "deepseek-mtp"),
    ("glm", HeadConfig(recycle_raw=True), "glm-mtp"),
    ("qwen3.5", HeadConfig(), "qwen-mtp"),
    ("qwen3-next", HeadConfig(), "qwen-mtp"),
    ("mimo", HeadConfig(modules=2, hidden_first=True, mask_position_zero=True), "mimo-mtp"),
    ("ernie", HeadConfig(norms=NormConfig(output=False), mask_position_zero=True), "ernie-mtp"),
    ("llama", MEDUSA, "medusa vllm-medusa"),
    ("qwen3", replace(MEDUSA, modules=2, own_lm_heads=True), "vllm-medusa"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A maker of toy targets."""

    @cache
    def make(name: str) -> Path:
        config = FAMILIES[name].config if name in FAMILIES else target_config(name)
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One skeleton for each configuration instead of one for each reading."""
    made: dict[str, Any] = {}

    def once(config: Any) -> Any:
        return made.setdefault(config.to_json_string(use_diff=False), skeleton(config))

    for module in (mtp_layout, mtp_loaders):
        monkeypatch.setattr(module, "skeleton", once)
    # A head takes its layer out of one.
    monkeypatch.setattr(layer, "skeleton", lambda config: copy.deepcopy(once(config)))


def head_for(folder: Path, config: HeadConfig) -> LoadedHead:
    """A drawn head for a target on disk; one with an lm_head of its own drafts a few ids."""
    target = text_config(folder)
    # ERNIE's modules have another layer than the target's last; a head of its own kind is so.
    as_last = ERNIE_MTP.layer_as if config.kind == "mtp" else copy.deepcopy
    if target.model_type == "ernie4_5_moe":
        target = as_last(target)
    return random_head(config, target, IDS if config.kind == "eagle3" else None)


APART = ("_name_or_path", "architectures", "dtype", "num_nextn_predict_layers")


def described(loaded: LoadedHead) -> dict[str, Any]:
    """Its target's configuration, as far as the layer is made of it."""
    config = loaded.head.target_config.to_dict()
    return {k: v for k, v in config.items() if k not in (*APART, "mtp_num_hidden_layers")}


def same(ours: LoadedHead, theirs: LoadedHead) -> None:
    """Every weight bit for bit, and how it is run."""
    one, other = ours.head.state_dict(), theirs.head.state_dict()
    assert set(one) == set(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert theirs.head.recycle == ours.head.recycle
    assert theirs.head.boundaries == ours.head.boundaries
    assert theirs.head.config == ours.head.config
    assert described(theirs) == described(ours)
    ids = [None if head.draft_ids is None else head.draft_ids.tolist() for head in (ours, theirs)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("family", "config", "held"),
    HELD,
    ids=[f"{index}-{family}-{config.kind}" for index, (family, config, _) in enumerate(HELD)],
)
def test_native_to_layout_to_native(
    folders: Callable[[str], Path], tmp_path: Path, family: str, config: HeadConfig, held: str
) -> None:
    """Bit for bit where the layout holds the head, found from its files and read as it lies; else
    refused, and nothing is written. Training starts from it all the same."""
    folder = folders(family)
    loaded = head_for(folder, config)
    for name, (write, _) in LAYOUTS.items():
        out = tmp_path / name
        if name not in held.split():
            with pytest.raises(ValueError, match="layout"):
                write(loaded, folder, out)
            assert not out.exists()
            continue
        write(loaded, folder, out)
        back = read_head(out, folder, MARKS)
        assert back.meta["layout"] == name and back.meta["trained_length"] == 9
        same(loaded, back)
        if not held.startswith(name):
            continue
        same(loaded, started(back, folder, tmp_path / "native"))
        half = replace(loaded, head=copy.deepcopy(loaded.head).bfloat16())
        write(half, folder, out)
        same(replace(half, head=half.head.float()), read_head(out, folder, MARKS))


def started(back: LoadedHead, folder: Path, native: Path) -> LoadedHead:
    """The head that training from an imported one begins with."""
    save_head(
        native,
        back.head,
        target_fingerprint=MARKS,
        draft_ids=back.draft_ids,
        trained_length=9,
        config={},
    )
    source = find_source(str(native), folder, MARKS)
    assert source is not None
    wanted = HeadConfig(init=InitConfig(source=str(native)))
    shape = take_shape(wanted, source.head.config, str(native))
    head = build_head(shape, folder, 2.0, draft_ids=source.draft_ids, source=source)
    head.config = replace(head.config, init=InitConfig())
    return replace(source, head=head)


def without(value: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The same but for one key, nested where the path is long."""
    first, *rest = path
    if not rest:
        return {key: inner for key, inner in value.items() if key != first}
    return value | {first: without(value[first], tuple(rest))}


def paths(value: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key, nested ones too."""
    for key, inner in value.items():
        yield (*before, key)
        if isinstance(inner, dict):
            yield from paths(inner, (*before, key))


def noticed(loaded: LoadedHead, out: Path, folder: Path, *names: str) -> None:
    """Reading refuses or warns by one of these names, or gives the very same head."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            back = read_head(out, folder, MARKS)
        except ValueError as refusal:
            assert any(name in str(refusal) for name in names), (names, str(refusal))
            return
    if not any(name in str(one.message) for one in told for name in names):
        same(loaded, back)


CASES = {NATIVE: ("llama", EAGLE3)} | {
    name: (family, config) for family, config, held in reversed(HELD) for name in held.split()
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_taken_away_unnoticed(
    folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Any one tensor, any one key of config.json: refused or told by its name, or without effect;
    nothing is ever random."""
    family, config = CASES[name]
    folder = folders(family)
    loaded = head_for(folder, config)
    if name == NATIVE:
        started(loaded, folder, tmp_path)
    else:
        layout(name)[0](loaded, folder, tmp_path)
    weights, tensors, save = stored(tmp_path)
    # One of each kind: modules and experts are alike.
    kinds = {re.sub(r"\d+", "", tensor): tensor for tensor in tensors}
    for tensor in kinds.values():
        save({key: value for key, value in tensors.items() if key != tensor})
        if name == NATIVE:
            mark(tmp_path, weights)
        noticed(loaded, tmp_path, folder, tensor)
    save(tensors)
    if name == NATIVE:
        mark(tmp_path, weights)
    written = json.loads((tmp_path / "config.json").read_text())
    for path in paths(written):
        name = path[-1]
        if path[0] in ("target_config", "head") and len(path) > 1:
            continue  # settings younger than the folder have their defaults
        (tmp_path / "config.json").write_text(json.dumps(without(written, path)))
        noticed(loaded, tmp_path, folder, name)


def stored(folder: Path) -> tuple[Path, dict[str, Tensor], Callable[[dict[str, Tensor]], None]]:
    """The file with the head's weights, what is in it, and how to write it anew; an index names
    what the file holds."""
    path = next(
        folder / name
        for name in (
            "mtp.safetensors",
            "head.safetensors",
            "model.safetensors",
            "medusa_lm_head.pt",
        )
        if (folder / name).exists()
    )
    index = folder / "model.safetensors.index.json"
    if path.suffix == ".pt":
        return path, torch.load(path, weights_only=True), lambda tensors: torch.save(tensors, path)

    def save(tensors: dict[str, Tensor]) -> None:
        save_file(tensors, path)
        if index.exists():
            places = json.loads(index.read_text())["weight_map"]
            kept = {name: file for name, file in places.items() if file != path.name}
            kept |= dict.fromkeys(tensors, path.name)
            index.write_text(json.dumps({"weight_map": kept}))

    return path, load_file(path), save


def mark(folder: Path, weights: Path) -> None:
    """Let a native head's config.json name the checksum of what lies there."""
    config = json.loads((folder / "config.json").read_text())
    config["sha256"] = sha256_file(weights)
    (folder / "config.json").write_text(json.dumps(config))
