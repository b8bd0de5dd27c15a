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

from collections import Counter
from dataclasses import replace
from typing import Any

from .cleaning import DEFAULT, CleaningConfig
from .conversations import Conversation, Dropped, Turn
from .schemas import RawRecord, Unreadable, read_record
from .turns import SURROGATE, Cut, Drop, TurnReader, clean_text

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
_MAX_ROLE_NAMES = 50


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
        return Dropped(error.reason, name, SURROGATE.sub("?", error.message))
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
        return SURROGATE.sub("\ufffd", str(value))
    return f"record-{index}"


class _Cleaner:
    """One pass of the rules over one record, with its own counts."""

    def __init__(self, cleaning: CleaningConfig, keep_blank_prompts: bool = False) -> None:
        self.repairs: Counter[str] = Counter()
        self.answers_blank = False  # an answer was left out that follows blank user turns only
        self._cleaning = cleaning
        self._keep_blank_prompts = keep_blank_prompts
        self._read = TurnReader(cleaning, self.repairs)
        self._kept: list[Turn] = []
        self._blank_user = False

    def run(self, raw: RawRecord, name: str) -> Conversation | Dropped:
        """The rules, over every turn."""
        self.repairs["read"] += len(raw.turns)
        kept = self._kept
        for place, value in enumerate(raw.turns):
            try:
                self._take(value)
            except Cut as cut:
                self.repairs[str(cut)] += 1
                self.repairs["removed_after_cut"] += len(raw.turns) - place
                break
            except Drop as drop:
                self.repairs["in_dropped_records"] += len(kept) + len(raw.turns) - place
                return Dropped(drop.reason, name, f"turn {place + 1}{drop.message}")
        _trim(kept, self.repairs)
        if not any(turn.role == "assistant" for turn in kept):
            if kept:
                self.repairs["in_dropped_records"] += len(kept)
            return Dropped("no_answer", name)
        self.repairs["kept"] += len(kept)
        return Conversation(name, tuple(kept), self._read.tools(raw.tools))

    def _take(self, value: Any) -> None:
        """Rules 1 to 8 for one raw turn."""
        kept, policy = self._kept, self._cleaning
        turn = self._read.turn(value)
        if not (turn.text.strip() or turn.tool_calls or turn.role == "tool"):
            turn = self._blank(turn)
            if turn is None:
                return
        limit = policy.max_turn_characters
        if limit is not None and len(turn.text) + len(turn.reasoning) > limit:
            raise Cut("cut_at_long_turn")
        if turn.role == "assistant" and all(other.role == "system" for other in kept):
            if policy.leading_assistant == "drop":
                raise Drop("leading_assistant")
            self.answers_blank |= self._blank_user
            self.repairs["leading_assistant_removed"] += 1
            return
        if turn.role == "system" and not self._keeps_system():
            return
        if turn.role == "tool" and not (kept and (kept[-1].tool_calls or kept[-1].role == "tool")):
            raise Cut("cut_at_unasked_tool_result")
        if kept and kept[-1].role == turn.role != "tool":
            self._repeat(turn)
        else:
            kept.append(turn)

    def _blank(self, turn: Turn) -> Turn | None:
        """Rule 4: the turn to keep, or None."""
        if self._cleaning.blank_turns == "drop":
            raise Drop("blank_turn", f" ({turn.role})")
        if self._cleaning.blank_turns == "cut":
            raise Cut("cut_at_blank_turn")
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
            raise Drop("system_turn")
        if policy.system == "remove":
            self.repairs["system_removed"] += 1
            return False
        if all(other.role == "system" for other in self._kept):
            return True
        if policy.late_system == "drop":
            raise Drop("late_system")
        if policy.late_system == "cut":
            raise Cut("cut_at_late_system")
        self.repairs["late_system_removed"] += 1
        return False

    def _repeat(self, turn: Turn) -> None:
        """Rule 8: a turn of the role that spoke last."""
        last, policy = self._kept[-1], self._cleaning.same_role
        if policy == "drop":
            raise Drop("same_role", f" ({turn.role})")
        if policy == "cut":
            raise Cut("cut_at_same_role")
        if last.tool_calls:
            raise Cut("cut_at_unanswered_tool_call")
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


def _add(counts: Counter[str], repairs: Counter[str]) -> None:
    """Add up by name; role names come from the data, so their number is bounded."""
    for name, count in counts.items():
        if name.startswith("cut_at_role:") and name not in repairs:
            known = sum(key.startswith("cut_at_role:") for key in repairs)
            name = "cut_at_role:(further names)" if known >= _MAX_ROLE_NAMES else name
        if count:
            repairs[name] += count
