"""One byte a value: within the stated bounds for whatever a residual stream may hold."""

from __future__ import annotations

import pytest
import torch

from draftsmith.data.quantise import dequantise, has_scale, quantise, state_bytes, stored_dtype

ROUND = 2.0**-8  # of bf16


def bounds(states: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """The documented error of each value [N, H]."""
    wide = states.float().abs()
    step = scale[:, None]
    spread = step / 2 if dtype == "int8" else torch.maximum(wide * 2.0**-4, step * 2.0**-10)
    return (spread + (wide + spread) * ROUND) * (1 + 1e-5)


def samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 96, generator=generator)
    outlier = normal.clone()
    outlier[:, 7] = 40_000.0
    wide = normal * 10.0 ** torch.randint(-30, 30, (64, 1), generator=generator)
    tiny = torch.full((4, 96), 2.0**-133)
    tiny[0, 3] = 0
    huge = normal.sign() * torch.finfo(torch.bfloat16).max
    each = {"normal": normal, "outlier": outlier, "wide": wide, "tiny": tiny, "huge": huge}
    return {name: value.to(torch.bfloat16) for name, value in each.items()}


@pytest.mark.parametrize("name", ["normal", "outlier", "wide", "tiny", "huge"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_error_is_within_the_bound(dtype: str, name: str) -> None:
    """Also with one huge channel, with subnormals, and at the ends of bf16's range."""
    states = samples()[name]
    codes, scale = quantise(states, dtype)
    assert scale is not None
    assert codes.dtype == stored_dtype(dtype) and codes.shape == states.shape
    assert scale.dtype == torch.float32 and bool((scale > 0).all())
    read = dequantise(codes, scale)
    assert read.dtype == torch.bfloat16 and bool(torch.isfinite(read).all())
    error = (read.float() - states.float()).abs()
    assert bool((error <= bounds(states, scale, dtype)).all())


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_zeros_come_back_as_zeros(dtype: str) -> None:
    """A token of zeros has a scale as any other."""
    codes, scale = quantise(torch.zeros(3, 8, dtype=torch.bfloat16), dtype)
    assert scale is not None and bool((scale > 0).all())
    assert not dequantise(codes, scale).any()


def test_small_values_beside_a_huge_channel() -> None:
    """fp8 keeps their proportion where int8's step swallows them."""
    states = torch.full((1, 32), 0.5, dtype=torch.bfloat16)
    states[0, 0] = 300.0
    assert dequantise(*quantise(states, "int8"))[0, 1] == 0
    assert dequantise(*quantise(states, "fp8"))[0, 1].item() == pytest.approx(0.5, rel=0.07)


def test_bf16_is_left_alone() -> None:
    """No scale, no copy of meaning: the bits are the same."""
    states = samples()["normal"]
    codes, scale = quantise(states, "bf16")
    assert scale is None and torch.equal(dequantise(codes, scale), states)


def test_bytes() -> None:
    """What the forecast counts: 2·H, or H + 4."""
    assert [state_bytes(dtype, 576) for dtype in ("bf16", "fp8", "int8")] == [1152, 580, 580]
    assert [has_scale(dtype) for dtype in ("bf16", "fp8", "int8")] == [False, True, True]
