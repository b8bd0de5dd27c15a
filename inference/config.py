"""Settings of the engine and of one request."""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """How the engine batches and pages."""

    draft_tokens: int = 3
    """K: drafts verified per step."""
    max_batch: int = 8
    """Requests that run together."""
    max_step_tokens: int = 512
    """Rows of one prefill or mixed step; longer prompts are prefilled in chunks."""
    page_size: int = 16
    """Slots per page."""
    pool_tokens: int = 16384
    """Slots in all, shared by every request; a page id is the same rows in every layer of target
    and head."""
    poison: bool = False
    """Fill free pages with NaN, so that a read of a stale slot shows (tests)."""
    adaptive: bool = False
    """Each step gives each request the drafts that pay, 0 to draft_tokens, by what was kept so far
    and the seconds of passes and drafts. Greedy and coupled answers stay what they are; other
    sampled ones are drawn from the same law, but not the same for the same seed, since chains
    follow the clock."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_tokens", "page_size", "pool_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} {getattr(self, name)}: must be at least 1")
        if not 0 <= self.draft_tokens <= 32:
            raise ValueError(f"engine.draft_tokens {self.draft_tokens}: choose 0 to 32")
        if self.max_step_tokens < self.max_batch:
            raise ValueError(
                f"engine.max_step_tokens {self.max_step_tokens} is below engine.max_batch "
                f"{self.max_batch}: "
                "every running request needs a row"
            )
        if self.adaptive and not self.draft_tokens:
            warnings.warn(
                "engine.adaptive is ignored: engine.draft_tokens=0 leaves nothing to choose",
                stacklevel=2,
            )


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling. temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches p; 1 = all."""
    seed: int = 0
    ignore_eos: bool = False
    coupled: bool = False
    """Keep a draft only where it equals the token that plain decoding would draw: one seed gives
    one text, whoever drafts and whatever runs beside it, at fewer tokens per step than rejection
    sampling."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be in (0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def draws_drafts(self) -> bool:
        """Whether a head draws its drafts; else it takes its likeliest token."""
        return not self.greedy and not self.coupled
