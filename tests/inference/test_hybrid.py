"""Look-up before a model, and chains as long as they pay: the text is plain decoding's, and what is
drafted follows what was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafting import GREEDY, Answers, Script, ScriptedDrafter, answers_of
from small_heads import HEAD_CONFIGS, PROMPTS, away_from_its_start
from test_engine import TINY_HEADS, tiny_target
from test_trees import has_the_law

from draftsmith.inference.adaptive import AdaptiveLengths, FixedCosts, MeasuredCosts
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMDrafter
from draftsmith.inference.drafters import Drafter, NgramDrafter, Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.inference.hybrid import HybridDrafter, NgramConfig
from draftsmith.inference.sequence import Sequence
from draftsmith.inference.tree import TreeConfig, grafted
from draftsmith.inference.tree_drafter import TreeHeadDrafter
from draftsmith.models.heads import HeadConfig, build_head
from draftsmith.models.target import Target

REPEATING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
COSTS = FixedCosts(base=1.0, per_row=0.1, per_draft=0.05)


def config(**changes: Any) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings: dict[str, Any] = {"pool_tokens": 1024, "page_size": 4, "poison": True, "max_batch": 3}
    return EngineConfig(**(settings | changes))


@pytest.fixture(scope="module")
def answers(target: Target) -> Answers:
    """Greedy continuations, one of them of a prompt that repeats itself."""
    return answers_of(target, [*PROMPTS, REPEATING])


def model_of(name: str, target: Target) -> Drafter:
    """Who drafts behind the look-up: a head that was moved, or the target itself."""
    if name == "draft-lm":
        return DraftLMDrafter(DraftLM.paired(target, target))
    modules = 2 if "2" in name else 1
    return HeadDrafter(away_from_its_start(HeadConfig(modules=modules), target), None)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", ["head", "head of 2 modules", "draft-lm"])
def test_text_is_plain_decodings(target: Target, answers: Answers, name: str, adaptive: bool):
    """Both draft in one run, steps of either after steps of the other; measured costs."""
    drafter = HybridDrafter(NgramConfig(min_match=1), model_of(name, target))
    served = {"lookup": 0, "model": 0}
    for who in served:
        part, name_of_call = getattr(drafter, who), "find" if who == "lookup" else "propose"
        call = getattr(part, name_of_call)

        def counted(*given, call=call, who=who):
            found = call(*given)
            drafted = [found] if who == "lookup" else [one.tokens for one in found]
            served[who] += sum(map(bool, drafted))
            return found

        setattr(part, name_of_call, counted)
    engine = Engine(target, config(adaptive=adaptive), drafter)
    results = engine.run([list(prompt) for prompt in answers], GREEDY)
    assert [one.output for one in results] == list(answers.values())
    assert adaptive or (served["lookup"] and served["model"])  # the clock may choose no drafts


def test_look_up_drafts_only_where_enough_tokens_match(target: Target):
    """Three tokens that occurred before: look-up; fewer: the model, with its own law."""
    drafter = HybridDrafter(NgramConfig(min_match=3), model_of("head", target))
    engine = Engine(target, config(), drafter)
    params = SamplingParams(max_new_tokens=9, temperature=1.0, ignore_eos=True)
    matching, other = engine.add(REPEATING, params), engine.add([5, 6, 7, 8, 9, 7], params)
    while not (matching.decoding and other.decoding):
        engine.step()
    # What was drawn last does not matter here: put the repeated token there.
    matching.tokens[-1], other.tokens[-1] = 8, 8
    matching.tokens[-4:] = [5, 6, 7, 8]
    first, second = drafter.propose([matching, other], [3, 3])
    assert (first.tokens, first.law) == ([9, 5, 6], None)
    assert len(second.tokens) == 3 and second.law is not None
    assert drafter.propose([matching], [0]) == [Proposal([])]


TREES = {
    "static": TreeConfig("static", "comb", top_k=2, lookup=5),
    "dynamic": TreeConfig("dynamic", top_k=2, nodes=5, lookup=5),
}


def beside(name: str, tree: TreeConfig, target: Target) -> HybridDrafter:
    """Look-up's branch beside a head's trees, or a draft LM's chains."""
    if name == "draft-lm":
        return HybridDrafter(NgramConfig(), model_of(name, target), tree)
    head = away_from_its_start(HEAD_CONFIGS[name], target)
    return HybridDrafter(NgramConfig(), TreeHeadDrafter(head, None, tree), tree)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", ["mtp", "eagle3", "medusa", "draft-lm"])
