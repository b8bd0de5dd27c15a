"""One raw turn -> a `Turn`: whose it is, what it says, what it thought and called for.

These are rules 1 to 3 of clean.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from .cleaning import CleaningConfig
from .conversations import Turn
from .html import strip_html
from .schemas import as_list

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}
TOOL_ROLES = ("tool", "function", "observation")
CALL_ROLES = ("function_call", "tool_call")
SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u202a-\u202e\u2066-\u2069]")
_TEXT_PARTS = ("text", "input_text", "output_text")


class Cut(Exception):
    """The conversation ends before this turn; carries the counter's name."""


class Drop(Exception):
    """The record is left out by a policy; carries the reason and a detail."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.message = message


def clean_text(text: str, repairs: Counter[str]) -> str:
    """The first half of rule 3 for one text."""
    text, replaced = SURROGATE.subn("\ufffd", text)
    text, removed = _CONTROL.subn("", text)
    if replaced:
        repairs["surrogates_replaced"] += replaced
    if removed:
        repairs["control_characters_removed"] += removed
    return text


class TurnReader:
    """Reads raw turns by the policies of one configuration.

    Args:
        repairs: incremented by the name of each repair.
    """

    def __init__(self, cleaning: CleaningConfig, repairs: Counter[str]) -> None:
        self._cleaning = cleaning
        self._repairs = repairs
        self._roles = ROLES | {name.strip().lower(): role for name, role in cleaning.roles.items()}

    def turn(self, raw: Any) -> Turn:
        """A turn, its text possibly blank.

        Raises:
            Cut, Drop: the conversation ends before it, or is left out.
        """
        if not isinstance(raw, dict):
            raise Cut("cut_at_non_object")
        named = _first(raw, "from", "role")
        if not isinstance(named, str):
            raise Cut("cut_at_missing_role")
        role = self._role(named)
        rendered = self._cleaning.tools == "render"
        value = _first(raw, "value", "content")
        calls: tuple[dict[str, Any], ...] = ()
        if role == "call":
            calls, value, role = _spoken_calls(value), "", "assistant"
        elif raw.get("tool_calls") or raw.get("function_call"):
            if not rendered:
                raise Cut("cut_at_role:tool_call")
            listed = as_list(raw.get("tool_calls"))
            calls = _plain(listed) if listed else _spoken_calls(raw.get("function_call"))
            value = "" if value is None else value
        text = self._text(_joined(value), role)
        name = raw.get("name") if role == "tool" else None
        return Turn(
            role,
            text,
            self._reasoning(raw) if role == "assistant" else "",
            calls,
            clean_text(name, self._repairs) if isinstance(name, str) else "",
        )

    def _role(self, named: str) -> str:
        """Rule 1: system, user, assistant, tool, or call (a turn that is a tool call alone)."""
        name = named.strip().lower()
        role = self._roles.get(name)
        if role is None:
            role = "tool" if name in TOOL_ROLES else "call" if name in CALL_ROLES else None
        if role in ("tool", "call") and self._cleaning.tools == "render":
            return role
        if role in ("system", "user", "assistant"):
            return role
        shown = SURROGATE.sub("?", name)[:40]
        if self._cleaning.unknown_role == "drop":
            raise Drop("unknown_role", f": role {shown!r}; data.rows.cleaning.roles can name it")
        raise Cut(f"cut_at_role:{shown}")

    def _text(self, text: str, role: str) -> str:
        """Rule 3."""
        text = clean_text(text, self._repairs)
        if self._cleaning.html == "strip":
            stripped = strip_html(text)
            self._repairs["html_stripped"] += int(stripped != text)
            text = stripped
        if self._cleaning.reasoning == "remove" and role == "assistant" and _thinks(text):
            text = text.partition("</think>")[2].lstrip()
            self._repairs["reasoning_removed"] += 1
        return text

    def _reasoning(self, raw: dict[Any, Any]) -> str:
        value = _first(raw, "reasoning_content", "reasoning", "thinking")
        if not isinstance(value, str) or not value.strip():
            return ""
        if self._cleaning.reasoning == "remove":
            self._repairs["reasoning_removed"] += 1
            return ""
        return clean_text(value, self._repairs)

    def tools(self, tools: list[Any]) -> tuple[dict[str, Any], ...]:
        if self._cleaning.tools != "render":
            self._repairs["tools_left_out"] += len(tools)
            return ()
        try:
            return _plain(tools)
        except Cut:
            self._repairs["tools_left_out"] += len(tools)
            return ()


def _joined(value: Any) -> str:
    """Rule 2: one text of a string or a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Cut("cut_at_missing_text")
    parts = []
    for part in value:
        inner = part.get("text") if isinstance(part, dict) else part
        if not isinstance(inner, str) or (
            isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS
        ):
            raise Cut("cut_at_non_text_part")
        parts.append(inner)
    return "".join(parts)


def _spoken_calls(value: Any) -> tuple[dict[str, Any], ...]:
    """The calls of a turn whose text is the call, as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise Cut("cut_at_unreadable_tool_call") from None
    calls = found if isinstance(found, list) else [found]
    return _plain(
        [
            call
            if isinstance(call, dict) and "function" in call
            else {"type": "function", "function": call}
            for call in calls
        ]
    )


def _plain(values: list[Any]) -> tuple[dict[str, Any], ...]:
    """Objects as plain JSON that encodes as UTF-8; fields that are null are left out."""
    try:
        text = json.dumps(values, ensure_ascii=False, default=str)
        plain = json.loads(SURROGATE.sub("\ufffd", text))
    except (ValueError, TypeError, RecursionError):
        raise Cut("cut_at_unreadable_tool_call") from None
    if not all(isinstance(value, dict) for value in plain):
        raise Cut("cut_at_unreadable_tool_call")
    return tuple(
        {key: field for key, field in value.items() if field is not None} for value in plain
    )


def _thinks(text: str) -> bool:
    """Whether the text begins with its reasoning: an opened block, or one closed unopened."""
    end = text.find("</think>")
    opened = text.lstrip().startswith("<think>")
    return end >= 0 and (opened or "<think>" not in text[:end])


def _first(raw: dict[Any, Any], *keys: str) -> Any:
    """The value of the first key that is there and not null."""
    return next((raw[key] for key in keys if raw.get(key) is not None), None)
