"""Toy conversations, and a toy target that speaks the real tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.models.target import Target, TargetConfig, load_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards boil black quartz".split()
# one for each toy conversation, in no other
NAMES = (
    "river table mountain window garden bottle engine letter island winter summer doctor farmer "
    "teacher soldier bridge castle forest desert ocean planet rocket camera pencil mirror ladder "
    "basket blanket butter cheese coffee dinner flower guitar hammer kitchen lemon market orange "
    "pillow"
).split()


def chat(number: int) -> dict[str, Any]:
    """A conversation of one or two rounds whose texts and lengths depend on its number."""
    turns = []
    for turn in range(2 + 2 * (number % 2)):
        count = 3 + (number * 7 + turn * 5) % 23
        text = " ".join(
            WORDS[(number + turn + k * (number % 5 + 1)) % len(WORDS)] for k in range(count)
        )
        value = f"{number}: {text} {NAMES[number]}."
        turns.append({"from": ("human", "gpt")[turn % 2], "value": value})
    return {"id": f"chat-{number}", "conversations": turns}


@pytest.fixture
def write_records(tmp_path: Path) -> Callable[..., Path]:
    """Writes records as a JSON list; gives the path."""

    def write(records: list[Any], name: str = "chats.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(records), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def chats_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty toy conversations."""
    path = tmp_path_factory.mktemp("chats") / "chats.json"
    path.write_text(json.dumps([chat(number) for number in range(40)]))
    return path


@pytest.fixture(scope="session")
def toy_folder(
    tiny_llama_folder: Callable[..., Path],
    smollm2_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A random Llama of two layers with SmolLM2's tokenizer and template."""
    folder = tmp_path_factory.mktemp("toy") / "target"
    weights = tiny_llama_folder(vocab_size=49152, num_hidden_layers=2, hidden_size=32)
    shutil.copytree(weights, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def toy_target(toy_folder: Path) -> Target:
    """The toy, loaded in float32 on the CPU."""
    return Target.load(TargetConfig(source=str(toy_folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def toy_rows(
    toy_target: Target, chats_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Rows:
    """36 training rows (and 4 held out) of the toy conversations."""
    out = tmp_path_factory.mktemp("rows")
    tokenizer = load_tokenizer(toy_target.folder)
    prepare(
        RowsConfig(str(chats_file), holdout=4, max_length=2048),
        tokenizer,
        toy_target.fingerprint,
        out,
    )
    return Rows.open(out)


@pytest.fixture
def poisoned(toy_rows: Rows, toy_folder: Path) -> Callable[..., Target]:
    """A maker of the toy whose embedding is infinite for a token that only the given row has."""

    def make(*numbers: int) -> Target:
        target = Target.load(TargetConfig(str(toy_folder), dtype="float32", device="cpu"))
        target.trunk.embedding = target.trunk.embedding.clone()
        tokens = [set(row.tokens.tolist()) for row in toy_rows]
        for number in numbers:
            others = set().union(*tokens[:number], *tokens[number + 1 :])
            target.trunk.embedding[min(tokens[number] - others)] = float("inf")
        return target

    return make


@pytest.fixture(scope="session")
def undisturbed(
    toy_rows: Rows, toy_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A dump of all toy rows at the boundary L, in several shards; not to be changed."""
    out = tmp_path_factory.mktemp("undisturbed")
    dump(DumpConfig(shard_tokens=300, tokens_per_batch=128), toy_rows, toy_target, out)
    return out
