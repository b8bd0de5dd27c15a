"""A drafted tree changes what a step costs, never the text: every head, static and dynamic, every
accepted path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Answers, answers_of
from small_heads import HEAD_CONFIGS, PROMPTS, away_from_its_start
from test_engine import TINY_HEADS, joint_law, tiny_target
from torch import Tensor

from draftsmith.inference.batch import Batch
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.drafters import Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.pages import KVPool
from draftsmith.inference.sequence import Sequence
from draftsmith.inference.tree import TreeConfig, depths_of, rows_of
from draftsmith.inference.tree_drafter import TreeHeadDrafter
from draftsmith.inference.tree_verify import verify_trees
from draftsmith.kernels.accept import DraftLaw, draw
from draftsmith.kernels.tree_walk import walk_sampled
from draftsmith.models.heads import build_head
from draftsmith.models.target import Target

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
SHAPES = {
    "published": TreeConfig("static"),
    "comb": TreeConfig("static", "comb", top_k=3),
    "dynamic": TreeConfig("dynamic", top_k=3, nodes=9),
}


def config(tree: TreeConfig, **changes: Any) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings: dict[str, Any] = {
        "draft_tokens": 3,
        "pool_tokens": 1024,
        "page_size": 4,
        "max_batch": 3,
    }
    return EngineConfig(**(settings | changes), poison=True, tree=tree)


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
    allocator = engine.scheduler.allocator
    assert allocator.num_free == allocator.num_pages
    assert engine.metrics.num_draft_tokens > 3 * engine.metrics.num_drafts > 0


class ScriptedTrees:
    """Proposes one small tree; of each round one node's path is right, all else is wrong.

    Args:
        rounds: per round the node whose path the target will keep, -1 for none.
    """

    name = "scripted"
    num_layers = 0
    boundaries = ()
    lookahead = 0
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


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_a_limit_cuts_a_trees_levels(target: Target, answers: Answers, limit: int):
    """No deeper than what may still be kept, and no page is wanting."""
    tree = SHAPES["published"]
    drafter = TreeHeadDrafter(away_from_its_start(HEAD_CONFIGS["mtp"], target), None, tree)
    need = max(map(len, PROMPTS)) + limit + config(tree).step_slots
    engine = Engine(target, config(tree, pool_tokens=need, page_size=1), drafter)
    results = engine.run(PROMPTS, SamplingParams(max_new_tokens=limit, ignore_eos=True))
    assert [s.output for s in results] == [answers[tuple(prompt)][:limit] for prompt in PROMPTS]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coupled", [False, True])
def test_a_sampled_text_does_not_depend_on_its_batch(target: Target, shape: str, coupled: bool):
    """Alone and beside others, greedy ones among them, the same; coupled, it is what plain decoding
    draws."""
    head = away_from_its_start(HEAD_CONFIGS["mtp"], target)
    params = [
        SamplingParams(
            9, temperature=0.9 * (n > 0), top_k=9, seed=n, ignore_eos=True, coupled=coupled
        )
        for n in range(len(PROMPTS))
    ]

    def texts(chosen: list[int], draft_tokens: int = 3) -> list[list[int]]:
        drafter = TreeHeadDrafter(head, None, SHAPES[shape]) if draft_tokens else None
        settings = config(SHAPES[shape], draft_tokens=draft_tokens, max_batch=5)
        engine = Engine(target, settings, drafter)
        sequences = [engine.add(PROMPTS[index], params[index]) for index in chosen]
        while not engine.scheduler.idle:
            engine.step()
        return [sequence.output for sequence in sequences]

    together = texts([0, 1, 2, 3, 4])
    if coupled:
        assert together == texts([0, 1, 2, 3, 4], draft_tokens=0)
    else:
        # Alone, every step after the first speculates, as it does in a batch of one chunk.
        assert together == [texts([index])[0] for index in range(5)]


def has_the_law(engine: Engine, target: Target, prompt: list[int], count: int, limit: int) -> None:
    """Chi-square of the first three of `limit` tokens jointly, over `count` answers at T = 0.8."""
    sequences = [
        engine.add(prompt, SamplingParams(limit, temperature=0.8, seed=index, ignore_eos=True))
        for index in range(count)
    ]
    while not engine.scheduler.idle:
        engine.step()
    seen = torch.zeros(5, 5, 5, dtype=torch.float64)
    for sequence in sequences:
        a, b, c = sequence.output[:3]
        seen[a, b, c] += 1
    expected = joint_law(target, prompt, 0.8) * count
    likely = expected > 5
    chi2 = float(((seen - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5, (chi2, freedom)


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("reduced mtp", TreeConfig("static", "full", top_k=2)),
        ("medusa", TreeConfig("static", "full", top_k=3)),
        ("reduced eagle3", TreeConfig("dynamic", top_k=2, nodes=4)),
    ],
)
def test_sampled_trees_have_the_targets_law(
    tiny_llama_folder: Callable[..., Path], name: str, tree: TreeConfig
):
    """Chi-square of three tokens jointly over 2,000 answers, drawn and chosen children."""
    target = tiny_target(tiny_llama_folder)
    chosen, ids = TINY_HEADS[name]
    head = build_head(chosen, target.folder, 1.0, draft_ids=ids)
    drafter = TreeHeadDrafter(head.double(), ids, tree)
    count, prompt = 2000, [3, 1, 4, 1, 3, 1]
    settings = EngineConfig(
        draft_tokens=2, max_batch=500, pool_tokens=1 << 14, max_step_tokens=4000, tree=tree
    )
    engine = Engine(target, settings, drafter)
    has_the_law(engine, target, prompt, count, 4)
    assert engine.metrics.num_accepted_tokens > count / 10


@pytest.mark.parametrize("ids", [None, [0, 2, 3, 5, 6]], ids=["whole", "reduced"])
def test_each_row_is_judged_by_its_own_law(ids: list[int] | None):
    """Two trees and a greedy one, with very different laws at every node: what the batch decides is
    what each tree's walk decides."""
    generator = torch.Generator().manual_seed(1)
    table = None if ids is None else torch.tensor(ids)
    parents, inner, kept = [-1, -1, 0, 0, 1], [0, 1, 2], set()
    for seed in range(40):
        sequences, proposals = [], []
        for index in range(3):
            params = SamplingParams(8, temperature=float(index > 0), seed=seed, ignore_eos=True)
            sequence = Sequence.create(str(index), [1, 2], params)
            sequence.pages, sequence.page_size = [index], 16
            laws = torch.softmax(4 * torch.randn(3, len(ids or range(7)), generator=generator), -1)
            tokens = [0] * 5
            for row, law in enumerate(laws.double()):
                children = [node for node in range(5) if parents[node] == row - 1]
                drawn = torch.multinomial(law, len(children), generator=generator)
                for node, token in zip(children, drawn.tolist(), strict=True):
                    tokens[node] = token if ids is None else ids[token]
            law = DraftLaw(laws.double(), table) if index else None
            sequences.append(sequence)
            proposals.append(Proposal(tokens, law, parents))
        parts = [(one, 1, [2, *two.tokens]) for one, two in zip(sequences, proposals, strict=True)]
        rows = rows_of(parents, 5)
        batch = Batch.build(parts, parents=[rows] * 3)
        logits = 2 * torch.randn(18, 7, generator=generator, dtype=torch.float64)
        streams = [sequence.foreseen(6) for sequence in sequences]
        verdict = verify_trees(batch, sequences, proposals, logits)
        links = [1, 3, 5, -1, -1, -1], [-1, 2, -1, 4, -1, -1]
        for index in (1, 2):
            law = proposals[index].law
            assert law is not None
            path, weights = walk_sampled(
                [0, *proposals[index].tokens],
                *links,
                dict(zip(inner, law.dense(7), strict=True)).__getitem__,
                torch.softmax(logits[6 * index : 6 * index + 6], -1),
                streams[index],
            )
            assert verdict.kept[index] == [row - 1 for row in path]
            assert verdict.following[index] == draw(weights, streams[index][-1])
            kept.add(tuple(path))
    assert len(kept) >= 5


