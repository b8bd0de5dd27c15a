"""`evaluate`: which report is reused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from draftsmith.conf.compose import composed, to_config
from draftsmith.conf.schema import Config
from draftsmith.data.rows import RowsConfig, prepare
from draftsmith.models.target import fingerprint
from draftsmith.scripts.evaluate import key, reusable


def hold_out(work: Path, tokenizer: PreTrainedTokenizerBase, target: Path, seed: int) -> None:
    """Prepare rows, two of them held out."""
    source = work / "chats.json"
    turns = (("user", "Name a river."), ("assistant", "The river Seine, in France."))
    chats = [
        {"messages": [{"role": role, "content": f"{text} {number}"} for role, text in turns]}
        for number in range(seed, seed + 6)
    ]
    source.write_text(json.dumps(chats))
    shutil.rmtree(work / "rows", ignore_errors=True)
    rows = RowsConfig(str(source), holdout=2, max_length=256)
    prepare(rows, tokenizer, fingerprint(target), work / "rows")


@pytest.fixture
def made(
    talking_folder: Path,
    smollm2_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Config]:
    """A maker of configurations whose report lies in the work folder already."""
    target = tmp_path / "target"
    shutil.copytree(talking_folder, target)
    hold_out(tmp_path, smollm2_tokenizer, target, 0)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "why?"}))

    def make(*changes: str) -> Config:
        config = to_config(
            composed(
                [
                    f"work={tmp_path}",
                    f"target.source={target}",
                    f"target.folder={target}",
                    "evaluate.drafters=[none,ngram]",
                    f"evaluate.prompts=[heldout,{tmp_path}/mine.jsonl]",
                    *changes,
                ]
            )
        )
        (tmp_path / "report.json").write_text(json.dumps({"key": key(config)}))
        (tmp_path / "report.html").write_text("")
        return config

    return make


def test_a_report_is_reused_until_what_it_measured_changes(
    made: Callable[..., Config], smollm2_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The target's weights, the held-out rows, a prompt file's text, the template's arguments."""
    config = made()
    assert reusable(config) == {"key": key(config)}

    weights = tmp_path / "target" / "model.safetensors"
    changed = load_file(weights)
    changed["lm_head.weight"] *= 2
    save_file(changed, weights, {"format": "pt"})
    assert reusable(config) is None
    assert reusable(made()) is not None

    hold_out(tmp_path, smollm2_tokenizer, tmp_path / "target", 7)
    assert reusable(config) is None
    assert reusable(made()) is not None

    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "why not?"}))
    assert reusable(config) is None

    other = made("+data.rows.template_kwargs.thinking=true")
    assert reusable(other) is not None and reusable(config) is None


def test_rows_do_not_matter_where_no_prompt_is_of_them(
    made: Callable[..., Config], smollm2_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """A report on a file alone outlives other held-out rows, and needs none."""
    config = made(f"evaluate.prompts=[{tmp_path}/mine.jsonl]")
    shutil.rmtree(tmp_path / "rows")
    assert reusable(config) is not None
