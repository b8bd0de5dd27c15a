"""A cleaned conversation: between a source's records (clean.py) and token rows (render.py)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One message.

    role: system, user, assistant, or (with `tools=render`) tool. reasoning: what the assistant
    thought before the text, from a field of its own. tool_calls: as the record gives them. name:
    of the tool that answers.
    """

    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""

    def message(self) -> dict[str, Any]:
        """The form that chat templates take; what is empty is left out, but never the content."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.name:
            message["name"] = self.name
        return message


@dataclass(frozen=True)
class Conversation:
    """A cleaned conversation: an optional system turn, then user and assistant by turns, the
    assistant last; tool results stand after the assistant turn that calls for them.

    tools: the tools offered, for the template. raw: a document or a rendered conversation of the
    schema `text`; then there are no turns, the text goes to the tokenizer without the template, and
    every token but the first is supervised, as a base model would have generated it.
    """

    id: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    raw: str = ""

    def messages(self) -> list[dict[str, Any]]:
        """The turns as chat templates take them; [] for raw text."""
        return [turn.message() for turn in self.turns]

    @property
    def content_hash(self) -> str:
        """Hex SHA-256 of all that can be rendered; ids do not enter."""
        content: list[Any] = [
            [turn.role, turn.text]
            + ([turn.message()] if turn.reasoning or turn.tool_calls or turn.name else [])
            for turn in self.turns
        ]
        if self.raw:
            content.append(["raw", self.raw])
        if self.tools:
            content.append(["tools", list(self.tools)])
        return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True)
class Dropped:
    """A record that is left out: why, its id, and a detail for the ledger."""

    reason: str
    id: str
    message: str = ""
