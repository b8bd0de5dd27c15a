"""The Medusa layouts: written, read again, and what each loader would make of them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.models.formats import MEDUSA_LAYOUTS, layout
from draftsmith.models.formats.source import layout_of
from draftsmith.models.heads import HeadConfig, LoadedHead
from draftsmith.models.trunk import Trunk

from .eagle_toys import IDS, NONE, random_head, target_config

SHARED = HeadConfig("medusa", modules=5, norms=NONE)
OWN = replace(SHARED, own_lm_heads=True)
BY_NAME = {one.name: one for one in MEDUSA_LAYOUTS}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target on disk."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(target_config("llama")).save_pretrained(folder)
    return folder


def logits(loaded: LoadedHead, target: Path) -> Tensor:
    """Of every head on the same states, [K, N, Vd]."""
    trunk, head = Trunk.load(target, torch.float32), loaded.head
    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    found: list[Tensor] = []
    for step in range(head.config.modules):
        drafted = head(states, states, torch.arange(7), None, step).drafted  # type: ignore[arg-type]
        rows = (
            trunk.lm_head_weight(loaded.draft_ids) if head.lm_head is None else head.lm_head[step]
        )
        found.append(drafted @ rows.T)
    return torch.stack(found)


HELD: list[tuple[str, HeadConfig, Tensor | None]] = [
    ("medusa", SHARED, None),
    ("medusa", OWN, None),
    ("medusa", SHARED, IDS),
    ("vllm-medusa", SHARED, None),
    ("vllm-medusa", OWN, IDS),
    ("vllm-medusa", replace(SHARED, modules=2, num_layers=2), IDS),
]


@pytest.mark.parametrize(("name", "config", "ids"), HELD)
def test_native_to_layout_to_native_is_bit_exact(
    target: Path, tmp_path: Path, name: str, config: HeadConfig, ids: Tensor | None
) -> None:
    """Tensors, shape, draft ids and logits; the same from the files alone."""
    loaded = random_head(config, target_config("llama"), ids)
    write, read = layout(name)
    origin = write(loaded, target, tmp_path)
    back = read(tmp_path, target)
    assert back.head.config == config and back.meta["trained_length"] == 9
    ours, theirs = loaded.head.state_dict(), back.head.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (back.draft_ids is None) == (ids is None)
    assert ids is None or torch.equal(back.draft_ids, ids)  # type: ignore[arg-type]
    assert torch.equal(logits(loaded, target), logits(back, target))
    copied = {key for key, value in origin.items() if value == "copied from the target"}
    assert bool(copied) != config.own_lm_heads
    (tmp_path / "draftsmith.json").unlink()
    assert layout_of(tmp_path) == name
    other = read(tmp_path, target)
    assert other.head.config == config
    assert all(torch.equal(ours[key], other.head.state_dict()[key]) for key in ours)
    if name == "vllm-medusa" and ids is not None:
        assert torch.equal(logits(loaded, target), logits(other, target))


def test_the_names_are_the_engines(target: Path) -> None:
    """Written out by hand, at the sizes of Llama-3.1-8B."""
    settings = target_config(
        "llama", hidden_size=4096, vocab_size=128256, num_hidden_layers=32, intermediate_size=14336
    )
    with torch.device("meta"):
        loaded = LoadedHead(layout_head(OWN, settings), None, {})
        few = LoadedHead(layout_head(replace(SHARED, modules=2), settings), None, {})
    shapes = {k: list(v.shape) for k, v in BY_NAME["medusa"].plan(loaded, target).tensors.items()}
    right: dict[str, list[int]] = {}
    for head in range(5):
        right |= {
            f"{head}.0.linear.weight": [4096, 4096],
            f"{head}.0.linear.bias": [4096],
            f"{head}.1.weight": [128256, 4096],
        }
    assert shapes == right
    planned = BY_NAME["vllm-medusa"].plan(few, target)
    assert {key: list(value.shape) for key, value in planned.tensors.items()} == {
        "blocks.0.layers.0.weight": [4096, 4096],
        "blocks.0.layers.0.bias": [4096],
        "blocks.1.layers.0.weight": [4096, 4096],
        "blocks.1.layers.0.bias": [4096],
        "lm_head.weight": [128256, 4096],
    }
    assert planned.config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 4096,
        "vocab_size": 128256,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "truncated_vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }


def layout_head(config: HeadConfig, settings: Any) -> Any:
    """A head for a configuration."""
    from draftsmith.models.heads import head_class

    return head_class("medusa")(config, settings)


REFUSED: list[tuple[str, HeadConfig, dict[str, Any], str]] = [
    ("medusa", replace(SHARED, modules=3), {}, "finds no 3.0.linear.weight"),
    ("medusa", replace(SHARED, modules=6), {}, "drops 5.0.linear.weight"),
    ("medusa", replace(SHARED, num_layers=2), {}, "train with head.num_layers=1"),
    ("medusa", SHARED, {"model_type": "qwen2"}, "knows llama and mistral alone"),
    ("vllm-medusa", SHARED, {"model_type": "granite", "logits_scaling": 8.0}, "scaled or capped"),
    ("vllm-medusa", HeadConfig("eagle", norms=NONE), {}, "of kind eagle"),
]


@pytest.mark.parametrize(("name", "config", "changes", "words"), REFUSED)
def test_what_an_engine_would_run_otherwise_is_refused(
    target: Path,
    tmp_path: Path,
    name: str,
    config: HeadConfig,
    changes: dict[str, Any],
    words: str,
) -> None:
    """With the reason, and nothing is written."""
    loaded = random_head(config, target_config("llama", **changes))
    with pytest.raises(ValueError) as refusal:
        layout(name)[0](loaded, target, tmp_path / "out")
    assert words in str(refusal.value) and "keep the native folder" in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_rows_for_a_draft_vocabulary_have_no_place_with_the_authors(
    target: Path, tmp_path: Path
) -> None:
    """Their lm_heads have a row for every id."""
    loaded = random_head(OWN, target_config("llama"), IDS)
    with pytest.raises(ValueError, match=r"0.1.weight has shape \[8, 32\], the class makes"):
        layout("medusa")[0](loaded, target, tmp_path / "out")


def test_removing_any_one_tensor_is_noticed_by_name(target: Path, tmp_path: Path) -> None:
    """And keys of config.json, or the very same head is read."""
    loaded = random_head(OWN, target_config("llama"), IDS)
    one = BY_NAME["vllm-medusa"]
    one.write(loaded, target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for tensor in tensors:
        save_file({k: v for k, v in tensors.items() if k != tensor}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=tensor):
            one.read(tmp_path, target)
    save_file(tensors, tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    for key in written:
        rest = {k: v for k, v in written.items() if k != key}
        (tmp_path / "config.json").write_text(json.dumps(rest))
        if key in ("architectures", "torch_dtype", "original_lm_head"):  # what stands in is right
            again = one.read(tmp_path, target).head.state_dict()
        elif key in ("num_heads", "num_hidden_layers"):  # five heads of one block, too
            with pytest.warns(UserWarning, match=f"config.json has no {key}"):
                again = one.read(tmp_path, target).head.state_dict()
        else:
            with pytest.raises(ValueError) as refusal:
                one.read(tmp_path, target)
            words = str(refusal.value)
            assert key in words or "the class makes" in words or "layers.0.bias" in words, words
            continue
        assert all(torch.equal(again[k], v) for k, v in loaded.head.state_dict().items())


def test_published_heads_come_in(target: Path, tmp_path: Path) -> None:
    """As a pickle of tensors, or of safetensors with the module's name before theirs; blocks
    without a bias have one of zeros; a pickle of anything else is refused."""
    loaded = random_head(OWN, target_config("llama"))
    planned = BY_NAME["medusa"].plan(loaded, target)
    (tmp_path / "config.json").write_text(json.dumps(planned.config))
    torch.save(planned.tensors, tmp_path / "medusa_lm_head.pt")
    back = BY_NAME["medusa"].read(tmp_path, target)
    assert torch.equal(logits(loaded, target), logits(back, target))
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.1.weight": Path}, 2))
    with pytest.raises(ValueError, match="holds more than tensors"):
        BY_NAME["medusa"].read(tmp_path, target)
    named = {f"medusa_head.{name}": value for name, value in planned.tensors.items()}
    save_file(named, tmp_path / "medusa_lm_head.safetensors")
    back = BY_NAME["medusa"].read(tmp_path, target)
    assert torch.equal(logits(loaded, target), logits(back, target))
    plain = BY_NAME["vllm-medusa"].plan(loaded, target)
    (tmp_path / "v").mkdir()
    config = {k: v for k, v in plain.config.items() if k != "medusa_fc_bias"}
    (tmp_path / "v" / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v for k, v in plain.tensors.items() if not k.endswith("bias")},
        tmp_path / "v" / "model.safetensors",
    )
    found = BY_NAME["vllm-medusa"].read(tmp_path / "v", target).head.state_dict()
    assert not found["heads.3.0.linear.bias"].any()
    assert torch.equal(
        found["heads.3.0.linear.weight"], loaded.head.state_dict()["heads.3.0.linear.weight"]
    )
