"""Settings of the engine and of one request."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from torch import Tensor

from .tree import TreeConfig


@dataclass(frozen=True)
class EngineConfig:
    """How the engine batches and pages."""

    draft_tokens: int = 3
    """K: drafts of a chain verified per step, or levels of a tree; 0 decodes plainly."""
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
    tree: TreeConfig = field(default_factory=TreeConfig)
    """Trees instead of chains, where a head drafts."""
    prefix_reuse: bool = True
    """Keep the pages of a prefix that another request may begin with, until their room is
    needed."""
    schedule: str = "synchronous"
    """synchronous | overlapped: overlapped leaves drafts and verdicts on the device, with one copy
    to the host a step, and plans the next batch while the head runs; the same tokens."""
    attention: str = "auto"
    """auto | flashinfer: what reads the pages. auto is one of our own forms, as DRAFTSMITH_KERNELS
    and the machine have it; flashinfer that package's kernels (an NVIDIA GPU, bfloat16 or float16,
    `pip install draftsmith[flashinfer]`)."""
    cuda_graphs: bool | None = None
    """Replay decode and verify passes of the target from CUDA graphs, one a shape. None: where they
    can be captured (a GPU, DRAFTSMITH_KERNELS=triton, lean layers, one process); true warns where
    they cannot; false never."""
    micro_batches: int = 1
    """Halves in which the target runs a decode-only batch, 1 or 2: with experts on other machines,
    the one half's exchange can hide behind the other's work."""
    adaptive: bool = False
    """Each step gives each request the drafts that pay, 0 to draft_tokens, by what was kept so far
    and the seconds of passes and drafts. Greedy and coupled answers stay what they are; other
    sampled ones are drawn from the same law, but not the same for the same seed, since chains
    follow the clock."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_tokens", "page_size", "pool_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} {getattr(self, name)}: must be at least 1")
        if self.schedule not in ("synchronous", "overlapped"):
            raise ValueError(f"engine.schedule {self.schedule!r}: choose synchronous or overlapped")
        if self.attention not in ("auto", "flashinfer"):
            raise ValueError(f"engine.attention {self.attention!r}: choose auto or flashinfer")
        if self.micro_batches not in (1, 2):
            raise ValueError(f"engine.micro_batches {self.micro_batches}: choose 1 or 2")
        if not 0 <= self.draft_tokens <= 32:
            raise ValueError(f"engine.draft_tokens {self.draft_tokens}: choose 0 to 32")
        if self.max_step_tokens < self.max_batch:
            raise ValueError(
                f"engine.max_step_tokens {self.max_step_tokens} is below engine.max_batch "
                f"{self.max_batch}: "
                "every running request needs a row"
            )
        self.tree.slots(self.draft_tokens)  # refuses a tree that is too large
        if self.adaptive and self.tree.kind != "none":
            raise ValueError(
                f"engine.adaptive=true with engine.tree.kind={self.tree.kind}: lengths are chosen "
                "for chains; set engine.tree.kind=none, or choose a dynamic tree without "
                "engine.adaptive"
            )
        if self.adaptive and not self.draft_tokens:
            warnings.warn(
                "engine.adaptive is ignored: engine.draft_tokens=0 leaves nothing to choose",
                stacklevel=2,
            )

    @property
    def step_slots(self) -> int:
        """How many slots behind the decided tokens a step may write: those of drafts that are
        verified, or of the rows that a head runs while it grows a tree."""
        return self.tree.slots(self.draft_tokens)


class TokenMask(Protocol):
    """What a grammar says may follow a text.

    It is asked for speculated texts too, in any order and more than once, so it must not keep what
    it was asked; it is never asked what follows a token that it did not allow itself.
    """

    def allowed(self, prompt: list[int], output: list[int]) -> Tensor:
        """Which tokens may follow prompt + output.

        Returns:
            [V] bool, on any device; at least one is true.
        """
        ...