def test_a_branch_beside_a_tree_changes_no_text(
    target: Target, answers: Answers, name: str, shape: str, page_size: int
):
    """Of bad heads and a good draft LM, greedy; branches go deeper than the model's levels, and a
    pool with room for one request at a time is enough."""
    tree = TREES[shape]
    for pool in (1024, max(map(len, answers)) + 20 + config(tree=tree).step_slots + page_size):
        settings = config(tree=tree, draft_tokens=2, page_size=page_size, pool_tokens=pool)
        engine = Engine(target, settings, beside(name, tree, target))
        results = engine.run([list(prompt) for prompt in answers], GREEDY)
        assert [one.output for one in results] == list(answers.values())
        allocator = engine.scheduler.allocator
        assert allocator.num_free == allocator.num_pages
        assert len(engine.metrics.drafted_per_position) == 5


def test_a_branch_is_kept_further_than_the_head_sees(target: Target):
    """An answer that repeats itself: five looked-up tokens and the target's own in a step, though
    the head's tree has two levels."""
    tree = TREES["dynamic"]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logit_bias=((5, 1e4),))
    engine = Engine(target, config(tree=tree, draft_tokens=2), beside("mtp", tree, target))
    (sequence,) = engine.run([PROMPTS[1]], params)
    assert sequence.output == [5] * 24
    # One of the prompt, one before anything repeats itself, then six at a time; the limit makes the
    # last branch shorter, and such a round is left out of the rates.
    assert sequence.tokens_per_step[-4:] == [6, 6, 6, 4] and engine.metrics.cut_drafts == 1
    assert engine.metrics.accepted_per_position[4] == 3


@pytest.mark.parametrize("shape", TREES)
def test_drawn_drafts_stand_alone(target: Target, shape: str):
    """A dynamic tree's nodes are chosen and take a branch at every temperature; drawn ones of a
    static tree have a law, and look-up stands in their place where its match is long."""
    tree = TREES[shape]
    drafter = beside("mtp", tree, target)
    engine = Engine(target, config(tree=tree), drafter)
    params = SamplingParams(max_new_tokens=9, temperature=1.0, ignore_eos=True)
    matching, other = engine.add(REPEATING, params), engine.add([5, 6, 7, 8, 9, 7], params)
    while not (matching.decoding and other.decoding):
        engine.step()
    matching.tokens[-4:], other.tokens[-2:] = [5, 6, 7, 8], [7, 8]
    first, second = drafter.propose([matching, other], [2, 2])
    if shape == "static":
        assert first == Proposal([9, 5])
        assert second.law is not None and len(second.tokens) == 4
    else:
        assert first.law is second.law is None
        for proposal, branch in ((first, [9, 5, 6, 7, 8]), (second, [9, 7])):
            parents, place = proposal.parents, -1
            assert parents is not None
            for token in branch:
                place = next(
                    node
                    for node, above in enumerate(parents)
                    if above == place and proposal.tokens[node] == token
                )
    assert drafter.propose([matching], [0]) == [Proposal([])]


@pytest.mark.parametrize("shape", TREES)
def test_coupled_answers_with_a_branch(target: Target, shape: str):
    """What plain decoding draws for the same seed."""
    tree = TREES[shape]
    params = SamplingParams(12, temperature=0.8, seed=4, ignore_eos=True, coupled=True)
    prompts = [*PROMPTS[:2], REPEATING]
    plain = Engine(target, config(draft_tokens=0)).run(prompts, params)
    engine = Engine(target, config(tree=tree), beside("mtp", tree, target))
    assert [one.output for one in engine.run(prompts, params)] == [one.output for one in plain]


