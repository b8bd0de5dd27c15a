"""Cleaning: the policies, tool calls and reasoning, shortening, and counts that add up.

What a default rule makes of messy records stands under the numbers of tests/cases/test_records.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from draftsmith.data.clean import REMOVALS, clean, cut_before
from draftsmith.data.cleaning import DEFAULT, CleaningConfig
from draftsmith.data.conversations import Conversation, Dropped, Turn


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


def cleaned(
    record: Any, cleaning: CleaningConfig = DEFAULT
) -> tuple[list[tuple[str, str]] | str, dict[str, int]]:
    """(role, text) of the turns, or the reason; and the repairs besides what every record counts.
    Turns read must be those kept and those removed."""
    repairs: Counter[str] = Counter()
    found = clean(record, 3, repairs, cleaning)
    removed = sum(repairs[name] for name in REMOVALS)
    assert repairs["read"] == repairs["kept"] + repairs["in_dropped_records"] + removed
    for name in ("read", "kept", "in_dropped_records", "schema:sharegpt", "schema:openai"):
        repairs.pop(name, None)
    repairs = Counter({name: count for name, count in repairs.items() if count})
    if isinstance(found, Dropped):
        return found.reason, dict(repairs)
    return [(turn.role, turn.text) for turn in found.turns], dict(repairs)


QA = [("user", "q"), ("assistant", "a")]
RB = [("user", "r"), ("assistant", "b")]
SHORT = [("human", "q"), ("gpt", "a")]
LONG = [*SHORT, ("human", "r"), ("gpt", "b")]


@pytest.mark.parametrize(
    ("policy", "pairs", "expected", "repairs"),
    [
        (
            {"leading_assistant": "drop"},
            [("system", "s"), ("gpt", "0"), *SHORT],
            "leading_assistant",
            {},
        ),
        ({"leading_assistant": "drop"}, SHORT, QA, {}),
        (
            {"same_role": "first"},
            [("human", "q"), ("human", "x"), ("gpt", "a"), ("gpt", "y")],
            QA,
            {"same_role_removed": 2},
        ),
        (
            {"same_role": "last"},
            [("human", "x"), ("human", "q"), ("gpt", "y"), ("gpt", "a")],
            QA,
            {"same_role_removed": 2},
        ),
        (
            {"same_role": "cut"},
            [*SHORT, ("human", "r"), ("human", "x"), ("gpt", "b")],
            QA,
            {"cut_at_same_role": 1, "removed_after_cut": 2, "trailing_user_removed": 1},
        ),
        ({"same_role": "drop"}, [*SHORT, ("gpt", "b")], "same_role", {}),
        ({"unknown_role": "drop"}, [*SHORT, ("moderator", "x")], "unknown_role", {}),
        ({"roles": {"Model": "assistant"}}, [("human", "q"), (" MODEL", "a")], QA, {}),
        (
            {"roles": {"guide": "tool"}},
            [*SHORT, ("guide", "x")],
            QA,
            {"cut_at_role:guide": 1, "removed_after_cut": 1},
        ),
        (
            {"blank_turns": "cut"},
            [*SHORT, ("human", "\n"), ("gpt", "b")],
            QA,
            {"cut_at_blank_turn": 1, "removed_after_cut": 2},
        ),
        ({"blank_turns": "drop"}, [*SHORT, ("human", "")], "blank_turn", {}),
        (
            {"system": "remove"},
            [("system", "s"), *SHORT, ("system", "t"), ("human", "r"), ("gpt", "b")],
            [*QA, *RB],
            {"system_removed": 2},
        ),
        ({"system": "drop"}, [("system", "s"), *SHORT], "system_turn", {}),
        (
            {"late_system": "remove"},
            [*SHORT, ("system", "t"), ("human", "r"), ("gpt", "b")],
            [*QA, *RB],
            {"late_system_removed": 1},
        ),
        ({"late_system": "drop"}, [*SHORT, ("system", "t")], "late_system", {}),
        (
            {"max_turn_characters": 3},
            [*SHORT, ("human", "1234"), ("gpt", "b")],
            QA,
            {"cut_at_long_turn": 1, "removed_after_cut": 2},
        ),
        ({"max_turn_characters": 1}, LONG, [*QA, *RB], {}),
    ],
)
def test_policies(
    policy: dict[str, Any],
    pairs: list[tuple[str, str]],
    expected: list[tuple[str, str]] | str,
    repairs: dict[str, int],
) -> None:
    """Each choice that is no default does what its field says."""
    record = {"conversations": turns(*pairs)}
    assert cleaned(record, CleaningConfig(**policy)) == (expected, repairs)


def test_dropped_records_say_where() -> None:
    """A policy that drops names the turn, and an unknown role how it could be known."""
    record = {"id": "x", "conversations": turns(*SHORT, ("moderator", "x"))}
    found = clean(record, 0, Counter(), CleaningConfig(unknown_role="drop"))
    assert found == Dropped(
        "unknown_role", "x", "turn 3: role 'moderator'; data.rows.cleaning.roles can name it"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"same_role": "join"}, "same_role='join': choose one of merge, first, last, cut, drop"),
        ({"roles": {"model": "robot"}}, "roles: model='robot': choose one of system, user"),
        ({"max_turn_characters": 0}, "max_turn_characters=0: must be 1 or more"),
    ],
)
def test_policies_that_there_are_not(settings: dict[str, Any], message: str) -> None:
    """Refused with the choices."""
    with pytest.raises(ValueError, match=message):
        CleaningConfig(**settings)


def test_a_blank_prompt_is_kept_where_it_is_the_only_one() -> None:
    """An answer to an empty message can be used; beside other prompts the blank one goes."""
    alone = turns(("system", "s"), ("gpt", "0"), ("human", " "), ("human", ""), ("gpt", "a"))
    assert cleaned({"messages": alone}) == (
        [("system", "s"), ("user", ""), ("assistant", "a")],
        {"leading_assistant_removed": 1, "blank_prompt_kept": 1, "blank_removed": 1},
    )
    assert cleaned({"messages": [*alone, *turns(*SHORT)]}) == (
        [("system", "s"), *QA],
        {"leading_assistant_removed": 2, "blank_removed": 2},
    )


THOUGHT = "<think>\nhm\n</think>\n\na"


@pytest.mark.parametrize(
    ("answer", "kept", "removed"),
    [
        ({"content": THOUGHT}, Turn("assistant", THOUGHT), 1),
        ({"content": "hm</think>a"}, Turn("assistant", "hm</think>a"), 1),
        ({"content": "a", "reasoning_content": "hm"}, Turn("assistant", "a", "hm"), 1),
        ({"content": "a", "reasoning": "hm\x00"}, Turn("assistant", "a", "hm"), 1),
        ({"content": "a", "reasoning": {"effort": 1}}, Turn("assistant", "a"), 0),
        ({"content": "a", "reasoning": " "}, Turn("assistant", "a"), 0),
    ],
)
def test_reasoning(answer: dict[str, Any], kept: Turn, removed: int) -> None:
    """Kept as it stands (in the text, or in its field), or removed and counted."""
    record = {"messages": [*turns(("user", "q")), {"role": "assistant", **answer}]}
    found = clean(record, 0, Counter())
    assert isinstance(found, Conversation)
    assert found.turns[1] == kept
    assert ("reasoning_content" in found.messages()[1]) == bool(kept.reasoning)
    repairs: Counter[str] = Counter()
    found = clean(record, 0, repairs, CleaningConfig(reasoning="remove"))
    assert isinstance(found, Conversation)
    assert found.turns[1] == Turn("assistant", "a")
    assert repairs["reasoning_removed"] == removed


def test_reasoning_is_an_answers_own() -> None:
    """A user's text about thinking stays, and so does a block in the middle of an answer."""
    pairs = [("user", "<think>x</think>q"), ("assistant", "see <think>x</think>")]
    found, repairs = cleaned({"messages": turns(*pairs)}, CleaningConfig(reasoning="remove"))
    assert (found, repairs) == (pairs, {})


