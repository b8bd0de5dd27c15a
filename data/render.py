"""Conversation -> token ids and an exact mask of what the assistant wrote.

A text is rendered by the tokenizer's own chat template and tokenised once, whole, so the ids are
those that serving produces. Where an answer lies is proven by rendering, never by hunting for
marker tokens:

    text(messages[:i], add_generation_prompt=True)  is what the model was served for answer i;
    text(messages[:i+1])                            must begin with it; what stands behind it is
                                                    the answer (see spans.py)

**Parts.** An answer joins the row of the one before it where its served prompt begins with that
row; where the template rewrites earlier turns (strips their thoughts, say) it begins a new row. So
a conversation gives one row for each stable prefix, mostly one, and every answer is supervised
once, behind the very text it was served.

The span reaches through the special token that ends the turn (`<|im_end|>`, not the newline behind
it). A turn whose span cannot be proven, whose border falls inside a token, whose prompt has other
ids when it is tokenised alone, or which the template's own `{% generation %}` blocks describe
otherwise, is left unsupervised and counted; it is never guessed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .backend import special_texts
from .clean import cut_before
from .conversations import Conversation, Dropped
from .marks import Layout, Marker, Part
from .spans import Answer, blocks_explain, find_answer

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as rows.

    Attributes:
        conversation: as rendered (shortened where a turn would have been forged).
        parts: one for each stable prefix with a proven answer, in order; none where nothing is.
        unproven: (turn, why) of each assistant turn that is not supervised.
    """

    conversation: Conversation
    parts: list[Part]
    unproven: list[tuple[int, str]]


