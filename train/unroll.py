"""K steps of a head over a packed batch, each fed its own state of the step before, in the engine's
context.

```
          token      hidden                   position   sees of row p's document
step 0    x_{p+1}    norm(h_p)                p          step-0 keys 0..p
step k    x_{p+1+k}  own output of step k-1   p + k      the same, and its own chain's steps 1..k
```
The tokens are the text's own at every step, so inputs and teacher always belong to the same prefix.
Of a head with separate modules, module k has keys of its own: its first step is step k, and those
keys are then its committed ones.

What a row of step k sees can be asked for otherwise, for comparison (`train.context=causal`): rows
0..p of step k itself, as trainers have it that know no such context. See docs/training.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..data.batches import PackedBatch
from ..kernels.shift import shift_tokens
from ..kernels.ttt_attention import ttt_attention
from ..models.heads import Head, HeadStep
from ..models.trunk import Trunk


class Seen(NamedTuple):
    """Keys and values of one layer, by step; entry 0 is the committed step, the others are
    chains."""

    first: int  # the step of entry 0
    keys: list[Tensor]  # k + 1 tensors [Hkv, N, D]
    values: list[Tensor]  # k + 1 tensors [Hkv, N, Dv]


class UnrollContext:
    """The attention context of one unroll; one per batch and forward pass, since it keeps what each
    step wrote.

    Args:
        starts: [R+1] row borders, starts[0] = 0, starts[-1] = N.
        attention: the op, exchanged in benchmarks and tests for another form of the same
            definition.
        causal: a row of step k sees rows 0..p of step k alone, and nothing is kept.
    Attributes:
        step: the unroll step that is being computed; set before the head runs.
    """

    def __init__(
        self,
        starts: Tensor | Sequence[int],
        attention: Callable[..., Tensor] = ttt_attention,
        *,
        causal: bool = False,
    ) -> None:
        borders = starts.tolist() if isinstance(starts, Tensor) else starts
        self.starts = tuple(int(b) for b in borders)
        self.attention = attention
        self.causal = causal
        self.step = 0
        self.seen: dict[int, Seen] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """q [1,Hq,N,D], k [1,Hkv,N,D], v [1,Hkv,N,Dv] of `step` -> [1,N,Hq,Dv].

        The step in which a layer first comes is its committed one, the steps after it are chains. A
        step that is computed again (backward of a checkpointed one) sees what it saw before, and
        adds nothing.
        """
        device = q.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        keys, values = self._visible(layer, k[0].to(dtype), v[0].to(dtype))
        out = self.look(
            q[0].to(dtype), keys, values, scaling=scaling, window=window, softcap=softcap
        )
        return out.transpose(0, 1)[None]

    def commit(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer's queries may look at, from those of its first step."""
        return key, value

    def look(
        self,
        q: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Queries [Hq, N, D] at the committed keys and the chains' -> [Hq, N, Dv]."""
        return self.attention(
            q,
            keys[0],
            values[0],
            keys[1:],
            values[1:],
            self.starts,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )

    def _visible(self, layer: int, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values that the rows of this step see, its own [Hkv, N, ...] last."""
        if self.causal:
            return [k], [v]
        seen = self.seen.setdefault(layer, Seen(self.step, [], []))
        before = self.step - seen.first
        assert 0 <= before <= len(seen.keys), f"step {self.step} of layer {layer} came too early"
        if before == 0:
            k, v = self.commit(layer, k, v)
        if before == len(seen.keys):
            seen.keys.append(k)
            seen.values.append(v)
        return [*seen.keys[:before], k], [*seen.values[:before], v]


def split_states(hidden: Tensor, boundaries: tuple[int, ...], size: int) -> dict[int, Tensor]:
    """The columns of a batch's states by boundary.

    Args:
        hidden: [N, B·H], boundaries side by side in ascending order. size: H.
    Returns:
        boundary -> [N, H] views.
    Raises:
        ValueError: the width is not that of the boundaries.
    """
    if hidden.shape[1] != len(boundaries) * size:
        raise ValueError(
            f"a batch holds states {hidden.shape[1]} wide; boundaries {list(boundaries)} of {size} "
            f"each are {len(boundaries) * size}: dump the boundaries that the head reads"
        )
    return dict(zip(boundaries, hidden.split(size, 1), strict=True))


def check_steps(head: Head, steps: int) -> None:
    """ValueError where a head has not so many steps."""
    if steps < 1:
        raise ValueError(f"steps {steps}: an unroll has at least step 0")
    if head.max_steps is not None and steps > head.max_steps:
        raise ValueError(
            f"train.steps={steps}: this {head.kind} head has {head.max_steps} steps; raise "
            "head.modules or lower train.steps"
        )


def unroll(
    head: Head,
    trunk: Trunk,
    batch: PackedBatch,
    steps: int,
    *,
    states: dict[int, Tensor] | None = None,
    context: UnrollContext | None = None,
    noise: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """What the head drafts with at every step (lm_head reads it), [K, N, H] in the dtype the head
    computes in.

    states: boundary -> [N, H] raw states of the batch, L among them; None where the batch holds L
    alone. steps: K >= 1. noise: [N, H], added to what step 0 is fed. recompute: backward runs each
    step's forward again instead of keeping its activations; of a step remain what it recycled and
    drafted, and its keys and values. Rows whose token x_{p+1+k} lies past the end of their document
    are computed with token 0 and belong to no supervised chain.
    """
    check_steps(head, steps)
    dtype = next(head.parameters()).dtype
    states = {0: batch.hidden} if states is None else states
    hidden = head.feed(states, trunk).to(dtype)
    if noise is not None:
        hidden = hidden + noise.to(dtype)
    seen = UnrollContext(batch.starts) if context is None else context

    def forward(hidden: Tensor, step: int) -> HeadStep:
        seen.step = step
        tokens = shift_tokens(batch.tokens, batch.starts, 1 + step)
        return head(trunk.embed(tokens).to(dtype), hidden, batch.positions + step, seen, step)

    drafted = []
    for step in range(steps):
        if recompute and torch.is_grad_enabled():
            # Nothing in a head draws random numbers, so there is no state to restore.
            out = checkpoint(forward, hidden, step, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(out, HeadStep)
        else:
            out = forward(hidden, step)
        hidden = out.recycled
        drafted.append(out.drafted)
    return torch.stack(drafted)
