"""Links lead somewhere, anchors exist, and files that the pages name are there."""

from __future__ import annotations

import re

import handbook
import pytest
from handbook import NAMES, PAGES, ROOT

_PLACE = re.compile(r"(?:[\w.-]+/)+[\w.{},*-]*")
_FOLDERS = ("kernels", "models", "inference", "conf", "scripts", "tests", "docs")
"""Folders of the checkout that a work folder has nothing like; below `data/` and `train/` only
Python files are meant."""


@pytest.mark.parametrize("name", NAMES)
def test_links_and_anchors_lead_somewhere(name: str) -> None:
    """To a file or a heading; the network is not asked."""
    page = ROOT / name
    wrong = []
    for link in handbook.links(page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        place, _, anchor = link.partition("#")
        path = (page.parent / place).resolve() if place else page
        if not path.exists():
            wrong.append(link)
        elif anchor and anchor not in handbook.anchors(path.read_text()):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_files_that_a_page_names_are_there(name: str) -> None:
    """`folder/file`, with `*` and `{a,b}` as a shell takes them."""
    wrong = []
    for code in handbook.inline((ROOT / name).read_text()):
        place = code.partition("::")[0]
        folder = place.split("/")[0]
        if not _PLACE.fullmatch(place) or "NAME" in place or "LAYOUT" in place:
            continue
        if folder in _FOLDERS or (folder in ("data", "train") and place.endswith(".py")):
            wrong += [one for one in spelt_out(place) if not list(ROOT.glob(one.rstrip("/")))]
    assert not wrong


def spelt_out(place: str) -> list[str]:
    """A path for each of the names between braces."""
    found = re.search(r"\{([^{}]*)\}", place)
    if not found:
        return [place]
    before, after = place[: found.start()], place[found.end() :]
    return [path for one in found[1].split(",") for path in spelt_out(f"{before}{one}{after}")]


def test_every_page_can_be_reached_from_the_index() -> None:
    """In one step, so that nothing is written for nobody."""
    index = ROOT / "docs" / "index.md"
    reached = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in handbook.links(index.read_text())
    }
    left = {page for page in PAGES if page.parent != ROOT} - reached - {index}
    assert sorted(page.relative_to(ROOT).as_posix() for page in left) == []


def test_anchors_are_those_of_the_headings() -> None:
    """Lower case, without marks, spaces as dashes; the second of a name is numbered."""
    text = "# A `b.c`: d, e\n\n## What\n\n## What\n\n```\n# no\n```\n"
    assert handbook.anchors(text) == {"a-bc-d-e", "what", "what-1"}
    assert spelt_out("a/{b,c}.py") == ["a/b.py", "a/c.py"]
