"""Tables of the comparisons page, from lines as the runs write them."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.scripts.results_page import lengths, page, trees
from draftsmith.scripts.results_runs import NORMS, RATES, STARTS, best_setting, runs


def timed(batch: int, count: int, seconds: float) -> dict[str, Any]:
    return {
        "head": "fam",
        "batch": batch,
        "draft_tokens": count,
        "tokens": 100,
        "seconds": seconds,
        "tokens_per_target_call": 1.0 + count / 10,
    }


def test_the_best_draft_length_of_each_batch_size_stands_out() -> None:
    """Speed-up over plain decoding of as many requests together."""
    records = [timed(1, 0, 4.0), timed(1, 1, 2.0), timed(1, 3, 2.5)]
    records += [timed(16, 0, 1.0), timed(16, 1, 1.25), timed(16, 3, 2.0)]
    (table,) = lengths(records)
    lines = table.splitlines()
    assert "K=1 (1.10 a call)" in table and "K=3 (1.30 a call)" in table
    assert lines[-2] == "| 1 | 25.0 | **2.00×** | 1.60× |"
    assert lines[-1] == "| 16 | 100.0 | **0.80×** | 0.50× |"


def test_a_page_of_runs_that_were_stopped() -> None:
    """Batches without plain decoding are left out, lengths that are missing are dashes."""
    records = [timed(4, 1, 1.0), timed(1, 0, 4.0), timed(1, 1, 2.0), timed(16, 0, 1.0)]
    (table,) = lengths(records)
    assert [line[:6] for line in table.splitlines()[-2:]] == ["| 1 | ", "| 16 |"]
    assert table.splitlines()[-1] == "| 16 | 100.0 | – |"


def test_trees_stand_beside_the_same_heads_chains() -> None:
    """Heads without trees are left out; what was not measured is a dash."""
    line = {"prompts": "humaneval", "temperature": 0.0}
    accepted = [
        {"head": "a", "tokens_per_target_call": 1.25, **line},
        {"head": "a+static", "tokens_per_target_call": 1.5, **line},
        {"head": "b", "tokens_per_target_call": 9.0, **line},
    ]
    told = trees(accepted)
    assert "| a | chain of 3 | 1.250 | – | – | – | – | – |" in told
    assert "| a | static | 1.500 |" in told and "9.0" not in told
    assert trees(accepted[2:]) == "" and page([], []) == ""


def test_norms_take_their_best_setting_and_wait_for_all_of_them() -> None:
    """Of six short runs the one of the lowest held-out loss."""
    done = [
        {
            "name": run.name,
            "train": run.train,
            "figures": {"loss": abs(index - 3)},
        }
        for index, run in enumerate(r for r in runs("select", []) if "-hidden-" in r.name)
    ]
    assert len(done) == len(STARTS) * len(RATES)
    _, _, start, rate = done[3]["name"].split("-")
    assert best_setting("hidden", done) == (start, float(rate))
    with pytest.raises(ValueError, match="5 of its short runs are done"):
        best_setting("hidden", done[1:])
    assert len(list(runs("select", []))) == len(NORMS) * len(STARTS) * len(RATES)


def test_an_unknown_phase_lists_those_there_are() -> None:
    """With what was asked for."""
    with pytest.raises(ValueError, match="phase 'norm': choose select, norms"):
        list(runs("norm", []))
