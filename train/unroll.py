"""K steps of a head over a packed batch, each fed its own state of the step before, in the engine's
context.

```
          token      hidden                   position   sees of row p's document
step 0    x_{p+1}    norm(h_p)                p          step-0 keys 0..p
step k    x_{p+1+k}  own output of step k-1   p + k      the same, and its own chain's steps 1..k
```
The tokens are the text's own at every step, so inputs and teacher always belong to the same prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data.batches import PackedBatch
from ..kernels.shift import shift_tokens
from ..kernels.ttt_attention import ttt_attention
from ..models.trunk import Trunk


class _Seen(NamedTuple):
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

    def __init__(self, starts: Tensor, attention: Callable[..., Tensor] = ttt_attention) -> None:
        self.starts = tuple(int(b) for b in starts.tolist())
        self.attention = attention
        self.seen: dict[int, _Seen] = {}

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
        seen = self.seen.setdefault(layer, _Seen([], []))
        seen.keys.append(k[0].to(dtype))
        seen.values.append(v[0].to(dtype))
        out = self.attention(
            q[0].to(dtype),
            seen.keys[0],
            seen.values[0],
            seen.keys[1:],
            seen.values[1:],
            self.starts,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
        return out.transpose(0, 1)[None]


def unroll(
    head: nn.Module,
    trunk: Trunk,
    batch: PackedBatch,
    steps: int,
    *,
    normed: Tensor | None = None,
    context: UnrollContext | None = None,
) -> Tensor:
    """The head's states of every step, [K, N, H] in the dtype the head computes in.

    head: `forward(embeds [N,H], hidden [N,H], positions [N], context) -> [N,H]`. batch: its
    `hidden` are raw states of boundary L. steps: K >= 1. normed: trunk.norm(batch.hidden) where the
    caller has it already. Rows whose token x_{p+1+k} lies past the end of their document are
    computed with token 0 and belong to no supervised chain.
    """
    if steps < 1:
        raise ValueError(f"steps {steps}: an unroll has at least step 0")
    dtype = next(head.parameters()).dtype
    hidden = (trunk.norm(batch.hidden) if normed is None else normed).to(dtype)
    context = UnrollContext(batch.starts) if context is None else context
    states = []
    for step in range(steps):
        tokens = shift_tokens(batch.tokens, batch.starts, 1 + step)
        hidden = head(trunk.embed(tokens).to(dtype), hidden, batch.positions + step, context)
        states.append(hidden)
    return torch.stack(states)
