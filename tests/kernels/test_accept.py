"""Verification is lossless: the law of what is emitted is the target's."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.accept import DraftLaw, accept_greedy, accept_sampled, draw, draw_rows
from draftsmith.kernels.accept_chains import accept_chains_reference
from draftsmith.kernels.chains import Chains

V = 5
JUST_BELOW_ONE = 1 - 1e-12


def test_greedy_keeps_the_longest_matching_prefix():
    """A match after a mismatch does not count; missing drafts (-1) never match."""
    drafts = torch.tensor([[7, 8, 9], [7, 1, 9], [1, 8, 9], [7, -1, -1]])
    choices = torch.tensor([[7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9]])
    assert accept_greedy(drafts, choices).tolist() == [3, 1, 0, 1]


def test_draw_inverts_the_cumulative_sum():
    """Each token takes a share of [0, 1) equal to its weight, zero weights none, edges included."""
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    assert [draw(weights, u) for u in (0.0, 0.2499, 0.25, 0.9, JUST_BELOW_ONE)] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]], ids=str)
def test_weights_without_a_law_are_refused(weights: list[float]):
    """NaN logits must not become a token id."""
    with pytest.raises(ValueError, match="NaN or infinity"):
        draw(torch.tensor(weights), 0.5)


def _acceptance(token: int, law: DraftLaw | None, target: torch.Tensor) -> float:
    """The probability that one draft is kept, found by bisection over its uniform (it is
    monotone)."""
    low, high = 0.0, 1.0
    if accept_sampled([token], law, target, [JUST_BELOW_ONE, 0.5])[0] == 1:
        return 1.0
    for _ in range(45):
        middle = (low + high) / 2
        kept = accept_sampled([token], law, target, [middle, 0.5])[0]
        low, high = (middle, high) if kept else (low, middle)
    return low


def _residual(
    token: int, law: DraftLaw | None, target: torch.Tensor, cells: int = 4000
) -> torch.Tensor:
    """The law of the token that replaces a rejected draft, over a grid of the last uniform."""
    counts = torch.zeros(V, dtype=torch.float64)
    for cell in range(cells):
        kept, following = accept_sampled(
            [token], law, target, [JUST_BELOW_ONE, (cell + 0.5) / cells]
        )
        assert kept == 0
        counts[following] += 1
    return counts / cells


@pytest.mark.parametrize("drafted", ["drawn", "drawn from a reduced vocabulary", "argmax"])
def test_first_token_has_the_targets_law_exactly(drafted: str):
    """All draft tokens, all accept decisions, all replacements, weighted by the law of the draft:
    the sum is p."""
    torch.manual_seed(3)
    p = torch.softmax(torch.randn(2, V, dtype=torch.float64) * 1.5, -1)
    if drafted == "argmax":
        law, q = None, torch.eye(V, dtype=torch.float64)[2]
    else:
        ids = torch.tensor([0, 2, 3]) if "reduced" in drafted else None
        probs = torch.softmax(torch.randn(1, V if ids is None else 3, dtype=torch.float64), -1)
        law = DraftLaw(probs, ids)
        q = law.dense(V)[0]
    emitted = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        if q[token] == 0:
            continue
        keep = _acceptance(token, law, p)
        expected = float(p[0, token]) if law is None else min(1.0, float(p[0, token] / q[token]))
        assert keep == pytest.approx(expected, abs=1e-9)
        emitted[token] += q[token] * keep
        if keep < 1:
            emitted += q[token] * (1 - keep) * _residual(token, law, p)
    torch.testing.assert_close(emitted, p[0], rtol=0, atol=1e-3)


def test_bonus_comes_from_the_last_row():
    """When every draft is kept the next token has the law of the target's last row, not of an
    earlier one."""
    p = torch.tensor([[0.0, 1.0, 0, 0, 0], [0, 0, 0, 0.25, 0.75]], dtype=torch.float64)
    results = [accept_sampled([1], None, p, [0.5, u]) for u in (0.1, 0.24, 0.26, 0.9)]
    assert results == [(1, 3), (1, 3), (1, 4), (1, 4)]


@pytest.mark.parametrize("size", [1, 5, 256, 700, 1024])
def test_rows_are_drawn_as_one_running_sum_would(size: int):
    """Blocks change nothing: each row's token is that of its own cumulative sum, with stretches of
    zeros, the ends of [0, 1), and neighbours that cannot be drawn from."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(40, size, generator=generator, dtype=torch.float64)
    weights[:20] *= torch.rand(20, size, generator=generator) < 0.01
    weights[:20, size // 2] += 0.5
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64)
    uniforms[:3], uniforms[20:23] = JUST_BELOW_ONE, 0
    weights[30], weights[31, 0] = 0, float("nan")
    tokens = draw_rows(weights, uniforms).tolist()
    assert tokens[30:32] == [-1, -1]
    for row in (*range(30), *range(32, 40)):
        cumulative = weights[row].cumsum(0)
        expected = int(torch.searchsorted(cumulative, uniforms[row] * cumulative[-1], right=True))
        assert tokens[row] == min(expected, int(weights[row].nonzero()[-1]))


@pytest.mark.parametrize("reduced", [False, True])
def test_chains_are_judged_as_each_alone(reduced: bool):
    """A batch of drawn and chosen chains of every length against `accept_sampled`, one by one."""
    generator = torch.Generator().manual_seed(2)
    size, most, lengths = 9, 3, [3, 0, 1, 2] * 50
    ids = torch.tensor([0, 3, 4, 8]) if reduced else None
    columns = None
    if ids is not None:
        columns = torch.full((size,), -1)
        columns[ids] = torch.arange(4)
    starts = torch.tensor([0, *(length + 1 for length in lengths)]).cumsum(0)
    target = torch.softmax(torch.randn(int(starts[-1]), size, generator=generator).double(), -1)
    law = torch.softmax(
        torch.randn(len(lengths), most, 4 if reduced else size, generator=generator).double(), -1
    )
    drawn = torch.rand(len(lengths), generator=generator) < 0.6
    drafts = torch.full((len(lengths), most), -1)
    for index, length in enumerate(lengths):
        picks = torch.multinomial(law[index], 1, generator=generator)[:length, 0]
        drafts[index, :length] = picks if ids is None else ids[picks]
    uniforms = torch.rand(len(lengths), most + 1, generator=generator, dtype=torch.float64)
    greedy = torch.zeros(len(lengths), dtype=torch.bool)
    chains = Chains(drafts, starts, greedy, drawn, uniforms, law, columns)
    unread = torch.zeros(len(target), dtype=torch.int64)
    kept, following = accept_chains_reference(chains, unread, target)
    for index, length in enumerate(lengths):
        own = DraftLaw(law[index, :length], ids) if drawn[index] and length else None
        rows = target[starts[index] : starts[index + 1]]
        given = uniforms[index, : length + 1].tolist()
        expected = accept_sampled(drafts[index, :length].tolist(), own, rows, given)
        assert (int(kept[index]), int(following[index])) == expected
    assert {0, 1, 2, 3} == set(kept.tolist())
