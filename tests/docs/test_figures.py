"""The drawings: readable anywhere, and what they show is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from handbook import ROOT

from draftsmith.inference.tree import depths_of, rows_of
from draftsmith.kernels.shift import shift_insert, supervision
from draftsmith.kernels.ttt_attention import ttt_attention

FIGURES = sorted((ROOT / "docs" / "figures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
GREEN = "#cfe8d5"


def drawing(name: str) -> ElementTree.Element:
    """A drawing's root."""
    return ElementTree.parse(ROOT / "docs" / "figures" / f"{name}.svg").getroot()


def marked(name: str, mark: str) -> list[dict[str, str]]:
    """Attributes of the boxes that carry a mark."""
    return [dict(one.attrib) for one in drawing(name).iter(f"{SVG}rect") if mark in one.attrib]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_drawing_stands_alone(path: Path) -> None:
    """A title and a description for readers who do not see it, words as text within its frame on
    a ground of its own (so that it is readable on dark pages, too), small, nothing from
    elsewhere."""
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert len(text) < 20_000 and "href" not in text and "url(http" not in text
    assert root.findtext(f"{SVG}title") and root.findtext(f"{SVG}desc")
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}" and width <= 800
    ground = next(root.iter(f"{SVG}rect"))
    assert float(ground.attrib["width"]) == width - 1 and ground.attrib["fill"] == "#fcfcfb"
    words = list(root.iter(f"{SVG}text"))
    assert len(words) > 10
    for one in words:
        size = float(one.attrib["font-size"])
        room = len(one.text or "") * size * 0.58
        start = {"middle": room / 2, "end": room}.get(one.attrib.get("text-anchor", ""), 0.0)
        left = float(one.attrib["x"]) - start
        assert size >= 10 and left >= 0 and left + room <= width, one.text
        assert 0 < float(one.attrib["y"]) < height


def test_the_rows_that_are_trained_are_those_of_the_code() -> None:
    """`supervision` of the drawn mask; and each row holds the token behind its own position."""
    tokens = marked("alignment", "data-token")
    flags = torch.tensor([one["data-supervised"] == "1" for one in tokens])
    trained = supervision(flags, torch.tensor([0, len(flags)]), 1)[0].tolist()
    rows = marked("alignment", "data-row")
    assert [one["data-trained"] == "1" for one in rows] == trained[: len(rows)]
    assert [one["fill"] == GREEN for one in rows] == trained[: len(rows)]
    words = [one.text or "" for one in drawing("alignment").iter(f"{SVG}text")]
    pairs = [re.fullmatch(r"h(\d) , x(\d)", word) for word in words]
    assert [(int(one[1]) + 1, int(one[2])) for one in pairs if one] == [
        (p + 1, p + 1) for p in range(len(rows))
    ]


def test_what_a_row_attends_to_is_what_training_lets_it_see() -> None:
    """The values that move an output of the attention op, over the drawn four positions and three
    steps."""
    generator = torch.Generator().manual_seed(0)
    length, steps = 4, 3
    seen: set[str] = set()
    for step in range(steps):
        q, k0, v0 = (torch.randn(1, length, 8, generator=generator) for _ in range(3))
        keys, values = ([torch.randn(1, length, 8, generator=generator) for _ in range(step)],) * 2
        values = [one.clone().requires_grad_() for one in [v0, *values]]
        out = ttt_attention(q, k0, values[0], keys, values[1:], [0, length], scaling=0.3)
        for p in range(length):
            moved = torch.autograd.grad(out[0, p].sum(), values, retain_graph=True)
            for k, gradient in enumerate(moved):
                places = torch.nonzero(gradient[0].abs().sum(-1))[:, 0].tolist()
                seen |= {f"{step}.{p}-{k}.{place}" for place in places}
    assert {one["data-cell"] for one in marked("ttt-attention", "data-cell")} == seen


def test_the_tree_and_its_mask_are_those_of_the_code() -> None:
    """Ancestors and positions of the drawn nodes as a verify batch has them."""
    nodes = marked("trees", "data-node")
    parents = [int(one["data-parent"]) for one in nodes]
    rows = rows_of(parents, len(parents))
    cells: set[str] = set()
    for row in range(len(rows)):
        above = row
        while above >= 0:
            cells.add(f"{row}-{above}")
            above = rows[above]
    assert {one["data-cell"] for one in marked("trees", "data-cell")} == cells
    words = [one.text or "" for one in drawing("trees").iter(f"{SVG}text")]
    stands = [word for word in words if re.fullmatch(r"n(\+\d)?", word)]
    places = [("n", "n"), *((f"n+{i + 1}", f"n+{d}") for i, d in enumerate(depths_of(parents)))]
    assert stands == [word for pair in places for word in pair]


@pytest.mark.parametrize("kept", [1, 0])
def test_the_rows_of_the_head_s_second_run_are_those_of_the_code(kept: int) -> None:
    """`shift_insert` over the rows [x_n, d], one draft kept or refused: what each head row holds,
    and which of them is the last true one."""
    names = {11: "d", 12: "y", 0: None}
    shifted = shift_insert(
        torch.tensor([10, 11]), torch.tensor([0, 2]), torch.tensor([kept]), torch.tensor([12])
    )
    states = ["h_n", "h_n+1"]
    expected = [
        f"{state} , {names[token]}" if names[token] else "unused"
        for state, token in zip(states, shifted.tolist(), strict=True)
    ]
    boxes: list[str | None] = []
    texts: list[str | None] = []
    box = None
    for one in drawing("mtp-schedule"):
        if one.tag == f"{SVG}text" and re.fullmatch(r"h_n(\+1)? , [dy]|unused", one.text or ""):
            texts.append(one.text)
            boxes.append(box)
        box = one.attrib.get("fill")
    drawn = slice(0, 2) if kept else slice(2, 4)
    assert texts[drawn] == expected
    assert [fill == GREEN for fill in boxes[drawn]] == [row == kept for row in range(2)]
