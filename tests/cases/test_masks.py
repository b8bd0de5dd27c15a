"""Known faults of chat templates and loss masks, each under its number: the mask is what the model
would have written behind the ids it would have been served, or nothing.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from draftsmith.data.conversations import Conversation, Dropped, Turn
from draftsmith.data.render import Rendered, Renderer, render
from draftsmith.data.rows import Prepared, Rows, RowsConfig, prepare
from draftsmith.kernels.shift import supervision

END = "<|im_end|>"
FINGERPRINT = {"tokenizer": "t", "chat_template": "c"}
Make = Callable[..., Prepared]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts are shown in the last answer and stripped from earlier ones; with thinking off, the
# generation prompt holds an empty block.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set parts = m['content'].split('</think>') %}"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n"
    "{{ (m['reasoning_content'] or parts[0].split('<think>')[-1] if parts | length > 1 "
    "or m['reasoning_content'] else '') | trim }}\n</think>\n{% endif %}"
    "{{ parts[-1].lstrip('\\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def conversation(*texts: str, system: str | None = None, name: str = "x") -> Conversation:
    """User and assistant by turns."""
    turns = [Turn(("user", "assistant")[place % 2], text) for place, text in enumerate(texts)]
    return Conversation(name, (*([Turn("system", system)] if system else []), *turns))


def talk(name: str, *texts: str) -> dict[str, Any]:
    """A ShareGPT record."""
    turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    return {"id": name, "conversations": turns}


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def learnt(rendered: Rendered, tokenizer: Any) -> list[list[str]]:
    """The decoded supervised runs of each part."""
    found = []
    for part in rendered.parts:
        mask = np.array(part.supervised)
        borders = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
        runs = np.split(np.arange(len(mask)), borders)
        found.append([tokenizer.decode(np.array(part.tokens)[run]) for run in runs if mask[run[0]]])
    return found


def answers(tokenizer: Any, chat: Conversation, **kwargs: Any) -> list[str]:
    """The decoded supervised runs of a conversation of one part."""
    [runs] = learnt(render(chat, tokenizer, kwargs), tokenizer)
    return runs


@pytest.fixture
def make(tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase) -> Make:
    """prepare(records, tokenizer=None, **settings)."""

    def run(records: list[Any], tokenizer: Any = None, **settings: Any) -> Prepared:
        path = tmp_path / "chats.json"
        path.write_text(json.dumps(records))
        config = RowsConfig(str(path), **{"holdout": 0, "max_length": 2048, **settings})
        return prepare(config, tokenizer or smollm2_tokenizer, FINGERPRINT, tmp_path / "rows")

    return run


def test_case_01_first_draft_position_is_supervised(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Inputs shifted without their mask leave the first position of each answer untrained. Right:
    row p learns iff x_{p+1} and x_{p+2} are the assistant's: p = 30, 31, 45, 46, 47.
    """
    [part] = render(conversation("Hi", "Hello!", "Bye", "Goodbye."), smollm2_tokenizer).parts
    starts = torch.tensor([0, len(part.tokens)])
    mask = supervision(torch.tensor(part.supervised), starts, 1)[0]
    assert mask.nonzero().flatten().tolist() == [30, 31, 45, 46, 47]


def test_case_16_ids_and_mask_are_one_record(make: Make) -> None:
    """A mask that is paired later with ids of another tokenisation is silently wrong. Right: ids
    and mask lie in one row, whose hash is over its ids, and a foreign tokenizer is refused.
    """
    rows = Rows.open(make([talk("a", "Hi", "Hello!")]).folder)
    assert len(rows[0].tokens) == len(rows[0].supervised)
    with pytest.raises(ValueError, match="chat_template of the rows is 'c', the target's is 'd'"):
        rows.require_tokenizer({"tokenizer": "t", "chat_template": "d"})


