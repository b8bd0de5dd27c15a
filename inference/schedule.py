"""The order of the forward calls of one step. Scheduling, sampling and verification are shared; a
schedule only decides what runs when.

A step of K drafts for a sequence whose tokens are x_0 … x_n (x_n decided, not yet computed):

    draft    head output at row n-1 -> d_1; rows n … n+K-2 on its own states -> d_2 … d_K
    verify   target rows n … n+K hold [x_n, d_1 … d_K]; their logits judge the drafts
    refill   a drafts kept: the head rows n … n+a are written again, from true target states

Of a tree the target's row j stands in slot n+j, whatever its depth; the keys and values of the kept
path are moved to slots n … n+a before the refill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
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
from .static_pass import StaticPasses
from .tree import depths_of, rows_of
from .tree_verify import close_up, verify_trees
from .verifier import sample, verify


@dataclass(frozen=True)
class StepOutput:
    """What one step decided for one request."""

    sequence: Sequence
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    """What was proposed, of a tree all nodes; empty where nothing was."""


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
            plainly. static: what runs decode and verify passes in place of the target's own call.
    """

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        pool: KVPool,
        drafter: Drafter | None,
        static: StaticPasses | None = None,
    ) -> None:
        tree = getattr(drafter, "tree", config.tree)
        if tree != config.tree:
            raise ValueError(
                f"the drafter grows trees of {tree}, the engine has room for {config.tree}; give "
                "both the same engine.tree"
            )
        self.target = target
        self.config = config
        self.pool = pool
        self.drafter = drafter
        self.static = static
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
            decided: dict[int, int] = {}
            if deciding:
                logits = self.target.logits(normed[batch.last_rows[deciding]])
                tokens = sample([plan.parts[index][0] for index in deciding], logits)
                decided = dict(zip(deciding, tokens, strict=True))
            for index, (sequence, rows) in enumerate(plan.parts):
                sequence.num_computed += rows
                if index in decided:
                    emitted = sequence.extend([decided[index]], self.target.eos_ids)
                    outputs.append(StepOutput(sequence, emitted))
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
        branching = any(proposal.parents is not None for proposal in proposals)
        with self.metrics.timed("verify"):
            batch = Batch.build(
                [
                    (seq, seq.num_computed, [seq.tokens[-1], *proposal.tokens])
                    for seq, proposal in zip(sequences, proposals, strict=True)
                ],
                self.target.device,
                [rows_of(one.parents, len(one.tokens)) for one in proposals] if branching else None,
            )
            states, normed = self._compute(batch, self.config.micro_batches)
            logits = self.target.logits(normed)
        with self.metrics.timed("sample"):
            judge = verify_trees if branching else verify
            verdict = judge(batch, sequences, proposals, logits)
            # The rows that became text: the newest token's and those of the drafts kept.
            paths = [[0, *(node + 1 for node in kept)] for kept in verdict.kept]
            close_up(self.pool, batch, paths, self.target.num_layers)
        outputs = []
        for index, sequence in enumerate(sequences):
            context, drafts = len(sequence.tokens), proposals[index].tokens
            kept = verdict.kept[index]
            emitted = sequence.extend(
                [*(drafts[i] for i in kept), verdict.following[index]], self.target.eos_ids
            )
            sequence.num_computed += len(kept) + 1
            sequence.tokens_per_step.append(len(emitted))
            cut = len(emitted) <= len(kept) or counts[index] < wanted[index] or proposals[index].cut
            parents = proposals[index].parents
            depth = len(drafts) if parents is None else max(depths_of(parents), default=0)
            self.metrics.record(context, len(drafts), len(kept), len(emitted), cut, depth)
            outputs.append(StepOutput(sequence, emitted, drafts))
        if self.drafter and not all(sequence.finished for sequence in sequences):
            with self.metrics.timed("refill"):
                true_rows, chosen = batch.keep(paths)
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

    def _compute(self, batch: Batch, parts: int = 1) -> tuple[dict[int, Tensor], Tensor]:
        """The target over a batch, in `parts` passes: raw states [N, H] of the drafter's boundaries
        and of L, and the final-normed ones [N, H]."""
        if parts == 2 and len(batch.sequences) > 1 and batch.trees is None:
            passes = [self._compute(half)[0] for half in batch.halves()]
            raw = {key: torch.cat([one[key] for one in passes]) for key in passes[0]}
        elif self.static is None or (raw := self.static(batch)) is None:
            context = PagedContext(self.pool, batch)
            boundaries = self.drafter.boundaries if self.drafter else ()
            raw = self.target.forward(batch.tokens, batch.positions, context, boundaries)
        return raw, self.target.trunk.norm(raw[self.target.num_layers])
