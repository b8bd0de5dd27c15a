"""Hidden states of whole rows, by the engine's own prefill: packed end to end, no row padded."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..models.attention import PackedContext
from ..models.target import Target


@torch.inference_mode()
def capture(target: Target, rows: list[Tensor], boundaries: tuple[int, ...]) -> dict[int, Tensor]:
    """Raw states of several rows in one pass.

    Args:
        rows: R tensors [n_r] int64 of token ids, none empty.
        boundaries: which boundaries, 0 .. L.
    Returns:
        boundary -> [N, H] with N = sum n_r, rows end to end in the order given, the target's dtype.
    """
    lengths = [int(row.shape[0]) for row in rows]
    if not rows or min(lengths) == 0:
        raise ValueError(
            f"capture of {len(rows)} rows with lengths {lengths[:8]}: every row needs a token"
        )
    starts = [0, *itertools.accumulate(lengths)]
    tokens = torch.cat(list(rows)).to(target.device, torch.int64)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(target.device)
    states = target.forward(tokens, positions, PackedContext(starts), boundaries)
    return {boundary: states[boundary] for boundary in boundaries}
