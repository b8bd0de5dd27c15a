"""What the pages mark with `<!-- run -->` does run: the quick start and the way from Python, word
for word, on a toy target in one folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import handbook
import pytest
from handbook import NAMES, ROOT

import draftsmith
from draftsmith.scripts.cli import main

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards boil black quartz".split()
SMALL = {
    "target.source": "target",
    "target.folder": "target",
    "data.rows.source": "chats.json",
    "data.rows.torn": "refuse",
    "data.rows.max_length": "96",
    "data.rows.holdout": "2",
    "doctor.rows": "2",
    "train.draft_vocab_size": "256",
    "train.tokens_per_batch": "512",
    "train.max_steps": "2",
    "validate.limit": "1",
    "validate.max_new_tokens": "4",
    "evaluate.limit": "1",
    "evaluate.max_new_tokens": "4",
    "evaluate.proof": "null",
    "generate.max_new_tokens": "4",
}
"""Settings that make every command a matter of a second, behind the page's own."""


@pytest.fixture(scope="module")
def folder(talking_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader would have: a target, and conversations."""
    made = tmp_path_factory.mktemp("reader")
    shutil.copytree(talking_folder, made / "target")
    chats = []
    for number in range(12):
        turns = []
        for turn in range(2):
            words = [WORDS[(number + turn + 3 * k) % len(WORDS)] for k in range(8 + number % 5)]
            turns.append({"from": ("human", "gpt")[turn], "value": f"{number}: {' '.join(words)}."})
        chats.append({"conversations": turns})
    (made / "chats.json").write_text(json.dumps(chats))
    return made


def marked(language: str) -> list[tuple[str, list[str]]]:
    """The marked blocks of each page that has any, in their order."""
    found = []
    for name in NAMES:
        blocks = handbook.blocks((ROOT / name).read_text())
        texts = [one.text for one in blocks if one.run and one.language == language]
        if texts:
            found.append((name, texts))
    return found


BASH, PYTHON = marked("bash"), marked("python")


@pytest.mark.parametrize(("name", "texts"), BASH, ids=[name for name, _ in BASH])
def test_marked_commands_run(
    name: str,
    texts: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after the other, each on what those before it left, with exit code 0."""
    monkeypatch.chdir(folder)
    for program, verb, *words in handbook.commands("\n".join(texts), folder):
        assert program == "draftsmith"
        code = main([verb, *words, *(f"{key}={value}" for key, value in SMALL.items())])
        told = capsys.readouterr()
        assert code == 0, f"{verb} {' '.join(words)}\n{told.out[-1500:]}{told.err[-1500:]}"
    for artifact in ("report.html", "report.json", "train/head/config.json", "export"):
        assert (folder / "work" / "first" / artifact).exists()


@pytest.mark.parametrize(("name", "texts"), PYTHON, ids=[name for name, _ in PYTHON])
def test_marked_python_runs(
    name: str,
    texts: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it is written: fifteen lines behind the imports, and drafted text equals plain text."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for text in texts:
        exec(compile(text, name, "exec"), names)
    assert names["drafted"].identical_to_plain is True
    assert names["drafted"].metrics.num_drafts > 0
    assert capsys.readouterr().out.split()[2] == "True"
    lines = [line for line in texts[0].splitlines() if line and "import" not in line]
    assert len(lines) == 15 and all(len(line) <= 100 for line in lines)


def test_public_names_are_what_they_say() -> None:
    """Each is there, listed by `dir` and told on the page; another is refused."""
    page = (ROOT / "docs" / "python-api.md").read_text()
    for names in draftsmith._PUBLIC.values():
        for name in names:
            assert getattr(draftsmith, name).__module__.startswith("draftsmith.")
            assert name in dir(draftsmith) and name in page
    with pytest.raises(AttributeError, match="has no attribute 'Targett'"):
        _ = draftsmith.Targett
