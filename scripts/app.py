"""What every command shares: its help, its overrides, its exit codes. `Verb.main` is the whole of a
command line.

A command is a Hydra app (`--cfg job`, `--multirun`, `--info`, launcher and sweeper plug-ins);
before Hydra sees the command line, the overrides are checked and composed once, so that a wrong one
ends here, with the nearest right one.

Exit codes: 0 done; 2 refused (wrong input, or a machine without the room or the rights); 130
interrupted (Ctrl-C); 1 an error in draftsmith itself, shown with its traceback.
DRAFTSMITH_TRACEBACK=1 shows a traceback for 2, too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from transformers.utils import logging as transformers_logging

from ..conf.compose import (
    MODULE,
    ROOT,
    check,
    composed,
    groups,
    is_sweep,
    options,
    plain,
    register,
    to_config,
)
from ..conf.schema import Config
from .cli import VERBS
from .versions import other_versions

REFUSED, INTERRUPTED = 2, 130
_OVERWRITE = re.compile(r"[+]*([\w.]+\.)?overwrite=")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
)
_WRONG_PATH = (
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOENT,
)


@dataclass(frozen=True)
class Invocation:
    """One run of a command.

    Attributes:
        overrides: as typed, after the verb's own. resolved: the whole configuration, JSON-ready,
            for provenance.
        console: prints to the user; silent on every rank but the first. one_of_many: a job of a
            sweep.
    """

    verb: str
    overrides: tuple[str, ...]
    resolved: dict[str, Any]
    console: Console = field(default_factory=Console)
    one_of_many: bool = False

    def say(self, text: str) -> None:
        """Print a line (rich markup)."""
        self.console.print(text, highlight=False)

    def wrote(self, **places: Path | str) -> None:
        """Say what was written and where."""
        width = max(map(len, places))
        for name, place in places.items():
            self.say(f"  [green]{name:<{width}}[/]  {escape(str(place))}")

    def next(self, verb: str, *further: str) -> None:
        """Say which command comes next over the same run; of a sweep, nothing, since the overrides
        are those of all its jobs. Leave to overwrite was given to this one alone."""
        if self.one_of_many:
            return
        kept = [word for word in self.overrides if not _OVERWRITE.match(word)]
        words = shlex.join(["draftsmith", verb, *kept, *further])
        self.say(f"[bold]next:[/] {escape(words)}")


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A command.

    Attributes:
        name: a key of `cli.VERBS`, which also holds the summary.
        task: does the work.
        reads, writes: artifacts, in words. sections: keys and sections of the configuration that
            `--help` lists.
        examples: whole command lines. kept: what an interruption leaves behind, in words.
        defaults: overrides that stand before the user's, unless the user sets the same key.
        flags: short ways to write an override, e.g. {"--show": "prepare.show"}: `--show 3` and
            `--show=3` are `prepare.show=3`; without dashes, `cache=PLACE` is `doctor.cache=PLACE`.
        listed: a list of the configuration that bare words fill: `compare a b` is
            `compare compare.runs=[a,b]`; empty where a verb takes none.
    """

    name: str
    task: Callable[[Config, Invocation], None]
    reads: str
    writes: str
    sections: tuple[str, ...]
    examples: tuple[str, ...]
    kept: str
    defaults: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    listed: str = ""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run a command line (`sys.argv` when none is given) and return its exit code."""
        given = list(sys.argv[1:] if arguments is None else arguments)
        # The deepspeed launcher adds this to every rank's line; LOCAL_RANK says the same.
        given = [word for word in given if not word.startswith(("--local_rank", "--local-rank"))]
        with _short_warnings():
            return self._guarded(lambda: self._run(given))

    def help(self) -> str:
        """The text of `--help`: purpose, input, output, options with defaults and meanings,
        examples."""
        node = composed(self.defaults)
        lines = [
            f"draftsmith {self.name}: {VERBS[self.name]}",
            "",
            f"usage: draftsmith {self.name} [key=value ...] [--cfg job] [--multirun]",
            "",
            f"  reads   {self.reads}",
            f"  writes  {self.writes}",
            "",
            "options, with their defaults:",
        ]
        for key, meaning in options().items():
            if any(key == section or key.startswith(f"{section}.") for section in self.sections):
                lines.append(f"  {key}={_shown(OmegaConf.select(node, key))}")
                if meaning:
                    lines.append(f"      {meaning}")
        if self.flags:
            lines += ["", "short for an option:"]
            for flag, key in self.flags.items():
                lines.append(
                    f"  {flag} N  is  {key}=N" if flag[0] == "-" else f"  {flag}=…  is  {key}=…"
                )
        lines += ["", "groups of defaults, chosen by group=name:"]
        lines += [f"  {name:<12}{', '.join(choices)}" for name, choices in groups().items()]
        lines += ["", "examples:", *(f"  {example}" for example in self.examples), ""]
        lines.append(
            "--cfg job prints the whole configuration; DRAFTSMITH_TRACEBACK=1 shows where an error "
            "arose."
        )
        return "\n".join(lines)

    def read(self, given: Sequence[str]) -> tuple[list[str], Any, list[str]]:
        """What a command line stands for: its words with every short form spelt out, Hydra's own
        flags among them (an `argparse.Namespace`), and all overrides, the verb's own first.

        Raises:
            ValueError: a short form without a value, or a list given twice.
        """
        spelt = self._spelt_out(given)
        flags = get_args_parser().parse_intermixed_args(spelt)
        words = self._with_list(flags.overrides)
        typed = {word.split("=")[0].lstrip("+") for word in words}
        own = [word for word in self.defaults if word.split("=")[0] not in typed]
        return spelt, flags, [*own, *words]

    def _spelt_out(self, given: Sequence[str]) -> list[str]:
        """The command line with every flag as the override that it stands for."""
        words: list[str] = []
        rest = iter(given)
        for word in rest:
            name, equals, value = word.partition("=")
            if name not in self.flags:
                words.append(word)
                continue
            value = value if equals else next(rest, "")
            if not value or (not equals and ("=" in value or _is_flag(value))):
                short = f"{name} N" if name[0] == "-" else f"{name}=…"
                end = short[-1]
                raise ValueError(f"{name} needs a value: {short}, or {self.flags[name]}={end}")
            words.append(f"{self.flags[name]}={value}")
        return words

    def _with_list(self, words: list[str]) -> list[str]:
        """Overrides, with bare words, or the one value where a list belongs, as `listed`."""
        if not self.listed:
            return words
        prefix = f"{self.listed}="
        one = [word for word in words if word.startswith(prefix) and "[" not in word]
        bare = [word for word in words if "=" not in word and word[0] != "~"]
        values = [*bare, *(word.removeprefix(prefix) for word in one)]
        if not values:
            return words
        if any(word.startswith(prefix) and word not in one for word in words):
            raise ValueError(f"give either words ({', '.join(values)}) or {prefix}[…], not both")
        quoted = ",".join(json.dumps(value, ensure_ascii=False) for value in values)
        return [*(word for word in words if word not in (*bare, *one)), f"{prefix}[{quoted}]"]

    def _run(self, given: list[str]) -> int:
        _check_launcher(os.environ)
        given, flags, overrides = self.read(given)
        if flags.help:
            _console().print(self.help(), highlight=False, markup=False)
            return 0
        parsed = check(overrides, flags.config_dir)
        several = any(override.is_sweep_override() for override in parsed)
        if not flags.multirun and not (several and is_sweep(parsed, flags.config_dir)):
            if several:
                raise ValueError(
                    "several values for one key: add --multirun to sweep, write a list as [a,b], "
                    "or quote a value that holds a comma: 'key=\"a,b\"'"
                )
            node = composed(overrides, flags.config_dir)
            to_config(node)
            if flags.cfg == "job":
                print(OmegaConf.to_yaml(node), end="")
                return 0
        if others := other_versions():
            warnings.warn(
                f"{'; '.join(others)}: results may differ; `pip install -r requirements.txt` "
                "brings what was tested",
                stacklevel=1,
            )
        codes: list[int] = []
        here = os.getpid()

        # A launcher of Hydra's may pickle the job and run it elsewhere: it holds no console.
        def job(node: DictConfig) -> None:
            if INTERRUPTED in codes:  # the rest of a sweep is not wanted either
                return
            transformers_logging.disable_progress_bar()
            console = _console()
            about = HydraConfig.get()
            swept = about.mode == RunMode.MULTIRUN
            invocation = Invocation(self.name, tuple(overrides), plain(node), console, swept)
            if swept:
                own = [word for word in about.overrides.task if word not in overrides]
                invocation.say(f"[bold]job {about.job.num + 1}:[/] {escape(' '.join(own))}")
            codes.append(self._guarded(lambda: self.task(to_config(node), invocation)))
            if codes[-1] and os.getpid() != here:
                raise RuntimeError(f"{invocation.verb} ended with {codes[-1]}; its log says why")

        before = sys.argv
        sys.argv = [
            f"draftsmith-{self.name}",
            *(word for word in given if word not in flags.overrides),
            *overrides,
        ]
        register()  # a sweep's jobs are composed by Hydra alone
        try:
            hydra.main(version_base="1.3", config_path=f"pkg://{MODULE}", config_name=ROOT)(job)()
        finally:
            sys.argv = before
        return max(codes, default=0)

    def _guarded(self, work: Callable[[], int | None]) -> int:
        """The exit code of `work`, whose errors are told in a line where the user can mend them."""
        try:
            return work() or 0
        except KeyboardInterrupt as interruption:
            _complain(str(interruption) or f"interrupted; {self.kept}")
            return INTERRUPTED
        except ValueError as error:
            _complain(str(error), error)
            return REFUSED
        except BrokenPipeError:  # whoever read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return INTERRUPTED
        except OSError as error:
            place = f": {error.filename}" if error.filename else ""
            if error.errno in _NO_ROOM:
                _complain(f"{error.strerror}{place}; {self.kept}", error)
            elif error.errno in _WRONG_PATH and place:
                _complain(f"{error.strerror}{place}; give another path", error)
            else:
                traceback.print_exc()
                return 1
            return REFUSED
        except Exception:
            traceback.print_exc()
            return 1


def _console() -> Console:
    """Prints to the user; silent on every rank but the first."""
    return Console(quiet=os.environ.get("RANK", "0") != "0", soft_wrap=True)


def _is_flag(word: str) -> bool:
    """Whether a word begins as a flag does, and is no negative number."""
    return word.startswith("-") and not word[1:].replace(".", "", 1).isdigit()


def _check_launcher(environment: Mapping[str, str]) -> None:
    """What a launcher announces must be whole numbers.

    Raises:
        ValueError: names the variable and its value.
    """
    for name in _LAUNCHER:
        value = environment.get(name)
        if value is not None and not (value.isascii() and value.isdigit()):
            raise ValueError(
                f"{name}={value!r} in the environment is no whole number: launchers (torchrun, "
                "srun) set it; unset it to run alone"
            )


def _shown(value: Any) -> str:
    """A value as it would be typed after `key=`."""
    if OmegaConf.is_list(value):
        return "[" + ",".join(map(_shown, value)) + "]"
    if OmegaConf.is_dict(value):
        return "{" + ",".join(f"{key}:{_shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value) if value != "" else '""'


def _complain(message: str, error: BaseException | None = None) -> None:
    """One line on stderr. An error that a library raised may not be the user's: say how to see
    where it arose."""
    if error is not None and os.environ.get("DRAFTSMITH_TRACEBACK") == "1":
        traceback.print_exception(error)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold red]draftsmith:[/] {escape(message)}", highlight=False)
    if error is not None and error.__traceback__ is not None:
        innermost = list(traceback.walk_tb(error.__traceback__))[-1][0].f_code.co_filename
        if not Path(innermost).is_relative_to(Path(__file__).parents[1]) or ".venv" in innermost:
            console.print("[dim]DRAFTSMITH_TRACEBACK=1 shows where this arose[/]", highlight=False)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Warnings without file, line and source, as a user of a command reads them."""
    before = warnings.formatwarning

    def short(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
        return (
            f"{'warning' if issubclass(category, UserWarning) else category.__name__}: {message}\n"
        )

    warnings.formatwarning = short  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        warnings.formatwarning = before
