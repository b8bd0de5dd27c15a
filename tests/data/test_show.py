"""Rows as a picture: green is what the head learns from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.data.show import show

ANSWER = "[red]not markup[/red] \\"


@pytest.fixture
def rows(tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Two rows, the second with a long question."""
    chats = [("[b]Hi[/b]", ANSWER), ("word " * 500, "short")]
    records = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}
        for asked, said in chats
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(records))
    config = RowsConfig(str(path), holdout=0, max_length=1024)
    return Rows.open(prepare(config, smollm2_tokenizer, {}, tmp_path / "rows").folder)


def green(shown: Text) -> list[str]:
    return [shown.plain[span.start : span.end] for span in shown.spans if span.style == "green"]


def test_what_is_supervised_is_green(
    rows: Rows, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The answers with their end of turn, and only they; markup in the data is shown as text."""
    shown = show(rows, smollm2_tokenizer, 5)
    assert green(shown) == [ANSWER + "<|im_end|>", "short<|im_end|>"]
    assert "[b]Hi[/b]" in shown.plain
    assert shown.plain.count("── record-") == 2
    assert f"(record 1): {len(rows[1].tokens)} tokens, 2 supervised" in shown.plain
    assert len(green(show(rows, smollm2_tokenizer, 1))) == 1


def test_long_runs_are_shortened(rows: Rows, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Their middle is left out and counted, so that three rows fit a screen."""
    shown = show(rows, smollm2_tokenizer, 2).plain
    assert f" … {len(rows[1].tokens) - 2 - 160} tokens … " in shown
    assert shown.count("word") < 170


def test_ids_on_demand(rows: Rows, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Each token with its id beside it."""
    shown = show(rows, smollm2_tokenizer, 2, ids=True)
    row = rows[1]
    tokens = row.tokens[row.supervised].tolist()
    assert green(shown)[-1] == "".join(f"{smollm2_tokenizer.decode([t])}[{t}]" for t in tokens)
