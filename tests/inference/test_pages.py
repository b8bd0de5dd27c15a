"""Pages: who has them, who may find them again, in which order they go."""

from __future__ import annotations

import random

import pytest
import torch

from draftsmith.inference.config import SamplingParams
from draftsmith.inference.pages import KVPool, PageAllocator
from draftsmith.inference.prefix import PrefixCache
from draftsmith.inference.sequence import Sequence


def filled(cache: PrefixCache, allocator: PageAllocator, tokens: list[int]) -> Sequence:
    """A sequence whose whole text but the newest token is computed, its pages offered."""
    sequence = Sequence.create("a", tokens, SamplingParams())
    pages = allocator.allocate(-(-len(tokens) // cache.page_size))
    assert pages is not None
    sequence.pages, sequence.page_size = pages, cache.page_size
    sequence.num_computed = len(tokens) - 1
    cache.offer(sequence)
    return sequence


def found(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """The pages of a prefix of these tokens."""
    return cache.find(Sequence.create("b", tokens, SamplingParams()))


def test_a_page_is_had_by_those_that_share_it_until_the_last_leaves():
    """Random taking, sharing and leaving against plain sets."""
    chance = random.Random(0)
    cache = PrefixCache(1, 0)
    allocator = PageAllocator(20, cache)
    holders: list[list[int]] = []
    for number in range(3000):
        act = chance.random()
        if act < 0.4:
            count = chance.randint(1, 8)
            held = {page for pages in holders for page in pages}
            avoid = set(chance.sample(range(20), 5))
            pages = allocator.allocate(
                count,
                after=chance.choice((None, 3, 19)),
                room=chance.randint(0, 9),
                avoid=avoid.copy,
            )
            assert (pages is None) == (count > 20 - len(held))
            if pages is not None:
                assert not held & set(pages) and len(set(pages)) == count
                assert not any(page in cache for page in pages)
                holders.append(pages)
                if chance.random() < 0.5:
                    tokens = [number + 100 * place for place in range(count + 1)]
                    sequence = Sequence.create("a", tokens, SamplingParams())
                    sequence.pages, sequence.num_computed = pages, count
                    cache.offer(sequence)
                    assert found(cache, tokens) == pages
        elif act < 0.6 and holders:
            pages = chance.choice(holders)[: chance.randint(1, 4)]
            allocator.share(pages)
            holders.append(list(pages))
        elif holders:
            gone = holders.pop(chance.randrange(len(holders)))
            left = {page for pages in holders for page in pages}
            emptied = allocator.release(gone)
            assert set(emptied) == {p for p in gone if p not in left and p not in cache}
        held = {page for pages in holders for page in pages}
        assert allocator.num_free == 20 - len(held)
        assert [users > 0 for users in allocator.users] == [page in held for page in range(20)]
    with pytest.raises(AssertionError, match="already free"):
        for _ in range(99):
            allocator.release([0])


def test_a_request_grows_into_its_neighbours():
    """It is put where its whole length fits, and others stay out of that while there is room."""
    allocator = PageAllocator(12)
    first = allocator.allocate(2, room=5)
    second = allocator.allocate(2, room=5, avoid={2, 3, 4}.copy)
    assert (first, second) == ([0, 1], [5, 6])
    assert allocator.allocate(1, after=1) == [2]
    assert allocator.allocate(3, after=6, avoid={3, 4}.copy) == [7, 8, 9]
    # No three in a row are left; then those that nobody hopes for go first.
    assert allocator.allocate(3, avoid={3}.copy) == [4, 10, 11]
    assert allocator.allocate(1, avoid={3}.copy) == [3]
    assert allocator.allocate(1) is None and allocator.num_free == 0


def test_the_oldest_prefix_goes_first_and_its_end_before_its_beginning():
    """Empty pages before all; a prefix in use never."""
    cache = PrefixCache(2, 0)
    allocator = PageAllocator(8, cache)
    texts = [[10, 11, 12, 13, 9], [20, 21, 22, 23, 9], [30, 31, 9]]
    old, new, used = (filled(cache, allocator, text) for text in texts)
    assert allocator.num_free == 0
    assert allocator.release(new.pages) == [new.pages[2]]  # its last page was never filled
    assert allocator.release(old.pages) == [old.pages[2]]
    assert [len(found(cache, text)) for text in texts] == [2, 2, 1]
    # No two neighbours are empty: the pair with the older prefix goes, of that its end.
    assert allocator.allocate(2) == new.pages[1:]
    assert [len(found(cache, text)) for text in texts] == [2, 1, 1]
    # The empty page, the rest of the prefix that was left first, the end of the other.
    taken = [allocator.allocate(1) for _ in range(3)]
    assert taken == [[old.pages[2]], [new.pages[0]], [old.pages[1]]]
    assert [len(found(cache, text)) for text in texts] == [1, 0, 1]
    allocator.share(old.pages[:1])
    assert allocator.allocate(1) is None
    assert allocator.forget_prefixes() == []
    assert [len(found(cache, text)) for text in texts] == [0, 0, 0]
    assert allocator.release(old.pages[:1]) == old.pages[:1]


@pytest.mark.parametrize("lookahead", range(4))
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_prefix_is_found_as_far_as_its_rows_are_the_same(size: int, lookahead: int):
    """Texts that part at token t share page i where (i + 1) S + a <= t, and only what a head of
    several modules has filled is offered."""
    cache = PrefixCache(size, lookahead)
    allocator = PageAllocator(64, cache)
    text = list(range(100, 120))
    sequence = filled(cache, allocator, text)
    known = (19 - max(lookahead - 1, 0)) // size
    for parted in range(20):
        other = text[:parted] + [7] * 6
        right = min(known, max(0, parted - lookahead) // size)
        assert found(cache, other) == sequence.pages[:right]
    shorter = found(cache, text[:11])
    assert shorter == sequence.pages[: min(known, (11 - lookahead) // size)]


def test_the_same_text_twice_has_one_known_page():
    """The second page of one content stays nameless and is emptied with its user."""
    cache = PrefixCache(2, 1)
    allocator = PageAllocator(8, cache)
    one, two = (filled(cache, allocator, [1, 2, 3, 4, 5]) for _ in range(2))
    assert found(cache, [1, 2, 3, 4, 5]) == one.pages[:2] and len(cache) == 2
    assert sorted(allocator.release(two.pages)) == sorted(two.pages)
    off = PrefixCache(2, 1, enabled=False)
    assert not filled(off, allocator, [1, 2, 3, 4, 5]).page_names and not len(off)


def test_a_page_is_copied_in_every_layer():
    """Whatever the layers' shapes; layers that nothing was written to are left alone."""
    pool = KVPool(3, 12, poison=True)
    for layer, width in ((0, 4), (2, 6)):
        rows = torch.randn(2, 12, width)
        keys, values = pool.layer(layer, rows, rows + 1)
        keys.copy_(rows)
        values.copy_(rows + 1)
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values) if tensor is not None]
    pool.copy(2, 0, 4)
    after = [tensor for tensor in (*pool.keys, *pool.values) if tensor is not None]
    assert pool.keys[1] is None and len(after) == 4
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, torch.cat([old[:, 8:], old[:, 4:]], 1))
