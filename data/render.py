"""Conversation -> token ids and an exact mask of what the assistant wrote.

The whole text is rendered once by the tokenizer's own chat template and tokenised once, so the ids
are those that serving produces. Where an answer lies is proven by rendering, never by hunting for
marker tokens:

    text(messages[:i], add_generation_prompt=True)  must be a prefix of the full text;
                                                    answer i starts at its end
    text(messages[:i+1])                            must be a prefix of the full text;
                                                    what follows the content in it closes the turn

The span reaches from there through the last special token of that closing part (`<|im_end|>`, not
the newline behind it). A turn whose span cannot be proven (the template rewrites earlier turns,
puts text of its own before the content, or writes no special token) or whose border falls inside a
token is left unsupervised and counted; it is never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from .conversations import Conversation, Dropped


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation and, of the same length, whether the assistant wrote each one."""

    tokens: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class _Layout:
    """The full text and the [start, end) character spans of the proven answers."""

    text: str
    spans: list[tuple[int, int]]


class Renderer:
    """Renders conversations with one tokenizer and one set of template arguments.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        template_kwargs: passed to the template, e.g. {"enable_thinking": False}; part of the rows'
            identity.
    Raises:
        ValueError: the tokenizer has no chat template, or is not a fast one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an "
                "instruction-tuned "
                "target, or put chat_template.jinja into its folder"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._backend = plain_backend(tokenizer)
        self._special = re.compile(
            "|".join(
                re.escape(text) for text in sorted(special_texts(tokenizer), key=len, reverse=True)
            )
            or r"(?!)"
        )

    def render(
        self, conversations: Sequence[Conversation], turns: Counter[str]
    ) -> list[Rendered | Dropped]:
        """Render a batch; `turns` counts supervised and unproven turns by reason.

        Returns:
            one entry for each conversation, `Dropped` with the reason control_tokens,
            template_error or template_rewrites (no answer's place could be proven).
        """
        layouts = [self._layout(conversation, turns) for conversation in conversations]
        texts = [layout.text for layout in layouts if isinstance(layout, _Layout)]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        return [
            layout if isinstance(layout, Dropped) else _mark(next(encodings), layout.spans, turns)
            for layout in layouts
        ]

    def prompt(self, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        """Text and ids of messages with the generation prompt: what serving feeds before the
        answer.
        """
        text = self._text(messages, True)
        return text, self._backend.encode(text, add_special_tokens=False).ids

    def _layout(self, conversation: Conversation, turns: Counter[str]) -> _Layout | Dropped:
        for place, turn in enumerate(conversation.turns):
            if forged := self._special.search(turn.text):
                detail = (
                    f"turn {place + 1} ({turn.role}) holds the control token {forged.group()!r}"
                )
                return Dropped("control_tokens", conversation.id, detail)
        messages = conversation.messages()
        spans: list[tuple[int, int]] = []
        try:
            full = self._text(messages, False)
            for place, turn in enumerate(conversation.turns):
                if turn.role == "assistant":
                    span = self._span(full, messages, place)
                    if isinstance(span, str):
                        turns[span] += 1
                    else:
                        spans.append(span)
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            return Dropped(
                "template_error", conversation.id, f"{type(error).__name__}: {error}"[:300]
            )
        if not spans:
            return Dropped(
                "template_rewrites",
                conversation.id,
                "no answer's place in the rendered text could be proven",
            )
        return _Layout(full, spans)

    def _span(self, full: str, messages: list[dict[str, str]], place: int) -> tuple[int, int] | str:
        """Character span of the assistant turn `place`, or the name under which it is counted as
        unproven.
        """
        before = self._text(messages[:place], True)
        if not full.startswith(before):
            return "unproven_prompt_rewritten"
        last = place + 1 == len(messages)
        through = full if last else self._text(messages[: place + 1], False)
        if not full.startswith(through):
            return "unproven_answer_rewritten"
        content = messages[place]["content"]
        if not through.startswith(content, len(before)):
            content = content.strip()
            if not through.startswith(content, len(before)):
                return "unproven_content_changed"
        after = len(before) + len(content)
        closing = [match.end() for match in self._special.finditer(through, after)]
        return (len(before), closing[-1]) if closing else "unproven_no_end_of_turn"

    def _text(self, messages: list[dict[str, str]], generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **self._kwargs
        )
        assert isinstance(text, str)
        return text


def render(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any] | None = None,
) -> Rendered:
    """Render one conversation; see `Renderer` for many.

    Returns:
        ids and mask of equal length.
    Raises:
        ValueError: the conversation cannot be rendered; names its id and why.
    """
    rendered = Renderer(tokenizer, template_kwargs).render([conversation], Counter())[0]
    if isinstance(rendered, Dropped):
        raise ValueError(f"conversation {rendered.id!r}: {rendered.reason}: {rendered.message}")
    return rendered


def special_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Every text that becomes a control token when it stands in the input."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {text for text in added | set(tokenizer.all_special_tokens) if text}


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the fast tokenizer that adds, cuts and pads nothing, and whose offsets are
    untrimmed.

    The post-processor is left out: without special tokens it changes no id, only (ByteLevel) the
    offsets.
    """
    original: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if original is None:
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} gives no character offsets; convert it to a "
            "fast one "
            "(tokenizer.json)"
        )
    backend = Tokenizer.from_str(original.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _mark(encoding: Encoding, spans: list[tuple[int, int]], turns: Counter[str]) -> Rendered:
    """Character spans -> token mask; a token across a border leaves the whole turn out."""
    tokens = encoding.ids
    supervised = [False] * len(tokens)
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        begins = None if first is None else encoding.token_to_chars(first)
        ends = None if last is None else encoding.token_to_chars(last)
        if begins is None or ends is None or begins[0] != start or ends[1] != end:
            turns["unproven_token_across_border"] += 1
            continue
        assert first is not None and last is not None
        supervised[first : last + 1] = [True] * (last + 1 - first)
        turns["supervised"] += 1
    return Rendered(tokens, supervised)
