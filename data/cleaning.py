"""The policies of cleaning: what to do where a conversation does not have the form of one."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_origin, get_type_hints

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class CleaningConfig:
    """One policy for each fault. `remove` takes the turn out, `cut` ends the conversation before
    it, `drop` leaves the whole record out; all are counted."""

    leading_assistant: Literal["remove", "drop"] = "remove"
    """Assistant turns before the first user turn: remove them, or drop the record."""
    same_role: Literal["merge", "first", "last", "cut", "drop"] = "merge"
    """The same role twice running: merge into one turn, keep the first or the last, cut before the
    second, or drop the record."""
    unknown_role: Literal["cut", "drop"] = "cut"
    """A role that no table knows: cut before it, or drop the record."""
    roles: dict[str, str] = field(default_factory=dict)
    """Further names of roles, as in {model: assistant}; names are compared in lower case."""
    blank_turns: Literal["remove", "cut", "drop"] = "remove"
    """Turns without text: remove them, cut before one, or drop the record."""
    system: Literal["keep", "remove", "drop"] = "keep"
    """System turns: keep the leading one, remove all, or drop the record."""
    late_system: Literal["cut", "remove", "drop"] = "cut"
    """A system turn that does not come first: cut before it, remove it, or drop the record."""
    control_tokens: Literal["cut", "drop"] = "cut"
    """A text that spells a control token of the tokenizer, and so could forge a turn: cut before
    it, or drop the record."""
    html: Literal["keep", "strip"] = "keep"
    """Leftovers of copied web pages outside code (div, span, p and br tags, entities beside them,
    `Copy code`, page counters): keep or strip them."""
    max_turn_characters: int | None = None
    """Cut before a turn longer than this; null keeps turns of any length."""
    reasoning: Literal["keep", "remove"] = "keep"
    """What an answer thinks before it speaks, in a field of its own or as a leading <think> block:
    keep or remove it."""
    tools: Literal["cut", "render"] = "cut"
    """Tool calls and results: cut before the first one, or keep them for the chat template."""

    def __post_init__(self) -> None:
        hints = get_type_hints(CleaningConfig)
        for entry in fields(self):
            choices, value = get_args(hints[entry.name]), getattr(self, entry.name)
            if get_origin(hints[entry.name]) is Literal and value not in choices:
                raise ValueError(f"{entry.name}={value!r}: choose one of {', '.join(choices)}")
        for name, role in self.roles.items():
            if role not in _ROLES:
                raise ValueError(f"roles: {name}={role!r}: choose one of {', '.join(_ROLES)}")
        if self.max_turn_characters is not None and self.max_turn_characters < 1:
            raise ValueError(
                f"max_turn_characters={self.max_turn_characters}: must be 1 or more, or null for "
                "any length"
            )


DEFAULT = CleaningConfig()
"""What is done where nobody says otherwise."""
