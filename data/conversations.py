"""From whatever a record holds to a conversation that can be trained on, by written, counted rules.

schemas.py takes a record apart into raw turns; the rules below make of them an optional system
turn, then user and assistant by turns, the assistant last. Where a rule leaves a choice,
`CleaningConfig` has a field for it, and what is said here is its default. Every repair is counted
under its name in the ledger's `turns`; none is silent, and

    read = kept + in_dropped_records + the sum of the REMOVALS.

Rules, in order, turn by turn:
 1. Roles go by the table `ROLES` and `roles`. A role that is not there is nobody's: the
    conversation ends before that turn (`cut_at_role:NAME`), so that no foreign text becomes an
    answer. So do tool calls and tool results, unless `tools` renders them.
 2. A turn that is no object, has no text, or has parts that are not text ends it as well.
 3. Text: lone surrogates become U+FFFD; control characters (C0 without tab and line ends, DEL,
    byte-order mark, bidirectional overrides) are removed. Zero-width characters stay: joiners are
    part of emoji and scripts. Then HTML (`html`) and the reasoning of answers (`reasoning`).
 4. Blank turns are removed; all that follows is judged after that. A blank user turn is kept only
    where otherwise no answer would have a user turn before it (`blank_prompt_kept`): an empty
    message is a message that can be served.
 5. A turn that is longer than `max_turn_characters` ends the conversation before it.
 6. Assistant turns before the first user turn are removed, the rest is kept.
 7. A system turn is kept where it comes first; a later one ends the conversation.
 8. The same role twice running becomes one turn, joined by an empty line.
 9. User turns and tool results after the last answer are removed.

Control tokens are known to the tokenizer alone: whoever renders looks for them, and shortens with
`cut_before`. A record of the schema `text` skips the turns altogether: it becomes `raw`, by rule 3.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from .cleaning import DEFAULT, CleaningConfig
from .html import strip_html
from .schemas import RawRecord, Unreadable, as_list, read_record

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
REMOVALS = (
    "blank_removed",
    "leading_assistant_removed",
    "system_removed",
    "late_system_removed",
    "merged",
    "same_role_removed",
    "trailing_user_removed",
    "trailing_tool_removed",
    "removed_after_cut",
)
JOIN = "\n\n"
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u202a-\u202e\u2066-\u2069]")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MAX_ROLE_NAMES = 50


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


class _Cut(Exception):
    """The conversation ends before this turn; carries the counter's name."""


class _Drop(Exception):
    """The record is left out by a policy; carries the reason and a detail."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.message = message


def clean(
    record: Any,
    index: int,
    repairs: Counter[str],
    cleaning: CleaningConfig = DEFAULT,
    schema: str = "auto",
) -> Conversation | Dropped:
    """Apply the rules above to one record.

    Args:
        record: the decoded record.
        index: its place in the source; names the record where it has no id.
        repairs: incremented by the name of each repair, and by `schema:NAME`.
        cleaning: the policies.
        schema: one of schemas.SCHEMAS, or "auto".
    Returns:
        the conversation, or `Dropped` with the reason not_an_object, no_turn_list, other_schema,
        empty (no turns at all), no_answer (no assistant turn with text after a user turn), or,
        where a policy says drop: leading_assistant, same_role, unknown_role, blank_turn,
        system_turn, late_system.
    """
    name = record_id(record, index)
    try:
        raw = read_record(record, schema)
    except Unreadable as error:
        return Dropped(error.reason, name, _SURROGATE.sub("?", error.message))
    repairs[f"schema:{raw.schema}"] += 1
    if raw.text is not None:
        return _document(raw.text, name, repairs, cleaning)
    if not raw.turns:
        return Dropped("empty", name)
    cleaner = _Cleaner(cleaning)
    found = cleaner.run(raw, name)
    if isinstance(found, Dropped) and cleaner.answers_blank:
        again = _Cleaner(cleaning, keep_blank_prompts=True)
        found = again.run(raw, name)
        cleaner = again
    _add(cleaner.repairs, repairs)
    return found


def cut_before(
    conversation: Conversation, turn: int, repairs: Counter[str], reason: str
) -> Conversation | Dropped:
    """The conversation that ends before a turn, for faults that only rendering finds.

    Args:
        turn: index into `conversation.turns` of the first turn that goes.
        repairs: incremented by `cut_at_REASON` and by what is removed; `kept` goes down by as much.
        reason: names the fault, e.g. "control_tokens".
    Returns:
        the shorter conversation; `Dropped` with `reason` where no answer lies before that turn.
    """
    if not 0 <= turn < len(conversation.turns):
        raise ValueError(
            f"conversation {conversation.id!r}: turn {turn} is not among its "
            f"{len(conversation.turns)} turns"
        )
    kept = list(conversation.turns[:turn])
    repairs[f"cut_at_{reason}"] += 1
    repairs["removed_after_cut"] += len(conversation.turns) - turn
    _trim(kept, repairs)
    answers = any(turn.role == "assistant" for turn in kept)
    repairs["kept"] += (len(kept) if answers else 0) - len(conversation.turns)
    if not answers:
        if kept:
            repairs["in_dropped_records"] += len(kept)
        return Dropped(reason, conversation.id, f"turn {turn + 1}, and no answer lies before it")
    return replace(conversation, turns=tuple(kept))


def record_id(record: Any, index: int) -> str:
    """The record's own id as text, or `record-INDEX`."""
    value = record.get("id") if isinstance(record, dict) else None
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
        return _SURROGATE.sub("\ufffd", str(value))
    return f"record-{index}"


