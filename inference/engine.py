"""The speculative engine: plan, run, settle. Its text is the target's, whoever drafts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cached_property

import torch
from transformers import PreTrainedTokenizerBase

from ..models.target import Target, has_tokenizer, load_tokenizer
from .config import EngineConfig, SamplingParams
from .drafters import Drafter
from .flashinfer_pages import FlashInfer
from .metrics import EngineMetrics
from .overlapped import Overlapped
from .pages import KVPool
from .running_text import RunningText
from .schedule import Schedule, StepOutput, Synchronous
from .scheduler import Scheduler
from .sequence import Sequence
from .static_pass import Capture, CudaGraphs, StaticPasses, hindrance


class Engine:
    """Runs requests on a target, with or without a drafter.

    Args:
        target: the model. config: batching and paging. drafter: None decodes plainly.
    Raises:
        ValueError: the target's layers lie in several places, or the attention that was chosen
        cannot run here.
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
        self.positions: int | None = getattr(target.config, "max_position_embeddings", None)
        pages = -(-config.pool_tokens // config.page_size)
        layers = target.num_layers + (self.drafter.num_layers if self.drafter else 0)
        boundaries = self.drafter.boundaries if self.drafter else ()
        graphs = _graphs(target, config)
        spare = config.page_size if graphs else 0
        self.pool = KVPool(layers, pages * config.page_size, config.poison, spare)
        if config.attention == "flashinfer":
            self.pool.attention = FlashInfer.open(target.device)
        lookahead = self.drafter.lookahead if self.drafter else 0
        self.scheduler = Scheduler(config, self.pool, lookahead)
        self._added = 0
        if self.drafter:
            self.drafter.attach(target, self.pool, target.num_layers)
        form = Overlapped if config.schedule == "overlapped" else Synchronous
        static = None
        if graphs:
            most = config.step_slots + 1
            static = StaticPasses(target, self.pool, boundaries, config.page_size, most, graphs)
        self.schedule: Schedule = form(target, config, self.pool, self.drafter, static)

    @property
    def metrics(self) -> EngineMetrics:
        """Counts and seconds since the engine was made, or since they were last reset."""
        return self.schedule.metrics

    def reset_metrics(self) -> None:
        """Count from zero, and compute from nothing: prefixes found so far are not reused."""
        self.schedule.metrics = EngineMetrics()
        self.scheduler.forget_prefixes()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's own; stop strings are looked for in its text.

        Raises:
            ValueError: the target's folder holds none.
        """
        if not has_tokenizer(self.target.folder):
            raise ValueError(
                f"target {self.target.folder}: no tokenizer.json, so no text to look for stop "
                "strings in; put it there, or give stop_ids"
            )
        return load_tokenizer(self.target.folder)

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        identity: str | None = None,
        priority: int = 0,
    ) -> Sequence:
        """Queue a request. It ends at the target's last position where max_new_tokens would pass
        it.

        Args:
            prompt: token ids, each inside the vocabulary. priority: higher ones run first, and take
                the place of lower ones where there is no room.
        Raises:
            ValueError: empty prompt, an id outside the vocabulary, a prompt that leaves no position
            for an answer, more tokens than the pool holds, or stop strings without a tokenizer.
        """
        return self._add(prompt, params, identity, priority, None)

    def fork(
        self,
        sequence: Sequence,
        params: SamplingParams,
        identity: str | None = None,
        priority: int = 0,
    ) -> Sequence:
        """Queue another answer to a request's prompt. While that request is alive its pages are
        shared, the partly filled last one as a copy; it starts once the prompt is read. Arguments
        and errors as of `add`."""
        prompt = sequence.tokens[: sequence.num_prompt]
        return self._add(prompt, params, identity, priority, sequence)

    def _add(
        self,
        prompt: list[int],
        params: SamplingParams,
        identity: str | None,
        priority: int,
        sibling: Sequence | None,
    ) -> Sequence:
        self._added += 1
        sequence = Sequence.create(
            identity or f"request-{self._added}", prompt, params, self.positions
        )
        sequence.priority = priority
        sequence.sibling = sibling if sibling and not sibling.finished else None
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
        strange = [one for one in params.stop_ids if not 0 <= one < self.target.vocab_size]
        if strange:
            raise ValueError(
                f"request {sequence.id!r}: stop_ids {strange} are outside the target's vocabulary "
                f"of {self.target.vocab_size}; no answer could end with them"
            )
        if self.positions is not None and len(prompt) >= self.positions:
            raise ValueError(
                f"request {sequence.id!r}: its prompt of {len(prompt)} tokens leaves none of the "
                f"target's {self.positions} positions for an answer; shorten it"
            )
        if params.stop:
            sequence.text = RunningText(self.tokenizer, params.stop)
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a request between two steps, whether it waits or runs, with finish reason
        `cancelled`; nothing happens to a finished one."""
        self.scheduler.cancel(sequence)
        if self.drafter:
            self.drafter.forget(sequence)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one batch; what it decided, in batch order. Empty when nothing is left to do, or
        where a step only read prompts."""
        plan = self.scheduler.schedule()
        for sequence in plan.preempted:
            if self.drafter:
                self.drafter.forget(sequence)
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

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Iterator[StepOutput]:
        """Decode several prompts and give each step's tokens as they are decided. Other requests
        run along unseen; leaving the loop early cancels these."""
        sequences = [self.add(prompt, params) for prompt in prompts]
        return self._follow(sequences)

    def _follow(self, sequences: list[Sequence]) -> Iterator[StepOutput]:
        own = set(sequences)
        try:
            while not all(sequence.finished for sequence in sequences):
                yield from (output for output in self.step() if output.sequence in own)
        finally:
            for sequence in sequences:
                self.cancel(sequence)


def _graphs(target: Target, config: EngineConfig) -> Capture | None:
    """What captures decode and verify passes, where that is possible and not refused."""
    reason = hindrance(target, config)
    if config.cuda_graphs and reason:
        warnings.warn(f"engine.cuda_graphs is ignored: {reason}", stacklevel=3)
    return None if reason or config.cuda_graphs is False else CudaGraphs()
