"""Counts of the engine: buckets, and sums over several runs."""

from __future__ import annotations

import random

from draftsmith.inference.metrics import EngineMetrics, context_bucket


def test_buckets_are_powers_of_two_from_256() -> None:
    """A bucket's lower bound belongs to it."""
    found = {
        size: context_bucket(size) for size in (1, 255, 256, 511, 512, 1023, 1024, 8191, 70000)
    }
    assert found == {
        1: 0,
        255: 0,
        256: 256,
        511: 256,
        512: 512,
        1023: 512,
        1024: 1024,
        8191: 4096,
        70000: 65536,
    }


def test_counts_of_two_runs_add_up() -> None:
    """Recorded apart and added = recorded in one, whatever the chains' lengths."""
    chance = random.Random(0)
    parts, whole = [EngineMetrics(), EngineMetrics()], EngineMetrics()
    for number in range(200):
        drafted = chance.randint(0, 2 + 3 * (number % 2))
        accepted = chance.randint(0, drafted)
        step = (chance.randint(1, 3000), drafted, accepted, accepted + 1, chance.random() < 0.1)
        parts[number % 2].record(*step)
        whole.record(*step)
    parts[0].seconds, parts[1].seconds = {"draft": 1.0}, {"draft": 0.5, "verify": 2.0}
    parts[0].add(parts[1])
    whole.seconds = {"draft": 1.5, "verify": 2.0}
    assert parts[0] == whole and parts[0].to_json() == whole.to_json()
    assert len(whole.drafted_per_position) == 5 and whole.cut_drafts > 0
