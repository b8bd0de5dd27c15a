"""`train head.init.source=…`: the target's own MTP weights, an imported head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.models.heads import load_head
from draftsmith.models.target import Target, TargetConfig
from draftsmith.scripts.acceptance import untrained
from draftsmith.scripts.cli import main
from draftsmith.scripts.source import named_settings

Run = tuple[list[str], Path]


@pytest.fixture(scope="module")
def prepared(talking_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Overrides of a miniature run whose states are dumped; its target brings two MTP modules."""
    place = tmp_path_factory.mktemp("source")
    target = place / "target"
    shutil.copytree(talking_folder, target)
    weights, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(1)
    size = weights["model.norm.weight"].shape[0]
    for layer in (2, 3):
        own = {"enorm": (size,), "hnorm": (size,), "eh_proj": (size, 2 * size)}
        shapes = {f"{name}.weight": shape for name, shape in own.items()}
        shapes["shared_head.norm.weight"] = (size,)
        shapes |= {
            name.removeprefix("model.layers.1."): tuple(value.shape)
            for name, value in weights.items()
            if name.startswith("model.layers.1.")
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}"] = torch.randn(shape, generator=generator) / 8
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    chats = [
        [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": f"the number is {n}"}]
        for n in range(8)
    ]
    source = place / "chats.json"
    source.write_text(json.dumps([{"conversations": turns} for turns in chats]))
    settings = [
        f"inputs={place / 'work'}",
        f"target.source={target}",
        "target.dtype=float32",
        "target.device=cpu",
        f"data.rows.source={source}",
        "data.rows.torn=refuse",
        "data.rows.holdout=0",
        "data.rows.max_length=64",
        "train.tokens_per_batch=128",
        "train.draft_vocab_size=null",
        "train.validate_every=0",
        "tracker=none",
    ]
    for verb in ("prepare", "dump"):
        assert main([verb, f"work={place / 'work'}", *settings]) == 0
    return settings, place


def test_a_run_starts_from_the_targets_own_weights(
    prepared: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told that they are there; taken, both modules are, and two steps too small to move a
    weight leave them bit for bit."""
    settings, place = prepared
    assert main(["train", f"work={place / 'last'}", *settings, "train.max_steps=1"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "brings its own MTP weights (DeepSeek MTP layout): head.init.source=target-mtp" in told
    further = ["head.init.source=target-mtp", "train.lr=1e-30", "train.max_steps=2"]
    assert main(["train", f"work={place / 'own'}", *settings, *further]) == 0
    assert "starts from target-mtp (mtp, 2 modules)" in capsys.readouterr().out
    loaded = load_head(place / "own" / "train" / "head")
    weights = load_file(place / "target" / "model.safetensors")
    state = loaded.head.state_dict()
    assert loaded.head.num_modules == 2 and loaded.meta["training"]["step"] == 2
    for module in (0, 1):
        for ours, theirs in (("norm", "shared_head.norm"), ("layer.mlp.up_proj", "mlp.up_proj")):
            right = weights[f"model.layers.{2 + module}.{theirs}.weight"]
            assert torch.equal(state[f"blocks.{module}.{ours}.weight"], right)
    target = TargetConfig(source=str(place / "target"), dtype="float32", device="cpu")
    before = untrained(loaded, Target.load(target)).state_dict()
    assert all(torch.equal(before[name], value) for name, value in state.items())


def test_an_imported_head_is_trained_on(
    prepared: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its shape is the run's, a setting against it is refused, and its content counts, not where it
    lies."""
    settings, place = prepared
    taken = [
        "import_head.folder=" + str(place / "target"),
        "import_head.out=" + str(tmp_path / "a"),
    ]
    assert main(["import", f"work={tmp_path}", *settings, *taken]) == 0
    command = ["train", f"work={tmp_path}", *settings, "train.max_steps=2"]
    assert main([*command, f"head.init.source={tmp_path / 'a'}", "head.modules=1"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "head.modules=1, where that head has 2" in told
    assert main([*command, f"head.init.source={tmp_path / 'a'}"]) == 0
    before, after = load_head(tmp_path / "a").head, load_head(tmp_path / "train" / "head").head
    assert after.config.modules == 2
    assert any(
        not torch.equal(value, after.state_dict()[name])
        for name, value in before.state_dict().items()
    )
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    capsys.readouterr()
    assert main([*command, f"head.init.source={tmp_path / 'b'}"]) == 0
    assert "reused: train (key matches; step 2)" in capsys.readouterr().out
    assert main([*command, "head.init.source=target-mtp"]) == 2
    assert "holds a run of other settings (head.init.source" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_settings_that_a_command_line_names() -> None:
    """Those of the head alone, however they are written."""
    words = ["head=mtp", "head.norms.output=false", "+head.modules=2", "train.steps=3"]
    assert named_settings(words) == {"norms.output", "modules"}
