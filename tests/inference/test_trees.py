"""A drafted tree changes what a step costs, never the text: every head, static and dynamic, every
accepted path."""

from __future__ import annotations

import pytest
import torch
from conftest import HEAD_CONFIGS, PROMPTS, away_from_its_start
from drafting import Answers, answers_of

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.tree import TreeConfig
from draftsmith.inference.tree_drafter import TreeHeadDrafter
from draftsmith.models.target import Target

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
SHAPES = {
    "published": TreeConfig("static"),
    "comb": TreeConfig("static", "comb", top_k=3),
    "dynamic": TreeConfig("dynamic", top_k=3, nodes=9),
}


def config(tree: TreeConfig, **changes: int) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings = {"draft_tokens": 3, "pool_tokens": 1024, "page_size": 4, "max_batch": 3} | changes
    return EngineConfig(**settings, poison=True, tree=tree)


@pytest.fixture(scope="module")
def answers(target: Target) -> Answers:
    """Plain greedy continuations."""
    return answers_of(target, PROMPTS, GREEDY)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["mtp", "eagle", "eagle3 of 2 layers", "medusa"])
def test_greedy_trees_write_the_plain_text(
    target: Target, answers: Answers, name: str, shape: str, page_size: int
):
    """Bad heads over a reduced vocabulary or the whole, batches that requests join and leave."""
    ids = torch.arange(0, 512, 3) if page_size == 1 else None
    head = away_from_its_start(HEAD_CONFIGS[name], target, ids)
    drafter = TreeHeadDrafter(head, ids, SHAPES[shape])
    engine = Engine(target, config(SHAPES[shape], page_size=page_size), drafter)
    results = engine.run(PROMPTS, GREEDY)
    assert [s.output for s in results] == [answers[tuple(prompt)] for prompt in PROMPTS]
    assert engine.metrics.num_draft_tokens > 3 * engine.metrics.num_drafts > 0
