"""Answers as text, step by step, and what their steps took."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.inference.acceptance import PromptSet, measure
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.drafted_text import Round, drafted_texts
from draftsmith.inference.drafters import NgramDrafter, Proposal
from draftsmith.inference.sequence import Sequence
from draftsmith.models.target import Target


class _Letters:
    """A tokenizer of which a token is a byte of UTF-8."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


def _texts(text: str, steps: list[int], drafts: list[str], trees: bool = False) -> list[Round]:
    params = SamplingParams(max_new_tokens=99)
    sequence = Sequence.create("a", list(b"why?"), params)
    sequence.tokens += list(text.encode())
    result: Any = SimpleNamespace(
        sequences=[sequence],
        steps=[steps],
        drafts=[[list(one.encode()) for one in drafts]],
        trees=trees,
        prompts=SimpleNamespace(name="p"),
    )
    (found,) = drafted_texts(result, _Letters(), 2)  # pyright: ignore[reportArgumentType]
    assert (found.prompts, found.id, found.prompt) == ("p", "a", "why?")
    return found.rounds


def test_rounds() -> None:
    """The prefill's token; all kept and a bonus; the first lost; one kept; all kept and cut."""
    rounds = _texts("abcdefghi", [1, 3, 1, 2, 2], ["", "bc", "xy", "fxz", "hi"])
    assert rounds == [
        Round("", "a", ""),
        Round("bc", "d", ""),
        Round("", "e", "xy"),
        Round("f", "g", "xz"),
        Round("hi", "", ""),
    ]


def test_half_letters_wait() -> None:
    """A letter of two bytes is shown where its second one came, and the text is whole."""
    assert _texts("aé", [2, 1], ["a", ""]) == [Round("a", "", ""), Round("", "é", "")]


def test_of_trees_no_draft_is_called_lost() -> None:
    """Their nodes are no text."""
    assert _texts("abc", [1, 2], ["", "xbyz"], trees=True)[1] == Round("b", "c", "")


class _Wrong(NgramDrafter):
    """Drafts two tokens that the target does not say."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        return [Proposal([1, 1][:count]) for count in counts]


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped"])
def test_a_run_keeps_its_drafts_and_its_steps_times(target: Target, schedule: str) -> None:
    """Two sequences of five tokens: four decode-only steps, the last without drafts, since the
    limit leaves no room, the one before with one draft each."""
    config = EngineConfig(draft_tokens=2, max_batch=2, pool_tokens=256, schedule=schedule)
    prompts = PromptSet("p", "f", ["a", "b"], [[5, 6, 7], [8, 9, 10]])
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    plain = measure(target, None, prompts, dataclasses.replace(config, draft_tokens=0), params)
    result = measure(target, _Wrong(), prompts, config, params, plain)
    assert result.steps == [[1] * 5] * 2
    assert result.drafts == [[[], [1, 1], [1, 1], [1], []]] * 2
    entry = result.to_json()
    page = (Path(__file__).parents[2] / "docs" / "formats" / "report.md").read_text()
    assert [name for name in entry if f"`{name}`" not in page] == []
    told = entry["passes"]
    assert [(one["sequences"], one["rows"], one["count"]) for one in told] == [
        (2, 2, 1),
        (2, 4, 1),
        (2, 6, 2),
    ]
    for one in told:
        spent = one["median"]
        assert 0 < spent["verify"] <= spent["step"] and "prefill" not in spent
    (alone,) = plain.to_json()["passes"]
    assert (alone["sequences"], alone["rows"], alone["count"]) == (2, 2, 4)
