"""When drafting pays: the formula against figures worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.inference.payoff import (
    MeasuredCosts,
    ModelledCosts,
    Rates,
    Weights,
    checks,
    payoff,
    rates,
    speedup,
)
from draftsmith.inference.payoff_plot import draw

RATES = Rates("mtp", 0.0, (30, 12), (60, 30))


def run(drafter: str, drafts: int, accepted: list[int], **changes: Any) -> dict[str, Any]:
    """A run of 40 drafts of one length over one sequence at a time."""
    count = 40 if drafts else 0
    return {
        "drafter": drafter,
        "prompts": "p",
        "temperature": 0.0,
        "dtype": "bfloat16",
        "batch": 1,
        "draft_tokens": drafts,
        "num_drafts": count,
        "drafted_per_position": [count] * drafts,
        "accepted_per_position": accepted,
    } | changes


def test_tokens_of_a_step() -> None:
    """a = 0.5, 0.4: 1 + 0.5 + 0.2; a third draft is taken to be kept as often as the second."""
    assert RATES.measured == 2
    assert RATES.tokens(1) == pytest.approx(1.5)
    assert RATES.tokens(2) == pytest.approx(1.7)
    assert RATES.tokens(3) == pytest.approx(1.7 + 0.5 * 0.4 * 0.4)


def test_rates_pool_lengths_and_leave_out_what_has_no_fixed_one() -> None:
    """The first draft of every length counts, the second of those that have one; look-up,
    which does not always find one, shorter drafts, trees and adaptive lengths do not."""
    look_up = run("ngram", 2, [9, 3])
    shorter = run("draft-lm", 2, [9, 3], drafted_per_position=[40, 30])
    runs = [
        run("none", 0, []),
        run("mtp", 1, [20]),
        run("mtp", 2, [22, 11], prompts="q"),
        run("mtp", 2, [4, 1], temperature=1.0),
        run("mtp", 2, [40, 40], adaptive=True),
        run("mtp", 2, [40, 40], tree={"kind": "dynamic"}),
        look_up,
        shorter,
    ]
    assert rates(runs) == [
        Rates("mtp", 0.0, (42, 11), (80, 22)),
        Rates("mtp", 1.0, (4, 1), (40, 4)),
    ]
    assert rates([run("mtp", 3, [3, 0, 0])])[0] == Rates("mtp", 0.0, (3, 0), (40, 3))


def test_a_modelled_pass() -> None:
    """100 bytes at 10 a second, against 2 x 50 operations a row at 640 a second in tiles of 64."""
    costs = ModelledCosts(Weights(100, 50, keys=5), Weights(10, 5), 10, 640, tile=64)
    assert costs.verify(1, 1) == pytest.approx((100 + 5) / 10)
    assert costs.verify(4, 64) == pytest.approx((100 + 20) / 10)
    assert costs.verify(4, 65) == pytest.approx(2 * 50 * 128 / 640)
    assert costs.draft(1) == costs.draft(64) == pytest.approx(1.0)
    assert costs.draft(65) == pytest.approx(2 * 5 * 128 / 640)
    experts = ModelledCosts(Weights(20, 1, experts=80, share=0.25), Weights(1, 1), 1, 1e9, 1, 3.0)
    assert experts.verify(1, 1) == pytest.approx(3 + 20 + 80 * 0.25)
    assert experts.verify(1, 2) == pytest.approx(3 + 20 + 80 * (1 - 0.75**2))


def test_speed_up_and_the_best_length() -> None:
    """1.7 tokens in 12 seconds against one in 10; where rows cost, no draft pays."""
    flat = ModelledCosts(Weights(100, 0), Weights(10, 0), 10, 1, tile=1)
    assert speedup(RATES, flat, 1, 2) == pytest.approx(1.7 * 10 / 12)
    steep = ModelledCosts(Weights(0, 5), Weights(10, 0), 10, 10, tile=1)
    assert speedup(RATES, steep, 1, 1) == pytest.approx(1.5 * 1 / 3)
    found = payoff(RATES, flat, (1, 8), 3)
    assert found.speedups[8] == tuple(speedup(RATES, flat, 8, k) for k in (1, 2, 3))
    assert found.best(1) == 2 and payoff(RATES, steep, (1,), 2).best(1) == 0
    told = found.to_json()
    assert told["best_draft_tokens"] == {"1": 2, "8": 2} and told["kept"] == [30, 12]
    labels = [line.get_label() for line in draw([found], "here").axes[0].get_lines()]
    assert labels[:3] == ["K=1", "K=2", "K=3 (not measured)"]


def _passes(sequences: int, drafts: int, count: int, **seconds: float) -> list[dict[str, Any]]:
    rows = sequences * (drafts + 1)
    return [{"sequences": sequences, "rows": rows, "count": count, "median": seconds}]


def test_measured_passes() -> None:
    """Drafts and refills are taken off a step; steps of one shape are weighted by how many there
    were; between and beyond measured rows is a line."""
    runs = [
        run("none", 0, [], passes=_passes(1, 0, 10, step=10.0)),
        run("none", 0, [], passes=_passes(1, 0, 30, step=14.0, verify=13.0)),
        run("mtp", 2, [8, 4], passes=_passes(1, 2, 5, step=20.0, draft=3.0, refill=1.0)),
        run("ngram", 2, [8, 4], passes=_passes(1, 2, 5, step=99.0)),
        run("mtp", 1, [8], passes=_passes(4, 1, 5, step=20.0, draft=3.0)),
    ]
    costs = MeasuredCosts.of(runs, "mtp")
    assert costs.passes[1] == [(1, 13.0), (3, 16.0)] and costs.drafts[1] == 2.0
    assert costs.batches == (1,)  # of four sequences there is no plain step
    assert costs.verify(1, 2) == 14.5 and costs.verify(1, 5) == 19.0
    assert speedup(RATES, costs, 1, 2) == pytest.approx(1.7 * 13 / (16 + 2 * 2))


def test_the_formula_is_held_against_other_runs() -> None:
    """K = 2 is foretold from K = 1 and 3, whose passes lie on a line, and whose rates it shares:
    with 40 steps of 1 + 20/40 + 10/40 tokens the measured speed-up is 1.75 x 10 / 16. A report of
    one K is held against itself."""

    def measured(drafts: int, accepted: list[int]) -> dict[str, Any]:
        step = 10.0 + drafts + 2.0 * drafts
        seconds = {"step": step, "draft": 2.0 * drafts}
        tokens = 40 + sum(accepted)
        return run(
            "mtp",
            drafts,
            accepted,
            decode_tokens=tokens,
            seconds=40 * step + 7.0,
            time={"prefill": 7.0},
            passes=_passes(1, drafts, 40, **seconds),
        )

    plain = run("none", 0, [], decode_tokens=40, seconds=403.0, time={"prefill": 3.0})
    plain["passes"] = _passes(1, 0, 40, step=10.0)
    one, two, three = (measured(k, [20, 10, 5][:k]) for k in (1, 2, 3))
    found = {check.drafts: check for check in checks([plain, one, two, three])}
    assert found[2].measured == pytest.approx(1.75 * 10 / 16)
    assert found[2].expected == pytest.approx(1.75 * 10 / 16) and found[2].left_out
    assert found[3].off == pytest.approx(0)  # rates and passes go on as they did
    (alone,) = checks([plain, two])
    assert not alone.left_out and alone.off == pytest.approx(0)
    slower = {**two, "seconds": 2 * (two["seconds"] - 7) + 7}
    assert {c.drafts: c for c in checks([plain, one, slower, three])}[2].off == pytest.approx(1.0)
    assert checks([plain, {**two, "passes": []}]) == []
