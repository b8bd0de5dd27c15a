"""How a cache holds states: bf16 as they are, or one byte a value with one float32 scale a token.

    fp8   scale = absmax / 448, code = e4m3(x / scale);    |x' - x| <= max(2^-4 |x|, 2^-10 scale)
    int8  scale = absmax / 127, code = round(x / scale);   |x' - x| <= scale / 2

for the largest magnitude `absmax` of the token, before x' is rounded to bf16 on read (2^-8 of x'
more at most). fp8 keeps the proportion of small values beside a huge channel; int8 keeps one
absolute step. The scale is at least 2^-126 (the smallest normal float32): a token of zeros comes
back as zeros, and no scale on disk is ever zero.
Legend: N tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = ("bf16", "fp8", "int8")
_STORED = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_SMALLEST_SCALE = 2.0**-126


def stored_dtype(dtype: str) -> torch.dtype:
    """The dtype of the tensor in the file."""
    return _STORED[dtype]


def has_scale(dtype: str) -> bool:
    """Whether a scale lies beside the codes."""
    return dtype in _LARGEST


def state_bytes(dtype: str, hidden_size: int) -> int:
    """Bytes of one token at one boundary: 2·H, or H + 4."""
    return hidden_size + 4 if has_scale(dtype) else 2 * hidden_size


def quantise(states: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of states.

    Args:
        states: [N, H] bf16 on any device; every value finite, for one that is not would spoil its
            whole token (the dump leaves such rows out before).
    Returns:
        codes [N, H] bf16, float8_e4m3fn or int8; scale [N] float32, None for bf16.
    """
    if not has_scale(dtype):
        return states.to(torch.bfloat16), None
    wide = states.float()
    largest = _LARGEST[dtype]
    scale = (wide.abs().amax(-1) / largest).clamp_min(_SMALLEST_SCALE)
    # rounding of the quotient may step past the largest code, which e4m3 would turn into NaN
    scaled = (wide / scale[:, None]).clamp_(-largest, largest)
    if dtype == "int8":
        scaled = scaled.round_()
    return scaled.to(_STORED[dtype]), scale


def dequantise(codes: Tensor, scale: Tensor | None) -> Tensor:
    """States [N, H] bf16 of codes [N, H] and their scale [N] float32 (None: the codes are bf16)."""
    if scale is None:
        return codes
    return codes.float().mul_(scale[:, None]).to(torch.bfloat16)
