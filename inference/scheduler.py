"""Who runs next. Continuous batching: requests join and leave between any two steps; long prompts
go in chunks.

A step is either mixed (at least one request still prefills: every decoding request gets one row,
the others a chunk under the token budget, and all decode plainly) or decode-only (where speculation
happens). A request is admitted when all the pages it can ever need are free, so a running request
never has to stop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .config import EngineConfig
from .pages import KVPool, PageAllocator
from .sequence import Sequence


@dataclass(frozen=True)
class Plan:
    """One step: (sequence, number of rows) in order; `speculate` when every sequence decodes."""

    parts: list[tuple[Sequence, int]]
    speculate: bool


class Scheduler:
    """Waiting and running requests, and their pages."""

    def __init__(self, config: EngineConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool
        self.allocator = PageAllocator(pool.num_slots // config.page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            ValueError: an empty prompt, or a request that could never fit the pool.
        """
        if not sequence.tokens:
            raise ValueError(
                f"request {sequence.id!r}: the prompt is empty; give at least one token"
            )
        need, have = self._pages_needed(sequence), self.allocator.num_pages
        if need > have:
            raise ValueError(
                f"request {sequence.id!r}: prompt {sequence.num_prompt} + max_new_tokens "
                f"{sequence.params.max_new_tokens} needs {need * self.config.page_size} slots, the "
                "pool has "
                f"{have * self.config.page_size}; raise engine.pool_tokens or shorten the request"
            )
        self.waiting.append(sequence)

    def schedule(self) -> Plan:
        """Admit what fits and plan the next step; an empty plan when nothing is left."""
        while self.waiting and len(self.running) < self.config.max_batch:
            pages = self.allocator.allocate(self._pages_needed(self.waiting[0]))
            if pages is None:
                break
            sequence = self.waiting.popleft()
            sequence.pages, sequence.page_size = pages, self.config.page_size
            self.running.append(sequence)
        if all(sequence.decoding for sequence in self.running):
            return Plan([(sequence, 1) for sequence in self.running], speculate=True)
        parts = [(sequence, 1) for sequence in self.running if sequence.decoding]
        budget = self.config.max_step_tokens - len(parts)
        for sequence in self.running:
            if not sequence.decoding and budget > 0:
                rows = min(len(sequence.tokens) - sequence.num_computed, budget)
                parts.append((sequence, rows))
                budget -= rows
        return Plan(parts, speculate=False)

    def settle(self) -> None:
        """Release the pages of finished requests."""
        for sequence in [item for item in self.running if item.finished]:
            self.running.remove(sequence)
            self.allocator.release(sequence.pages)
            self.pool.forget(sequence.pages, self.config.page_size)

    def cancel(self, sequence: Sequence) -> None:
        """Take a request out, whether it waits or runs."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if not sequence.finished:
            sequence.finish_reason = "cancelled"
        self.settle()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def _pages_needed(self, sequence: Sequence) -> int:
        longest = sequence.num_prompt + sequence.params.max_new_tokens + self.config.step_slots
        return -(-longest // self.config.page_size)
