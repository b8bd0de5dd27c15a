"""A request while it runs: tokens, pages, how far the pages are filled. Host bookkeeping only, no
model tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .config import SamplingParams
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

    Order that always holds: 0 <= num_computed < len(tokens) until it is finished. Rows 0 ..
    num_computed-1 are in the pages of the target, and of the head (whose row p also used
    tokens[p+1]).
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    generator: torch.Generator
    # set by the scheduler
    pages: list[int] = field(default_factory=list)
    page_size: int = 0
    # set by the engine
    num_computed: int = 0
    finish_reason: str | None = None
    leads: list[Lead] = field(default_factory=list)
    """Greedy plain steps: how clearly each token was chosen."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """By token of the output, where `SamplingParams.logprobs` asks for them."""
    tally: Tally = field(default_factory=Tally, init=False, repr=False)
    """Counts for penalties; read up to date by whoever needs them."""
    tokens_per_step: list[int] = field(default_factory=list)

    @classmethod
    def create(cls, identity: str, prompt: list[int], params: SamplingParams) -> Sequence:
        """A waiting request with its own random stream."""
        generator = torch.Generator().manual_seed(params.seed)
        return cls(identity, list(prompt), len(prompt), params, generator)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far, an end token included."""
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.num_prompt + self.params.max_new_tokens - len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether only its newest token is still to be computed."""
        return self.num_computed == len(self.tokens) - 1 and len(self.tokens) > self.num_prompt

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
        """Append newly decided tokens, cut at an end token or the length limit; returns what was
        kept."""
        kept: list[int] = []
        for token in tokens[: self.remaining]:
            kept.append(token)
            if token in eos_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
                break
        self.tokens += kept
        del self.logprobs[len(self.tokens) - self.num_prompt :]  # of drafts kept, then cut
        if self.remaining == 0 and self.finish_reason is None:
            self.finish_reason = "length"
        return kept
