"""The cleaning rules, each with its counter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from draftsmith.data.conversations import Conversation, Dropped, clean


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


def cleaned(record: Any) -> tuple[list[tuple[str, str]] | str, dict[str, int]]:
    """(role, text) of the turns, or the reason; and the repairs besides read and kept."""
    repairs: Counter[str] = Counter()
    found = clean(record, 3, repairs)
    for name in ("read", "kept", "in_dropped_records", "schema:sharegpt", "schema:openai"):
        repairs.pop(name, None)
    if isinstance(found, Dropped):
        return found.reason, dict(repairs)
    return [(turn.role, turn.text) for turn in found.turns], dict(repairs)


QA = [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize("key", ["conversations", "messages"])
@pytest.mark.parametrize(("role", "text"), [("from", "value"), ("role", "content")])
def test_four_key_combinations_read_the_same(key: str, role: str, text: str) -> None:
    """Case 60."""
    record = {"id": "x", key: [{role: "user", text: "q"}, {role: "assistant", text: "a"}]}
    assert cleaned(record) == (QA, {})


@pytest.mark.parametrize("name", ["gpt", "chatgpt", "bing", "bard", "assistant", " GPT "])
def test_assistant_names(name: str) -> None:
    """Case 53: the table says who is the assistant."""
    assert cleaned({"conversations": turns(("human", "q"), (name, "a"))}) == (QA, {})


@pytest.mark.parametrize("name", ["tool", "function", "observation", "function_call", "moderator"])
def test_unknown_roles_end_the_conversation(name: str) -> None:
    """Case 53: no foreign text becomes an answer, and what stands before it is kept."""
    record = {"conversations": turns(("user", "q"), ("gpt", "a"), (name, "x"), ("gpt", "from x"))}
    assert cleaned(record) == (QA, {f"cut_at_role:{name}": 1, "removed_after_cut": 2})


def test_role_names_in_the_ledger_are_bounded() -> None:
    """A file full of invented roles does not fill the ledger."""
    repairs: Counter[str] = Counter()
    for number in range(500):
        clean({"messages": turns((f"role {number}", "x"))}, 0, repairs)
    names = [name for name in repairs if name.startswith("cut_at_role:")]
    assert len(names) == 51
    assert repairs["cut_at_role:(further names)"] == 450


@pytest.mark.parametrize(
    ("raw", "counter"),
    [
        (None, "cut_at_non_object"),
        ("text", "cut_at_non_object"),
        (5, "cut_at_non_object"),
        ({}, "cut_at_missing_role"),
        ({"from": 7, "value": "x"}, "cut_at_missing_role"),
        ({"from": "human", "value": None}, "cut_at_missing_text"),
        ({"from": "human"}, "cut_at_missing_text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "cut_at_non_text_part"),
        ({"role": "user", "content": [{"type": "image", "text": "alt"}]}, "cut_at_non_text_part"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "cut_at_role:tool_call"),
    ],
)
def test_turns_that_cannot_be_read_end_the_conversation(raw: Any, counter: str) -> None:
    """Case 54: earlier answers stay, the reason is counted."""
    record = {"conversations": [*turns(("human", "q"), ("gpt", "a")), raw, *turns(("gpt", "b"))]}
    assert cleaned(record) == (QA, {counter: 1, "removed_after_cut": 2})
    assert cleaned({"conversations": [raw]}) == ("no_answer", {counter: 1, "removed_after_cut": 1})


def test_content_as_parts() -> None:
    """Case 56: a list of text parts is the text."""
    parts = [{"type": "text", "text": "q1 "}, {"text": "q2"}, " q3"]
    record = {"messages": [{"role": "user", "content": parts}, {"role": "gpt", "content": "a"}]}
    assert cleaned(record)[0] == [("user", "q1 q2 q3"), ("assistant", "a")]


def test_bare_list_of_turns() -> None:
    """Case 56: a record may be the list itself; its name is its place."""
    found = clean(turns(("human", "q"), ("gpt", "a")), 7, Counter())
    assert isinstance(found, Conversation)
    assert found.id == "record-7"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"id": "x", "conversations": []}, "empty"),
        ([], "empty"),
        ({"id": "x"}, "no_turn_list"),
        ({"id": "x", "conversations": "text"}, "no_turn_list"),
        ({"id": "x", "conversations": {"from": "human"}}, "no_turn_list"),
        (None, "not_an_object"),
        ("text", "not_an_object"),
        (5, "not_an_object"),
        ({"conversations": turns(("gpt", "a"))}, "no_answer"),
        ({"conversations": turns(("human", "q"))}, "no_answer"),
        ({"conversations": turns(("system", "s"))}, "no_answer"),
        ({"conversations": turns(("gpt", "a"), ("human", "q"))}, "no_answer"),
        ({"conversations": turns(("human", "q"), ("gpt", "  \n"))}, "no_answer"),
    ],
)
def test_reasons(record: Any, reason: str) -> None:
    """Case 51: nothing raises, everything has its reason."""
    assert cleaned(record)[0] == reason


@pytest.mark.parametrize(
    ("pairs", "expected", "repairs"),
    [
        (
            [("gpt", "0"), ("gpt", "1"), ("human", "q"), ("gpt", "a")],
            QA,
            {"leading_assistant_removed": 2},
        ),
        (
            [("system", "s"), ("gpt", "0"), ("human", "q"), ("gpt", "a")],
            [("system", "s"), *QA],
            {"leading_assistant_removed": 1},
        ),
        (
            [("human", "q"), ("human", "r"), ("gpt", "a"), ("gpt", "b")],
            [("user", "q\n\nr"), ("assistant", "a\n\nb")],
            {"merged": 2},
        ),
        (
            [("human", "q"), ("gpt", "a"), ("human", " "), ("gpt", "b")],
            [("user", "q"), ("assistant", "a\n\nb")],
            {"blank_removed": 1, "merged": 1},
        ),
        (
            [("human", "q"), ("gpt", "a"), ("human", "r"), ("human", "s")],
            QA,
            {"merged": 1, "trailing_user_removed": 1},
        ),
        (
            [("human", "q"), ("gpt", "a"), ("system", "s"), ("human", "r"), ("gpt", "b")],
            QA,
            {"cut_at_late_system": 1, "removed_after_cut": 3},
        ),
        ([("system", "s"), ("human", "q"), ("gpt", "a")], [("system", "s"), *QA], {}),
        (
            [("human", " q\n"), ("gpt", "\ta ")],
            [("user", " q\n"), ("assistant", "\ta ")],
            {},
        ),
    ],
)
def test_repairs(
    pairs: list[tuple[str, str]], expected: list[tuple[str, str]], repairs: dict[str, int]
) -> None:
    """Cases 36, 50, 52, 55: turns are kept, merged or removed by the rule, and each repair is
    counted.
    """
    assert cleaned({"conversations": turns(*pairs)}) == (expected, repairs)


def test_characters() -> None:
    """Case 58: lone surrogates and control characters are counted; joiners and accents stay."""
    family = "👩\u200d👧 e\u0301 \u200b"
    record = {
        "conversations": turns(
            ("human", f"a\ud83d b\x00\ufeff\u202e{family}\tx\r\n"), ("gpt", "\x1b[1mok")
        )
    }
    found, repairs = cleaned(record)
    assert found == [("user", f"a\ufffd b{family}\tx\r\n"), ("assistant", "[1mok")]
    assert repairs == {"surrogates_replaced": 1, "control_characters_removed": 4}


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
