"""The schedules that do not wait for the device: drafts, verdicts and the head's next input stay
there, and one copy a step, which nothing waits for until more work is queued, tells the host.

    one token    verify 2·B rows [x_n, d] of B sequences; count the kept drafts on the device; begin
                 the copy; shift the tokens, insert the next ones and re-run the head on the *same*
                 rows, rejected ones among them (their keys are written again before they are
                 read); only then the host reads the lengths and plans the next batch
    a chain      K drafts, each fed from the device; verify; begin the copy; the host reads the
                 lengths and queues the refill of exactly the kept rows, which runs while the next
                 batch is planned. For longer drafts a re-run's rejected rows would cost too much

It draws the numbers that `Synchronous` draws, in the same order, and gives its tokens. What it does
not cover runs there, step by step: prefill and mixed batches, a sequence within K tokens of its
limit, requests whose processing or verdict needs the drafts on the host, heads with several
modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.accept import accept_greedy
from ..kernels.accept_chains import accept_chains
from ..kernels.chains import Chains
from .batch import Batch
from .device_chains import DeviceChains, DeviceDrafter, Draws, RerunDrafter
from .sampler import laws
from .schedule import StepOutput, Synchronous
from .scheduler import Plan
from .sequence import Sequence
from .upload import upload


class Overlapped(Synchronous):
    """See the module's text. The drafter is a `DeviceDrafter`, or everything runs synchronously.

    Attributes:
        copies: device-to-host copies that were begun; one for every overlapped step.
        steps: overlapped steps.
    """

    copies = 0
    steps = 0

    def speculate(self, plan: Plan) -> list[StepOutput]:
        """A decode-only step, see the module's text."""
        sequences = [sequence for sequence, _ in plan.parts]
        count, drafter = self.config.draft_tokens, self.drafter
        if not isinstance(drafter, DeviceDrafter) or not self._covers(sequences, drafter):
            return super().speculate(plan)
        self.steps += 1
        with self.metrics.timed("draft"):
            draws = Draws(sequences, count, self.target.device)
            chains = drafter.chains(sequences, count, draws)
        with self.metrics.timed("verify"):
            batch = self._rows(sequences, chains)
            states, normed = self._compute(batch, self.config.micro_batches)
            logits = self.target.logits(normed)
        with self.metrics.timed("sample"):
            kept, following, sound = _verdict(sequences, chains, draws, logits)
            told = torch.cat([kept[:, None], following[:, None], chains.tokens], 1)
            arrival = self._send(torch.cat([told, sound.expand(len(sequences), 1)], 1))
        again = drafter if count == 1 and isinstance(drafter, RerunDrafter) else None
        if again is not None:
            with self.metrics.timed("refill"):
                last = upload(batch.starts[:-1], kept.device) + kept
                again.rerun(batch, states, last, following)
        with self.metrics.timed("sample"):
            table = arrival()
        outputs = self._settle(sequences, table)
        if again is not None:
            return outputs
        if not all(sequence.finished for sequence in sequences):
            with self.metrics.timed("refill"):
                true_rows, chosen = batch.keep([list(range(row[0] + 1)) for row in table])
                true_states = {boundary: rows[chosen] for boundary, rows in states.items()}
                drafter.observe(true_rows, true_states, [row[1] for row in table])
        return outputs

    def _covers(self, sequences: list[Sequence], drafter: DeviceDrafter) -> bool:
        count = self.config.draft_tokens
        fixed = self.config.tree.kind == "none" and not self.config.adaptive
        return (
            fixed
            and drafter.overlaps(sequences, count)
            and all(
                sequence.remaining > count and sequence.params.device_only for sequence in sequences
            )
        )

    def _rows(self, sequences: list[Sequence], chains: DeviceChains) -> Batch:
        """K + 1 rows of every sequence; the drafts among their tokens come from the device."""
        count = chains.tokens.shape[1]
        batch = Batch.build(
            [(one, one.num_computed, [one.tokens[-1], *[0] * count]) for one in sequences],
            self.target.device,
        )
        tokens = batch.tokens.view(len(sequences), count + 1).clone()
        tokens[:, 1:] = chains.tokens
        return replace(batch, tokens=tokens.flatten())

    def _send(self, told: Tensor) -> Callable[[], list[list[int]]]:
        """Begin the step's one copy to the host; what is returned waits for it."""
        self.copies += 1
        if told.device.type != "cuda":
            return told.tolist
        host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        host.copy_(told, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def arrival() -> list[list[int]]:
            event.synchronize()
            return host.tolist()

        return arrival

    def _settle(self, sequences: list[Sequence], table: list[list[int]]) -> list[StepOutput]:
        """Host bookkeeping of [kept, following, drafts …, sound] by sequence."""
        outputs = []
        for sequence, (kept, following, *drafts, sound) in zip(sequences, table, strict=True):
            if not sound or following < 0:
                raise ValueError(
                    f"request {sequence.id!r} at position {len(sequence.tokens)}: logits are not "
                    "finite; the weights are damaged or the dtype overflows: try "
                    "target.dtype=float32"
                )
            context = len(sequence.tokens)
            emitted = sequence.extend([*drafts[:kept], following], self.target.eos_ids)
            sequence.num_computed += kept + 1
            sequence.tokens_per_step.append(len(emitted))
            self.metrics.record(context, len(drafts), kept, len(emitted), len(emitted) <= kept)
            outputs.append(StepOutput(sequence, emitted, drafts))
        return outputs


def _verdict(
    sequences: list[Sequence],
    chains: DeviceChains,
    draws: Draws,
    logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kept drafts [B] and the token behind them [B], on the device, and whether all logits are
    finite, [1]; int64."""
    size, count = chains.tokens.shape
    best, choices = logits.max(-1)
    sound = (torch.isfinite(best).all() & chains.sound).long()[None]
    if draws.greedy:
        by_row = choices.view(size, count + 1)
        kept = accept_greedy(chains.tokens, by_row[:, :-1])
        return kept, by_row.gather(1, kept[:, None])[:, 0], sound
    assert chains.law is not None
    greedy = upload([sequence.params.greedy for sequence in sequences], logits.device)
    columns = None
    if chains.ids is not None:
        columns = chains.ids.new_full((logits.shape[1],), -1)
        columns[chains.ids] = torch.arange(len(chains.ids), device=columns.device)
    described = Chains(
        chains.tokens,
        torch.arange(0, size * (count + 1) + 1, count + 1, device=logits.device),
        greedy,
        ~greedy,
        draws.verdict,
        chains.law,
        columns,
    )
    params = [sequence.params for sequence in sequences for _ in range(count + 1)]
    kept, following = accept_chains(described, choices, laws(logits, params))
    return kept, following, sound
