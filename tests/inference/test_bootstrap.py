"""Intervals over prompts: what they hold, and that they are honest."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.inference.bootstrap import difference, ratio


def prompts(count: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """[count, 2]: tokens and target calls of answers whose acceptance differs, 2 `scale` tokens a
    call on the whole."""
    draw = np.random.default_rng(seed)
    calls = draw.integers(5, 60, count)
    return np.stack([calls * draw.normal(2 * scale, 0.5, count), calls], 1)


def test_the_figure_is_the_ratio_of_sums():
    """Not the mean of ratios: a long answer weighs more."""
    interval = ratio(np.array([[30, 10], [4, 4], [12, 8]]))
    assert interval is not None
    assert interval.value == pytest.approx(46 / 22)
    assert 1 <= interval.low < interval.value < interval.high <= 3


def test_resampling_equals_its_definition():
    """Prompts drawn with replacement, one by one."""
    counts = prompts(12, 0)
    interval = ratio(counts)
    draw = np.random.default_rng(5)
    sums = counts[draw.integers(0, 12, (20_000, 12))].sum(1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    assert interval is not None
    assert interval.low == pytest.approx(low, abs=0.01)
    assert interval.high == pytest.approx(high, abs=0.01)
    assert ratio(counts) == interval


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Of 100 samples of 40 prompts about 95: fewer than 87 or all 100 would be another interval
    (each less likely than one in a hundred)."""
    found = [ratio(prompts(40, seed)) for seed in range(100)]
    covered = sum(one is not None and one.low <= 2 <= one.high for one in found)
    assert 87 <= covered < 100


def test_a_difference_is_paired():
    """The same prompts, each drafted a little better: that is certain, the figures are not."""
    theirs = prompts(20, 1)
    ours = theirs * [1.05, 1]
    change, alone = difference(ours, theirs), ratio(theirs)
    assert change is not None and alone is not None
    assert change.value == pytest.approx(0.05 * alone.value)
    assert change.low > 0 and not change.holds_zero
    assert change.high - change.low < 0.2 * (alone.high - alone.low)
    same = difference(theirs, theirs)
    assert same is not None and tuple(same) == (0, 0, 0) and same.holds_zero


@pytest.mark.parametrize("counts", [[[5, 3]], [[0, 0], [0, 0]]], ids=["one prompt", "no call"])
def test_nothing_is_said_where_nothing_can_be(counts: list[list[int]]):
    """None, and no division by zero."""
    assert ratio(np.array(counts)) is None


def test_answers_without_a_call_do_not_spoil_the_rest():
    """Resamples of such answers alone are left out."""
    interval = ratio(np.array([[0, 0], [6, 3]]))
    assert interval is not None and tuple(interval) == (2, 2, 2)


def test_each_run_is_divided_by_its_own_calls():
    """The value of a difference is that of the two ratios of sums."""
    ours, theirs = np.array([[30, 10], [12, 8]]), np.array([[30, 20], [12, 10]])
    change = difference(ours, theirs)
    assert change is not None and change.value == pytest.approx(42 / 18 - 42 / 30)
