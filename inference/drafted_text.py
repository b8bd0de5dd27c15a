"""An answer as it came about: drafts kept, drafts lost, and what the target said in their place."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .acceptance import RunResult
from .running_text import BROKEN

_LONGEST = 300  # characters of a prompt that are kept of it, its end


@dataclass(frozen=True)
class Round:
    """One step of one answer, as text.

    Attributes:
        accepted: the drafts that were kept. target: the token that the target added (of an answer
            that an accepted end token or the limit cut short, nothing). rejected: of a chain, the
            drafts that were not kept, the first of which stood where `target` stands.
    """

    accepted: str
    target: str
    rejected: str


@dataclass(frozen=True)
class DraftedText:
    """One answer. prompt: its end. Together the rounds' `accepted` and `target` are the answer."""

    prompts: str
    id: str
    prompt: str
    rounds: list[Round]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def drafted_texts(
    result: RunResult, tokenizer: PreTrainedTokenizerBase, count: int
) -> list[DraftedText]:
    """The first `count` answers of a run."""
    found = []
    runs = zip(result.sequences, result.steps, result.drafts, strict=True)
    for sequence, steps, drafts in list(runs)[:count]:
        prompt = _text(tokenizer, sequence.tokens[: sequence.num_prompt])
        if len(prompt) > _LONGEST:
            prompt = f"…{prompt[-_LONGEST:]}"
        chains = [[] for _ in steps] if result.trees else drafts
        rounds = _rounds(tokenizer, sequence.output, steps, chains)
        found.append(DraftedText(result.prompts.name, sequence.id, prompt, rounds))
    return found


def _rounds(
    tokenizer: PreTrainedTokenizerBase,
    output: list[int],
    steps: Several[int],
    drafts: Several[list[int]],
) -> list[Round]:
    """A token may be half a letter, which is shown with the token that completes it."""
    rounds, answer, end = [], "", 0
    for emitted, chain in zip(steps, drafts, strict=True):
        pieces = []
        # All but the last token of a step are drafts; the last is one, too, where it was cut short.
        tokens = output[end : end + emitted]
        whole = bool(chain) and tokens == chain[:emitted]
        kept = emitted if whole else emitted - 1
        for size in (kept, emitted - kept):
            end += size
            text = _text(tokenizer, output[:end]).rstrip(BROKEN)
            pieces.append(text[len(answer) :])
            answer = text
        lost = _text(tokenizer, chain[kept:]) if chain else ""
        rounds.append(Round(pieces[0], pieces[1], lost))
    return rounds


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text
