"""From whatever a record holds to a conversation that can be trained on, by written, counted rules.

What is read: turns under `conversations` or `messages` (or a bare list of turns), each with
`from`/`value` or `role`/`content`; the text is a string or a list of text parts.

Rules, in order. Every repair is counted under its name in the ledger's `turns`; none is silent.
 1. Roles go by the table `ROLES`. A tool, a function, an observation or an unknown role is not
    mapped to anybody: the conversation ends before that turn (`cut_at_role:NAME`), so that no
    foreign text becomes an answer.
 2. A turn that is no object, has no text, or has parts that are not text ends it as well.
 3. Text: lone surrogates become U+FFFD; control characters (C0 without tab and line ends, DEL,
    byte-order mark, bidirectional overrides) are removed. Zero-width characters stay: joiners are
    part of emoji and scripts.
 4. Blank turns are removed. Assistant turns before the first user turn are removed, the rest kept.
 5. A system turn is kept where it comes first; a later one ends the conversation.
 6. The same role twice running becomes one turn, joined by an empty line.
 7. User turns after the last answer are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ..models.files import content_hash

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}
JOIN = "\n\n"
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u202a-\u202e\u2066-\u2069]")
_MAX_ROLE_NAMES = 50


@dataclass(frozen=True)
class CleaningConfig:
    """What is done about a record that cannot be used as it stands."""

    control_tokens: str = "cut"
    """Text that spells a control token: cut ends the conversation before that turn, drop leaves the
    record out."""

    def __post_init__(self) -> None:
        if self.control_tokens not in ("cut", "drop"):
            raise ValueError(f"control_tokens={self.control_tokens!r}: choose cut or drop")


@dataclass(frozen=True)
class Turn:
    """One message; `role` is system, user, assistant or tool."""

    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A cleaned conversation: an optional system turn, then user and assistant by turns, the
    assistant last. `raw` is a plain text in place of turns.
    """

    id: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    raw: str = ""

    def messages(self) -> list[dict[str, Any]]:
        """The form that chat templates take."""
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            message: dict[str, Any] = {"role": turn.role, "content": turn.text}
            if turn.reasoning:
                message["reasoning_content"] = turn.reasoning
            if turn.tool_calls:
                message["tool_calls"] = list(turn.tool_calls)
            messages.append(message)
        return messages

    @property
    def content_hash(self) -> str:
        """Hex SHA-256 of all that is rendered; the id does not enter."""
        if (
            not self.tools
            and not self.raw
            and not any(turn.reasoning or turn.tool_calls for turn in self.turns)
        ):
            return conversation_hash([[turn.role, turn.text] for turn in self.turns])
        return content_hash([self.messages(), list(self.tools), self.raw])


@dataclass(frozen=True)
class Dropped:
    """A record that is left out: why, its id, and a detail for the ledger."""

    reason: str
    id: str
    message: str = ""


class _Cut(Exception):
    """The conversation ends before this turn; carries the counter's name."""


def conversation_hash(turns: list[list[str]]) -> str:
    """Hex SHA-256 of [[role, text], ...] in JSON."""
    return hashlib.sha256(json.dumps(turns, ensure_ascii=False).encode()).hexdigest()


def clean(record: Any, index: int, repairs: Counter[str]) -> Conversation | Dropped:
    """Apply the rules above to one record.

    Args:
        record: the decoded JSON value.
        index: its place in the file; names the record where it has no id.
        repairs: incremented by the name of each repair.
    Returns:
        the conversation, or `Dropped` with the reason not_an_object, no_turn_list, empty, no_answer
        (no assistant turn after a user turn) or blank_prompt (there is one, but it answers blank
        turns only).
    """
    name = record_id(record, index)
    turns = _turn_list(record)
    if isinstance(turns, Dropped):
        return Dropped(turns.reason, name, turns.message)
    if not turns:
        return Dropped("empty", name)
    repairs["read"] += len(turns)
    kept: list[Turn] = []
    blank_user = answers_blank = False
    for place, raw in enumerate(turns):
        try:
            turn = _turn(raw, repairs)
            if not turn.text.strip():
                repairs["blank_removed"] += 1
                blank_user |= turn.role == "user"
                continue
            if turn.role == "assistant" and (not kept or kept[-1].role == "system"):
                answers_blank |= blank_user
                repairs["leading_assistant_removed"] += 1
                continue
            if turn.role == "system" and any(other.role != "system" for other in kept):
                raise _Cut("cut_at_late_system")
        except _Cut as cut:
            _count_cut(str(cut), repairs)
            repairs["removed_after_cut"] += len(turns) - place
            break
        if kept and kept[-1].role == turn.role:
            repairs["merged"] += 1
            kept[-1] = Turn(turn.role, kept[-1].text + JOIN + turn.text)
        else:
            kept.append(turn)
    while kept and kept[-1].role == "user":
        kept.pop()
        repairs["trailing_user_removed"] += 1
    if not any(turn.role == "assistant" for turn in kept):
        return Dropped("blank_prompt" if answers_blank else "no_answer", name)
    repairs["kept"] += len(kept)
    return Conversation(name, tuple(kept))


