"""The speculative engine: plan, run, settle. Its text is the target's, whoever drafts."""

from __future__ import annotations

import torch

from ..models.target import Target
from .config import EngineConfig, SamplingParams
from .drafters import Drafter
from .metrics import EngineMetrics
from .overlapped import Overlapped
from .pages import KVPool
from .schedule import Schedule, StepOutput, Synchronous
from .scheduler import Scheduler
from .sequence import Sequence


class Engine:
    """Runs requests on a target, with or without a drafter.

    Args:
        target: the model. config: batching and paging. drafter: None decodes plainly.
    Raises:
        ValueError: the target's layers lie in several places.
    """

    def __init__(
        self, target: Target, config: EngineConfig, drafter: Drafter | None = None
    ) -> None:
        if target.spread:
            raise ValueError(
                f"target {target.folder}: its layers are spread over several places "
                "(target.spread=true), where pages cannot be shared; the engine needs it on one "
                "device"
            )
        self.target = target
        self.config = config
        self.drafter = drafter if config.draft_tokens else None
        pages = -(-config.pool_tokens // config.page_size)
        layers = target.num_layers + (self.drafter.num_layers if self.drafter else 0)
        self.pool = KVPool(layers, pages * config.page_size, config.poison)
        self.scheduler = Scheduler(config, self.pool)
        self._added = 0
        if self.drafter:
            self.drafter.attach(target, self.pool, target.num_layers)
        form = Overlapped if config.schedule == "overlapped" else Synchronous
        self.schedule: Schedule = form(target, config, self.pool, self.drafter)

    @property
    def metrics(self) -> EngineMetrics:
        """Counts and seconds since the engine was made, or since they were last reset."""
        return self.schedule.metrics

    def reset_metrics(self) -> None:
        """Count from zero."""
        self.schedule.metrics = EngineMetrics()

    def add(
        self, prompt: list[int], params: SamplingParams, identity: str | None = None
    ) -> Sequence:
        """Queue a request.

        Args:
            prompt: token ids, each inside the vocabulary.
        Raises:
            ValueError: empty prompt, an id outside the vocabulary, or more tokens than pool or
            positions allow.
        """
        self._added += 1
        sequence = Sequence.create(identity or f"request-{self._added}", prompt, params)
        wrong = next(
            (i for i, token in enumerate(prompt) if not 0 <= token < self.target.vocab_size), None
        )
        if wrong is not None:
            raise ValueError(
                f"request {sequence.id!r}: token {prompt[wrong]} at position {wrong} is outside "
                "the target's "
                f"vocabulary of {self.target.vocab_size}; the prompt was made with another "
                "tokenizer"
            )
        params.check_vocabulary(self.target.vocab_size)
        limit = getattr(self.target.config, "max_position_embeddings", None)
        if limit is not None and len(prompt) + params.max_new_tokens > limit:
            raise ValueError(
                f"request {sequence.id!r}: {len(prompt)} + {params.max_new_tokens} tokens pass the "
                "target's "
                f"{limit} positions; shorten the prompt or max_new_tokens"
            )
        self.scheduler.add(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one batch; what it decided, in batch order. Empty when nothing is left to do."""
        plan = self.scheduler.schedule()
        if not plan.parts:
            return []
        outputs = self.schedule.step(plan)
        for output in outputs:
            if output.sequence.finished and self.drafter:
                self.drafter.forget(output.sequence)
        self.scheduler.settle()
        return outputs

    def run(self, prompts: list[list[int]], params: SamplingParams) -> list[Sequence]:
        """Decode several prompts to their ends; results in the order given."""
        sequences = [self.add(prompt, params) for prompt in prompts]
        while not self.scheduler.idle:
            self.step()
        return sequences