VERIFICATIONS = ("rejection", "block", "typical")


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling. temperature 0 is greedy.

    The order in which the settings act, on every row with that row's own text: `mask` and
    `logit_bias`, penalties, temperature, min_p, top_k, top_p.
    """

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
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 = all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it where positive, multiplied where
    negative; 1 = off, above discourages."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the output, once for every time they occur there."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit); a mapping is taken too."""
    mask: TokenMask | None = None
    """Which tokens may follow (a grammar)."""
    logprobs: int | None = None
    """How many of the likeliest tokens are reported with every token of the output, beside the
    token itself; null reports nothing. Log-probabilities are of the target's own law: log-softmax
    of its logits before any setting here (vLLM's `raw_logprobs`)."""
    verification: Literal["rejection", "block", "typical"] = "rejection"
    """How sampled drafts are judged. rejection: token by token; block: jointly, which keeps at
    least as many; both give the target's law. typical is LOSSY: it keeps what is likely enough."""
    typical_threshold: float = 0.09
    """typical: keep a draft whose probability exceeds the lesser of this and …"""
    typical_scale: float = 0.3
    """… this times exp(-entropy) of the row."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; its text ends before them."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer like the target's end tokens, whatever `ignore_eos` says."""

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens}: must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p}: must be in [0, 1]; 0 keeps all tokens")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty}: must be positive; 1 is off"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name)}: must be finite; 0 is off")
        self._check_bias()
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(
                f"logprobs {self.logprobs}: must be 0 (the token's own) or positive; None is off"
            )
        self._check_verification()
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(
                f"stop {self.stop!r}: give a tuple of strings, none of them empty (an empty one is "
                "met at once)"
            )

    def _check_bias(self) -> None:
        seen: set[int] = set()
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise ValueError(
                    f"logit_bias: {bias} for token {token}; give finite values for token ids "
                    "(forbid a token with a mask, or with -1e9)"
                )
            if token in seen:
                raise ValueError(f"logit_bias: token {token} is given twice; add its two values")
            seen.add(token)

    def _check_verification(self) -> None:
        if self.verification not in VERIFICATIONS:
            raise ValueError(
                f"verification {self.verification!r}: choose {', '.join(VERIFICATIONS)}"
            )
        if self.coupled and self.verification != "rejection":
            raise ValueError(
                f"verification {self.verification!r} with coupled: a coupled request judges its "
                "drafts by its own draws; leave verification at rejection"
            )
        for name in ("typical_threshold", "typical_scale"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be in (0, 1)")
        if self.verification == "typical" and self.greedy:
            warnings.warn(
                "verification typical changes nothing at temperature 0, where drafts are held "
                "against the likeliest token; set a temperature",
                stacklevel=4,
            )

    @property
    def device_only(self) -> bool:
        """Whether drafts can be judged without the host: nothing counts or reports them there."""
        plain = self.greedy or (self.verification == "rejection" and not self.coupled)
        return plain and not self.edits_logits and self.logprobs is None

    def check_vocabulary(self, size: int) -> None:
        """Hold token ids and counts against a target's vocabulary.

        Raises:
            ValueError: a bias for an id outside it, or more log-probabilities than it has tokens.
        """
        outside = next((token for token, _ in self.logit_bias if token >= size), None)
        if outside is not None:
            raise ValueError(
                f"logit_bias: token {outside} is outside the target's vocabulary of {size}"
            )
        if self.logprobs is not None and self.logprobs > size:
            raise ValueError(
                f"logprobs {self.logprobs}: the target's vocabulary has {size} tokens; ask for "
                "fewer"
            )

    @cached_property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @cached_property
    def draws_drafts(self) -> bool:
        """Whether a head draws its drafts; else it takes its likeliest token."""
        return not self.greedy and not self.coupled and self.verification != "typical"

    @property
    def lossless(self) -> bool:
        """Whether the text has the target's law, whoever drafts."""
        return self.greedy or self.verification != "typical"

    @cached_property
    def penalises(self) -> bool:
        """Whether a row's logits depend on how often its text holds a token."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @cached_property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def edits_logits(self) -> bool:
        """Whether anything acts before the temperature."""
        return self.penalises or bool(self.logit_bias) or self.mask is not None
