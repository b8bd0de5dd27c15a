"""Every form of record, as the turns it holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from draftsmith.data.clean import clean
from draftsmith.data.conversations import Conversation, Dropped

QA = [("user", "q"), ("assistant", "a")]
SYSTEM = [("system", "s"), *QA]
ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def read(record: Any, schema: str = "auto") -> tuple[str, list[tuple[str, str]]]:
    """The schema by the counter, and (role, text) of the turns."""
    repairs: Counter[str] = Counter()
    found = clean(record, 0, repairs, schema=schema)
    assert isinstance(found, Conversation), found
    (name,) = (key for key in repairs if key.startswith("schema:"))
    return name.removeprefix("schema:"), [(turn.role, turn.text) for turn in found.turns]


@pytest.mark.parametrize(
    ("record", "schema", "turns"),
    [
        ({"conversations": SHAREGPT}, "sharegpt", QA),
        ({"messages": SHAREGPT}, "sharegpt", QA),
        (SHAREGPT, "sharegpt", QA),
        ({"system": "s", "conversations": SHAREGPT}, "sharegpt", SYSTEM),
        ({"system": {"on": 1}, "messages": [ASKED, ANSWERED]}, "openai", QA),
        ({"conversations": [ASKED, ANSWERED]}, "openai", QA),
        ([ASKED, ANSWERED], "openai", QA),
        ({"messages": [{"role": "developer", "content": "s"}, ASKED, ANSWERED]}, "openai", SYSTEM),
        ({"prompt": "other", "messages": [ASKED, ANSWERED]}, "openai", QA),
        ({"messages": '[{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]'},
            "openai", QA),
        ({"instruction": "q", "output": "a"}, "alpaca", QA),
        ({"instruction": "q", "input": " ", "output": "a", "text": "t"}, "alpaca", QA),
        ({"instruction": "q", "input": "i", "output": "a"}, "alpaca", [("user", "q\n\ni"), QA[1]]),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["q0", "a0"]]},
            "alpaca",
            [("system", "s"), ("user", "q0"), ("assistant", "a0"), *QA],
        ),
        ({"prompt": "q", "response": "a"}, "prompt_response", QA),
        ({"question": "q", "answer": "a"}, "prompt_response", QA),
        ({"query": "q", "completion": "a"}, "prompt_response", QA),
        ({"instruction": "q", "context": "", "response": "a"}, "prompt_response", QA),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, "prompt_response", QA),
        ({"prompt": [ASKED], "chosen": "a"}, "prompt_response", QA),
        ({"system_prompt": "s", "prompt": "q", "output": "a"}, "prompt_response", SYSTEM),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", QA),
        ({"prompt": "q", "chosen": [ANSWERED], "rejected": [ANSWERED]}, "preference", QA),
        ({"prompt": "x", "chosen": [ASKED, ANSWERED], "rejected": []}, "preference", QA),
        ({"chosen": SHAREGPT, "rejected": SHAREGPT[:1]}, "preference", QA),
        ({"question": "q", "chosen": ANSWERED, "rejected": "b"}, "preference", QA),
        ({"messages": [ASKED], "chosen": "a", "rejected": "b"}, "preference", QA),
    ],
)  # fmt: skip
def test_forms(record: Any, schema: str, turns: list[tuple[str, str]]) -> None:
    """Each form is seen from the record, stated, and gives the same conversation; forced, it gives
    the same again."""
    assert read(record) == (schema, turns)
    assert read(record, schema) == (schema, turns)


def test_columns_of_a_table() -> None:
    """Nulls that fill up a struct are no values, and a struct of lists is a list of structs."""
    filled = [
        {"from": "human", "value": "q", "role": None, "content": None, "tool_calls": None},
        {"from": None, "value": None, "role": "assistant", "content": "a", "tool_calls": None},
    ]
    assert read({"messages": None, "conversations": filled}) == ("sharegpt", QA)
    columns = {"from": ["human", "gpt"], "value": ["q", "a"]}
    assert read({"conversations": columns}) == ("sharegpt", QA)


def test_text_is_taken_as_it_stands() -> None:
    """A document has no turns; it becomes raw text, by the rule for characters."""
    repairs: Counter[str] = Counter()
    found = clean({"id": "d", "text": "<|im_start|>user\nq\x00 <br>"}, 0, repairs)
    assert found == Conversation("d", (), raw="<|im_start|>user\nq <br>")
    assert isinstance(found, Conversation)
    assert found.messages() == []
    assert (repairs["read"], repairs["kept"], repairs["control_characters_removed"]) == (1, 1, 1)
    other = clean({"text": "another"}, 0, repairs)
    assert isinstance(other, Conversation)
    assert found.content_hash != other.content_hash
    blank = clean({"text": " \n"}, 5, repairs)
    assert blank == Dropped("empty", "record-5")


@pytest.mark.parametrize(
    ("record", "schema", "reason", "message"),
    [
        ({"conversations": SHAREGPT}, "openai", "other_schema", "sharegpt, not openai; keys"),
        ({"text": "t"}, "alpaca", "other_schema", "text, not alpaca; keys ['text']"),
        (SHAREGPT, "text", "other_schema", "sharegpt, not text; a list of 2"),
        ({"a": 1, "prompt": "q"}, "auto", "no_turn_list", "keys ['a', 'prompt']"),
        ({"chosen": "a", "rejected": "b"}, "auto", "no_turn_list", "no prompt"),
        ({"text": 5}, "auto", "no_turn_list", "'text' is a int"),
        ({"messages": "[1"}, "auto", "no_turn_list", "'messages' is a str"),
        (7, "text", "not_an_object", "the record is a int"),
    ],
)
def test_records_of_no_or_another_form(record: Any, schema: str, reason: str, message: str) -> None:
    """Dropped by reason; the detail names the keys."""
    found = clean(record, 0, Counter(), schema=schema)
    assert isinstance(found, Dropped)
    assert found.reason == reason
    assert message in found.message
