"""A request while it runs: tokens, pages, how far the pages are filled. Host bookkeeping only, no
model tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .config import SamplingParams
from .running_text import RunningText
from .tally import Tally


class Lead(NamedTuple):
    """A greedy choice: the taken token's logit, and by how much it led the runner-up's."""

    top: float
    gap: float


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities where one token was taken, by the target's own law."""

    token: float
    """Of the token that was taken."""
    top: list[tuple[int, float]]
    """(id, log-probability) of the likeliest, best first."""


@dataclass(eq=False)
class Sequence:
    """One request.

    Order that always holds: 0 <= num_computed < len(tokens) <= limit until it is finished. Rows 0
    .. num_computed-1 are in the pages of the target, and of the head (whose row p also used
    tokens[p+1]). A request that gave its pages up has computed nothing and keeps its tokens.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    generator: torch.Generator
    limit: int
    """The most tokens it may come to, prompt included."""
    priority: int = 0
    sibling: Sequence | None = None
    """A request of the same prompt, whose pages it may start from."""
    text: RunningText | None = None
    """Its answer as text, where the request has stop strings."""
    # set by the scheduler
    arrival: int = 0
    pages: list[int] = field(default_factory=list)
    page_size: int = 0
    page_names: list[bytes] = field(default_factory=list)
    """Of `PrefixCache`: the names of its first pages."""
    num_offered: int = 0
    """Of `PrefixCache`: the pages that it was asked to keep."""
    # set by the engine
    num_computed: int = 0
    finish_reason: str | None = None
    """stop (an end token, id or string), length (max_new_tokens, or the target's positions) or
    cancelled; None while it is alive."""
    leads: list[Lead] = field(default_factory=list)
    """Greedy plain steps: how clearly each token was chosen."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """By token of the output, where `SamplingParams.logprobs` asks for them."""
    tally: Tally = field(default_factory=Tally, init=False, repr=False)
    """Counts for penalties; read up to date by whoever needs them."""
    tokens_per_step: list[int] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        identity: str,
        prompt: list[int],
        params: SamplingParams,
        positions: int | None = None,
    ) -> Sequence:
        """A waiting request with its own random stream, of at most `positions` tokens in all."""
        generator = torch.Generator().manual_seed(params.seed)
        limit = len(prompt) + params.max_new_tokens
        limit = limit if positions is None else min(limit, positions)
        return cls(identity, list(prompt), len(prompt), params, generator, limit)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far, an end token included."""
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.limit - len(self.tokens)

    @property
    def num_prefill(self) -> int:
        """Rows to compute before it decodes: the prompt; of a request that gave its pages up in the
        middle, all but its newest token, so that nothing is decided twice."""
        return len(self.tokens) - (len(self.tokens) > self.num_prompt)

    @property
    def decoding(self) -> bool:
        """Whether only its newest token is still to be computed."""
        return len(self.tokens) > self.num_prompt and self.num_computed == self.num_prefill

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts requests: the highest priority first, then the oldest."""
        return -self.priority, self.arrival

    @property
    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None

    def slot(self, position: int) -> int:
        """The pool slot of a position."""
        return self.pages[position // self.page_size] * self.page_size + position % self.page_size

    def uniforms(self, count: int) -> list[float]:
        """`count` draws in [0, 1) of this request's own stream, so that a batch does not change its
        text."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64).tolist()

    def foreseen(self, count: int) -> list[float]:
        """The draws that `uniforms` will give next, without taking them."""
        state = self.generator.get_state()
        draws = self.uniforms(count)
        self.generator.set_state(state)
        return draws

    def extend(self, tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
        """Append newly decided tokens, cut behind an end token, a stop id, the token that completes
        a stop string, or the length limit; returns what was kept."""
        kept: list[int] = []
        for token in tokens[: self.remaining]:
            kept.append(token)
            if self._ends(token, eos_ids):
                self.finish_reason = "stop"
                break
        self.tokens += kept
        del self.logprobs[len(self.tokens) - self.num_prompt :]  # of drafts kept, then cut
        if self.remaining == 0 and self.finish_reason is None:
            self.finish_reason = "length"
        if self.finished and self.text:
            self.text.close()
        return kept

    def _ends(self, token: int, eos_ids: frozenset[int]) -> bool:
        if token in self.params.stop_ids or (token in eos_ids and not self.params.ignore_eos):
            return True
        return self.text is not None and self.text.add(token)
