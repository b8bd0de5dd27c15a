"""Rows of a tree see the text and their own path, and nothing else; a chain is a tree."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.causal_attention import causal_attention_reference
from draftsmith.kernels.tree_attention import tree_attention, tree_attention_reference
from draftsmith.kernels.tree_build import build_trees

SETTINGS = [(None, None), (1, None), (2, None), (3, 3.0), (7, None), (30, 2.0)]
"""(window, soft cap): windows that end inside the tree, in the text, and nowhere."""
PARENTS = [-1, 0, 0, 1, 1, 2, 3, -1, 7]


def _keys(columns: int, past: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(columns)
    shapes = ((4, columns, 8), (2, past + columns, 8), (2, past + columns, 5))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
def test_every_row_equals_the_last_row_of_its_path_as_a_chain(
    window: int | None, softcap: float | None
):
    """Both forms against causal attention over the text and one path; only the last rows of a tree
    give the same."""
    q, k, v = _keys(len(PARENTS))
    ancestry = build_trees(torch.tensor([PARENTS]), 4).ancestry[0]
    past = k.shape[1] - len(PARENTS)
    settings = (0.3, window, softcap)
    defined = tree_attention_reference(q, k, v, ancestry, *settings)
    for form in (tree_attention_reference, tree_attention):
        torch.testing.assert_close(form(q, k, v, ancestry, *settings), defined, atol=1e-14, rtol=0)
        last = form(q[:, 5:], k, v, ancestry[5:], *settings)
        torch.testing.assert_close(last, defined[:, 5:], atol=1e-14, rtol=0)
    for row in range(len(PARENTS)):
        path, node = [], row
        while node >= 0:
            path.insert(0, node)
            node = PARENTS[node]
        seen = [*range(past), *(past + place for place in path)]
        alone = causal_attention_reference(q[:, path], k[:, seen], v[:, seen], *settings)
        torch.testing.assert_close(defined[:, row], alone[:, -1], atol=1e-14, rtol=0)


def test_keys_off_the_path_are_not_read():
    """Not even where they are infinite."""
    q, k, v = _keys(3)
    k[:, -2] = float("inf")
    ancestry = build_trees(torch.tensor([[-1, 0, 0]]), 2).ancestry[0]
    out = tree_attention(q[:, 2:], k, v, ancestry[2:], 1.0)
    assert bool(torch.isfinite(out).all())