TOOLS = [{"type": "function", "function": {"name": "f"}, "strict": None}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def with_tools() -> dict[str, Any]:
    return {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "name": "f", "content": "r1"},
            {"role": "tool", "name": "f", "content": ""},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "r"},
            {"role": "assistant", "content": "wait", "tool_calls": [CALL]},
        ],
    }


def test_tools_are_cut_or_rendered() -> None:
    """By default a conversation ends before the first call; rendered, calls, results and offers go
    to the template as they are."""
    assert cleaned(with_tools())[0] == "no_answer"
    repairs: Counter[str] = Counter()
    found = clean(with_tools(), 0, repairs, CleaningConfig(tools="render"))
    assert isinstance(found, Conversation)
    assert found.messages() == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "r1", "name": "f"},
        {"role": "tool", "content": "", "name": "f"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "wait", "tool_calls": [CALL]},
    ]
    assert found.tools == ({"type": "function", "function": {"name": "f"}},)
    assert repairs["kept"] == 7
    plain = clean({**with_tools(), "tools": None}, 0, Counter(), CleaningConfig(tools="render"))
    assert isinstance(plain, Conversation)
    assert plain.content_hash != found.content_hash


def test_calls_that_are_turns_of_their_own() -> None:
    """The call is the turn's text, and what comes back is called an observation."""
    pairs = [("human", "q"), ("gpt", "wait"), ("function_call", '{"name": "f"}')]
    record = {"conversations": turns(*pairs, ("observation", "r"), ("gpt", "a"))}
    found = clean(record, 0, Counter(), CleaningConfig(tools="render"))
    assert isinstance(found, Conversation)
    call = {"type": "function", "function": {"name": "f"}}
    assert found.turns[1] == Turn("assistant", "wait", "", (call,))
    assert [turn.role for turn in found.turns] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("messages", "counter"),
    [
        ([{"role": "tool", "content": "r"}], "cut_at_unasked_tool_result"),
        (
            [{"role": "user", "content": "r"}, {"role": "assistant", "tool_calls": [5]}],
            "cut_at_unreadable_tool_call",
        ),
        (
            [{"role": "user", "content": "r"}, {"role": "function_call", "content": "f(x)"}],
            "cut_at_unreadable_tool_call",
        ),
        ([{"role": "assistant", "tool_calls": [CALL]}, *turns(("gpt", "b"))], None),
    ],
)
def test_tool_turns_out_of_order(messages: list[Any], counter: str | None) -> None:
    """A result that nobody asked for, and calls that cannot be read, end the conversation."""
    record = {"messages": [*turns(*SHORT), *messages]}
    found, repairs = cleaned(record, CleaningConfig(tools="render"))
    if counter is None:
        assert repairs == {
            "merged": 1,
            "cut_at_unanswered_tool_call": 1,
            "removed_after_cut": 1,
        }
        return
    assert found == QA
    assert repairs[counter] == 1


