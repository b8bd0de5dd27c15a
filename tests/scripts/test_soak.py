"""The soak in small: few pages, many requests, every answer that of a pool without limit."""

from __future__ import annotations

import pytest

from draftsmith.inference.prefix import PrefixCache
from draftsmith.models.target import Target
from draftsmith.scripts.bench.soak import soak, toy_target


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The bench's target."""
    return toy_target(tmp_path_factory.mktemp("toy"), 0)


@pytest.mark.parametrize(("name", "count"), [("mtp of 3 modules", 20), ("draft-lm", 40)])
def test_answers_are_those_of_a_pool_without_limit(toy: Target, name: str, count: int):
    """Preempted, cancelled, forked, begun on pages of others: nothing is lost, nothing is NaN."""
    result = soak(name, toy, count, 3)
    assert result["preemptions"] > 5 and result["cancelled"] and result["prefix_hits"] > 5
    assert result["tokens"] > 5 * count and result["tokens_per_target_call"] > 1


def test_a_wrong_page_is_noticed(toy: Target, monkeypatch: pytest.MonkeyPatch):
    """Names that forget what lies before a page give other answers."""
    name = PrefixCache._name

    def blind(cache: PrefixCache, sequence, index: int) -> bytes:
        return name(cache, sequence, index)[:0] + bytes(sequence.tokens[4 * index : 4 * index + 1])

    monkeypatch.setattr(PrefixCache, "_name", blind)
    with pytest.raises(AssertionError):
        soak("none", toy, 40, 3)
