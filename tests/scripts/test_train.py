"""`train` on the command line: which run is finished, and what is asked of its rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.scripts.cli import main


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
    """What is recorded are the steps done: fewer are there already, more go on from them."""
    for verb in ("prepare", "dump"):
        assert main([verb, *settings]) == 0
    assert main(["train", *settings, "train.max_steps=2"]) == 0
    record = tmp_path / "work" / "train" / "run.json"
    assert json.loads(record.read_text())["finished"] == 2
    capsys.readouterr()
    assert main(["train", *settings, "train.max_steps=1"]) == 0
    assert "reused: train (key matches; step 2)" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="train.max_steps=3; until then it was 2"):
        assert main(["train", *settings, "train.max_steps=3"]) == 0
    assert json.loads(record.read_text())["finished"] == 3