class Renderer:
    """Renders conversations with one tokenizer and one set of template arguments.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        template_kwargs: passed to the template, e.g. {"enable_thinking": False}; part of the rows'
            identity.
        control_tokens: what to do about text that spells a control token: "cut" the conversation
            before that turn, or "drop" it.
    Raises:
        ValueError: the tokenizer has no chat template, or is not a fast one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any] | None = None,
        control_tokens: str = "cut",
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an "
                "instruction-tuned target, or put chat_template.jinja into its folder"
            )
        self._marker = Marker(tokenizer)
        self._tokenizer = tokenizer
        self._kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._control_tokens = control_tokens
        texts = sorted(special_texts(tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._templates: dict[bool, tuple[str, bool]] = {}

    def render(
        self, conversations: Sequence[Conversation], turns: Counter[str]
    ) -> list[Rendered | Dropped]:
        """Render a batch; `turns` counts supervised and unproven turns by reason, and cuts.

        Returns:
            one entry for each conversation, `Dropped` with the reason control_tokens or
            template_error.
        Raises:
            ValueError: the template writes the token that begins a text twice.
        """
        found = [self._layout(conversation, turns) for conversation in conversations]
        marked = self._marker.mark(
            [layout for each in found if not isinstance(each, Dropped) for layout in each[1]]
        )
        results: list[Rendered | Dropped] = []
        for each in found:
            if isinstance(each, Dropped):
                results.append(each)
                continue
            conversation, layouts, unproven = each
            parts: list[Part] = []
            for _ in layouts:
                part, failed = next(marked)
                unproven += failed
                if any(part.supervised):
                    parts.append(part)
            for _, reason in unproven:
                turns[reason] += 1
            answers = sum(turn.role == "assistant" for turn in conversation.turns)
            turns["supervised"] += answers - len(unproven)
            results.append(Rendered(conversation, parts, sorted(unproven)))
        return results

    def forgery(self, conversation: Conversation) -> tuple[int, str] | None:
        """The first turn (-1 is the list of tools) with a text that spells a control token, and
        which token it is, in words; None where there is none.
        """
        for place, who, text in _texts(conversation):
            if forged := self._special.search(text):
                return place, f"{who} holds the control token {forged.group()!r}"
        return None

    def prompt(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        """Text and ids of messages with the generation prompt: what serving feeds before the
        answer.

        Raises:
            ValueError: the template refuses the messages; says why.
        """
        try:
            text, _ = self._text(messages, tools, True)
        except _TEMPLATE_ERRORS as error:
            raise ValueError(
                f"the chat template refuses the messages ({type(error).__name__}: {error})"
            ) from error
        return text, self._marker.ids(text)

    def describe(self) -> dict[str, Any]:
        """What the template does of its own, for the ledger: `default_system` (the system text that
        it adds where a conversation has none, or null), `system_role` (whether it takes one),
        `generation_blocks`, `writes_bos`, `dated` (it writes the day's date).
        """
        question, order = {"role": "user", "content": "QUESTION"}, "INSTRUCTION"
        plain = self._attempt([question])
        own = self._attempt([{"role": "system", "content": order}, question])
        begins, _, ends = (own or "").partition(order)
        default = None
        if plain and own and plain.startswith(begins) and plain.endswith(ends):
            default = plain[len(begins) : len(plain) - len(ends)] or None
        bos = self._tokenizer.bos_token
        template, has_blocks = self._template(())
        return {
            "default_system": default,
            "system_role": own is not None and order in own,
            "generation_blocks": has_blocks,
            "writes_bos": bool(bos and plain and plain.startswith(str(bos))),
            "dated": "strftime_now" in template and "date_string" not in self._kwargs,
        }

    def _attempt(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self._text(messages, (), True)[0]
        except _TEMPLATE_ERRORS:
            return None

    def _layout(
        self, conversation: Conversation, turns: Counter[str]
    ) -> tuple[Conversation, list[Layout], list[tuple[int, str]]] | Dropped:
        """The parts of a conversation, and its unproven turns."""
        if conversation.raw:
            return conversation, [Layout(conversation.raw, raw=True)], []
        guarded = self._guard(conversation, turns)
        if isinstance(guarded, Dropped):
            return guarded
        messages = guarded.messages()
        parts: list[Layout] = []
        unproven: list[tuple[int, str]] = []
        failure: Exception | None = None
        for place, turn in enumerate(guarded.turns):
            if turn.role != "assistant":
                continue
            try:
                found = self._answer(messages, guarded.tools, place)
            except _TEMPLATE_ERRORS as error:
                failure = error
                found = "unproven_template_error"
            if isinstance(found, str):
                unproven.append((place, found))
                continue
            before, text, answer = found
            self._refuse_two_bos(text)
            if not parts or not before.startswith(parts[-1].text):
                parts.append(Layout(""))
            parts[-1].text = text
            parts[-1].answers.append((place, answer))
        if failure is not None and not parts:
            detail = f"{type(failure).__name__}: {failure}"[:300]
            return Dropped("template_error", guarded.id, detail)
        return guarded, parts, unproven

    def _guard(self, conversation: Conversation, turns: Counter[str]) -> Conversation | Dropped:
        """No text may spell a control token: it could forge a turn."""
        found = self.forgery(conversation)
        if found is None:
            return conversation
        place, detail = found
        dropped = Dropped("control_tokens", conversation.id, detail)
        if place < 0 or self._control_tokens == "drop":
            return dropped
        cut = cut_before(conversation, place, turns, "control_tokens")
        return cut if not isinstance(cut, Dropped) else dropped

    def _answer(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], place: int
    ) -> tuple[str, str, Answer] | str:
        """What was served for the assistant turn `place`, the text through its end, and where it
        lies; or the name under which it is counted as unproven.
        """
        before, _ = self._text(messages[:place], tools, True)
        text, blocks = self._text(messages[: place + 1], tools, False)
        if not text.startswith(before):
            return "unproven_prompt_rewritten"
        answer = find_answer(text, len(before), messages[place], self._special)
        if isinstance(answer, str):
            return answer
        if blocks is not None and not blocks_explain(blocks, text, answer):
            return "unproven_generation_block"
        return before, text[: answer.end], answer

    def _refuse_two_bos(self, text: str) -> None:
        bos = str(self._tokenizer.bos_token or "")
        if bos and text.lstrip().removeprefix(bos).lstrip().startswith(bos):
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} writes {bos!r} twice at "
                "the start of a text; write it once in chat_template.jinja (no other is added here)"
            )

    def _template(self, tools: Sequence[dict[str, Any]]) -> tuple[str, bool]:
        """The template for conversations with or without tools, and whether it has generation
        blocks."""
        if bool(tools) not in self._templates:
            text = self._tokenizer.get_chat_template(None, list(tools) or None)
            self._templates[bool(tools)] = text, bool(_GENERATION.search(text))
        return self._templates[bool(tools)]

    def _text(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        generation_prompt: bool,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The rendered text; without a generation prompt also the template's generation blocks,
        None where it has none.
        """
        template, has_blocks = self._template(tools)
        blocks = has_blocks and not generation_prompt
        rendered: Any = render_jinja_template(  # (texts, blocks of each), whatever it declares
            conversations=[messages],
            tools=list(tools) or None,
            chat_template=template,
            return_assistant_tokens_mask=blocks,
            add_generation_prompt=generation_prompt,
            **self._kwargs,
        )
        return rendered[0][0], rendered[1][0] if blocks else None


_TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)


def render(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any] | None = None,
) -> Rendered:
    """Render one conversation; see `Renderer` for many.

    Raises:
        ValueError: the conversation cannot be rendered or no answer is proven; names its id and
            why.
    """
    rendered = Renderer(tokenizer, template_kwargs).render([conversation], Counter())[0]
    if isinstance(rendered, Dropped):
        raise ValueError(f"conversation {rendered.id!r}: {rendered.reason}: {rendered.message}")
    if not rendered.parts:
        raise ValueError(f"conversation {conversation.id!r}: unproven: {rendered.unproven}")
    return rendered


def _texts(conversation: Conversation) -> Iterator[tuple[int, str, str]]:
    """(turn or -1, whose words, text) of everything that the template writes."""
    if conversation.tools:
        yield -1, "the list of tools", json.dumps(conversation.tools, ensure_ascii=False)
    for place, turn in enumerate(conversation.turns):
        who = f"turn {place + 1} ({turn.role})"
        yield place, who, turn.text
        if turn.reasoning:
            yield place, who, turn.reasoning
        if turn.name:
            yield place, who, turn.name
        if turn.tool_calls:
            yield place, who, json.dumps(turn.tool_calls, ensure_ascii=False)
