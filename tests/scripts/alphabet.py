"""A toy target that knows one thing, and knows it well: after a letter comes the next of the
alphabet. Byte-level tokens, a chat template, two layers; so a head of it learns in a second, and
every probe has something to say."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "<end>"]
TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}:{% if loud %}!{% endif %} {{ m['content'] }}"
    "<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if loud %}!{% endif %} {% endif %}"
)
_SIZE, _WIDTH, _SHARP = 264, 64, 7.0


def save_target(folder: Path, seed: int = 0) -> Path:
    """The target's folder: weights (float32, untied), tokenizer, template."""
    config = LlamaConfig(
        vocab_size=_SIZE,
        hidden_size=_WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        before = torch.arange(_SIZE).roll(7)
        letters = [tokenizer.convert_tokens_to_ids(one) for one in string.ascii_lowercase]
        before[letters] = torch.tensor(letters).roll(1)
        embedding = 0.3 * torch.randn(_SIZE, _WIDTH)
        norm = torch.empty(_WIDTH).uniform_(0.2, 1.8)
        model.model.embed_tokens.weight.copy_(embedding)
        model.model.norm.weight.copy_(norm)
        model.lm_head.weight.copy_(_SHARP * embedding[before] / 0.3 / norm / _WIDTH)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<end>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_chats(path: Path, count: int = 24) -> Path:
    """Conversations of one or two rounds, all letters in their order."""

    def run(first: int, length: int) -> str:
        return "".join(string.ascii_lowercase[(first + k) % 26] for k in range(length))

    talks = []
    for number in range(count):
        turns = []
        for turn in range(2 + 2 * (number % 2)):
            role = ("human", "gpt")[turn % 2]
            value = run(number * 5 + turn, 8 + (number * 7 + turn * 5) % 23)
            turns.append({"from": role, "value": value})
        talks.append({"id": f"talk-{number}", "conversations": turns})
    path.write_text(json.dumps(talks))
    return path


def settings(target: Path, chats: Path, work: Path) -> list[str]:
    """Overrides of a run over it."""
    return [
        f"work={work}",
        f"target.source={target}",
        f"target.folder={target}",
        "target.dtype=float32",
        "target.device=cpu",
        f"data.rows.source={chats}",
        "data.rows.torn=refuse",
        "data.rows.holdout=4",
        "data.rows.max_length=256",
        "head=mtp",
        "train.tokens_per_batch=256",
        "train.draft_vocab_size=null",
        "train.validate_every=40",
        "train.max_steps=40",
        "train.unroll_warmup=0",
        "train.log_every=5",
        "train.lr=0.003",
        "train.warmup_steps=2",
        "validate.limit=2",
        "validate.max_new_tokens=16",
        "validate.temperatures=[0]",
        "evaluate.prompts=[heldout]",
        "evaluate.drafters=[none,head]",
        "evaluate.proof=null",
        "evaluate.limit=2",
        "evaluate.max_new_tokens=16",
        "tracker=none",
    ]
