"""Every command of the documentation is one that the command line takes: the verb exists, every
key, choice and value does, and what is swept composes for each value."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import handbook
import pytest
from handbook import NAMES, PROGRAMS, ROOT, shell
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from draftsmith.conf.compose import check, composed, is_sweep, options, to_config
from draftsmith.scripts.cli import VERBS

OTHERS = {"pip", "git", "wandb", "pytest", "sbatch", "mkdir", "cat"}
"""Programs that the pages may use besides those of `PROGRAMS`."""
_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
_SECTIONS = {key.split(".")[0] for key in options() if "." in key}
_KEY = re.compile(r"\+?([a-z_]+(?:\.[a-z_]+)+)(\.\*)?(?:=.*)?")
_FILES = (".py", ".json", ".jsonl", ".md", ".html", ".png", ".safetensors", ".parquet", ".yaml")
FREE = ("data.rows.template_kwargs", "data.rows.cleaning.roles", "target.shape")
"""Settings that hold names of the user's own."""
_COMPOSED: set[tuple[str | None, ...]] = set()
"""Overrides that were composed already, by whichever verb."""


def test_bash_reads_a_page_as_a_reader_would(tmp_path: Path) -> None:
    """Loops, quotes, comments, continued lines and files written on the way; nothing is run."""
    script = (
        "for norm in a b; do\n  draftsmith train head.norms.$norm=true work='x y'  # why\ndone\n"
        "mkdir -p made\ncat > made/file <<'END'\n$kept\nEND\nrm -rf / \\\n  more\n"
    )
    assert handbook.commands(script, tmp_path) == [
        ["draftsmith", "train", "head.norms.a=true", "work=x y"],
        ["draftsmith", "train", "head.norms.b=true", "work=x y"],
        ["rm", "-rf", "/", "more"],
    ]
    assert (tmp_path / "made" / "file").read_text() == "$kept\n"


def test_commands_are_found_wherever_they_stand() -> None:
    """In fenced blocks, indented ones and sentences; not in output, and not where `…` is left
    open."""
    text = (
        "a\n\n    make demo\n\n```bash\nx\n```\n\n```\n$ no\n```\n\n```\ntorchrun a\n```\n\n"
        "Then `draftsmith plan`, `draftsmith train …` and `train.lr`.\n"
    )
    assert shell(text) == ["x\n", "torchrun a\n", "make demo\n", "draftsmith plan"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_page_composes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--cfg job` would compose it; launchers by the module that they start."""
    monkeypatch.chdir(tmp_path)
    scripts = shell((ROOT / name).read_text())
    calls = handbook.commands("\n".join(scripts), tmp_path)
    wrong = {" ".join(call): fault for call in calls if (fault := fault_of(call))}
    assert not wrong


def test_a_wrong_command_is_noticed() -> None:
    """A verb, a key, a choice, a value, a module, a target of make, a program, values that need
    --multirun."""
    for line, fault in {
        "draftsmith trian": "no verb trian",
        "draftsmith train train.max_stepz=3": "did you mean train.max_steps",
        "draftsmith train head=eagel": "did you mean eagle",
        "torchrun -m draftsmith.scripts.train train.steps=no": "train.steps",
        "deepspeed --module draftsmith.scripts.trian": "no module scripts.trian",
        "srun draftsmith train --multirun train.steps=1,x": "train.steps",
        "draftsmith train train.steps=1,2": "--multirun",
        "make dem": "no target dem",
        "drafsmith train": "no program drafsmith",
    }.items():
        assert fault in str(fault_of(line.split()))


def fault_of(call: list[str]) -> str | None:
    """What is wrong with a program's command line; None where nothing is."""
    program, words = call[0], call[1:]
    if program == "draftsmith":
        return fault_in(words)
    if program == "make":
        return next((f"no target {word}" for word in words if word not in _TARGETS), None)
    if program == "srun" and "draftsmith" in words:
        return fault_in(words[words.index("draftsmith") + 1 :])
    for flag in ("-m", "--module"):
        if flag in words:
            module, *rest = words[words.index(flag) + 1 :]
            return fault_of_module(module, rest)
    return None if program in PROGRAMS | OTHERS else f"no program {program} is known here"


def fault_of_module(module: str, words: list[str]) -> str | None:
    """The same of a module that is run; those of other packages are not looked at."""
    package, _, rest = module.partition(".")
    if package != "draftsmith":
        return None
    verb = rest.removeprefix("scripts.").replace("import_head", "import")
    if verb in VERBS:
        return fault_in([verb, *words])
    path = ROOT / f"{rest.replace('.', '/')}.py"
    return None if path.exists() else f"no module {rest}"


def fault_in(words: list[str]) -> str | None:
    """What the verb itself would say to a command line, read and composed by its own parser; of a
    sweep, to each of its jobs."""
    verb, *rest = words
    if verb in ("--help", "--version") or "--help" in rest:
        return None
    if verb not in VERBS:
        return f"no verb {verb}"
    command = import_module(f"draftsmith.scripts.{verb.replace('import', 'import_head')}").VERB
    try:
        _, flags, overrides = command.read(rest)
        jobs = [overrides]
        if any("," in word for word in overrides):
            parsed = check(overrides, flags.config_dir)
            if any(one.is_sweep_override() for one in parsed):
                if not flags.multirun and not is_sweep(parsed, flags.config_dir):
                    return "several values without --multirun"
                (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        for job in jobs:
            if (line := (flags.config_dir, *job)) not in _COMPOSED:
                to_config(composed(job, flags.config_dir))
                _COMPOSED.add(line)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_a_page_names_exists(name: str) -> None:
    """`section.key`, `section.key=value` and `section.*` in sentences, blocks apart."""
    keys = list(options())
    wrong = []
    for code in handbook.inline((ROOT / name).read_text()):
        found = _KEY.fullmatch(code)
        if not found or code.endswith(_FILES) or found[1].split(".")[0] not in _SECTIONS:
            continue
        key = found[1]
        free = any(key.startswith(f"{one}.") for one in FREE)
        if not free and not any(one == key or one.startswith(f"{key}.") for one in keys):
            wrong.append(code)
    assert not wrong


def test_every_verb_and_section_is_on_the_page_of_commands() -> None:
    """A verb by a heading of its own, a section by at least one of its keys."""
    text = (ROOT / "docs" / "commands.md").read_text()
    headings = ", ".join(re.findall(r"^## (.+)$", text, re.M))
    assert [verb for verb in VERBS if not re.search(rf"\b{verb}\b", headings)] == []
    assert [one for one in sorted(_SECTIONS) if f"{one}." not in text] == []
