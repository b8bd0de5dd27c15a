"""The speculative engine: schedule, compute, decide, refill. Its text is the target's, whoever
drafts.

A step of K drafts for a sequence whose tokens are x_0 … x_n (x_n decided, not yet computed):

    draft    head output at row n-1 -> d_1; rows n … n+K-2 on its own states -> d_2 … d_K
    verify   target rows n … n+K hold [x_n, d_1 … d_K]; their logits judge the drafts
    refill   a drafts kept: the head rows n … n+a are written again, from true target states
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.accept import accept_greedy, accept_sampled, draw
from ..models.target import Target
from .batch import Batch, PagedContext
from .config import EngineConfig, SamplingParams
from .drafters import Drafter, Proposal
from .metrics import EngineMetrics
from .pages import KVPool
from .sampler import check_finite, probabilities
from .scheduler import Plan, Scheduler
from .sequence import Lead, Sequence


@dataclass(frozen=True)
class StepOutput:
    """What one step decided for one request."""

    sequence: Sequence
    tokens: list[int]


class Engine:
    """Runs requests on a target, with or without a drafter.

    Args:
        target: the model. config: batching and paging. drafter: None decodes plainly.
    """

    def __init__(
        self, target: Target, config: EngineConfig, drafter: Drafter | None = None
    ) -> None:
        self.target = target
        self.config = config
        self.drafter = drafter if config.draft_tokens else None
        pages = -(-config.pool_tokens // config.page_size)
        layers = target.num_layers + (self.drafter.num_layers if self.drafter else 0)
        self.pool = KVPool(layers, pages * config.page_size, config.poison)
        self.scheduler = Scheduler(config, self.pool)
        self.metrics = EngineMetrics()
        self._added = 0
        if self.drafter:
            self.drafter.attach(target, self.pool, target.num_layers)

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
        outputs = self._speculate(plan) if plan.speculate else self._prefill(plan)
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

    def _prefill(self, plan: Plan) -> list[StepOutput]:
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
                    token = self._sample(sequence, logits[deciding.index(index)])
                    outputs.append(
                        StepOutput(sequence, sequence.extend([token], self.target.eos_ids))
                    )
                upcoming.append(sequence.tokens[sequence.num_computed])
        if self.drafter:
            with self.metrics.timed("refill"):
                self.drafter.observe(batch, states, upcoming)
        return outputs

    def _speculate(self, plan: Plan) -> list[StepOutput]:
        """A decode-only step: draft, verify, keep, refill."""
        sequences = [sequence for sequence, _ in plan.parts]
        wanted = self.config.draft_tokens if self.drafter else 0
        # The last token of a round is the target's own, so drafts beyond the limit less one cannot
        # be kept.
        counts = [min(wanted, sequence.remaining - 1) for sequence in sequences]
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
            kept, following = self._verify(batch, sequences, proposals, logits)
        outputs = []
        for index, sequence in enumerate(sequences):
            context, drafts = len(sequence.tokens), proposals[index].tokens
            emitted = sequence.extend(
                [*drafts[: kept[index]], following[index]], self.target.eos_ids
            )
            sequence.num_computed += kept[index] + 1
            sequence.tokens_per_step.append(len(emitted))
            cut = len(emitted) <= kept[index] or counts[index] < wanted
            self.metrics.record(context, len(drafts), kept[index], len(emitted), cut)
            outputs.append(StepOutput(sequence, emitted))
        if self.drafter and not all(sequence.finished for sequence in sequences):
            with self.metrics.timed("refill"):
                true_rows, chosen = batch.keep([count + 1 for count in kept])
                true_states = {boundary: rows[chosen] for boundary, rows in states.items()}
                self.drafter.observe(true_rows, true_states, following)
        return outputs

    def _compute(self, batch: Batch) -> tuple[dict[int, Tensor], Tensor]:
        """The target over a batch: raw states [N, H] of the drafter's boundaries and of L, and the
        final-normed ones [N, H]."""
        context = PagedContext(self.pool, batch)
        boundaries = self.drafter.boundaries if self.drafter else ()
        raw = self.target.forward(batch.tokens, batch.positions, context, boundaries)
        return raw, self.target.trunk.norm(raw[self.target.num_layers])

    def _sample(self, sequence: Sequence, logits: Tensor) -> int:
        """One token from one row of logits [V]; greedy rows also note their lead over the
        runner-up."""
        check_finite(logits[None], f"request {sequence.id!r} at position {len(sequence.tokens)}")
        if not sequence.params.greedy:
            return draw(probabilities(logits[None], sequence.params)[0], sequence.uniforms(1)[0])
        token = int(logits.argmax(-1))
        sequence.leads.append(_lead(logits, token))
        return token

    def _verify(
        self, batch: Batch, sequences: list[Sequence], proposals: list[Proposal], logits: Tensor
    ) -> tuple[list[int], list[int]]:
        """How many drafts of each sequence are kept, and the token that follows them. logits [N,
        V]."""
        best, choices = logits.max(-1)
        if not bool(torch.isfinite(best).all()):
            check_finite(logits, f"verify rows of {[sequence.id for sequence in sequences][:4]}")
        longest = max(len(proposal.tokens) for proposal in proposals)
        table = torch.full((2, len(sequences), longest + 1), -1, dtype=torch.int64)
        decided = choices.cpu()
        for index, proposal in enumerate(proposals):
            table[0, index, : len(proposal.tokens)] = torch.tensor(
                proposal.tokens, dtype=torch.int64
            )
            rows = decided[batch.starts[index] : batch.starts[index + 1]]
            table[1, index, : len(rows)] = rows
        # A missing draft is -1 and must not meet a missing choice; the last column is never a
        # draft.
        greedy = (
            accept_greedy(table[0, :, :longest], table[1, :, :longest]).tolist()
            if longest
            else None
        )
        kept, following = [], []
        for index, sequence in enumerate(sequences):
            first, last = batch.starts[index], batch.starts[index + 1]
            if sequence.params.greedy:
                count = greedy[index] if greedy else 0
                kept.append(count)
                following.append(int(decided[first + count]))
                if last - first == 1:
                    sequence.leads.append(_lead(logits[first], following[-1]))
                continue
            law = probabilities(logits[first:last], sequence.params)
            drafts = proposals[index].tokens
            if sequence.params.coupled:
                # One draw for each token of the answer, as in plain decoding.
                foreseen = zip(law, sequence.foreseen(last - first), strict=True)
                drawn = [draw(row, uniform) for row, uniform in foreseen]
                count = next((i for i, t in enumerate(drafts) if t != drawn[i]), len(drafts))
                sequence.uniforms(count + 1)
                kept.append(count)
                following.append(drawn[count])
            else:
                uniforms = sequence.uniforms(last - first)
                count, token = accept_sampled(drafts, proposals[index].law, law, uniforms)
                kept.append(count)
                following.append(token)
        return kept, following


def _lead(logits: Tensor, token: int) -> Lead:
    """How clearly `token` leads in logits [V]."""
    rest = logits.clone()
    rest[token] = float("-inf")
    top = float(logits[token])
    return Lead(top, top - float(rest.max()))