def clean_text(text: str, repairs: Counter[str]) -> str:
    """The first half of rule 3 for one text."""
    text, replaced = _SURROGATE.subn("\ufffd", text)
    text, removed = _CONTROL.subn("", text)
    if replaced:
        repairs["surrogates_replaced"] += replaced
    if removed:
        repairs["control_characters_removed"] += removed
    return text


class _Cleaner:
    """One pass of the rules over one record, with its own counts."""

    def __init__(self, cleaning: CleaningConfig, keep_blank_prompts: bool = False) -> None:
        self.repairs: Counter[str] = Counter()
        self.answers_blank = False  # an answer was left out that follows blank user turns only
        self._cleaning = cleaning
        self._keep_blank_prompts = keep_blank_prompts
        self._roles = ROLES | {name.strip().lower(): role for name, role in cleaning.roles.items()}
        self._kept: list[Turn] = []
        self._blank_user = False

    def run(self, raw: RawRecord, name: str) -> Conversation | Dropped:
        """The rules, over every turn."""
        self.repairs["read"] += len(raw.turns)
        kept = self._kept
        for place, value in enumerate(raw.turns):
            try:
                self._take(value)
            except _Cut as cut:
                self.repairs[str(cut)] += 1
                self.repairs["removed_after_cut"] += len(raw.turns) - place
                break
            except _Drop as drop:
                self.repairs["in_dropped_records"] += len(kept) + len(raw.turns) - place
                return Dropped(drop.reason, name, f"turn {place + 1}{drop.message}")
        _trim(kept, self.repairs)
        if not any(turn.role == "assistant" for turn in kept):
            if kept:
                self.repairs["in_dropped_records"] += len(kept)
            return Dropped("no_answer", name)
        self.repairs["kept"] += len(kept)
        return Conversation(name, tuple(kept), self._tools(raw.tools))

    def _take(self, value: Any) -> None:
        """Rules 1 to 8 for one raw turn."""
        kept, policy = self._kept, self._cleaning
        turn = self._turn(value)
        if not (turn.text.strip() or turn.tool_calls or turn.role == "tool"):
            turn = self._blank(turn)
            if turn is None:
                return
        limit = policy.max_turn_characters
        if limit is not None and len(turn.text) + len(turn.reasoning) > limit:
            raise _Cut("cut_at_long_turn")
        if turn.role == "assistant" and all(other.role == "system" for other in kept):
            if policy.leading_assistant == "drop":
                raise _Drop("leading_assistant")
            self.answers_blank |= self._blank_user
            self.repairs["leading_assistant_removed"] += 1
            return
        if turn.role == "system" and not self._keeps_system():
            return
        if turn.role == "tool" and not (kept and (kept[-1].tool_calls or kept[-1].role == "tool")):
            raise _Cut("cut_at_unasked_tool_result")
        if kept and kept[-1].role == turn.role != "tool":
            self._repeat(turn)
        else:
            kept.append(turn)

    def _blank(self, turn: Turn) -> Turn | None:
        """Rule 4: the turn to keep, or None."""
        if self._cleaning.blank_turns == "drop":
            raise _Drop("blank_turn", f" ({turn.role})")
        if self._cleaning.blank_turns == "cut":
            raise _Cut("cut_at_blank_turn")
        nobody_asked = all(other.role == "system" for other in self._kept)
        if turn.role == "user" and nobody_asked and self._keep_blank_prompts:
            self.repairs["blank_prompt_kept"] += 1
            return Turn("user", "")
        self._blank_user |= turn.role == "user"
        self.repairs["blank_removed"] += 1
        return None

    def _keeps_system(self) -> bool:
        """Rule 7: whether the system turn stays."""
        policy = self._cleaning
        if policy.system == "drop":
            raise _Drop("system_turn")
        if policy.system == "remove":
            self.repairs["system_removed"] += 1
            return False
        if all(other.role == "system" for other in self._kept):
            return True
        if policy.late_system == "drop":
            raise _Drop("late_system")
        if policy.late_system == "cut":
            raise _Cut("cut_at_late_system")
        self.repairs["late_system_removed"] += 1
        return False

    def _repeat(self, turn: Turn) -> None:
        """Rule 8: a turn of the role that spoke last."""
        last, policy = self._kept[-1], self._cleaning.same_role
        if policy == "drop":
            raise _Drop("same_role", f" ({turn.role})")
        if policy == "cut":
            raise _Cut("cut_at_same_role")
        if last.tool_calls:
            raise _Cut("cut_at_unanswered_tool_call")
        if policy == "merge":
            self.repairs["merged"] += 1
            self._kept[-1] = Turn(
                last.role,
                JOIN.join(text for text in (last.text, turn.text) if text),
                JOIN.join(text for text in (last.reasoning, turn.reasoning) if text),
                turn.tool_calls,
            )
            return
        self.repairs["same_role_removed"] += 1
        if policy == "last":
            self._kept[-1] = turn

    def _turn(self, raw: Any) -> Turn:
        """Rules 1 to 3 for one turn, its text possibly blank."""
        if not isinstance(raw, dict):
            raise _Cut("cut_at_non_object")
        named = _first(raw, "from", "role")
        if not isinstance(named, str):
            raise _Cut("cut_at_missing_role")
        role = self._role(named)
        rendered = self._cleaning.tools == "render"
        value = _first(raw, "value", "content")
        calls: tuple[dict[str, Any], ...] = ()
        if role == "call":
            calls, value, role = _spoken_calls(value), "", "assistant"
        elif raw.get("tool_calls") or raw.get("function_call"):
            if not rendered:
                raise _Cut("cut_at_role:tool_call")
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
            clean_text(name, self.repairs) if isinstance(name, str) else "",
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
        shown = _SURROGATE.sub("?", name)[:40]
        if self._cleaning.unknown_role == "drop":
            raise _Drop("unknown_role", f": role {shown!r}; data.rows.cleaning.roles can name it")
        raise _Cut(f"cut_at_role:{shown}")

    def _text(self, text: str, role: str) -> str:
        """Rule 3."""
        text = clean_text(text, self.repairs)
        if self._cleaning.html == "strip":
            stripped = strip_html(text)
            self.repairs["html_stripped"] += int(stripped != text)
            text = stripped
        if self._cleaning.reasoning == "remove" and role == "assistant" and _thinks(text):
            text = text.partition("</think>")[2].lstrip()
            self.repairs["reasoning_removed"] += 1
        return text

    def _reasoning(self, raw: dict[Any, Any]) -> str:
        value = _first(raw, "reasoning_content", "reasoning", "thinking")
        if not isinstance(value, str) or not value.strip():
            return ""
        if self._cleaning.reasoning == "remove":
            self.repairs["reasoning_removed"] += 1
            return ""
        return clean_text(value, self.repairs)

    def _tools(self, tools: list[Any]) -> tuple[dict[str, Any], ...]:
        if self._cleaning.tools != "render":
            self.repairs["tools_left_out"] += len(tools)
            return ()
        try:
            return _plain(tools)
        except _Cut:
            self.repairs["tools_left_out"] += len(tools)
            return ()


