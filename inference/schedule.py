"""The order of the forward calls of one step. Scheduling, sampling and verification are shared; a
schedule only decides what runs when.

A step of K drafts for a sequence whose tokens are x_0 … x_n (x_n decided, not yet computed):

    draft    head output at row n-1 -> d_1; rows n … n+K-2 on its own states -> d_2 … d_K
    verify   target rows n … n+K hold [x_n, d_1 … d_K]; their logits judge the drafts
    refill   a drafts kept: the head rows n … n+a are written again, from true target states
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..models.target import Target
from .adaptive import DraftLengths, draft_lengths
from .batch import Batch, PagedContext
from .config import EngineConfig
from .drafters import Drafter, Proposal
from .metrics import EngineMetrics
from .pages import KVPool
from .scheduler import Plan
from .sequence import Sequence
from .verifier import sample, verify


@dataclass(frozen=True)
class StepOutput:
    """What one step decided for one request."""

    sequence: Sequence
    tokens: list[int]


class Schedule(Protocol):
    """Runs what the scheduler planned."""

    metrics: EngineMetrics
    lengths: DraftLengths
    """How many drafts each request is asked for."""

    def step(self, plan: Plan) -> list[StepOutput]:
        """One batch; what it decided, in batch order."""
        ...


class Synchronous:
    """One call after the other, each waited for: the oracle that every other schedule is held
    against.

    Args:
        target: the model. pool: keys and values of target and drafter. drafter: None decodes
            plainly.
    """

    def __init__(
        self, target: Target, config: EngineConfig, pool: KVPool, drafter: Drafter | None
    ) -> None:
        self.target = target
        self.config = config
        self.pool = pool
        self.drafter = drafter
        self.metrics = EngineMetrics()
        self.lengths = draft_lengths(config)

    def step(self, plan: Plan) -> list[StepOutput]:
        """See `Schedule`."""
        return self.speculate(plan) if plan.speculate else self.prefill(plan)

    def prefill(self, plan: Plan) -> list[StepOutput]:
        """A mixed step: chunks of prompts, and one plain row for whoever decodes already."""
        with self.metrics.timed("prefill"):
            batch = Batch.build(
                [
                    (seq, seq.num_computed, seq.tokens[seq.num_computed : seq.num_computed + rows])
                    for seq, rows in plan.parts
                ],
                self.target.device,
            )
            states, normed = self._compute(batch)
            outputs, upcoming = [], []
            deciding = [
                index
                for index, (seq, rows) in enumerate(plan.parts)
                if seq.num_computed + rows == len(seq.tokens)
            ]
            chosen = batch.last_rows[deciding] if deciding else None
            logits = self.target.logits(normed[chosen]) if chosen is not None else None
            for index, (sequence, rows) in enumerate(plan.parts):
                sequence.num_computed += rows
                if logits is not None and index in deciding:
                    token = sample(sequence, logits[deciding.index(index)])
                    outputs.append(
                        StepOutput(sequence, sequence.extend([token], self.target.eos_ids))
                    )
                upcoming.append(sequence.tokens[sequence.num_computed])
        if self.drafter:
            with self.metrics.timed("refill"):
                self.drafter.observe(batch, states, upcoming)
        return outputs

    def speculate(self, plan: Plan) -> list[StepOutput]:
        """A decode-only step: draft, verify, keep, refill."""
        sequences = [sequence for sequence, _ in plan.parts]
        before = dict(self.metrics.seconds)
        wanted = self.lengths.choose(sequences) if self.drafter else [0] * len(sequences)
        # The last token of a round is the target's own, so drafts beyond the limit less one cannot
        # be kept.
        counts = [
            min(count, sequence.remaining - 1)
            for count, sequence in zip(wanted, sequences, strict=True)
        ]
        proposals = [Proposal([])] * len(sequences)
        if self.drafter:
            with self.metrics.timed("draft"):
                proposals = self.drafter.propose(sequences, counts)
        with self.metrics.timed("verify"):
            batch = Batch.build(
                [
                    (seq, seq.num_computed, [seq.tokens[-1], *proposal.tokens])
                    for seq, proposal in zip(sequences, proposals, strict=True)
                ],
                self.target.device,
            )
            states, normed = self._compute(batch)
            logits = self.target.logits(normed)
        with self.metrics.timed("sample"):
            verdict = verify(batch, sequences, proposals, logits)
        outputs = []
        for index, sequence in enumerate(sequences):
            context, drafts = len(sequence.tokens), proposals[index].tokens
            kept = verdict.kept[index]
            emitted = sequence.extend(
                [*(drafts[i] for i in kept), verdict.following[index]], self.target.eos_ids
            )
            sequence.num_computed += len(kept) + 1
            sequence.tokens_per_step.append(len(emitted))
            cut = len(emitted) <= len(kept) or counts[index] < wanted[index]
            self.metrics.record(context, len(drafts), len(kept), len(emitted), cut)
            outputs.append(StepOutput(sequence, emitted))
        if self.drafter and not all(sequence.finished for sequence in sequences):
            with self.metrics.timed("refill"):
                true_rows, chosen = batch.keep([len(kept) + 1 for kept in verdict.kept])
                true_states = {boundary: rows[chosen] for boundary, rows in states.items()}
                self.drafter.observe(true_rows, true_states, verdict.following)
        if self.drafter:
            self.lengths.learn(
                sequences,
                [len(proposal.tokens) for proposal in proposals],
                [len(kept) for kept in verdict.kept],
                {name: spent - before.get(name, 0) for name, spent in self.metrics.seconds.items()},
            )
        return outputs

    def _compute(self, batch: Batch) -> tuple[dict[int, Tensor], Tensor]:
        """The target over a batch: raw states [N, H] of the drafter's boundaries and of L, and the
        final-normed ones [N, H]."""
        context = PagedContext(self.pool, batch)
        boundaries = self.drafter.boundaries if self.drafter else ()
        raw = self.target.forward(batch.tokens, batch.positions, context, boundaries)
        return raw, self.target.trunk.norm(raw[self.target.num_layers])
