"""The documentation as data: pages, code blocks, the commands in them, links and anchors."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
PROGRAMS = {"draftsmith", "torchrun", "deepspeed", "srun", "python", "python3", "make", "vllm"}
"""What is run by hand; a block without a language that begins with one of them is for the shell."""

_FENCE = re.compile(
    r"^(?P<run><!-- run -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
_INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}[^\n]*)?\n)+")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


@dataclass(frozen=True)
class Block:
    """Code of a page. `run`: marked to be run and not only composed."""

    language: str
    text: str
    run: bool = False


def blocks(text: str) -> list[Block]:
    """Fenced blocks, and indented ones as blocks without a language."""
    found = [
        Block(one["language"], one["text"], one["run"] is not None) for one in _FENCE.finditer(text)
    ]
    bare = _FENCE.sub("\n", text)
    found += [
        Block("", "\n".join(line[4:] for line in one[0].strip("\n").splitlines()) + "\n")
        for one in _INDENTED.finditer(bare)
        if one[0].strip()
    ]
    return found


def inline(text: str) -> list[str]:
    """Code within sentences."""
    bare = "\n".join(line for line in _FENCE.sub("\n", text).splitlines() if line[:4] != "    ")
    return _INLINE.findall(bare)


def shell(text: str) -> list[str]:
    """Everything on a page that a reader might paste into a shell, but what is left open by `…`."""
    found = [
        one.text
        for one in blocks(text)
        if one.language == "bash"
        or (not one.language and {*one.text.split()[:1]} & {*PROGRAMS, "for"})
    ]
    found += [one for one in inline(text) if one.startswith("draftsmith ")]
    return [one for one in found if "…" not in one]


# No program is found, so each is recorded with its arguments, as bash would give them to it.
_RECORDER = r"""
set -eu
record() { { printf '%s\037' "$@"; printf '\036'; } >&3; }
command_not_found_handle() { record "$@"; }
source() { :; }
mkdir() { /bin/mkdir "$@"; }
cat() { /bin/cat "$@"; }
exec 3>&1 >/dev/null
PATH=/nowhere
"""


def commands(script: str, folder: Path) -> list[list[str]]:
    """The argument lists of every program that a script runs, as bash reads it: loops, quotes and
    continued lines; nothing is run but `mkdir` and `cat`, in `folder`."""
    done = subprocess.run(
        ["/bin/bash", "-c", _RECORDER + script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    calls = [call.split("\x1f")[:-1] for call in done.stdout.split("\x1e")[:-1]]
    return [call for call in calls if call]


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead."""
    return _LINK.findall(_FENCE.sub("\n", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("\n", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = sum(
            one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found
        )
        found.add(f"{slug}-{number}" if number else slug)
    return found
