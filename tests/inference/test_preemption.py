"""A request that gives its pages up says what it would have said, and drafts what it would have
drafted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafting import Answers, ForcedHeadDrafter, Script, ScriptedDrafter, answers_of
from small_heads import PROMPTS
from test_prefix import engine_of, require_same_rows, watched

from draftsmith.inference.config import SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.sequence import Sequence
from draftsmith.models.target import Target

PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True)
LONG = replace(PARAMS, max_new_tokens=23)
TEXTS = [PROMPTS[1], PROMPTS[3], PROMPTS[0], PROMPTS[4]]


@pytest.fixture(scope="module")
def answers(target: Target) -> Answers:
    """What the target says undisturbed."""
    return answers_of(target, TEXTS, LONG)


def run_restlessly(engine: Engine, sequences: list[Sequence]) -> int:
    """Take the pages of every running request after each step that decided something; how often."""
    taken = 0
    while not engine.scheduler.idle:
        if engine.step():
            for sequence in list(engine.scheduler.running):
                if sequence.decoding:
                    engine.scheduler._preempt(sequence, [])
                    if engine.drafter:
                        engine.drafter.forget(sequence)
                    taken += 1
    assert all(sequence.finished for sequence in sequences)
    assert not any(engine.scheduler.allocator.users)
    return taken


@pytest.mark.parametrize(
    ("size", "chunk", "reuse"), [(1, 512, True), (16, 5, False)], ids=["reused", "anew"]
)
@pytest.mark.parametrize("name", ["mtp", "mtp of 3 modules", "eagle3", "draft-lm"])
def test_preempted_at_every_step(
    target: Target, answers: Answers, name: str, size: int, chunk: int, reuse: bool
):
    """Whatever is kept in between: the text, the rounds, and the rows the drafts come from."""
    right, ours = (watched(name, target, answers, [1, 3, 0, 2]) for _ in range(2))
    assert right is not None and ours is not None
    calm = engine_of(target, right, size, max_batch=1, max_step_tokens=chunk, prefix_reuse=False)
    still = [calm.add(prompt, PARAMS) for prompt in TEXTS]
    while not calm.scheduler.idle:
        calm.step()
    engine = engine_of(target, ours, size, max_batch=1, max_step_tokens=chunk, prefix_reuse=reuse)
    sequences = [engine.add(prompt, PARAMS) for prompt in TEXTS]
    assert run_restlessly(engine, sequences) >= 8
    assert [sequence.output for sequence in sequences] == [answers[tuple(p)][:9] for p in TEXTS]
    assert [s.tokens_per_step for s in sequences] == [s.tokens_per_step for s in still]
    require_same_rows(ours.rows, right.rows, least=12)


@pytest.mark.parametrize("pattern", [[0], [3], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("name", ["scripted", "mtp of 3 modules"])
def test_a_pool_for_two_holds_four(target: Target, answers: Answers, name: str, pattern: list[int]):
    """Pages run out while requests grow, over and over."""
    script = Script(answers, pattern, target.vocab_size)
    drafter = ScriptedDrafter(script) if name == "scripted" else None
    drafter = drafter or watched(name, target, answers, pattern)
    engine = engine_of(target, drafter, 4, pool_tokens=64, max_batch=4, max_step_tokens=11)
    sequences = engine.run([*TEXTS, *TEXTS], LONG)
    assert [one.output for one in sequences] == 2 * [answers[tuple(p)] for p in TEXTS]
    assert engine.scheduler.counts.preemptions > 2
    assert not any(engine.scheduler.allocator.users)


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "coupled"])
def test_a_sampled_text_stays_its_own(target: Target, answers: Answers, drafted: bool):
    """Nothing is drawn while a text is computed anew."""
    params = replace(PARAMS, temperature=1.0, coupled=drafted)
    wanted = [
        engine_of(target, None, 4, draft_tokens=0).run([prompt], replace(params, seed=seed))[0]
        for seed, prompt in enumerate(TEXTS)
    ]
    drafter = watched("mtp", target, answers, [1]) if drafted else None
    if isinstance(drafter, ForcedHeadDrafter):
        told = {tuple(p): one.output for p, one in zip(TEXTS, wanted, strict=True)}
        drafter.script.answers = told
    engine = engine_of(target, drafter, 4)
    sequences = [
        engine.add(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(TEXTS)
    ]
    assert run_restlessly(engine, sequences) > 10
    assert [one.output for one in sequences] == [one.output for one in wanted]


def test_the_last_in_order_goes_first(target: Target, answers: Answers):
    """Of the running the lowest priority, then the youngest; it comes back before those that came
    after it."""
    engine = engine_of(target, None, 4, draft_tokens=0, pool_tokens=64, prefix_reuse=False)
    old, urgent = engine.add(PROMPTS[1], PARAMS), engine.add(PROMPTS[3], PARAMS, priority=1)
    later = engine.add(PROMPTS[1], PARAMS)
    ends: list[Sequence] = []
    engine.step()
    assert engine.scheduler.running == [urgent, old] and engine.scheduler.waiting == [later]
    top = engine.add(PROMPTS[4], PARAMS, priority=2)
    while not engine.scheduler.idle:
        ends += [one.sequence for one in engine.step() if one.sequence.finished]
        order = [*engine.scheduler.running, *engine.scheduler.waiting]
        assert order == sorted(order, key=lambda one: one.urgency)
    assert ends == [top, urgent, old, later]
    assert engine.scheduler.counts.preemptions >= 2
    for one in ends:
        prompt = tuple(one.tokens[: one.num_prompt])
        assert one.output == answers[prompt][:9]


def test_preempted_pages_are_poisoned(target: Target, answers: Answers):
    """What a request left behind is NaN where no prefix is kept."""
    engine = engine_of(target, None, 4, draft_tokens=0, prefix_reuse=False)
    sequence = engine.add(PROMPTS[3], PARAMS)
    engine.step()
    slots = [sequence.slot(position) for position in range(sequence.num_computed)]
    keys = engine.pool.keys[0]
    assert keys is not None and not bool(keys[:, slots].isnan().any())
    engine.scheduler._preempt(sequence, [])
    assert bool(torch.isnan(keys[:, slots]).all())
    assert engine.scheduler.waiting == [sequence] and sequence.num_computed == 0
