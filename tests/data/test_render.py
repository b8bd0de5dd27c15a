"""The mask is exact: what the assistant wrote with its end of turn, nothing else, or nothing at
all.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import PreTrainedTokenizerBase

from draftsmith.data.conversations import Conversation, Dropped, Turn
from draftsmith.data.render import Renderer, plain_backend, render
from draftsmith.kernels.shift import supervision

END = "<|im_end|>"


def conversation(*texts: str, system: str | None = None, name: str = "x") -> Conversation:
    """User and assistant by turns."""
    turns = [Turn(("user", "assistant")[place % 2], text) for place, text in enumerate(texts)]
    return Conversation(name, (*([Turn("system", system)] if system else []), *turns))


def spans(tokens: list[int], supervised: list[bool], tokenizer: Any) -> list[str]:
    """The decoded supervised runs."""
    runs: list[list[int]] = []
    for place, (token, flag) in enumerate(zip(tokens, supervised, strict=True)):
        if flag and (place == 0 or not supervised[place - 1]):
            runs.append([])
        if flag:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def answers(tokenizer: Any, talk: Conversation, **kwargs: Any) -> list[str]:
    rendered = render(talk, tokenizer, kwargs)
    return spans(rendered.tokens, rendered.supervised, tokenizer)


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_two_rounds_give_the_five_draft_rows(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 1: row p learns iff x_{p+1} and x_{p+2} are the assistant's: p = 30, 31, 45, 46, 47."""
    rendered = render(conversation("Hi", "Hello!", "Bye", "Goodbye."), smollm2_tokenizer)
    starts = torch.tensor([0, len(rendered.tokens)])
    mask = supervision(torch.tensor(rendered.supervised), starts, 1)[0]
    assert mask.nonzero().flatten().tolist() == [30, 31, 45, 46, 47]


@pytest.mark.parametrize(
    "answer",
    [
        "no",
        "'tis",
        "7",
        " led by a space",
        "😀 smile",
        "é",
        "x" * 400,
        "ends in space ",
        "ends in newline\n",
        "assistant\nassistant",
        "日本語のテキスト",
        "```python\nprint('a')\n```",
    ],
)
def test_supervised_text_is_the_answer_and_its_end(
    smollm2_tokenizer: PreTrainedTokenizerBase, answer: str
) -> None:
    """Cases 20-22: also where the answer occurs earlier, is one token, or begins with any
    character.
    """
    talk = conversation(f"Say yes or {answer}", answer, "Again", answer, system="Be short: no.")
    assert answers(smollm2_tokenizer, talk) == [answer + END] * 2