def _document(
    text: str, name: str, repairs: Counter[str], cleaning: CleaningConfig
) -> Conversation | Dropped:
    """A record of the schema `text`."""
    repairs["read"] += 1
    text = clean_text(text, repairs)
    if not text.strip():
        repairs["in_dropped_records"] += 1
        return Dropped("empty", name)
    if cleaning.max_turn_characters is not None and len(text) > cleaning.max_turn_characters:
        repairs["documents_shortened"] += 1
        text = text[: cleaning.max_turn_characters]
    repairs["kept"] += 1
    return Conversation(name, (), raw=text)


def _trim(kept: list[Turn], repairs: Counter[str]) -> None:
    """Rule 9, in place."""
    while kept and kept[-1].role in ("user", "tool"):
        repairs[f"trailing_{kept.pop().role}_removed"] += 1


def _joined(value: Any) -> str:
    """Rule 2: one text of a string or a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _Cut("cut_at_missing_text")
    parts = []
    for part in value:
        inner = part.get("text") if isinstance(part, dict) else part
        if not isinstance(inner, str) or (
            isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS
        ):
            raise _Cut("cut_at_non_text_part")
        parts.append(inner)
    return "".join(parts)


def _spoken_calls(value: Any) -> tuple[dict[str, Any], ...]:
    """The calls of a turn whose text is the call, as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise _Cut("cut_at_unreadable_tool_call") from None
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
        plain = json.loads(_SURROGATE.sub("\ufffd", text))
    except (ValueError, TypeError, RecursionError):
        raise _Cut("cut_at_unreadable_tool_call") from None
    if not all(isinstance(value, dict) for value in plain):
        raise _Cut("cut_at_unreadable_tool_call")
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


def _add(counts: Counter[str], repairs: Counter[str]) -> None:
    """Add up by name; role names come from the data, so their number is bounded."""
    for name, count in counts.items():
        if name.startswith("cut_at_role:") and name not in repairs:
            known = sum(key.startswith("cut_at_role:") for key in repairs)
            name = "cut_at_role:(further names)" if known >= _MAX_ROLE_NAMES else name
        if count:
            repairs[name] += count
