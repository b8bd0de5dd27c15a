"""Who runs next. Continuous batching: requests join and leave between any two steps; long prompts
go in chunks.

A step is either mixed (at least one request still prefills: every decoding request gets one row,
the others a chunk under the token budget, and all decode plainly) or decode-only (where speculation
happens).

Requests stand in one order, the highest priority first and then the oldest, and so do those that
run. A request takes the pages of the tokens it has and of the coming step, and more as it grows.
When there are none left, the last of the running gives its pages up and waits again, with its text;
it is computed anew later, from what is still found of its pages. The first in that order is never
held up by another, and `add` refuses what does not fit the pool alone, so all come to their end.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from .config import EngineConfig
from .pages import KVPool, PageAllocator
from .prefix import PrefixCache
from .sequence import Sequence


@dataclass(frozen=True)
class Plan:
    """One step: (sequence, number of rows) in order; `speculate` when every sequence decodes.
    `preempted` gave their pages up: what a drafter keeps of them is void."""

    parts: list[tuple[Sequence, int]]
    speculate: bool
    preempted: tuple[Sequence, ...] = ()


@dataclass
class Counts:
    """What became of the requests since the engine was made."""

    admissions: int = 0
    """Requests that began to run, those that began again included."""
    preemptions: int = 0
    """Requests that gave their pages up before their end."""
    hits: int = 0
    """Admissions that found computed rows."""
    reused_tokens: int = 0
    """Rows that those did not have to compute."""


class Scheduler:
    """Waiting and running requests, and their pages.

    Args:
        lookahead: tokens behind a row that the drafter made it from (`Drafter.lookahead`).
    """

    def __init__(self, config: EngineConfig, pool: KVPool, lookahead: int = 0) -> None:
        self.config = config
        self.pool = pool
        self.cache = PrefixCache(config.page_size, lookahead, config.prefix_reuse)
        self.allocator = PageAllocator(pool.num_slots // config.page_size, self.cache)
        self.counts = Counts()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._arrivals = 0
        # A head's module m is filled up to m rows behind the target: so many rows are made again.
        self._rows_again = max(lookahead - 1, 0)

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            ValueError: an empty prompt, or a request that could never fit the pool.
        """
        if not sequence.tokens:
            raise ValueError(
                f"request {sequence.id!r}: the prompt is empty; give at least one token"
            )
        need = self._most_pages(sequence)
        have = self.allocator.num_pages
        if need > have:
            raise ValueError(
                f"request {sequence.id!r}: prompt {sequence.num_prompt} + max_new_tokens "
                f"{sequence.params.max_new_tokens} needs {need * self.config.page_size} slots, the "
                "pool has "
                f"{have * self.config.page_size}; raise engine.pool_tokens or shorten the request"
            )
        self._arrivals += 1
        sequence.arrival, sequence.page_size = self._arrivals, self.config.page_size
        insort(self.waiting, sequence, key=lambda one: one.urgency)

    def schedule(self) -> Plan:
        """Give pages to whoever runs on, admit who fits, and plan the next step; an empty plan when
        nothing is left."""
        preempted: list[Sequence] = []
        self._grow(preempted)
        while self.waiting and self.waiting[0] not in preempted:
            sequence = self.waiting[0]
            if self._awaits_sibling(sequence):
                break
            full = len(self.running) >= self.config.max_batch
            if not full and self._admit(sequence):
                continue
            if not self.running or self.running[-1].priority >= sequence.priority:
                break
            self._preempt(self.running[-1], preempted)
        if all(sequence.decoding for sequence in self.running):
            parts = [(sequence, 1) for sequence in self.running]
            return Plan(parts, speculate=True, preempted=tuple(preempted))
        parts = [(sequence, 1) for sequence in self.running if sequence.decoding]
        budget = self.config.max_step_tokens - len(parts)
        for sequence in self.running:
            if not sequence.decoding and budget > 0:
                rows = min(sequence.num_prefill - sequence.num_computed, budget)
                parts.append((sequence, rows))
                budget -= rows
        return Plan(parts, speculate=False, preempted=tuple(preempted))

    def settle(self) -> None:
        """After a step: offer the pages that were filled for reuse, release those of finished
        requests (whose last rows no drafter has seen, and which are not offered for that)."""
        for sequence in list(self.running):
            if sequence.finished:
                self.running.remove(sequence)
                self._release(sequence)
            else:
                self.cache.offer(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take a request out, whether it waits or runs; nothing happens to a finished one."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if not sequence.finished:
            sequence.finish_reason = "cancelled"
            if sequence.text:
                sequence.text.close()
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)

    def forget_prefixes(self) -> None:
        """Keep no prefix for later requests."""
        self.pool.forget(self.allocator.forget_prefixes(), self.config.page_size)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def _grow(self, preempted: list[Sequence]) -> None:
        """Pages for the coming step of all that run, the most urgent first."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            missing = self._step_pages(sequence) - len(sequence.pages)
            while missing > 0 and sequence.pages:
                pages = self._allocate(sequence, missing, sequence.pages[-1])
                if pages is not None:
                    sequence.pages += pages
                    break
                self._preempt(self.running[-1], preempted)
            index += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Let the first of the waiting run where its pages can be had: those of a known prefix as
        they are; a page that is known in part is copied, for its next row is written at once."""
        found, known = self._find(sequence)
        size = self.config.page_size
        # Where the pool has no page for the copy, the rows of that page are computed.
        for start in (known, known // size * size) if known % size else (known,):
            whole = start // size
            borrowed = found[: self._pages(start)]
            self.allocator.share(borrowed)
            count = self._step_pages(sequence) - whole
            # Not behind the borrowed ones: there lies how the other text went on.
            pages = self._allocate(sequence, count, None)
            if pages is not None:
                break
            self._release_pages(borrowed)
        else:
            return False
        if start % size:
            self.pool.copy(found[whole], pages[0], size)
            self._release_pages(borrowed[whole:])
        sequence.pages = borrowed[:whole] + pages
        sequence.num_computed, sequence.num_offered = start, whole
        sequence.sibling = None
        self.counts.admissions += 1
        self.counts.hits += start > 0
        self.counts.reused_tokens += start
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda one: one.urgency)
        return True

    def _find(self, sequence: Sequence) -> tuple[list[int], int]:
        """Pages that begin with rows of this sequence, and how many rows of them it can start from:
        its last row is always computed, for what is decided or drafted from it."""
        pages = self.cache.find(sequence)
        known = len(pages) * self.config.page_size
        if sequence.sibling is not None and sequence.sibling.pages:
            shared = min(sequence.sibling.num_computed, sequence.num_prompt - 1)
            if shared > known:
                pages, known = sequence.sibling.pages, shared
        return pages, max(0, min(known, sequence.num_prefill - 1) - self._rows_again)

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether the pages it is to start from are just being filled."""
        sibling = sequence.sibling
        return sibling is not None and sibling in self.running and not sibling.decoding

    def _preempt(self, sequence: Sequence, preempted: list[Sequence]) -> None:
        """Take the pages of a running request; it waits again, before all that came after it."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=lambda one: one.urgency)
        preempted.append(sequence)
        self.counts.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._release_pages(sequence.pages)
        sequence.pages = []

    def _release_pages(self, pages: list[int]) -> None:
        self.pool.forget(self.allocator.release(pages), self.config.page_size)

    def _allocate(self, sequence: Sequence, count: int, after: int | None) -> list[int] | None:
        """Pages for a sequence that may come to its limit; not where the others will grow."""
        room = self._most_pages(sequence) - len(sequence.pages)

        def others() -> set[int]:
            left = (one for one in self.running if one is not sequence)
            return {page for one in left for page in self._foreseen(one)}

        pages = self.allocator.allocate(count, after=after, room=room, avoid=others)
        if pages is not None:
            self.pool.forget(pages, self.config.page_size)
        return pages

    def _foreseen(self, sequence: Sequence) -> range:
        """The neighbours that a running sequence grows into, where it can."""
        most = self._most_pages(sequence)
        last = sequence.pages[-1]
        return range(last + 1, last + 1 + most - len(sequence.pages))

    def _step_pages(self, sequence: Sequence) -> int:
        """Pages for the tokens it has, the drafts of its next step, and the token that the step
        decides (a draft LM computes it at once)."""
        return self._pages(len(sequence.tokens) + self.config.step_slots + 1)

    def _most_pages(self, sequence: Sequence) -> int:
        """Pages for its last step."""
        return self._pages(sequence.limit + self.config.step_slots)

    def _pages(self, slots: int) -> int:
        return -(-slots // self.config.page_size)
