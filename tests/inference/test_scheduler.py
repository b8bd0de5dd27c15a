"""Who runs, by what a scheduler plans: nobody starves, nobody writes where another reads. No
model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.pages import KVPool
from draftsmith.inference.scheduler import Scheduler
from draftsmith.inference.sequence import Sequence


def scheduler_of(lookahead: int, **changes: int | bool) -> Scheduler:
    """Pages without tensors."""
    settings = {"page_size": 4, "pool_tokens": 64, "max_batch": 4, "max_step_tokens": 9} | changes
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return Scheduler(config, KVPool(0, config.pool_tokens), lookahead)


def request(tokens: list[int], most: int, priority: int = 0) -> Sequence:
    """A request of up to `most` tokens."""
    sequence = Sequence.create("a", tokens, SamplingParams(most))
    sequence.priority = priority
    return sequence


def require_own_pages(scheduler: Scheduler, sequence: Sequence, rows: int) -> None:
    """The slots that a step writes are reserved, and no other request or prefix has them."""
    size = scheduler.config.page_size
    first = max(0, sequence.num_computed - scheduler._rows_again)
    last = sequence.num_computed + rows - 1
    if sequence.decoding:
        last = len(sequence.tokens) + scheduler.config.step_slots
    # Rows made again lie in own pages too, where the sequence began on another's.
    began = min(first, sequence.num_computed) if sequence.decoding else sequence.num_computed
    for page in sequence.pages[began // size : last // size + 1]:
        assert scheduler.allocator.users[page] == 1
        assert page not in scheduler.cache or page == sequence.pages[began // size]
    assert len(sequence.pages) * size > last


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_all_come_to_their_end(lookahead: int, seed: int):
    """Random requests, forks and cancellations: the first in order goes on at every step, what is
    written is nobody else's, and every page comes back."""
    chance = random.Random(seed)
    scheduler = scheduler_of(lookahead, max_batch=chance.choice((1, 2, 4)))
    texts = [[chance.randrange(3) for _ in range(30)] for _ in range(2)]
    added: list[Sequence] = []
    steps = 0
    while len(added) < 120 or not scheduler.idle:
        if len(added) < 120 and chance.random() < 0.6:
            prompt = chance.choice(texts)[: chance.randint(1, 30)]
            sequence = request(prompt, chance.randint(1, 25), chance.choice((0, 0, 1)))
            if added and chance.random() < 0.3:
                other = chance.choice(added[-5:])
                sequence = request(other.tokens[: other.num_prompt], 5)
                sequence.sibling = other
            scheduler.add(sequence)
            added.append(sequence)
        if added and chance.random() < 0.05:
            scheduler.cancel(chance.choice(added))
        plan = scheduler.schedule()
        running = scheduler.running
        assert running == sorted(running, key=lambda one: one.urgency)
        assert not running or plan.parts and plan.speculate == all(one.decoding for one in running)
        held = Counter(page for one in running for page in one.pages)
        assert [held[page] for page in range(16)] == scheduler.allocator.users
        assert sum(rows for _, rows in plan.parts) <= 9 and all(rows for _, rows in plan.parts)
        assert not running or running[0] in {one for one, _ in plan.parts}
        for sequence in plan.preempted:
            assert not sequence.pages and sequence.num_computed == 0
            assert sequence.urgency > running[-1].urgency
        for sequence, rows in plan.parts:
            require_own_pages(scheduler, sequence, rows)
            decides = sequence.num_computed + rows == len(sequence.tokens)
            kept = chance.randint(0, min(3, sequence.remaining - 1)) if plan.speculate else 0
            sequence.num_computed += rows + kept
            if decides:
                new = [chance.randrange(3) for _ in range(kept + 1)]
                sequence.extend(new, frozenset())
        scheduler.settle()
        steps += 1
        assert steps < 20_000
    assert all(sequence.finished for sequence in added)
    assert not any(scheduler.allocator.users)
    assert scheduler.counts.preemptions > 10 or scheduler.config.max_batch == 1
    assert scheduler.counts.hits > 10


def test_pages_are_taken_as_a_request_grows():
    """Not for the answer it may give: as many as its tokens and the coming step need."""
    scheduler = scheduler_of(0, pool_tokens=400)
    sequence = request([1] * 5, 60)
    scheduler.add(sequence)
    held = []
    while not sequence.finished:
        scheduler.schedule()
        held.append(len(sequence.pages))
        assert held[-1] == -(-(len(sequence.tokens) + 4) // 4)
        sequence.num_computed = len(sequence.tokens)
        sequence.extend([2], frozenset())
    assert held[0] == 3 and held[-1] == 17 and sequence.pages == list(range(17))


def test_the_chunk_of_the_first_in_order_is_the_largest():
    """Decoding rows first, then chunks as requests stand in order, under the budget."""
    scheduler = scheduler_of(0, pool_tokens=400)
    one, two, three = request([1] * 4, 9), request([2] * 12, 9), request([3] * 12, 9, priority=1)
    scheduler.add(one)
    assert scheduler.schedule().parts == [(one, 4)]
    one.num_computed = 4
    one.extend([5], frozenset())
    scheduler.add(two)
    scheduler.add(three)
    plan = scheduler.schedule()
    assert plan.parts == [(one, 1), (three, 8)] and not plan.speculate


def test_a_higher_priority_takes_the_place_of_a_lower_one():
    """Where the batch is full or the pages are; equal ones wait."""
    scheduler = scheduler_of(0, max_batch=1)
    low, equal, high = request([1] * 4, 9), request([2] * 4, 9), request([3] * 4, 9, priority=1)
    scheduler.add(low)
    scheduler.schedule()
    scheduler.add(equal)
    assert scheduler.schedule().preempted == () and scheduler.running == [low]
    scheduler.add(high)
    plan = scheduler.schedule()
    assert plan.preempted == (low,) and scheduler.running == [high]
    assert scheduler.waiting == [low, equal]
    scheduler.cancel(high)
    scheduler.cancel(equal)
    scheduler.cancel(equal)
    assert scheduler.schedule().parts == [(low, 4)]
    assert (equal.finish_reason, low.finish_reason) == ("cancelled", None)


def test_a_request_that_needs_every_page_runs():
    """With the page of its drafts and no other; one token more is refused."""
    scheduler = scheduler_of(0)
    for prompt, most in (([1] * 40, 21), ([2], 60)):
        scheduler.add(request(prompt, most))
        with pytest.raises(ValueError, match="raise engine.pool_tokens"):
            scheduler.add(request(prompt, most + 1))
    for _ in range(200):
        for sequence, rows in scheduler.schedule().parts:
            sequence.num_computed += rows
            if sequence.num_computed == len(sequence.tokens):
                sequence.extend([3], frozenset())
        scheduler.settle()
    assert scheduler.idle and scheduler.counts.preemptions > 0
