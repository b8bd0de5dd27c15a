"""Where an answer lies in what a chat template wrote behind the generation prompt.

Accepted is what the model itself would have written there: the message's own content, its reasoning
in front and its tool calls behind, with the markup that the template puts around these, white
space, and the special token that ends the turn. Any other text is the template's own (an empty
thinking block, a preamble): a model that is served the prompt would not begin with it, so the
answer is not proven.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Answer:
    """Characters [start, end) of a text; the end-of-turn token lies at [body_end, end), white space
    before it included.
    """

    start: int
    body_end: int
    end: int


def find_answer(
    text: str, start: int, message: dict[str, Any], special: re.Pattern[str]
) -> Answer | str:
    """The answer `message` in text[start:], which ends with that turn.

    Args:
        start: where the generation prompt ends.
        special: matches the texts of special tokens.
    Returns:
        the answer, or the name under which the turn is counted as unproven.
    """
    content: str = message.get("content") or ""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    reasoning = str(message.get("reasoning_content") or "").strip()
    if not reasoning:
        if content and text.startswith(content, start):
            found = _close(text, start, start + len(content), calls, special)
            if isinstance(found, Answer):
                return found
        if thought := _THOUGHT.match(content):
            reasoning, content = thought[1].strip(), thought[2]
    content = content.strip()
    if reasoning:
        place = text.find(reasoning, start)
        if place < 0:
            return "unproven_reasoning_left_out"
        return _behind_reasoning(text, start, place + len(reasoning), content, calls, special)
    place = _skip_space(text, start)
    if not text.startswith(content, place):
        return "unproven_content_changed"
    return _close(text, start, place + len(content), calls, special)


def blocks_explain(blocks: list[tuple[int, int]], text: str, answer: Answer) -> bool:
    """Whether the template's own `{% generation %}` blocks, [start, end) characters of `text`, say
    the same as the proof: together they cover the answer from its start to its last word or beyond
    it, white space apart, and nothing in front of it or behind its end of turn.
    """
    reached = answer.start
    for first, last in sorted(blocks):
        if last <= answer.start:
            continue
        if first < answer.start or text[reached:first].strip():
            return False
        reached = max(reached, last)
    body = text[reached : answer.body_end].strip()
    return reached > answer.start and not body and not text[answer.end : reached].strip()


def _behind_reasoning(
    text: str,
    start: int,
    place: int,
    content: str,
    calls: list[dict[str, Any]],
    special: re.Pattern[str],
) -> Answer | str:
    """The content stands last before a special token (or before the calls); what closes the
    reasoning is the template's markup for it.
    """
    if calls:
        found = text.find(content, place)
        if found < 0:
            return "unproven_content_changed"
        return _close(text, start, found + len(content), calls, special)
    matches = list(special.finditer(text, place))
    for match in matches:
        body = text[place : match.start()].rstrip()
        if body.endswith(content):
            return Answer(start, place + len(body), match.end())
    return "unproven_content_changed" if matches else "unproven_no_end_of_turn"


def _close(
    text: str, start: int, place: int, calls: list[dict[str, Any]], special: re.Pattern[str]
) -> Answer | str:
    """The end of turn behind `place`: the special token that follows at once, or with tool calls
    the last one, behind every call's name.
    """
    if calls:
        matches = list(special.finditer(text, place))
        if not matches:
            return "unproven_no_end_of_turn"
        written = text[place : matches[-1].start()]
        for call in calls:
            name = str((call.get("function") or call).get("name", ""))
            if name not in written:
                return "unproven_tool_calls_left_out"
        return Answer(start, matches[-1].start(), matches[-1].end())
    match = special.match(text, _skip_space(text, place))
    if match:
        return Answer(start, place, match.end())
    behind = special.search(text, place)
    return "unproven_content_changed" if behind else "unproven_no_end_of_turn"


def _skip_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()
