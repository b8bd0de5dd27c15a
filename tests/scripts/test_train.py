"""`train` on the command line: which run is finished, and what is asked of its rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from draftsmith.conf.compose import composed, to_config
from draftsmith.scripts.cli import main
from draftsmith.scripts.feed import Feed
from draftsmith.scripts.run_identity import run_identity
from draftsmith.train.config import TrainConfig


@pytest.fixture
def settings(
    tiny_llama_folder: Callable[..., Path], smollm2_folder: Path, tmp_path: Path
) -> list[str]:
    """Overrides of a miniature run on a random Llama that speaks SmolLM2's tokenizer."""
    target = tmp_path / "target"
    weights = tiny_llama_folder(vocab_size=49152, num_hidden_layers=2, hidden_size=32)
    shutil.copytree(weights, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / name, target / name)
    chats = [
        [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": f"the number is {n}"}]
        for n in range(8)
    ]
    source = tmp_path / "chats.json"
    source.write_text(json.dumps([{"conversations": turns} for turns in chats]))
    return [
        f"work={tmp_path / 'work'}",
        f"target.source={target}",
        f"target.folder={target}",
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


def test_a_run_of_more_steps_is_finished(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is recorded are the steps done: fewer are there already, more go on from them, also
    with the activations computed again."""
    settings = [*settings, "train.step_weights=[1,0.5,0.5]"]
    for verb in ("prepare", "dump"):
        assert main([verb, *settings]) == 0
    assert main(["train", *settings, "train.max_steps=2"]) == 0
    record = tmp_path / "work" / "train" / "run.json"
    assert json.loads(record.read_text())["finished"] == 2
    capsys.readouterr()
    assert main(["train", *settings, "train.max_steps=1"]) == 0
    assert "reused: train (key matches; step 2)" in capsys.readouterr().out
    further = ["train.max_steps=3", "train.checkpoint_activations=true"]
    with pytest.warns(UserWarning) as told:
        assert main(["train", *settings, *further]) == 0
    changed = [str(one.message).partition(" with ")[2] for one in told]
    assert changed == [
        "train.checkpoint_activations=True; until then it was False",
        "train.max_steps=3; until then it was 2",
    ]
    assert json.loads(record.read_text())["finished"] == 3


def test_a_run_is_what_determines_its_weights() -> None:
    """Of `train`, all settings but those that change nothing beyond rounding, or only where it
    ends and what is written, belong to a run; what is compared is what its file gives back."""
    free = ["max_steps", "patience", "validate_every", "checkpoint_every", "keep_checkpoints"]
    free += ["log_every", "prefetch", "accumulation", "zero_stage", "offload"]
    free += ["checkpoint_activations", "chunk_tokens", "sequence_parallel"]
    config = to_config(composed(["train.step_weights=[1,0.5,0.5]"]))
    feed = cast(Feed, SimpleNamespace(identity={"rows": "key"}))
    identity = run_identity(config, feed, None)
    kept = {name.removeprefix("train.") for name in identity if name.startswith("train.")}
    assert {one.name for one in fields(TrainConfig)} - kept == set(free)
    assert json.loads(json.dumps(identity)) == identity
    other = replace(config, train=replace(config.train, step_weights=(1.0, 0.5, 0.25)))
    assert run_identity(other, feed, None) != identity


@pytest.mark.slow
def test_a_validated_run_leaves_figures_and_curves(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine and held-out figures of every validation in metrics.jsonl, the curves drawn and named
    at the end, a short summary in the head's folder; another prompt length later is another
    basis."""
    replaced = ("data.rows.holdout=", "train.validate_every=")
    kept = [word for word in settings if not word.startswith(replaced)]
    words = [
        *kept,
        "data.rows.holdout=2",
        "train.validate_every=1",
        "validate.limit=1",
        "validate.max_new_tokens=4",
    ]
    for verb in ("prepare", "dump"):
        assert main([verb, *words]) == 0
    assert main(["train", *words, "train.max_steps=2"]) == 0
    train = tmp_path / "work" / "train"
    out = capsys.readouterr().out
    assert "tokens per target call in the engine (temperature 0)" in " ".join(out.split())
    assert "curves" in out and (train / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (train / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in validations] == [1, 2]
    for line in validations:
        runs = line["acceptance"]["runs"]["heldout"]
        assert set(runs) == {"0", "1"} and all(run["target_calls"] for run in runs.values())
        assert line["score"] == runs["0"]["tokens_per_target_call"]
        assert set(line["by_context"]) == {"0"} and len(line["acceptance"]["samples"]) == 1
    validation = json.loads((train / "head" / "config.json").read_text())["training"]["validation"]
    assert validation["basis"] == validations[0]["basis"] == validations[1]["basis"]
    assert "samples" not in validation["acceptance"] and "by_context" not in validation
    with pytest.warns(UserWarning) as told:
        longer = [*words, "train.max_steps=3", "validate.temperatures=[1]"]
        assert main(["train", *longer]) == 0
    assert any("measured with other settings" in str(one.message) for one in told)
    head = json.loads((train / "head" / "config.json").read_text())
    assert head["training"]["step"] == 3