def test_case_17_no_generation_tags(make: Make, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A template without generation tags must not turn the mask to all ones. Right: spans are
    proven by rendering, and a template that writes the answers alone is refused.
    """
    assert "generation %}" not in str(smollm2_tokenizer.chat_template)
    [part] = render(conversation("Hi", "Hello!"), smollm2_tokenizer).parts
    assert sum(part.supervised) == 3 < len(part.tokens)
    bare = with_template(
        smollm2_tokenizer,
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>"
        "{% endif %}{% endfor %}",
    )
    with pytest.raises(ValueError, match="every token of every row is supervised"):
        make([talk("a", "q", "answer"), talk("b", "q", "other")], bare)


def test_case_18_nothing_supervised(make: Make) -> None:
    """An all-zero mask trains on nothing and looks like training. Right: it stops with the
    reasons; the share of supervised tokens is always in the ledger.
    """
    long = [talk("a", "word " * 90, "x"), talk("b", "word " * 91, "y")]
    with pytest.raises(ValueError, match="2 records read, 0 kept, dropped: 2 emptied_by_trunc"):
        make(long, max_length=50)
    tokens = make([talk("a", "Hi", "Hello!")]).ledger["tokens"]
    assert (tokens["total"], tokens["supervised"], tokens["on_policy"]) == (34, 3, 0)


def test_case_19_role_marker_that_merges(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A role marker tokenised alone is not found where it merges with its neighbours. Right: spans
    come from rendering; where a token crosses the border, the turn is left out and counted.
    """
    glued = CHATML.replace("{{ m['role'] }}\n", "{{ m['role'] }}:").replace(
        "assistant\n{% endif", "assistant:{% endif"
    )
    other = with_template(smollm2_tokenizer, glued)
    assert answers(other, conversation("q", "Yes.")) == ["Yes." + END]
    counts: Counter[str] = Counter()
    [rendered] = Renderer(smollm2_tokenizer).render([conversation("q", "\n\na", "r", "b")], counts)
    assert isinstance(rendered, Rendered)
    assert learnt(rendered, smollm2_tokenizer) == [["b" + END]]
    assert rendered.unproven == [(1, "unproven_token_across_border")]
    assert counts == {"unproven_token_across_border": 1, "supervised": 1}


@pytest.mark.parametrize("answer", ["no", "yes or no", "assistant\nassistant", "x" * 400])
def test_case_20_answer_that_occurs_earlier(
    smollm2_tokenizer: PreTrainedTokenizerBase, answer: str
) -> None:
    """Looked up by its words, a short answer is found at the wrong place and loses its end of
    turn. Right: the supervised text is the answer and its end of turn, nothing else.
    """
    chat = conversation(f"Say yes or {answer}", answer, "Again", answer, system="Be short: no.")
    assert answers(smollm2_tokenizer, chat) == [answer + END] * 2


@pytest.mark.parametrize(
    "answer",
    [
        "'tis",
        "7",
        " led by a space",
        "😀 smile",
        "é",
        "日本語のテキスト",
        "```python\nprint('a')\n```",
    ],
)
def test_case_21_first_character(smollm2_tokenizer: PreTrainedTokenizerBase, answer: str) -> None:
    """A mask that begins one character late teaches a loop. Right: any first character is
    supervised, white space and many-byte signs included.
    """
    assert answers(smollm2_tokenizer, conversation("q", answer)) == [answer + END]


def test_case_22_one_token_answer(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Mask and labels cut differently leave the first answer token untrained. Right: an answer of
    one token has two labels, itself and the end of turn.
    """
    [part] = render(conversation("Say yes or no", "no"), smollm2_tokenizer).parts
    assert sum(part.supervised) == 2


def test_case_23_empty_thinking_block(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Answers written without thinking, under a template that inserts an empty block, are not what
    the model would write. Right: unproven and counted while the generation prompt lacks the block;
    supervised with the argument that puts it there; the argument is part of the rows' identity.
    """
    other = with_template(smollm2_tokenizer, THINKING)
    counts: Counter[str] = Counter()
    [rendered] = Renderer(other).render([conversation("q", "a", "r", "b")], counts)
    assert isinstance(rendered, Rendered)
    assert rendered.parts == []
    assert counts == {"unproven_content_changed": 2, "supervised": 0}
    off = render(conversation("q", "a", "r", "b"), other, {"enable_thinking": False})
    assert learnt(off, other) == [["a" + END], ["b" + END]]
    assert off.unproven == []


def test_case_23_template_arguments_change_the_key(make: Make) -> None:
    """Rows made with other template arguments are other rows."""
    first = make([talk("a", "q", "a")])
    second = make([talk("a", "q", "a")], template_kwargs={"enable_thinking": False})
    assert second.changed == ("template_kwargs",)
    assert first.manifest["key"] != second.manifest["key"]


@pytest.mark.parametrize(
    "turn",
    [
        Turn("assistant", "a", reasoning="because"),
        Turn("assistant", "<think>because</think>a"),
        Turn("assistant", "<think>\nbecause\n</think>\n\na"),
    ],
)
def test_case_24_thoughts_that_are_forgotten_later(
    smollm2_tokenizer: PreTrainedTokenizerBase, turn: Turn
) -> None:
    """A template that strips earlier thoughts shows an answer otherwise once it is history. Right:
    one row for each stable prefix; each answer is supervised once, thoughts included, behind the
    very ids it was served.
    """
    other = with_template(smollm2_tokenizer, THINKING)
    last = Turn("assistant", "b", reasoning="so")
    chat = Conversation("x", (Turn("user", "q"), turn, Turn("user", "r"), last))
    rendered = render(chat, other)
    thought = "<think>\nbecause\n</think>\na" + END
    assert learnt(rendered, other) == [[thought], ["<think>\nso\n</think>\nb" + END]]
    for part, place in zip(rendered.parts, (1, 3), strict=True):
        served = Renderer(other).prompt(chat.messages()[:place])[1]
        assert part.tokens[: len(served)] == served
        assert part.supervised == [False] * len(served) + [True] * (len(part.tokens) - len(served))
    assert "because" not in other.decode(rendered.parts[1].tokens)


def test_case_24_prompt_that_opens_the_thought(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Behind a generation prompt that ends with the opening tag the model writes the thought and
    the closing tag. Right: that, and the answer, are supervised; an answer that the template shows
    without its opening tag is unproven.
    """
    opens = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and keep | default(true) %}<think>\n{% endif %}"
        "{{ m['content'].split('</think>')[-1] if not keep | default(true) else m['content'] }}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    other = with_template(smollm2_tokenizer, opens)
    chat = conversation("q", "hm\n</think>\n\na")
    assert answers(other, chat) == ["hm\n</think>\n\na" + END]
    counts: Counter[str] = Counter()
    [rendered] = Renderer(other, {"keep": False}).render([chat], counts)
    assert isinstance(rendered, Rendered)
    assert rendered.unproven == [(1, "unproven_prompt_rewritten")]


def test_case_24_thoughts_that_the_template_never_shows(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """An answer whose thoughts are left out of the text was not written behind that prompt."""
    chat = Conversation("x", (Turn("user", "q"), Turn("assistant", "a", reasoning="because")))
    [rendered] = Renderer(smollm2_tokenizer).render([chat], Counter())
    assert isinstance(rendered, Rendered)
    assert rendered.unproven == [(1, "unproven_reasoning_left_out")]


def test_case_25_prefix_without_a_user_turn(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A mask by growing prefixes crashes where a lone system turn is illegal. Right: only prefixes
    that end before or behind an answer are rendered.
    """
    template = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user') }}{% endif %}" + CHATML
    )
    other = with_template(smollm2_tokenizer, template)
    assert answers(other, conversation("q", "a", system="s")) == ["a" + END]


def test_case_25_strict_alternation(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A template that raises costs the record whose order it refuses, with its id; others go on.
    A space that it writes before the answer is the model's to write.
    """
    other = with_template(smollm2_tokenizer, STRICT)
    bad = conversation("q", "a", system="s", name="rec-7")
    dropped, good = Renderer(other).render([bad, conversation("q", "a", "r", "b")], Counter())
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.id) == ("template_error", "rec-7")
    assert "roles must alternate" in dropped.message
    assert isinstance(good, Rendered)
    assert learnt(good, other) == [[" a" + END, " b" + END]]


def test_case_26_end_of_turn_that_is_not_eos(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Matching markers anywhere blanks out a real answer where the end of turn is not EOS. Right:
    the end is found by structure, whatever the tokenizer calls EOS.
    """
    other = with_template(smollm2_tokenizer, CHATML.replace(END, "<file_sep>"))
    assert other.eos_token == END
    chat = conversation("assistant", "assistant\nassistant", "assistant", "assistant")
    assert answers(other, chat) == ["assistant\nassistant<file_sep>", "assistant<file_sep>"]


def test_case_27_ids_are_those_of_serving(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A simplified template for masks differs from the one in serving. Right: the row equals the
    template's own tokenisation of the chat, and each served prompt is its prefix.
    """
    chat = conversation("Hi ", " Hello!  ", "a\n\nb", "'c' 😀\n", system="You are terse.")
    [part] = render(chat, smollm2_tokenizer).parts
    served: Any = smollm2_tokenizer.apply_chat_template(chat.messages(), return_dict=True)
    assert part.tokens == list(served["input_ids"])[: len(part.tokens)]
    assert part.tokens[-1] == 2
    for place in (2, 4):
        prompt = Renderer(smollm2_tokenizer).prompt(chat.messages()[:place])[1]
        assert part.tokens[: len(prompt)] == prompt
        assert part.supervised[len(prompt) - 1 : len(prompt) + 1] == [False, True]


def test_case_27_prompt_with_other_ids(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A prompt whose last tokens change once the answer stands behind it is not what was served:
    this tokenizer parts two newlines before a word. Right: unproven and counted.
    """
    other = with_template(
        smollm2_tokenizer,
        CHATML.replace("'] }}\n", "'] }}\n\n").replace("assistant\n", "assistant\n\n"),
    )
    [rendered] = Renderer(other).render([conversation("q", "a")], Counter())
    assert isinstance(rendered, Rendered)
    assert rendered.parts == []
    assert rendered.unproven == [(1, "unproven_prompt_ids")]


def test_case_28_rows_in_are_rows_out_and_drops(make: Make) -> None:
    """Rows that vanish between two lists are noticed by nobody. Right: records read = kept + the
    sum of drops by reason, a thousand of them.
    """
    records: list[Any] = [talk(f"r{n}", f"q {n}", f"a {n}") for n in range(1000)]
    records[10::100] = [talk("empty")] * 10
    done = make(records)
    assert done.ledger["records"]["read"] == 1000
    assert done.ledger["records"]["kept"] == 990 == len(Rows.open(done.folder))
    assert done.ledger["records"]["dropped"] == {"empty": 10}


def test_case_29_one_bos(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """The template writes a BOS and the tokenizer adds another. Right: the template's is the only
    one; two in the text itself are refused with the remedy.
    """
    other = with_template(smollm2_tokenizer, "{{ bos_token }}" + CHATML)
    other.bos_token = "<|endoftext|>"
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert other("x")["input_ids"][0] == 0
    assert render(conversation("q", "a"), other).parts[0].tokens[:2] == [0, 1]
    other.chat_template = "{{ bos_token }}" + str(other.chat_template)
    with pytest.raises(ValueError, match="writes '<.endoftext.>' twice .* write it once in chat_t"):
        render(conversation("q", "a"), other)


def test_case_30_pad_is_eos(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A mask by "id == pad" erases true ends of turn where pad is EOS. Right: the mask never looks
    at ids, and every end of turn of the assistant is a label.
    """
    assert smollm2_tokenizer.pad_token_id == smollm2_tokenizer.eos_token_id == 2
    [part] = render(conversation("q", "a", "r", "b"), smollm2_tokenizer).parts
    flags = [on for token, on in zip(part.tokens, part.supervised, strict=True) if token == 2]
    assert flags == [False, False, True, False, True]


@pytest.mark.parametrize(("limit", "kept", "cut"), [(33, 2, 1), (34, 3, 0), (35, 3, 0)])
def test_case_31_answers_cut_by_the_length(make: Make, limit: int, kept: int, cut: int) -> None:
    """Rows that end within an answer teach "never stop". Right: they are counted. The answer
    Hello! lies at 31..33.
    """
    done = make([talk("a", "Hi", "Hello!")], max_length=limit)
    [row] = Rows.open(done.folder)
    assert row.supervised.sum() == kept
    assert done.ledger["rows"]["cut_mid_answer"] == cut


def test_case_31_choices(make: Make) -> None:
    """Kept, cut back to the last whole answer, or dropped with its reason."""
    records = [talk("two", "Hi", "Hello!", "Bye", "Goodbye my dear."), talk("one", "Hi", "Hello!")]
    lengths = {}
    for choice in ("keep", "trim", "drop"):
        done = make(records, max_length=48, cut_mid_answer=choice)
        lengths[choice] = {row.id: len(row.tokens) for row in Rows.open(done.folder)}
    assert lengths == {
        "keep": {"two": 48, "one": 34},
        "trim": {"two": 34, "one": 34},
        "drop": {"one": 34},
    }
    records = [talk("cut", "Hi", "Hello! " * 50), talk("one", "Hi", "Hello!")]
    done = make(records, max_length=40, cut_mid_answer="trim")
    assert done.ledger["records"]["dropped"] == {"no_whole_answer": 1}


def test_case_32_long_last_prompt(make: Make) -> None:
    """A long last prompt must not cost the good answers before it. Right: the first answer stays,
    the useless tail goes.
    """
    done = make([talk("a", "Hi", "Hello!", "word " * 5000, "late")], max_length=1024)
    [row] = Rows.open(done.folder)
    assert len(row.tokens) == 34
    assert row.supervised.sum() == 3
    assert done.ledger["rows"]["truncated"] == 1
    assert done.ledger["rows"]["cut_mid_answer"] == 0


def test_case_33_ids_are_integers(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Iterating the mapping that a tokenizer returns gives the names of its fields. Right: ids."""
    [part] = render(conversation("q", "a"), smollm2_tokenizer).parts
    prompt = Renderer(smollm2_tokenizer).prompt([{"role": "user", "content": "q"}])[1]
    assert all(type(token) is int for token in [*part.tokens, *prompt])


def test_case_34_wholly_masked_data(make: Make, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Data without one label divides by zero. Right: refused, with the commonest reason and its
    remedy.
    """
    other = with_template(smollm2_tokenizer, THINKING)
    with pytest.raises(ValueError, match="no row keeps a supervised.*enable_thinking=false"):
        make([talk("a", "q", "a"), talk("b", "q", "b")], other)


def test_case_35_template_from_the_tokenizer(
    smollm2_folder: Path, tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A template picked by the model's name changes with the folder's. Right: the name of the
    folder plays no part.
    """
    from draftsmith.models.target import load_tokenizer

    renamed = tmp_path / "llama-3-vicuna"
    renamed.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (renamed / name).write_bytes((smollm2_folder / name).read_bytes())
    chat = conversation("q", "a")
    assert render(chat, load_tokenizer(renamed)) == render(chat, smollm2_tokenizer)


def test_case_36_system_turns(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A system turn must not vanish without a word. Right: the data's own is kept and the
    template's is not added; a template that takes none drops the record by reason; the ledger
    states what the template adds of its own.
    """
    [part] = render(conversation("q", "a", system="Mine."), smollm2_tokenizer).parts
    text = str(smollm2_tokenizer.decode(part.tokens))
    assert "Mine." in text
    assert "SmolLM" not in text
    told = Renderer(smollm2_tokenizer).describe()
    assert told["default_system"] == (
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    assert told["system_role"]
    strict = Renderer(with_template(smollm2_tokenizer, STRICT)).describe()
    assert (strict["default_system"], strict["system_role"]) == (None, False)
    assert Renderer(with_template(smollm2_tokenizer, CHATML)).describe()["default_system"] is None
