"""The command line in-process: verbs, help, overrides, exit codes."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from draftsmith.conf.schema import Config
from draftsmith.scripts.app import Invocation, Verb
from draftsmith.scripts.cli import VERBS, main


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder, so that what it leaves there shows."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verb(task: Callable[[Config, Invocation], None], **fields: object) -> Verb:
    """A command around a function."""
    plain = Verb(
        name="prepare",
        task=task,
        reads="nothing",
        writes="nothing",
        sections=("work", "train"),
        examples=("draftsmith prepare",),
        kept="all is kept",
    )
    return dataclasses.replace(plain, **fields)  # pyright: ignore[reportArgumentType]


def test_help_has_a_line_per_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """`draftsmith --help` names every verb and ends well; no argument at all is a mistake."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in VERBS)
    assert main([]) == 2


def test_unknown_verb_gives_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the verb that was meant."""
    assert main(["evalute"]) == 2
    assert "did you mean evaluate?" in capsys.readouterr().err


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What it reads and writes, its options with defaults, examples that begin with its own
    name."""
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"draftsmith {name}: {VERBS[name]}")
    assert all(
        word in out for word in ("  reads   ", "  writes  ", "  work=work/", f"draftsmith {name}")
    )


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_prints_its_configuration(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--cfg job` is YAML of the resolved configuration, the override among it, and nothing
    runs."""
    assert main([name, "--cfg", "job", "train.max_steps=7"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["max_steps"] == 7


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_refuses_an_unknown_key(
    name: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything runs, with exit code 2 and the nearest key."""
    assert main([name, "train.max_stepz=7"]) == 2
    captured = capsys.readouterr()
    assert "did you mean train.max_steps" in captured.err
    assert "Traceback" not in captured.err
    assert list(elsewhere.iterdir()) == []


def test_wrong_value_names_value_and_type(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    assert main(["prepare", "train.max_steps=soon"]) == 2
    err = capsys.readouterr().err
    assert "train.max_steps" in err and "'soon'" in err and "int" in err


def test_a_task_gets_the_frozen_configuration(elsewhere: Path) -> None:
    """Typed values, the overrides as typed, the resolved tree for provenance; Hydra leaves no
    files."""
    seen: list[tuple[Config, Invocation]] = []
    assert verb(lambda *given: seen.append(given)).main(["train.lr=1e-4"]) == 0
    ((config, invocation),) = seen
    assert config.train.lr == 1e-4
    assert invocation.overrides == ("train.lr=1e-4",)
    assert invocation.resolved["train"]["lr"] == 1e-4
    assert list(elsewhere.iterdir()) == []


def test_own_defaults_give_way_to_the_user() -> None:
    """`demo` composes experiment=demo unless the user names another."""
    seen: list[str] = []
    demo = verb(lambda config, _: seen.append(config.work), defaults=("experiment=demo",))
    assert demo.main([]) == 0
    assert demo.main(["work=elsewhere"]) == 0
    assert demo.main(["experiment=smollm2-long"]) == 0
    assert seen == ["work/demo", "elsewhere", "work/smollm2-long"]


def test_a_refusal_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError from below is exit code 2 and its message; the traceback only on demand."""

    def refuse(*_: object) -> None:
        raise ValueError("the cache is [stale]; run dump again")

    assert verb(refuse).main([]) == 2
    err = capsys.readouterr().err
    assert "draftsmith: the cache is [stale]; run dump again" in err
    assert "Traceback" not in err
    monkeypatch.setenv("DRAFTSMITH_TRACEBACK", "1")
    assert verb(refuse).main([]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interruption_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is exit code 130."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    assert verb(interrupt).main([]) == 130
    assert "interrupted; all is kept" in capsys.readouterr().err


def test_the_next_command_overwrites_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """What this command may throw away is no word about the next one's folder."""
    words = ("work=w", "overwrite=true", "data.dump.overwrite=true", "+overwrite=true", "seed=1")
    Invocation("dump", words, {}).next("train", "inputs=w")
    assert capsys.readouterr().out == "next: draftsmith train work=w seed=1 inputs=w\n"


def test_a_full_disk_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """The system's own words, the file, and what is kept; no traceback."""

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "work/cache/shard")

    assert verb(fill).main([]) == 2
    err = capsys.readouterr().err
    assert "No space left on device: work/cache/shard; all is kept" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", ["ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG", "ELOOP"])
def test_a_wrong_path_is_told_as_such(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file where a folder should be, and the like: the path, no traceback. Without a path it is
    no mistake of the user's."""
    code = getattr(errno, number)

    def fail(config: Config, _: Invocation) -> None:
        place = (config.work,) if config.work != "none" else ()
        raise OSError(code, "cannot be so", *place)

    assert verb(fail).main(["work=a/file"]) == 2
    err = capsys.readouterr().err
    assert "draftsmith: cannot be so: a/file; give another path" in err
    assert "Traceback" not in err
    assert verb(fail).main(["work=none"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_prepare_into_a_file(
    elsewhere: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the path."""
    (elsewhere / "file").write_text("")
    chats = elsewhere / "chats.json"
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "an answer"}]
    chats.write_text(json.dumps([{"conversations": turns}]))
    target = [f"target.source={smollm2_folder}", f"target.folder={smollm2_folder}"]
    rows = [f"data.rows.source={chats}", "data.rows.max_length=64", "data.rows.torn=refuse"]
    assert main(["prepare", f"work={elsewhere / 'file'}", *target, *rows]) == 2
    assert f"{elsewhere / 'file'}" in capsys.readouterr().err


def test_dump_asks_for_its_rows_before_its_target(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading takes minutes; the command that makes the missing rows is named at once."""
    for answers, maker in (("found", "prepare"), ("regenerated", "regenerate")):
        words = [f"target.source={elsewhere / 'none'}", f"data.answers={answers}"]
        assert main(["dump", f"work={elsewhere / 'work'}", *words]) == 2
        assert f"run `draftsmith {maker}` with this work folder" in capsys.readouterr().err


def test_a_fault_of_ours_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not the user's to mend is exit code 1, with everything that helps to mend it."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    assert verb(fail).main([]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_several_values_need_multirun(capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep is asked for, not guessed; then each value is a job, and the worst exit code is the
    sweep's."""
    seen: list[float] = []

    def task(config: Config, _: Invocation) -> None:
        seen.append(config.train.lr)
        if config.train.lr == 0.2:
            raise ValueError("too high")

    assert verb(task).main(["train.lr=0.1,0.2"]) == 2
    err = capsys.readouterr().err
    assert "--multirun" in err and "quote a value that holds a comma: 'key=\"a,b\"'" in err
    assert seen == []
    assert verb(task).main(["--multirun", "train.lr=0.1,0.2,0.3"]) == 2
    assert seen == [0.1, 0.2, 0.3]


def test_a_sweep_in_a_fresh_process_finds_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been composed before the first job, as from a shell."""
    monkeypatch.delitem(ConfigStore.instance().repo, "schema.yaml", raising=False)
    seen: list[str] = []
    kinds = "train.loss.kind=lk-alpha,smooth-l1+0.1*kl"
    work = "work=work/loss-${train.loss.kind}"
    sweep = verb(lambda config, _: seen.append(config.work))
    assert sweep.main(["--multirun", work, kinds]) == 0
    assert seen == ["work/loss-lk-alpha", "work/loss-smooth-l1+0.1*kl"]


def test_an_experiment_that_sweeps_takes_several_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They stand in place of the file's; every job says which it is, and no next command, whose
    overrides would be those of all jobs."""
    seen: list[str] = []

    def task(config: Config, invocation: Invocation) -> None:
        seen.append(config.work)
        invocation.next("evaluate")

    assert verb(task).main(["experiment=ablation-losses", "train.loss.kind=kl,tv"]) == 0
    assert seen == ["work/ablation-losses/kl", "work/ablation-losses/tv"]
    out = capsys.readouterr().out
    assert "job 2: train.loss.kind=tv" in out and "next:" not in out


def test_an_interruption_ends_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """Not just the job that it met."""
    seen: list[str] = []

    def task(config: Config, invocation: Invocation) -> None:
        seen.append(config.work)
        raise KeyboardInterrupt

    assert verb(task).main(["--multirun", "work=a,b"]) == 130
    assert seen == ["a"]


def test_the_launcher_s_own_argument_is_dropped() -> None:
    """`deepspeed` adds --local_rank to every rank's command line."""
    assert verb(lambda *_: None).main(["--local_rank=0", "train.lr=0.1"]) == 0


def test_a_launcher_s_variables_are_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 with the name and the value."""
    monkeypatch.setenv("LOCAL_RANK", "x")
    assert verb(lambda *_: None).main([]) == 2
    assert "LOCAL_RANK='x' in the environment is no whole number" in capsys.readouterr().err


def test_next_command_carries_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed can be run as it stands, quoting included."""
    assert verb(lambda _, call: call.next("dump")).main(["work=a b"]) == 0
    assert "next: draftsmith dump 'work=a b'" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--show", "3"], ["--show=3"], ["prepare.show=3"]])
def test_a_flag_is_short_for_an_option(words: list[str]) -> None:
    """In both spellings, and the option itself still works."""
    seen: list[tuple[Config, Invocation]] = []
    showing = verb(lambda *given: seen.append(given), flags={"--show": "prepare.show"})
    assert showing.main([*words, "train.lr=0.1"]) == 0
    ((config, invocation),) = seen
    assert (config.prepare.show, config.train.lr) == (3, 0.1)
    assert "prepare.show=3" in invocation.overrides


def test_a_flag_needs_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and how to write it; --help lists the flags of a verb."""
    showing = verb(lambda *_: None, flags={"--show": "prepare.show", "cache": "doctor.cache"})
    for words in (["--show"], ["--show="], ["--show", "--cfg"], ["--show", "train.lr=1"]):
        assert showing.main(words) == 2
        assert "--show needs a value: --show N, or prepare.show=N" in capsys.readouterr().err
    assert showing.main(["cache="]) == 2
    assert "cache needs a value: cache=…, or doctor.cache=…" in capsys.readouterr().err
    assert showing.main(["--show", "-1"]) == 2
    assert "prepare.show=-1: must be 0 or more" in capsys.readouterr().err
    assert main(["prepare", "--help"]) == 0
    assert "--show N  is  prepare.show=N" in capsys.readouterr().out