def test_shapes():
    """The published 25 paths, the comb and the full tree, cut at a depth; room for look-up's branch
    beside the nodes that are verified, not beside those that the head runs on the way."""
    assert sum(TreeConfig("static").children(5).values()) == 25
    assert sum(TreeConfig("static").children(2).values()) == 12
    comb = TreeConfig("static", "comb", top_k=3)
    assert comb.children(3) == {(): 3, (0,): 3, (0, 0): 3} and comb.slots(3) == 9 + 8
    full = TreeConfig("static", "full", top_k=2)
    assert full.slots(3) == 14 + 8 and len(full.children(3)) == 7
    assert TreeConfig("dynamic", top_k=10, nodes=59).slots(6) == 59 + 8
    assert TreeConfig("dynamic", top_k=10, nodes=59, lookup=0).slots(6) == 59
    assert TreeConfig("dynamic", top_k=10, nodes=20).slots(6) == 50
    assert config(TreeConfig()).step_slots == 3


def test_what_is_refused(target: Target):
    """Trees that are too large, and heads that have no trees."""
    with pytest.raises(ValueError, match="full tree of 3 levels and top_k 8 has more than 256"):
        config(TreeConfig("static", "full", top_k=8))
    with pytest.raises(ValueError, match="engine.tree.nodes 0"):
        TreeConfig(nodes=0)
    with pytest.raises(ValueError, match="engine.tree.top_k 99"):
        TreeConfig(top_k=99)
    with pytest.raises(ValueError, match="engine.tree.lookup 33: choose 0 to 32"):
        TreeConfig(lookup=33)
    modules = away_from_its_start(HEAD_CONFIGS["mtp of 3 modules"], target)
    with pytest.raises(ValueError, match="3 modules .* engine.tree.kind=none"):
        TreeHeadDrafter(modules, None, SHAPES["dynamic"])
    head = away_from_its_start(HEAD_CONFIGS["mtp"], target)
    with pytest.raises(ValueError, match="give both the same engine.tree"):
        Engine(target, config(TreeConfig()), TreeHeadDrafter(head, None, SHAPES["comb"]))
