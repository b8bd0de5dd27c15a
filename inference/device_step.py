"""Greedy speculation whose whole state lies on the device: no step reads or sends anything.

    verify   rows [x_n, d_1 .. d_K] of every sequence, placed where the last step ended
    keep     a drafts; the next step begins a + 1 rows further
    re-run   the head over the same rows, shifted, the next token inserted; row a gives d_1, its own
             states the others

Shapes never change, and positions, slots, lengths and tokens follow on the device from what was
kept, so on a GPU a step is captured once in a CUDA graph and replayed. It runs fixed sets of
requests, for measuring and checking; whoever joins, leaves or samples is the engine's
(`overlapped`).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..kernels.accept import accept_greedy
from ..kernels.paged_rows import PagedRows
from ..kernels.place_rows import place_rows
from ..kernels.shift import shift_insert
from ..models.heads import Head
from ..models.target import Target
from .pages import KVPool
from .static_pass import RowsContext


class DeviceSteps:
    """B requests, decoded step by step.

    Args:
        target: the model. head: of one module, without an lm_head of its own. prompts: at least one
            token each. room: tokens that a sequence may come to, drafts included. count: K >= 1.
    Attributes:
        emitted: [B, K+1] int64, what the last step decided, -1 behind it. kept: [B] the drafts of
            it.
    """

    @torch.inference_mode()
    def __init__(
        self,
        target: Target,
        head: Head,
        prompts: list[list[int]],
        room: int,
        count: int = 1,
        page_size: int = 16,
    ) -> None:
        assert head.lm_head is None and head.num_modules == 1 and head.num_layers
        self.target, self.head, self.count = target, target.head_function(head), count
        self.boundaries, self.page_size = head.boundaries, page_size
        batch, pages = len(prompts), -(-room // page_size)
        self.room = pages * page_size
        if max(map(len, prompts)) + count >= self.room:
            raise ValueError(
                f"room {room}: the longest prompt has {max(map(len, prompts))} tokens; give room "
                f"for {count + 1} more at least"
            )
        self.pool = KVPool(target.num_layers + head.num_layers, batch * self.room)
        device = target.device
        self.pages = torch.arange(batch * pages, device=device).view(batch, pages).int()
        self.limits = torch.full((batch,), self.room, device=device)
        self.first = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.starts = torch.arange(batch + 1, device=device) * (count + 1)
        self.alone = torch.arange(batch + 1, device=device)
        self.steps = torch.arange(count + 1, device=device)
        self.tokens, self.emitted = (
            torch.zeros(batch, count + 1, dtype=torch.int64, device=device) for _ in range(2)
        )
        self.kept = torch.zeros(batch, dtype=torch.int64, device=device)
        self._prefill(prompts)

    def _prefill(self, prompts: list[list[int]]) -> None:
        device = self.target.device
        lengths = [len(prompt) for prompt in prompts]
        starts = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        owner = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(lengths))
        slots = owner.to(device) * self.room + positions
        rows = PagedRows(starts, self.first, self.pages, self.page_size, max(lengths), max(lengths))
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        states = self._target(tokens, positions, rows, slots)
        last = starts[1:] - 1
        following = self._choose(self._normed(states)[last])
        shifted = shift_insert(tokens, starts, last, following)
        fed = self.head.feed(states, self.target.trunk)
        self._draft(following, *self._head(shifted, fed, positions, rows, slots, last))

    @torch.inference_mode()
    def step(self) -> None:
        """See the module's text; the result is in `emitted` and `kept`."""
        count, size = self.count, self.tokens.shape[0]
        positions, slots = self._places(self.first, count + 1)
        rows = self._rows(self.starts, self.first + (count + 1), count + 1)
        tokens = self.tokens.flatten()
        states = self._target(tokens, positions, rows, slots)
        choices = self._choose(self._normed(states)).view(size, count + 1)
        kept = accept_greedy(self.tokens[:, 1:], choices[:, :-1])
        following = choices.gather(1, kept[:, None])[:, 0]
        last = self.starts[:-1] + kept
        shifted = shift_insert(tokens, self.starts, last, following)
        fed = self.head.feed(states, self.target.trunk)
        drafted, recycled = self._head(shifted, fed, positions, rows, slots, last)
        # Kept drafts are what the target chose, so its own choices are the text.
        self.emitted.copy_(torch.where(self.steps <= kept[:, None], choices, -1))
        self.kept.copy_(kept)
        self.first += kept + 1
        self._draft(following, drafted, recycled)

    def _draft(self, following: Tensor, drafted: Tensor, hidden: Tensor) -> None:
        """K drafts from the head's state at the row before `first`."""
        chosen = [following]
        for step in range(self.count):
            chosen.append(self._choose(drafted))
            if step + 1 < self.count:
                positions, slots = self._places(self.first + step, 1)
                rows = self._rows(self.alone, self.first + (step + 1), 1)
                drafted, hidden = self._head(
                    chosen[-1], hidden, positions, rows, slots, self.alone[:-1]
                )
        self.tokens.copy_(torch.stack(chosen, 1))

    def _places(self, first: Tensor, width: int) -> tuple[Tensor, Tensor]:
        places = place_rows(first, self.limits, self.pages, self.page_size, width)
        return places[0].flatten(), places[1].flatten()

    def _rows(self, starts: Tensor, lengths: Tensor, most: int) -> PagedRows:
        seen = torch.minimum(lengths, self.limits)
        return PagedRows(starts, seen, self.pages, self.page_size, most, self.room)

    def _target(
        self, tokens: Tensor, positions: Tensor, rows: PagedRows, slots: Tensor
    ) -> dict[int, Tensor]:
        context = RowsContext(self.pool, rows, slots, 0)
        return self.target.forward(tokens, positions, context, self.boundaries)

    def _normed(self, states: dict[int, Tensor]) -> Tensor:
        return self.target.trunk.norm(states[self.target.num_layers])

    def _choose(self, normed: Tensor) -> Tensor:
        return self.target.logits(normed).argmax(-1)

    def _head(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        rows: PagedRows,
        slots: Tensor,
        last: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Drafted and recycled states of the rows `last`."""
        context = RowsContext(self.pool, rows, slots, self.target.num_layers)
        embeds = self.target.trunk.embed(tokens)
        out = self.head(embeds, hidden, positions, context)
        return out.drafted[last], out.recycled[last]