def cut_before(
    conversation: Conversation, turn_index: int, repairs: Counter[str], reason: str
) -> Conversation | Dropped:
    """The conversation up to its last answer before turn `turn_index`, counted as
    `cut_at_{reason}`; `Dropped` with that reason where no answer is left.
    """
    turns = list(conversation.turns[:turn_index])
    while turns and turns[-1].role != "assistant":
        turns.pop()
    if not turns:
        return Dropped(reason, conversation.id)
    repairs[f"cut_at_{reason}"] += 1
    repairs["removed_after_cut"] += len(conversation.turns) - len(turns)
    return replace(conversation, turns=tuple(turns))


def record_id(record: Any, index: int) -> str:
    """The record's own id as text, or `record-INDEX`."""
    value = record.get("id") if isinstance(record, dict) else None
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
        return _SURROGATE.sub("\ufffd", str(value))
    return f"record-{index}"


def clean_text(text: str, repairs: Counter[str]) -> str:
    """Rule 3 for one text."""
    text, replaced = _SURROGATE.subn("\ufffd", text)
    text, removed = _CONTROL.subn("", text)
    if replaced:
        repairs["surrogates_replaced"] += replaced
    if removed:
        repairs["control_characters_removed"] += removed
    return text


def _turn_list(record: Any) -> list[Any] | Dropped:
    if isinstance(record, list):
        return record
    if not isinstance(record, dict):
        return Dropped("not_an_object", "", f"the record is a {type(record).__name__}")
    for key in ("conversations", "messages"):
        if key in record:
            turns = record[key]
            if isinstance(turns, list):
                return turns
            return Dropped("no_turn_list", "", f"{key!r} is a {type(turns).__name__}, not a list")
    return Dropped("no_turn_list", "", f"keys {sorted(map(str, record))[:8]}")


def _turn(raw: Any, repairs: Counter[str]) -> Turn:
    """One turn, its text possibly blank; raises `_Cut` where the conversation must end."""
    if not isinstance(raw, dict):
        raise _Cut("cut_at_non_object")
    named = raw.get("from", raw.get("role"))
    if not isinstance(named, str):
        raise _Cut("cut_at_missing_role")
    role = ROLES.get(named.strip().lower())
    if role is None:
        raise _Cut(f"cut_at_role:{_SURROGATE.sub('?', named.strip().lower())[:40]}")
    if raw.get("tool_calls") or raw.get("function_call"):
        raise _Cut("cut_at_role:tool_call")
    return Turn(role, clean_text(_text(raw.get("value", raw.get("content"))), repairs))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = []
        for part in value:
            inner = part.get("text") if isinstance(part, dict) else part
            if not isinstance(inner, str) or (
                isinstance(part, dict) and part.get("type", "text") != "text"
            ):
                raise _Cut("cut_at_non_text_part")
            parts.append(inner)
        return "".join(parts)
    raise _Cut("cut_at_missing_text")


def _count_cut(name: str, repairs: Counter[str]) -> None:
    """Count by name; role names come from the data, so their number is bounded."""
    known = sum(key.startswith("cut_at_role:") for key in repairs)
    if name.startswith("cut_at_role:") and name not in repairs and known >= _MAX_ROLE_NAMES:
        name = "cut_at_role:(further names)"
    repairs[name] += 1
