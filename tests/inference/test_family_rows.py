"""Rows of training = rows of the engine for every target family and every kind of head."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from drafting import GREEDY, Answers, answers_of, worst_difference
from small_heads import HEAD_CONFIGS, PROMPTS, away_from_its_start

sys.path.append(str(Path(__file__).parents[1] / "models"))

from families import Exact, save_toy  # noqa: E402  # pyright: ignore[reportMissingImports]

from draftsmith.models.heads import HeadConfig  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402

HEADS = {
    "mtp": HeadConfig(),
    "mtp of 2 modules": HeadConfig(modules=2),
    "eagle": HEAD_CONFIGS["eagle"],
    "eagle restored": HeadConfig("eagle"),
    "eagle3": HeadConfig("eagle3", boundaries=(0, 1, 3)),
    "eagle3 of 2 layers": HEAD_CONFIGS["eagle3 of 2 layers"],
    "medusa": HEAD_CONFIGS["medusa"],
}
FAMILIES = [
    "llama3 rope",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "glm4",
    "phi3",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-moe",
]
WITHOUT_EAGLE3 = ("phi3", "deepseek-v2", "deepseek-v3")
Plain = tuple[Target, Answers]


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """A toy of each family in float64, by its own layers, and what it says."""
    folder = save_toy(request.param, tmp_path_factory.mktemp("toy"))
    target = Target.load(TargetConfig(source=str(folder), dtype="float64", device="cpu"))
    with Exact():
        return target, answers_of(target, PROMPTS[1:3], replace(GREEDY, max_new_tokens=9))


@pytest.fixture
def exact() -> Iterator[None]:
    """float64 throughout."""
    with Exact():
        yield


@pytest.mark.parametrize("name", HEADS)
def test_training_rows_equal_the_engines_rows(
    plain: Plain, request: pytest.FixtureRequest, name: str, exact: None
):
    """Three steps, prefill in chunks of three, every accept count: 1e-9."""
    target, answers = plain
    family = request.node.callspec.params["plain"]
    if name.startswith("eagle3") and family in WITHOUT_EAGLE3:
        with pytest.raises(ValueError, match="no [kq]_proj; .* use head.kind=mtp"):
            away_from_its_start(HEADS[name], target)
        return
    head = away_from_its_start(HEADS[name], target)
    worst = worst_difference(target, head, 3, 3, answers)
    assert float(worst.max()) < 1e-9, worst
