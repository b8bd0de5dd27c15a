"""A draft LM by name: `evaluate` reports it, `generate` chats with it, a missing one is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from draftsmith.scripts.cli import main


def test_a_draft_lm_is_evaluated_and_chats(
    talking_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A target that drafts for itself in float64 misses nothing: in the report, in its proof, and
    in the counts by prompt, which sum up to the run's."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(talking_folder, tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][2] = 0  # never the likeliest: no answer ends before its limit
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    asked = "a river, seven hills, what is rain, count to nine, write a poem, why, list fruits, no"
    prompts = [json.dumps({"prompt": text}) for text in asked.split(", ")]
    (tmp_path / "asked.jsonl").write_text("\n".join(prompts))
    words = [
        f"target.source={folder}",
        "target.dtype=float64",
        f"draft_lm.source={folder}",
        "draft_lm.dtype=float64",
        "engine.pool_tokens=512",
    ]
    measured = [
        "evaluate.drafters=[none,draft-lm]",
        "evaluate.prompts=[./asked.jsonl]",
        "evaluate.draft_tokens=[1,2]",
        "evaluate.limit=8",
        "evaluate.max_new_tokens=12",
        "evaluate.proof=float64",
    ]
    assert main(["evaluate", "work=w", *words, *measured]) == 0
    report = json.loads((tmp_path / "w" / "report.json").read_text())
    assert report["draft_lm"]["source"] == str(folder)
    drafted = [run for run in report["runs"] if run["drafter"] == "draft-lm"]
    assert [run["draft_tokens"] for run in drafted] == [1, 2, 3]
    for run in drafted:
        assert run["identical_to_plain"] is True and run["decode_tokens"] > 4
        assert run["num_accepted_tokens"] == run["num_draft_tokens"]
        assert sum(one["target_calls"] for one in run["per_prompt"]) == run["target_calls"]
        assert sum(one["decode_tokens"] for one in run["per_prompt"]) == run["decode_tokens"]
    capsys.readouterr()
    chat = ["generate.drafter=draft-lm", "generate.prompt=Hello", "generate.max_new_tokens=9"]
    assert main(["generate", *words, *chat]) == 0
    assert "tokens per target call" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words",
    [["evaluate", "evaluate.drafters=[none,draft-lm]"], ["generate", "generate.drafter=draft-lm"]],
    ids=lambda words: words[0],
)
def test_a_draft_lm_needs_a_source(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Before the target is looked for, with the key to set."""
    monkeypatch.chdir(tmp_path)
    assert main([*words, "target.source=nowhere"]) == 2
    assert "give draft_lm.source=" in " ".join(capsys.readouterr().err.split())


def test_a_source_that_no_drafter_uses_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It would be taken for measured."""
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="draft_lm.source is not used"):
        main(["generate", "generate.drafter=none", "draft_lm.source=x", "target.source=nowhere"])
    assert "nowhere" in capsys.readouterr().err
