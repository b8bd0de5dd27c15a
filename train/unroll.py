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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..kernels.shift import shift_tokens
from ..kernels.ttt_attention import ttt_attention
from ..models.heads import Head
from ..models.trunk import Trunk


class Seen(NamedTuple):
    """Keys and values of one layer, by step; entry 0 is the committed step, the others are
    chains."""

    keys: list[Tensor]  # k + 1 tensors [Hkv, N, D]
    values: list[Tensor]  # k + 1 tensors [Hkv, N, Dv]


class UnrollContext:
    """The attention context of one unroll; one per batch and forward pass, since it keeps what each
    step wrote.

    Args:
        starts: [R+1] row borders, starts[0] = 0, starts[-1] = N.
        attention: the op, exchanged in benchmarks and tests for another form of the same
            definition.
    """

    def __init__(
        self, starts: Tensor | Sequence[int], attention: Callable[..., Tensor] = ttt_attention
    ) -> None:
        borders = starts.tolist() if isinstance(starts, Tensor) else starts
        self.starts = tuple(int(b) for b in borders)
        self.attention = attention
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
        """q [1,Hq,N,D], k [1,Hkv,N,D], v [1,Hkv,N,Dv] of the next step -> [1,N,Hq,Dv].

        The first call of a layer is step 0, the call after that step 1, and so on.
        """
        device = q.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        seen = self.seen.setdefault(layer, Seen([], []))
        key, value = k[0].to(dtype), v[0].to(dtype)
        if not seen.keys:
            key, value = self.commit(layer, key, value)
        seen.keys.append(key)
        seen.values.append(value)
        out = self.look(q[0].to(dtype), seen, scaling=scaling, window=window, softcap=softcap)
        return out.transpose(0, 1)[None]

    def commit(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer's queries may look at, from those of its first step."""
        return key, value

    def look(
        self, q: Tensor, seen: Seen, *, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Queries [Hq, N, D] at what was seen -> [Hq, N, Dv]."""
        return self.attention(
            q,
            seen.keys[0],
            seen.values[0],
            seen.keys[1:],
            seen.values[1:],
            self.starts,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )


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
) -> Tensor:
    """What the head drafts with at every step (lm_head reads it), [K, N, H] in the dtype the head
    computes in.

    states: boundary -> [N, H] raw states of the batch, L among them; None where the batch holds L
    alone. steps: K >= 1. Rows whose token x_{p+1+k} lies past the end of their document are
    computed with token 0 and belong to no supervised chain.
    """
    check_steps(head, steps)
    dtype = next(head.parameters()).dtype
    states = {0: batch.hidden} if states is None else states
    hidden = head.feed(states, trunk).to(dtype)
    context = UnrollContext(batch.starts) if context is None else context
    drafted = []
    for step in range(steps):
        tokens = shift_tokens(batch.tokens, batch.starts, 1 + step)
        embeds = trunk.embed(tokens).to(dtype)
        out = head(embeds, hidden, batch.positions + step, context, step)
        hidden = out.recycled
        drafted.append(out.drafted)
    return torch.stack(drafted)