def test_one_token_answer_has_two_labels(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 22: the token and the end of turn."""
    rendered = render(conversation("Say yes or no", "no"), smollm2_tokenizer)
    assert sum(rendered.supervised) == 2


def test_ids_are_those_of_serving(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Cases 27, 33: the whole equals the template's own tokenisation, and each prompt is its
    prefix.
    """
    talk = conversation("Hi ", " Hello!  ", "a\n\nb", "'c' 😀\n", system="You are terse.")
    rendered = render(talk, smollm2_tokenizer)
    messages = talk.messages()
    served = smollm2_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert rendered.tokens == list(served["input_ids"])  # pyright: ignore
    for place in (2, 4):
        prompt = Renderer(smollm2_tokenizer).prompt(messages[:place])[1]
        assert rendered.tokens[: len(prompt)] == prompt
        assert rendered.supervised[len(prompt) - 1 : len(prompt) + 1] == [False, True]


def test_own_system_prompt_replaces_the_default(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 36: the data's system turn is kept, and the template's own is not added."""
    text = smollm2_tokenizer.decode(
        render(conversation("q", "a", system="Mine."), smollm2_tokenizer).tokens
    )
    assert "Mine." in text
    assert "SmolLM" not in text


def test_every_end_of_turn_is_kept_although_pad_is_eos(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Case 30: the mask never looks at ids, so pad = eos costs no label."""
    assert smollm2_tokenizer.pad_token_id == smollm2_tokenizer.eos_token_id == 2
    rendered = render(conversation("q", "a", "r", "b"), smollm2_tokenizer)
    ends = [
        flag for token, flag in zip(rendered.tokens, rendered.supervised, strict=True) if token == 2
    ]
    assert ends == [False, False, True, False, True]


def test_a_token_across_the_border_leaves_the_turn_out(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """An answer that begins with empty lines shares a token with the newline in front of it."""
    counts: Counter[str] = Counter()
    [rendered] = Renderer(smollm2_tokenizer).render([conversation("q", "\n\na", "r", "b")], counts)
    assert not isinstance(rendered, Dropped)
    assert spans(rendered.tokens, rendered.supervised, smollm2_tokenizer) == ["b" + END]
    assert counts == {"unproven_token_across_border": 1, "supervised": 1}


def test_control_tokens_in_the_text(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Text that would become a control token can forge a turn: the record is left out by reason."""
    counts: Counter[str] = Counter()
    talks = [
        conversation("q <|im_end|>", "a", name="user"),
        conversation("q", "a<|endoftext|>", name="answer"),
        conversation("q", "a <|im_end|", name="harmless"),
    ]
    user, answer, harmless = Renderer(smollm2_tokenizer).render(talks, counts)
    assert isinstance(user, Dropped)
    assert (user.reason, user.id) == ("control_tokens", "user")
    assert user.message == "turn 1 (user) holds the control token '<|im_end|>'"
    assert isinstance(answer, Dropped)
    assert answer.message == "turn 2 (assistant) holds the control token '<|endoftext|>'"
    assert not isinstance(harmless, Dropped)


def test_template_that_needs_a_user_turn(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 25: no prefix is rendered that ends before a user turn."""
    template = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user') }}{% endif %}" + CHATML
    )
    other = with_template(smollm2_tokenizer, template)
    assert answers(other, conversation("q", "a", system="s")) == ["a" + END]


def test_template_error_names_the_record(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 55: an alternation rule that is broken becomes a reason with the id; others go on."""
    template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    )
    renderer = Renderer(with_template(smollm2_tokenizer, template))
    bad = conversation("q", "a", system="s", name="rec-7")
    dropped, good = renderer.render([bad, conversation("q", "a")], Counter())
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.id) == ("template_error", "rec-7")
    assert "roles must alternate" in dropped.message
    assert not isinstance(good, Dropped)
    with pytest.raises(ValueError, match="'rec-7': template_error: .*roles must alternate"):
        render(bad, with_template(smollm2_tokenizer, template))


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_template_that_rewrites_earlier_answers(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Cases 23, 24: only an answer whose served prompt is a prefix of the text is trained on."""
    renderer = Renderer(with_template(smollm2_tokenizer, THINKING), {"enable_thinking": False})
    counts: Counter[str] = Counter()
    [rendered] = renderer.render([conversation("q", "a", "r", "b")], counts)
    assert not isinstance(rendered, Dropped)
    assert spans(rendered.tokens, rendered.supervised, smollm2_tokenizer) == ["b" + END]
    assert counts == {"unproven_prompt_rewritten": 1, "supervised": 1}


def test_template_arguments_that_do_not_fit_the_data(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Case 23: with thinking on, the block that the template inserts was not written by the
    assistant.
    """
    renderer = Renderer(with_template(smollm2_tokenizer, THINKING))
    counts: Counter[str] = Counter()
    [dropped] = renderer.render([conversation("q", "a", "r", "b", name="n")], counts)
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.id) == ("template_rewrites", "n")
    assert counts == {"unproven_answer_rewritten": 1, "unproven_content_changed": 1}


def test_template_that_strips(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A stripped answer is still found where the prompt ends."""
    other = with_template(smollm2_tokenizer, CHATML.replace("m['content']", "m['content'] | trim"))
    assert answers(other, conversation(" q ", "  a \n")) == ["a" + END]


def test_template_without_an_end_token(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a token that ends a turn nothing is proven."""
    other = with_template(smollm2_tokenizer, CHATML.replace("<|im_end|>", ""))
    counts: Counter[str] = Counter()
    [dropped] = Renderer(other).render([conversation("q", "a")], counts)
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "template_rewrites"
    assert counts == {"unproven_no_end_of_turn": 1}


def test_end_of_turn_that_is_not_eos(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 26: the end of turn is found by structure, whatever the tokenizer calls eos."""
    template = CHATML.replace("<|im_end|>", "<file_sep>")
    other = with_template(smollm2_tokenizer, template)
    assert other.eos_token == END
    talk = conversation("assistant", "assistant\nassistant", "assistant", "assistant")
    assert answers(other, talk) == ["assistant\nassistant<file_sep>", "assistant<file_sep>"]


def test_one_bos(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 29: the template's BOS is the only one although the tokenizer would prepend its own."""
    other = with_template(smollm2_tokenizer, "<|endoftext|>" + CHATML)
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert other("x")["input_ids"][0] == 0
    assert render(conversation("q", "a"), other).tokens[:2] == [0, 1]


def test_trimmed_offsets_do_not_move_the_border(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A byte-level post-processor that trims offsets would hide an answer's leading space."""
    other = with_template(smollm2_tokenizer, None)
    other.chat_template = CHATML
    other.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    assert answers(other, conversation("q", " spaced")) == [" spaced" + END]
    assert other.backend_tokenizer.post_processor is not None


def test_truncation_and_padding_of_the_tokenizer_are_ignored(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """A tokenizer that was left with truncation on does not cut our text."""
    other: Any = copy.deepcopy(smollm2_tokenizer)
    other.backend_tokenizer.enable_truncation(5)
    other.backend_tokenizer.enable_padding(length=4096)
    text = "one two three four five six seven eight nine"
    ids = plain_backend(other).encode(text, add_special_tokens=False).ids
    assert ids == smollm2_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_no_template_is_refused(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A tokenizer without a template cannot make rows, and says so before any work."""
    with pytest.raises(ValueError, match="no chat template; use an instruction-tuned target"):
        Renderer(with_template(smollm2_tokenizer, None))


def test_slow_tokenizer_is_refused(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Without character offsets no border can be proven."""

    class Slow:
        chat_template = CHATML
        name_or_path = "slow"

    with pytest.raises(ValueError, match="Slow gives no character offsets"):
        Renderer(Slow())  # pyright: ignore[reportArgumentType]
