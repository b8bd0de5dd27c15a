"""EAGLE and EAGLE-3 folders from elsewhere: what is mended, told and refused (CASES 7, 8, 39, 41,
42, 92, 116, 131)."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models.formats.eagle_layout import EagleLayout
from draftsmith.models.formats.source import layout_of
from draftsmith.models.heads import HeadConfig, LoadedHead
from draftsmith.models.trunk import Trunk
from draftsmith.scripts.proof import largest_difference

from .eagle_toys import BY_NAME, IDS, NONE, TARGETS, head_for, random_head, target_config


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
    target = loaded.head.target_config
    whole = one.engine.load(written, tensors, target)
    layer = written.get("transformer_layer_config", written)
    for key in list(layer):
        if layer is written:
            changed = {k: v for k, v in written.items() if k != key}
        else:
            changed = written | {
                "transformer_layer_config": {k: v for k, v in layer.items() if k != key}
            }
        report = one.engine.load(changed, tensors, target)
        if report.runs == whole.runs and not report.faults() and report.guessed == whole.guessed:
            continue  # all that reading makes a head of
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


def test_heads_of_another_shape_are_refused_by_name(
    foreign: tuple[Path, Path, LoadedHead],
) -> None:
    """A width of its own, and an attention of DeepSeek's kind (MLA), which has no q, k and v."""
    folder, target, _ = foreign
    config = json.loads((folder / "config.json").read_text())
    for key, value, words in (
        ("hidden_size", 16, "hidden_size=16, the target has 32"),
        ("architectures", ["Eagle3DeepseekV2ForCausalLM"], "the class Eagle3DeepseekV2ForCausalLM"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match=words):
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


def test_older_names_of_the_norms_before_fc_come_in(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """SGLang renames them; the flag was another, too."""
    target, one = folders("llama"), BY_NAME["sglang-eagle3"]
    loaded = head_for(target, HeadConfig("eagle3", norm_before_fc="each"), IDS)
    one.write(loaded, target, tmp_path)
    (tmp_path / "draftsmith.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["fc_norm"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_aux_norm": True}))
    older = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")

    def rename(tensors: dict[str, Tensor]) -> None:
        for index, name in enumerate(older):
            tensors[f"{name}.weight"] = tensors.pop(f"fc_norm.{index}.weight")

    harmed(tmp_path, rename)
    back = one.read(tmp_path, target).head
    assert back.config.norm_before_fc == "each"
    for name, value in loaded.head.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


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
