"""What form a record has, and the raw turns it holds. Nothing is cleaned here.

| schema | a record holds |
|---|---|
| sharegpt | turns (`conversations`, `messages` or the record itself) with `from` and `value` |
| openai | the same with `role` and `content`; `tools` beside them |
| preference | `chosen` and `rejected`, texts after a `prompt` or turns: the chosen side is read |
| alpaca | `instruction` and `output`, with or without `input`, `system` and `history` |
| prompt_response | one of PROMPTS and one of ANSWERS, each a text or a list of turns |
| text | `text`: a document, or a conversation already rendered, taken as it stands |

Tried in this order, after preference: a record with turns is read by its turns, whatever else it
carries. Which keys a turn has is seen from its first turn, so the keys may be mixed. A key whose
value is null counts as absent (columnar files fill in nulls), a list that comes as JSON text is
decoded, and a struct of lists is turned into a list of structs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TURN_LISTS = ("conversations", "messages")
PROMPTS = ("prompt", "question", "query", "instruction")
ANSWERS = ("response", "completion", "answer", "output", "chosen")
CONTEXTS = ("input", "context")
SYSTEMS = ("system", "system_prompt")
SCHEMAS = ("sharegpt", "openai", "preference", "alpaca", "prompt_response", "text")
# by these an object is a record, not a wrapper around records; `turns` is a prompt set's
RECORD_KEYS = (*TURN_LISTS, *PROMPTS, "chosen", "text", "turns")
_KEYS_SHOWN = 8


@dataclass(frozen=True)
class RawRecord:
    """A record taken apart: its schema, its raw turns or its text, and the tools it offers."""

    schema: str
    turns: list[Any]
    tools: list[Any]
    text: str | None = None


class Unreadable(Exception):
    """The record has no form that is known, or not the one asked for; carries reason and detail."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def schema_of(record: Any) -> str | None:
    """The schema of a record, one of SCHEMAS; None where it has none."""
    if isinstance(record, list):
        return _turn_schema(record, "sharegpt")
    if not isinstance(record, dict):
        return None
    if _has(record, "chosen") and _has(record, "rejected"):
        return "preference"
    for key, usual in zip(TURN_LISTS, ("sharegpt", "openai"), strict=True):
        if _has(record, key):
            return _turn_schema(as_list(record[key]) or [], usual)
    if _has(record, "instruction") and _has(record, "output"):
        return "alpaca"
    if _first(record, PROMPTS) is not None and _first(record, ANSWERS) is not None:
        return "prompt_response"
    return "text" if _has(record, "text") else None


def read_record(record: Any, schema: str = "auto") -> RawRecord:
    """The raw turns of a record.

    Args:
        record: a decoded record.
        schema: one of SCHEMAS refuses records of another form; "auto" reads each as what it is.
    Raises:
        Unreadable: not_an_object, no_turn_list, or other_schema; with the keys of the record.
    """
    if not isinstance(record, list | dict):
        raise Unreadable("not_an_object", f"the record is a {type(record).__name__}")
    found = schema_of(record)
    if found is None:
        raise Unreadable("no_turn_list", f"no known form; {_keys(record)}")
    if schema not in ("auto", found):
        raise Unreadable("other_schema", f"{found}, not {schema}; {_keys(record)}")
    if isinstance(record, list):
        return RawRecord(found, record, [])
    tools = as_list(record.get("tools")) or as_list(record.get("functions")) or []
    if found == "text":
        if not isinstance(record["text"], str):
            raise Unreadable(
                "no_turn_list", f"'text' is a {type(record['text']).__name__}, not a text"
            )
        return RawRecord(found, [], tools, record["text"])
    if found in ("sharegpt", "openai"):
        turns = _listed_turns(record)
    elif found == "preference":
        turns = _preferred(record)
    elif found == "alpaca":
        turns = _asked_and_answered(record, "instruction", "output")
    else:
        turns = _asked_and_answered(
            record,
            next(key for key in PROMPTS if _has(record, key)),
            next(key for key in ANSWERS if _has(record, key)),
        )
    return RawRecord(found, turns, tools)


def as_list(value: Any) -> list[Any] | None:
    """`value` as a list: a list, a struct of lists of one length, or either as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        lengths = {len(column) for column in value.values()}
        if len(lengths) == 1:
            return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    return None


def _listed_turns(record: dict[Any, Any]) -> list[Any]:
    key = next(key for key in TURN_LISTS if _has(record, key))
    turns = as_list(record[key])
    if turns is None:
        raise Unreadable(
            "no_turn_list", f"{key!r} is a {type(record[key]).__name__}, not a list of turns"
        )
    return turns if _names_system(turns) else [*_system(record), *turns]


def _preferred(record: dict[Any, Any]) -> list[Any]:
    chosen = _side(record["chosen"], "assistant")
    if any(_role(turn) not in ("assistant", "gpt") for turn in chosen):
        return chosen  # the whole conversation stands on the chosen side
    prompt = _first(record, (*PROMPTS, *TURN_LISTS))
    if prompt is None:
        raise Unreadable("no_turn_list", f"'chosen' answers nothing: no prompt; {_keys(record)}")
    return [*_system(record), *_side(prompt, "user"), *chosen]


def _asked_and_answered(record: dict[Any, Any], asked: str, answered: str) -> list[Any]:
    """System, history, prompt with its context, answer."""
    history = []
    for pair in as_list(record.get("history")) or []:
        if isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2:
            history += [_made("user", pair[0]), _made("assistant", pair[1])]
        else:
            history.append(pair)
    prompt, context = record[asked], _first(record, CONTEXTS)
    if isinstance(prompt, str) and isinstance(context, str) and context.strip():
        prompt = f"{prompt}\n\n{context}" if prompt.strip() else context
    answer = _side(record[answered], "assistant")
    return [*_system(record), *history, *_side(prompt, "user"), *answer]


def _side(value: Any, role: str) -> list[Any]:
    """A text, a turn or a list of turns, as turns."""
    if isinstance(value, Mapping) and not _role(value):
        value = as_list(value) or value
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, Mapping) else [_made(role, value)]


def _system(record: dict[Any, Any]) -> list[Any]:
    system = _first(record, SYSTEMS)
    return [] if system is None else [_made("system", system)]


def _made(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _names_system(turns: list[Any]) -> bool:
    return any(_role(turn) in ("system", "developer") for turn in turns)


def _role(turn: Any) -> str:
    role = _first(turn, ("from", "role")) if isinstance(turn, Mapping) else None
    return role.strip().lower() if isinstance(role, str) else ""


def _turn_schema(turns: list[Any], usual: str) -> str:
    for turn in turns:
        if isinstance(turn, dict):
            for key, schema in (("from", "sharegpt"), ("role", "openai")):
                if _has(turn, key):
                    return schema
    return usual


def _has(record: Mapping[Any, Any], key: str) -> bool:
    return record.get(key) is not None


def _first(record: Mapping[Any, Any], keys: Sequence[str]) -> Any:
    """The first value that is there and not null."""
    return next((record[key] for key in keys if _has(record, key)), None)


def _keys(record: Any) -> str:
    if not isinstance(record, dict):
        return f"a list of {len(record)}"
    return f"keys {sorted(map(str, record))[:_KEYS_SHOWN]}"
