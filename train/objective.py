"""What is minimised: a weighted loss of every unroll step against the target's distribution.

Step k of row p predicts x_{p+2+k}; its teacher is softmax(lm_head(norm(h_{p+1+k}))). So teacher row
t judges the students of rows t-1, t-2, ..., and is worked out once for all of them: states are
rolled by 1 + k before they meet it. Which loss: `kernels.losses`.

Survivors. In the engine, step k of a chain is of use only where its drafts 0..k-1 were accepted,
and a teacher exists only for prefixes of the text. So the chain of row p survives to step k when

    argmax q_j = x_{p+2+j}      for all j < k

and what it is then fed is its own drafts and the text's tokens in one. A draft that differs would
have to be followed by a teacher that nobody has computed: nothing is fed in its place, the chain's
later steps get weight 0. The sum is still divided by all supervised weight, so step k counts in
proportion to how often the engine gets that far.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..kernels.distill_loss import DistillStats, distill_loss
from ..kernels.logit_chunks import default_rows, top_columns
from ..kernels.losses import LossConfig
from ..kernels.shift import shift_tokens
from ..models.heads import Head
from ..models.trunk import Trunk
from .unroll import UnrollContext, split_states, unroll

_NOISE, _CHAINS = range(2)  # streams of random numbers of a batch


class Objective:
    """Loss of a head on a packed batch. Holds the frozen trunk and is no module, so no optimiser
    can find it.

    A head's own `lm_head` [V or Vd, H] reads the head's states plainly, without the target's logit
    scale and soft cap. Heads without one are read through the target's.

    Args:
        trunk: the target's frozen parts. step_weights: [K] weight of each unroll step.
        boundaries: those of the batches' states, ascending, L last; empty = L alone.
        draft_ids: int64 [Vd] of a reduced draft vocabulary; the teacher is renormalised over it.
            None = all.
        dtype: of the loss's matrix products; the lm_head rows are kept in it.
        chunk: rows of logits alive at a time, see `kernels.distill_loss`. loss: what is minimised.
        context, recompute, feature_noise, survivors: see `TrainConfig` (recompute is its
            checkpoint_activations); they hold while the head is in training mode.
        seed: of noise and of the choice of chains, with each batch's index.
        unroll: how the steps are run where not by `unroll.unroll` (row_chunks, sequence); it has
            the engine's context, and recompute does not apply to it.
    """

    def __init__(
        self,
        trunk: Trunk,
        step_weights: list[float],
        *,
        boundaries: tuple[int, ...] = (),
        draft_ids: Tensor | None = None,
        dtype: torch.dtype,
        chunk: int | None = None,
        loss: LossConfig = LossConfig(),  # noqa: B008 (frozen)
        context: str = "engine",
        recompute: bool = False,
        feature_noise: float = 0.0,
        survivors: float = 0.0,
        seed: int = 0,
        unroll: Callable[..., Tensor] | None = None,
    ) -> None:
        self.trunk = trunk
        self.unroll = unroll
        self.boundaries = boundaries or (0,)
        self.step_weights = torch.tensor(step_weights, dtype=torch.float32, device=trunk.device)
        self.draft_ids = None if draft_ids is None else draft_ids.to(trunk.device)
        self.head_weight = trunk.lm_head_weight(self.draft_ids).to(dtype)
        self.dtype = dtype
        self.chunk = chunk
        self.loss = loss
        self.context = context
        self.recompute = recompute
        self.feature_noise = feature_noise
        self.survivors = survivors
        self.seed = seed
        self.full_head = None
        if loss.measure_outside and draft_ids is not None:
            self.full_head = trunk.lm_head.to(dtype)
        elif loss.measure_outside:
            warnings.warn(
                "train.loss.measure_outside has no effect: the head drafts over the whole "
                "vocabulary",
                stacklevel=2,
            )
        # [V] column of each token, -1 outside the draft vocabulary
        self._columns: Tensor | None = None
        if (loss.labels == "data" or survivors) and self.draft_ids is not None:
            self._columns = self.draft_ids.new_full((trunk.vocab_size,), -1)
            self._columns[self.draft_ids] = torch.arange(
                len(self.draft_ids), device=self.draft_ids.device
            )

    def check(self, head: Head) -> None:
        """Warn of a setting that does nothing for this head."""
        alike = head.num_layers == 0 or head.num_modules >= len(self.step_weights)
        if self.context != "engine" and alike:
            warnings.warn(
                f"train.context={self.context} has no effect: each step of this {head.kind} head "
                "has keys of its own, or none",
                stacklevel=3,
            )

    def weights(self, batch: PackedBatch, steps: int) -> Tensor:
        """Weight of every row of every step, [K, N] fp32; 0 where the row is not supervised. Before
        any chain ends."""
        mask = batch.chains(steps).to(self.step_weights.device)
        return mask * self.step_weights[:steps, None]

    def states(self, batch: PackedBatch) -> dict[int, Tensor]:
        """Raw states of a batch by boundary, [N, H] each; the last one is L."""
        return split_states(batch.hidden, self.boundaries, self.trunk.hidden_size)

    def teacher(self, batch: PackedBatch) -> Tensor:
        """What the target's lm_head reads, [N, H]."""
        return self.trunk.norm(self.states(batch)[self.boundaries[-1]])

    def __call__(self, head: Head, batch: PackedBatch, steps: int) -> tuple[Tensor, DistillStats]:
        """Sum over supervised rows of weight * loss (a scalar, not normalised) and its statistics.

        steps: K <= len(step_weights). `student_top[k, t]` belongs to chain row t - 1 - k (see
        `chain_rows`).
        """
        drafted = self.drafted(head, batch, steps)
        weights = self.weights(batch, steps)
        if head.training and self.survivors and steps > 1:
            weights = weights * self.surviving(batch, drafted.detach(), weights, head.lm_head)
        return self.judge(
            self.aligned(drafted),
            self.teacher(batch),
            weights,
            labels=self.labels(batch),
            student_head=head.lm_head,
        )

    def drafted(self, head: Head, batch: PackedBatch, steps: int) -> Tensor:
        """The head's states of every step by chain row, [K, N, H'], in the run's context while the
        head is in training mode."""
        training, states = head.training, self.states(batch)
        noise = self._noise(batch) if training and self.feature_noise else None
        if self.unroll is not None:
            return self.unroll(head, self.trunk, batch, steps, states=states, noise=noise)
        return unroll(
            head,
            self.trunk,
            batch,
            steps,
            states=states,
            context=UnrollContext(batch.starts, causal=training and self.context == "causal"),
            noise=noise,
            recompute=self.recompute,
        )

    def aligned(self, drafted: Tensor) -> Tensor:
        """Each of the states [K, N, H'] at the row of its teacher, in `dtype`: entry [k, t] belongs
        to chain row t - 1 - k."""
        return torch.stack([one.roll(1 + k, 0) for k, one in enumerate(drafted)]).to(self.dtype)

    def labels(self, batch: PackedBatch) -> Tensor | None:
        """Column of the data's token for every teacher row, int64 [N]; -1 where its document ends
        or the draft vocabulary lacks the token. None where the loss takes the teacher's argmax."""
        return None if self.loss.labels == "teacher" else self._ahead(batch, 1)

    def _ahead(self, batch: PackedBatch, offset: int) -> Tensor:
        """Column of token p + offset for every row p, int64 [N]; -1 where there is none."""
        tokens = shift_tokens(batch.tokens.long(), batch.starts, offset, fill=-1)
        if self._columns is None:
            return tokens
        return torch.where(tokens >= 0, self._columns[tokens.clamp(min=0)], -1)

    @torch.no_grad()
    def surviving(
        self, batch: PackedBatch, drafted: Tensor, weights: Tensor, student_head: Tensor | None
    ) -> Tensor:
        """Which chains are trained at which step, bool [K, N] by chain row: see "survivors" above;
        of a chain that is not among the share that ends so, every step.

        drafted [K, N, H]. weights [K, N]: drafts are worked out only where one decides over a
        weight, a chunk of logits at a time.
        """
        head = (self.head_weight if student_head is None else student_head).to(self.dtype)
        size = self.chunk or default_rows(drafted.device, head.shape[-2])
        alive = torch.ones(drafted.shape[1], dtype=torch.bool, device=drafted.device)
        ends = alive
        if self.survivors < 1:
            draws = torch.rand(
                len(alive), generator=self._generator(batch, _CHAINS), device=alive.device
            )
            ends = draws < self.survivors
        kept = [alive]
        # Logit scale and soft cap are monotone: the argmax needs neither.
        with torch.autocast(drafted.device.type, enabled=False):
            for step in range(len(drafted) - 1):
                own = head if head.dim() == 2 else head[step]
                rows = (ends & alive & (weights[step + 1] > 0)).nonzero().squeeze(1)
                tops = [rows.new_zeros(0)]
                for part in drafted[step, rows].to(self.dtype).split(size):
                    tops.append(top_columns(part @ own.T)[1])
                text = self._ahead(batch, 2 + step)[rows]
                alive = alive.index_put((rows,), torch.cat(tops) == text)
                kept.append(alive)
        return torch.stack(kept)

    def _noise(self, batch: PackedBatch) -> Tensor:
        """Uniform noise of width feature_noise around 0, fp32 [N, H]; the same for a batch whenever
        it is read."""
        shape = batch.tokens.shape[0], self.trunk.hidden_size
        device = self.trunk.device
        draws = torch.rand(shape, generator=self._generator(batch, _NOISE), device=device)
        return draws.sub_(0.5).mul_(self.feature_noise)

    def _generator(self, batch: PackedBatch, stream: int) -> torch.Generator:
        if batch.index is None:
            raise ValueError(
                "train.feature_noise and train.survivors draw by the number of the batch: give it "
                "an index"
            )
        entropy = (self.seed % 2**64, batch.index, stream)
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        return torch.Generator(self.trunk.device).manual_seed(seed)

    def judge(
        self,
        students: Tensor,
        normed: Tensor,
        weights: Tensor,
        *,
        labels: Tensor | None = None,
        student_head: Tensor | None = None,
    ) -> tuple[Tensor, DistillStats]:
        """students [K, N, H'] already at their teacher's row; normed [N, H]; weights [K, N] by
        chain row; labels [N] by teacher row; student_head [V, H'] where the students have their
        own, [K, V, H'] where each step has."""
        # A supervised row's teacher lies in its own document, so what a roll carries around the end
        # has weight 0.
        aligned = torch.stack([row.roll(1 + k) for k, row in enumerate(weights)])

        def judged(steps: slice, own: Tensor | None) -> tuple[Tensor, DistillStats]:
            return distill_loss(
                students[steps],
                normed,
                aligned[steps],
                self.head_weight,
                loss=self.loss,
                labels=labels,
                student_head=own,
                full_head=self.full_head,
                chunk=self.chunk,
                logit_scale=self.trunk.logit_scale,
                softcap=self.trunk.softcap,
            )

        if student_head is None or student_head.dim() == 2:
            return judged(slice(None), student_head)
        parts = [judged(slice(k, k + 1), student_head[k]) for k in range(len(students))]
        losses, stats = zip(*parts, strict=True)
        return torch.stack(losses).sum(), _together(stats)


def _together(steps: Sequence[DistillStats]) -> DistillStats:
    """The statistics of calls for one step each, as of one call for all."""
    fields = {name: torch.cat([getattr(one, name) for one in steps]) for name in steps[0]._fields}
    # [N] by teacher row, -1 where a call did not need it.
    fields["teacher_top"] = torch.stack([one.teacher_top for one in steps]).amax(0)
    return DistillStats(**fields)


def chain_rows(aligned: Tensor) -> Tensor:
    """[K, N] by teacher row -> [K, N] by chain row: out[k, p] = aligned[k, p + 1 + k] (the end
    wraps)."""
    return torch.stack([row.roll(-(1 + k)) for k, row in enumerate(aligned)])