def test_sampled_answers_with_a_branch_have_the_targets_law(
    tiny_llama_folder: Callable[..., Path],
):
    """Chi-square of three tokens jointly over 2,000 answers to a prompt that repeats itself."""
    target = tiny_target(tiny_llama_folder)
    tree = TreeConfig("dynamic", top_k=2, nodes=3, lookup=3)
    chosen, ids = TINY_HEADS["reduced eagle3"]
    head = build_head(chosen, target.folder, 1.0, draft_ids=ids).double()
    drafter = HybridDrafter(NgramConfig(), TreeHeadDrafter(head, ids, tree), tree)
    count, prompt = 2000, [3, 1, 4, 1, 3, 1]
    settings = EngineConfig(
        draft_tokens=2, max_batch=500, pool_tokens=1 << 14, max_step_tokens=4000, tree=tree
    )
    engine = Engine(target, settings, drafter)
    has_the_law(engine, target, prompt, count, 5)
    assert len(engine.metrics.drafted_per_position) == 3  # one level more than the head's


def test_look_up_goes_on_where_the_text_ends():
    """The latest occurrence of the longest match; what repeats itself up to the end of the text is
    said again."""
    lookup = NgramDrafter(longest=3)

    def found(text: list[int], count: int, shortest: int = 1) -> list[int]:
        return lookup.find(Sequence.create("a", text, SamplingParams()), count, shortest)

    assert found([1, 2, 3, 4, 9, 3, 4, 5, 6, 3, 4], 3) == [5, 6, 3]
    assert found([1, 2, 3, 4, 9, 8, 4, 5, 2, 3, 4], 2) == [9, 8]
    assert found([7, 5, 5], 4) == [5, 5, 5, 5]
    assert found([1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]
    assert found([1, 2, 3], 4) == found([1, 2, 1], 4, shortest=2) == []


def test_a_path_is_grafted_once():
    """Onto a tree, a chain and nothing: common beginnings are shared, parents come first."""
    tree = [7, 8, 9, 7], [-1, -1, 0, 1]
    assert grafted(*tree, [7, 9, 4, 4]) == ([7, 8, 9, 7, 4, 4], [-1, -1, 0, 1, 2, 4])
    assert grafted(*tree, [8, 7]) == tree
    assert grafted([1, 2], None, [1, 3]) == ([1, 2, 3], [-1, 0, 0])
    assert grafted([], None, [6, 6]) == ([6, 6], [-1, 0])
    assert tree == ([7, 8, 9, 7], [-1, -1, 0, 1])


def test_a_bad_match_length_is_refused():
    """With both numbers."""
    with pytest.raises(ValueError, match="ngram.min_match=6, ngram.longest=5"):
        NgramConfig(min_match=6)


def lengths_of(target: Target, answers: Answers, keep: int) -> tuple[Engine, list[int]]:
    """An adaptive engine whose drafter has `keep` of its drafts right, and the drafts of each
    step."""
    drafter = ScriptedDrafter(Script(answers, [keep], target.vocab_size))
    asked: list[int] = []

    def noted(sequences, counts, propose=drafter.propose):
        asked.extend(counts)
        return propose(sequences, counts)

    drafter.propose = noted
    engine = Engine(target, config(draft_tokens=4, adaptive=True, max_batch=1), drafter)
    engine.schedule.lengths = AdaptiveLengths(4, COSTS)
    return engine, asked


@pytest.mark.parametrize("keep,last", [(0, 0), (1, 1), (2, 2), (4, 4)])
def test_chains_grow_to_what_is_kept(target: Target, keep: int, last: int):
    """A useless drafter is asked for nothing, an oracle for all K, others for what they get right;
    a full chain is tried again after 64 steps, and the report counts chains by length."""
    prompt, params = PROMPTS[1], SamplingParams(max_new_tokens=90, ignore_eos=True)
    answers = answers_of(target, [prompt], params)
    engine, asked = lengths_of(target, answers, keep)
    (sequence,) = engine.run([prompt], params)
    assert sequence.output == answers[tuple(prompt)]
    assert asked[0] == 4
    whole = asked[: -4 // (keep + 1) or None]  # the limit shortens the last
    settled = [count for count in whole[16:] if count != 4] or whole[16:]
    assert set(settled) == {last}
    if keep == 0:
        assert [step for step, count in enumerate(whole) if count == 4 and step > 16] == [
            64 + max(step for step, count in enumerate(whole[:17]) if count == 4) + 1
        ]
    metrics = engine.metrics.to_json()
    histogram = metrics["drafts_per_step_histogram"]
    assert histogram == [asked.count(count) for count in range(len(histogram))]
    assert sum(histogram) == metrics["target_calls"]
    drafts = metrics["drafted_per_position"]
    assert drafts == sorted(drafts, reverse=True) and sum(drafts) == metrics["num_draft_tokens"]


def test_the_limit_is_no_choice(target: Target):
    """Chains that the token limit cut are left out of the figures, those that were chosen short
    are not: an oracle's mean length is K + 1 but for its first guesses."""
    prompt = PROMPTS[1]
    answers = answers_of(target, [prompt], SamplingParams(max_new_tokens=23, ignore_eos=True))
    engine, _ = lengths_of(target, answers, 4)
    engine.run([prompt], SamplingParams(max_new_tokens=23, ignore_eos=True))
    assert (engine.metrics.mean_acceptance_length, engine.metrics.cut_drafts) == (5.0, 1)


def learnt(lengths: AdaptiveLengths, count: int, kept: int) -> list[Sequence]:
    """Requests of which `kept` drafts of K were kept, often."""
    made = [Sequence.create(str(i), [1], SamplingParams()) for i in range(count)]
    for _ in range(40):
        lengths.learn(made, [lengths.longest] * count, [kept] * count, {"verify": 1.0})
    return made


def test_a_batch_shares_the_rows_that_pay():
    """Rows cost little up to eight and much beyond: alone a good request gets all K, in a batch the
    better requests are drafted for first."""

    class Knee(FixedCosts):
        def verify(self, rows: int) -> float:
            return 1.0 + 0.01 * rows + max(0, rows - 8)

    lengths = AdaptiveLengths(4, Knee(1.0, 0.0, 0.01))
    good, bad = learnt(lengths, 2, 4), learnt(lengths, 4, 0)
    assert lengths.choose(good[:1]) == [4]
    assert lengths.choose(good) == [3, 3]
    assert lengths.choose([*bad[:2], *good]) == [0, 0, 2, 2]
    assert lengths.choose(bad) == [0, 0, 0, 0]


def test_costs_are_measured():
    """The first pass of a count of rows is left out, later ones averaged; between counts on a line,
    above flat, below in proportion; what is not renewed is forgotten."""
    costs = MeasuredCosts()
    assert (costs.verify(7), costs.draft()) == (1.0, 0.0)
    for rows, seconds in ((2, 9.0), (2, 1.0), (6, 9.0), (6, 3.0)):
        costs.add(rows, seconds, 2, 0.5)
    assert [costs.verify(rows) for rows in (1, 2, 4, 6, 9)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert costs.draft() == 0.25
    costs.add(2, 2.0, 0, 0.0)
    assert costs.verify(2) == pytest.approx(1.2)
    for _ in range(600):
        costs.add(2, 1.0, 0, 0.0)
    assert costs.verify(6) == costs.verify(2) == pytest.approx(1.0)


@pytest.mark.parametrize("coupled", [True, False])
def test_sampled_answers_of_a_changing_chain(target: Target, coupled: bool):
    """Coupled answers are plain decoding's for the same seed, whatever the chains; others are whole
    and drawn anew with costs that are known."""
    params = SamplingParams(
        max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True, coupled=coupled
    )
    plain = Engine(target, config(draft_tokens=0)).run(PROMPTS[:3], params)
    texts = []
    for _ in range(2):
        drafter = HybridDrafter(NgramConfig(min_match=1), model_of("head", target))
        engine = Engine(target, config(adaptive=True), drafter)
        engine.schedule.lengths = AdaptiveLengths(3, COSTS)
        texts.append([one.output for one in engine.run(PROMPTS[:3], params)])
        assert sum(engine.metrics.drafts_per_step_histogram[1:])
    assert texts[0] == texts[1] and all(len(text) == 12 for text in texts[0])
    assert not coupled or texts[0] == [one.output for one in plain]


def test_nothing_to_choose_from_is_told():
    """adaptive without drafts."""
    with pytest.warns(UserWarning, match=r"engine.adaptive is ignored: engine.draft_tokens=0"):
        EngineConfig(draft_tokens=0, adaptive=True)
