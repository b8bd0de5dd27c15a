"""Look-up before a model, and chains as long as they pay: the text is plain decoding's, and what is
drafted follows what was kept."""

from __future__ import annotations

import pytest
from drafting import GREEDY, Answers, Script, ScriptedDrafter, answers_of
from small_heads import PROMPTS, away_from_its_start

from draftsmith.inference.adaptive import AdaptiveLengths, FixedCosts, MeasuredCosts
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMDrafter
from draftsmith.inference.drafters import Drafter, Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.inference.hybrid import HybridDrafter, NgramConfig
from draftsmith.inference.sequence import Sequence
from draftsmith.models.heads import HeadConfig
from draftsmith.models.target import Target

REPEATING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
COSTS = FixedCosts(base=1.0, per_row=0.1, per_draft=0.05)


def config(**changes: int | bool) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings = {"pool_tokens": 1024, "page_size": 4, "poison": True, "max_batch": 3} | changes
    return EngineConfig(**settings)  # type: ignore[arg-type]


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
        part = getattr(drafter, who)

        def counted(sequences, counts, propose=part.propose, who=who):
            found = propose(sequences, counts)
            served[who] += sum(bool(one.tokens) for one in found)
            return found

        part.propose = counted
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
