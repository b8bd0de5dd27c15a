"""Acceptance of the weights of this moment, measured in the engine while a head is trained."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..conf.schema import Config
from ..inference.acceptance import PromptSet, RunResult, measure
from ..inference.config import SamplingParams
from ..inference.drafted_text import drafted_texts
from ..inference.metrics import EngineMetrics
from ..models.files import content_hash
from ..models.heads import Head
from ..models.target import Target, load_tokenizer
from ..train.ranks import Meeting, rank, world_size
from .acceptance import head_drafter, prompt_set

_SHOWN = 2  # prompts of each set whose answers are kept
ACCEPTED = ("\u27e6", "\u27e7")
"""Put around accepted draft tokens in a kept answer."""


@dataclass
class _Counts:
    """What was measured on one prompt set at one temperature, by one rank or several."""

    counts: EngineMetrics = field(default_factory=EngineMetrics)
    num_prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, other: _Counts) -> None:
        """Take in another rank's; they measured side by side, so the slowest gives the seconds."""
        self.counts.add(other.counts)
        self.num_prompts += other.num_prompts
        self.tokens += other.tokens
        self.seconds = max(self.seconds, other.seconds)

    def to_json(self) -> dict[str, Any]:
        counts = self.counts
        accepted, drafts = counts.accepted_per_position, counts.num_drafts
        before = [drafts, *accepted]
        return {
            "num_prompts": self.num_prompts,
            **counts.to_json(),
            "unconditional": [count / drafts if drafts else None for count in accepted],
            "conditional": [
                count / base if base else None
                for count, base in zip(accepted, before, strict=False)
            ],
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class _Part:
    """What one rank measured: counts by (prompt set, temperature), a few answers, and what it
    measured with."""

    counts: dict[tuple[str, float], _Counts]
    samples: list[dict[str, str]]
    measured_with: dict[str, Any]


class LiveAcceptance:
    """The weights of this moment, drafting in the engine. Ranks that measure load the target at the
    first call.

    Args:
        draft_ids: int64 [Vd] of a reduced draft vocabulary, or None.
    Raises:
        ValueError: two prompt sets of one name (at the first call).
    """

    def __init__(self, config: Config, draft_ids: Tensor | None) -> None:
        self.config = config
        self.draft_ids = draft_ids
        self.temperature = min(config.validate.temperatures)
        self._meeting: Meeting | None = None
        self._target: Target | None = None

    def __call__(self, head: Head) -> dict[str, Any]:
        """Figures of one measurement, the same on every rank; all of them must call it. `score`,
        which the best weights are chosen by, is the tokens per target call at the lowest
        temperature, over all prompt sets together."""
        began = time.perf_counter()
        if self._meeting is None:
            self._meeting = Meeting()
        parts = [part for part in self._meeting.share(lambda: self._part(head)) if part is not None]
        merged: dict[tuple[str, float], _Counts] = {}
        for part in parts:
            for name, counts in part.counts.items():
                merged.setdefault(name, _Counts()).add(counts)
        scored = EngineMetrics()
        runs: dict[str, dict[str, Any]] = {}
        for (prompts, temperature), counts in merged.items():
            runs.setdefault(prompts, {})[f"{temperature:g}"] = counts.to_json()
            if temperature == self.temperature:
                scored.add(counts.counts)
        return {
            "score": scored.tokens_per_target_call,
            "temperature": self.temperature,
            "tokens_per_target_call": scored.tokens_per_target_call,
            "runs": runs,
            "samples": parts[0].samples,
            "seconds": round(time.perf_counter() - began, 3),
            "measured_with": parts[0].measured_with,
        }

    def _part(self, head: Head) -> _Part | None:
        """This rank's share of the prompts; None where it only waits."""
        settings = self.config.validate
        # Weights are compared at one K, not at chains that follow the clock.
        engine = dataclasses.replace(self.config.engine, adaptive=False)
        processes = world_size() if settings.ranks == "all" else 1
        if rank() >= processes:
            return None
        target, tokenizer, sets = self._loaded()
        counts: dict[tuple[str, float], _Counts] = {}
        samples: list[dict[str, str]] = []
        for whole in sets:
            prompts = whole.part(rank(), processes)
            if not prompts.prompts:
                continue
            for temperature in settings.temperatures:
                params = SamplingParams(
                    max_new_tokens=settings.max_new_tokens,
                    temperature=temperature,
                    seed=settings.seed,
                )
                drafter = head_drafter(head, self.draft_ids, engine.tree)
                result = measure(target, drafter, prompts, engine, params)
                counts[whole.name, temperature] = _Counts(
                    result.metrics, len(prompts.prompts), result.tokens, result.seconds
                )
                if temperature == self.temperature:
                    samples += shown(result, tokenizer)
        measured_with = {
            "score": "tokens per target call",
            "temperature": self.temperature,
            "seed": settings.seed if self.temperature else None,
            "prompts": {whole.name: content_hash(whole.prompts)[:12] for whole in sets},
            "max_new_tokens": settings.max_new_tokens,
            "engine": dataclasses.asdict(engine),
            "target_dtype": str(target.dtype).removeprefix("torch."),
            "processes": processes,
        }
        return _Part(counts, samples, measured_with)

    def _loaded(self) -> tuple[Target, PreTrainedTokenizerBase, list[PromptSet]]:
        if self._target is None:
            settings = self.config.validate
            target = Target.load(self.config.target)
            self._tokenizer = load_tokenizer(target.folder)
            self._sets = [
                prompt_set(name, settings.limit, self.config, self._tokenizer)
                for name in settings.prompts
            ]
            names = [whole.name for whole in self._sets]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"validate.prompts: {list(settings.prompts)} are called {names} in the "
                    "figures; list each set once, and give files names of their own"
                )
            self._target = target
        return self._target, self._tokenizer, self._sets


def shown(result: RunResult, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """The first answers of a run as text, accepted draft tokens between `ACCEPTED`."""
    found = []
    for text in drafted_texts(result, tokenizer, _SHOWN):
        marked = "".join(
            (f"{ACCEPTED[0]}{one.accepted}{ACCEPTED[1]}" if one.accepted else "") + one.target
            for one in text.rounds
        )
        found.append(
            {"prompts": text.prompts, "id": text.id, "prompt": text.prompt, "answer": marked}
        )
    return found
