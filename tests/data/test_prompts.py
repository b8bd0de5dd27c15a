"""Prompt sets are what serving would feed, spread over their categories."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.data.prompts import HELDOUT_FORM, load_prompts
from draftsmith.data.rows import Rows


def test_humaneval(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """164 problems, each the template's own tokenisation of one user message."""
    prompts = load_prompts("humaneval", tokenizer=smollm2_tokenizer)
    assert len(prompts) == 164
    assert prompts[0].id == "HumanEval/0"
    assert prompts[0].text.startswith(
        "Complete the following Python function:\n```python\nfrom typ"
    )
    assert prompts[0].text.endswith('"""\n```')
    served = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": prompts[0].text}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )
    assert prompts[0].tokens == list(served["input_ids"])  # pyright: ignore
    assert str(smollm2_tokenizer.decode(prompts[0].tokens)).endswith("<|im_start|>assistant\n")
    assert {prompt.form for prompt in prompts} == {"chat:complete-python-function"}


def test_mt_bench_is_spread_over_its_categories(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """80 questions in 8 categories; eight of them are one of each."""
    prompts = load_prompts("mt_bench", tokenizer=smollm2_tokenizer)
    assert len(prompts) == 80
    few = load_prompts("mt_bench", limit=8, tokenizer=smollm2_tokenizer)
    assert len({prompt.category for prompt in few}) == 8
    assert [prompt.id for prompt in few] == [prompt.id for prompt in prompts[::10]]
    assert {prompt.form for prompt in few} == {"chat:first-turn"}
    assert prompts[0].text.startswith("Compose an engaging travel blog post")


def test_heldout_prompts_end_where_the_answer_begins(
    toy_rows: Rows, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A held-out prompt is the row's own ids up to its first supervised token."""
    held = Rows.open(toy_rows.folder, "heldout")
    prompts = load_prompts("heldout", tokenizer=smollm2_tokenizer, rows=toy_rows.folder)
    assert len(prompts) == len(held) == 4
    for prompt, row in zip(prompts, held, strict=True):
        count = len(prompt.tokens)
        assert prompt.tokens == row.tokens[:count].tolist()
        assert not row.supervised[:count].any()
        assert row.supervised[count]
        assert str(smollm2_tokenizer.decode(prompt.tokens)).endswith("<|im_start|>assistant\n")
        assert row.messages is not None
        assert prompt.text == row.messages[0]["content"]
        assert prompt.form == HELDOUT_FORM
    assert len(load_prompts("heldout", limit=2, tokenizer=smollm2_tokenizer, rows=held)) == 2


def test_own_file(tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """A file may hold prompts, turns, or conversations; an own system turn is kept."""
    path = tmp_path / "mine.jsonl"
    records = [
        {"id": "p", "prompt": "one"},
        {"turns": ["two", "later"], "category": "c"},
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "three"},
                {"role": "assistant", "content": "answer"},
                {"role": "user", "content": "more"},
            ]
        },
        {"conversations": [{"from": "human", "value": "four"}]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    prompts = load_prompts(str(path), tokenizer=smollm2_tokenizer)
    assert [prompt.text for prompt in prompts] == ["one", "two", "three", "four"]
    assert [prompt.id for prompt in prompts] == ["p", "prompt-1", "prompt-2", "prompt-3"]
    assert prompts[1].category == "c"
    text = smollm2_tokenizer.decode(prompts[2].tokens)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


def served(texts: list[str], tokenizer: Any) -> list[int]:
    """The ids of a chat of user and assistant by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "a\ud800b\x07"}, "a\ufffdb"),
        ({"turns": [{"role": "user", "content": "Hello"}]}, "Hello"),
        ({"turns": '["Hello", "later"]'}, "Hello"),
        ([{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "x"}], "Hello"),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({"prompt": "Hello", "response": "x"}, "Hello"),
        ({"prompt": "Hello", "text": "Hello x"}, "Hello"),
    ],
)
def test_own_file_is_cleaned_as_rows_are(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase, record: Any, text: str
) -> None:
    """Every schema gives what is asked before the first answer; text is cleaned by rule 3."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([record]))
    [prompt] = load_prompts(str(path), tokenizer=smollm2_tokenizer)
    assert (prompt.id, prompt.text) == ("prompt-0", text)
    assert prompt.tokens == served([text], smollm2_tokenizer)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"turns": "Hello"}, "holds no prompt .*'Hello' is no list of texts, nor of messages"),
        ({"turns": [7]}, r"holds no prompt .*\[7\] is no list of texts"),
        ({"text": "a document"}, "holds no prompt .*no user turn"),
        ("Hello", "holds no prompt .*the record is a str"),
        ({"messages": [{"role": "user"}]}, "holds no prompt .*no user turn .cut_at_missing_text"),
        ({"prompt": "a<|im_end|>b"}, "turn 1 .user. holds the control token '<.im_end.>', and so"),
    ],
)
def test_own_file_without_a_prompt(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase, record: Any, message: str
) -> None:
    """The file, the record and what is wrong with it."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"prompt": "x"}, record]))
    with pytest.raises(ValueError, match=f"mine.json: record 2.* {message}"):
        load_prompts(str(path), tokenizer=smollm2_tokenizer)


def test_a_template_that_refuses_a_prompt(
    tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Named with the file and the record, not as a fault of the template engine."""
    path = tmp_path / "mine.json"
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    path.write_text(json.dumps([{"messages": turns}]))
    other = copy.deepcopy(smollm2_tokenizer)
    other.chat_template = "{{ raise_exception('no system turn, please') }}"
    with pytest.raises(
        ValueError, match="mine.json: record 1: the chat template refuses .*no system turn"
    ):
        load_prompts(str(path), tokenizer=other)


def test_larger_limit_warns(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """Case 89: fewer prompts than asked for are said."""
    with pytest.warns(UserWarning, match="'mt_bench' holds 80 prompts, 500 were asked for"):
        prompts = load_prompts("mt_bench", limit=500, tokenizer=smollm2_tokenizer)
    assert len(prompts) == 80


def test_refusals(
    tmp_path: Path, toy_rows: Rows, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each names what is wrong and what to give."""
    path = tmp_path / "mine.json"
    path.write_text('[{"prompt": "x"}, {"question": "y"}]')
    for name, rows, limit, message in (
        (
            "humanevil",
            None,
            None,
            "'humanevil': choose one of humaneval, mt_bench, heldout, or give",
        ),
        ("heldout", None, None, "needs the folder of prepared rows"),
        ("heldout", toy_rows, None, "the rows are of the split 'train'"),
        ("mt_bench", None, 0, "limit 0"),
        (str(path), None, None, "record 2 holds no prompt .* expected prompt .a text., turns"),
    ):
        with pytest.raises(ValueError, match=message):
            load_prompts(name, limit=limit, tokenizer=smollm2_tokenizer, rows=rows)
    with pytest.raises(ValueError, match="record 1 holds no prompt .* the fields of humaneval"):
        load_prompts("humaneval", str(path), tokenizer=smollm2_tokenizer)
    with pytest.warns(UserWarning, match="rows are not used for the prompt set 'mt_bench'"):
        load_prompts("mt_bench", limit=1, tokenizer=smollm2_tokenizer, rows=toy_rows)
