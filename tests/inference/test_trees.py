"""A drafted tree changes what a step costs, never the text: every head, static and dynamic, every
accepted path."""

from __future__ import annotations

import pytest
import torch
from conftest import HEAD_CONFIGS, PROMPTS, away_from_its_start
from drafting import Answers, answers_of
from torch import Tensor

from draftsmith.inference.batch import Batch
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.drafters import Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.pages import KVPool
from draftsmith.inference.sequence import Sequence
from draftsmith.inference.tree import TreeConfig, depths_of
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


class ScriptedTrees:
    """Proposes one small tree; of each round one node's path is right, all else is wrong.

    Args:
        rounds: per round the node whose path the target will keep, -1 for none.
    """

    name = "scripted"
    num_layers = 0
    boundaries = ()
    parents = (-1, -1, 0, 0, 1, 3, 4)

    def __init__(self, answers: Answers, rounds: list[int], vocabulary: int) -> None:
        self.answers, self.rounds, self.vocabulary = answers, rounds, vocabulary
        self.round: dict[str, int] = {}

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Nothing to prepare."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """Wrong tokens differ from the right one of their level."""
        depths = depths_of(list(self.parents))
        found = []
        for sequence, count in zip(sequences, counts, strict=True):
            answer = self.answers[tuple(sequence.tokens[: sequence.num_prompt])]
            turn = self.round.get(sequence.id, 0)
            self.round[sequence.id] = turn + 1
            node, right = self.rounds[turn % len(self.rounds)], set()
            while node >= 0:
                right.add(node)
                node = self.parents[node]
            nodes = [node for node, depth in enumerate(depths) if depth <= count]
            tokens = []
            for node in nodes:
                place = len(sequence.output) + depths[node] - 1
                true = answer[place] if place < len(answer) else 0
                tokens.append(true if node in right else (true + 1 + node) % self.vocabulary)
            places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
            parents = [places[self.parents[node]] for node in nodes]
            found.append(Proposal(tokens, None, parents))
        return found

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """Nothing to refill."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("rounds", [[-1], [0, 4], [1, 6], [5, -1, 6, 2], [3, 3, 5], [6]], ids=str)
def test_every_path_of_a_small_tree(
    target: Target, answers: Answers, rounds: list[int], page_size: int
):
    """Rounds keep the root alone, a first child, later siblings, the deepest leaves; pages are
    scattered and NaN where nothing was written."""
    drafter = ScriptedTrees(answers, rounds, target.vocab_size)
    tree = TreeConfig("dynamic", nodes=7)
    engine = Engine(target, config(tree, page_size=page_size), drafter)
    scatter(engine)
    results = engine.run(PROMPTS, GREEDY)
    depths = depths_of(list(drafter.parents))
    for sequence in results:
        assert sequence.output == answers[tuple(sequence.tokens[: sequence.num_prompt])]
        whole = sequence.tokens_per_step[:-3]
        kept = [depths[node] if node >= 0 else 0 for node in rounds]
        assert whole == [kept[i % len(kept)] + 1 for i in range(len(whole))]
    if rounds == [-1]:
        assert engine.metrics.accepted_per_position == [0, 0, 0]
        assert engine.metrics.num_draft_tokens == 7 * engine.metrics.num_drafts
        assert engine.metrics.drafted_per_position == [engine.metrics.num_drafts] * 3


def scatter(engine: Engine) -> None:
    """Leave every other page free."""
    allocator = engine.scheduler.allocator
    pages = allocator.allocate(allocator.num_pages)
    assert pages is not None
    allocator.release(pages[::2])