def test_cut_before_shortens_or_drops() -> None:
    """For faults that rendering finds: what stands before keeps its answers, or there is none."""
    repairs: Counter[str] = Counter()
    found = clean({"id": "x", "conversations": turns(*LONG)}, 0, repairs)
    assert isinstance(found, Conversation)
    shorter = cut_before(found, 3, repairs, "control_tokens")
    assert isinstance(shorter, Conversation)
    assert [(turn.role, turn.text) for turn in shorter.turns] == QA
    assert repairs == {
        "schema:sharegpt": 1,
        "read": 4,
        "kept": 2,
        "cut_at_control_tokens": 1,
        "removed_after_cut": 1,
        "trailing_user_removed": 1,
    }
    gone = cut_before(shorter, 1, repairs, "control_tokens")
    assert gone == Dropped("control_tokens", "x", "turn 2, and no answer lies before it")
    assert repairs["kept"] == 0
    assert repairs["read"] == sum(repairs[name] for name in REMOVALS)
    with pytest.raises(ValueError, match="'x': turn 2 is not among its 2 turns"):
        cut_before(shorter, 2, repairs, "control_tokens")


def test_role_names_in_the_ledger_are_bounded() -> None:
    """A file full of invented roles does not fill the ledger."""
    repairs: Counter[str] = Counter()
    for number in range(500):
        clean({"messages": turns((f"role {number}", "x"))}, 0, repairs)
    names = [name for name in repairs if name.startswith("cut_at_role:")]
    assert len(names) == 51
    assert repairs["cut_at_role:(further names)"] == 450


def test_a_turn_of_control_characters_is_blank() -> None:
    """Blankness is judged after the text was cleaned."""
    record = {"conversations": turns(("human", "q"), ("gpt", "\x00\ufeff"), ("gpt", "a"))}
    assert cleaned(record) == (QA, {"blank_removed": 1, "control_characters_removed": 2})


def test_content_hash_sees_roles_and_texts_only() -> None:
    """The same content under another id or key is a repeat; another border between turns is not."""
    first = clean({"id": "1", "conversations": turns(("human", "q"), ("gpt", "a"))}, 0, Counter())
    again = clean({"id": 2, "messages": turns(("user", "q"), ("bing", "a"))}, 9, Counter())
    other = clean({"messages": turns(("system", "q"), ("user", "q"), ("gpt", "a"))}, 0, Counter())
    assert isinstance(first, Conversation)
    assert isinstance(again, Conversation)
    assert isinstance(other, Conversation)
    assert (first.id, again.id) == ("1", "2")
    assert first.content_hash == again.content_hash != other.content_hash


def test_turn_counts_add_up() -> None:
    """Turns read = kept + every kind of removal."""
    repairs: Counter[str] = Counter()
    pairs = [
        ("gpt", "0"),
        ("human", "q"),
        ("human", ""),
        ("gpt", "a"),
        ("gpt", "b"),
        ("human", "t"),
    ]
    clean({"conversations": [*turns(*pairs), None, None]}, 0, repairs)
    removed = ("leading_assistant_removed", "blank_removed", "merged", "trailing_user_removed")
    assert repairs["read"] == 8
    assert repairs["kept"] == 2
    assert repairs["kept"] + sum(repairs[name] for name in (*removed, "removed_after_cut")) == 8
