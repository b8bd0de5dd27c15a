"""Top-k, top-p and min-p without a sort, against sorting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.inference.config import SamplingParams
from draftsmith.inference.sampler import probabilities
from draftsmith.kernels.renormalise import renormalise, renormalise_reference


def _settings(size: int) -> tuple[Tensor, ...]:
    """Six rows: nothing, each filter alone, two together, all."""
    return (
        torch.tensor([1.0, 0.7, 2.0, 1.0, 1.0, 0.5]),
        torch.tensor([0, 5, 0, 7, size, 1]),
        torch.tensor([1.0, 1.0, 0.8, 0.6, 0.1, 0.9]),
        torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.0]),
    )


@pytest.mark.parametrize("size", [1, 37, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_definition(size: int, ties: bool):
    """Continuous logits, and logits on a coarse grid, where many tokens share an edge."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(size)
    logits = torch.randn(6, size, generator=generator) * 3
    logits = (logits * 2).round() / 2 if ties else logits
    out = renormalise(logits, *_settings(size))
    expected = renormalise_reference(logits.double(), *(s.double() for s in _settings(size)))
    assert torch.equal(out > 0, expected > 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(out.sum(1), torch.ones(6))


@pytest.mark.parametrize("size", [49152, 151936])
def test_real_vocabularies(size: int):
    """Both edges are found over many blocks, the last of them not full."""
    logits = torch.randn(1, size) * 2
    settings = (
        torch.tensor([0.8]),
        torch.tensor([1000]),
        torch.tensor([0.9]),
        torch.tensor([0.001]),
    )
    out = renormalise(logits, *settings)
    expected = renormalise_reference(logits.double(), *(s.double() for s in settings))
    assert torch.equal(out > 0, expected > 0) and 10 < int((out > 0).sum()) < 1000
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_engines_sampler_gives_the_same_law(dtype: torch.dtype):
    """Where no two logits are equal, this is `inference.sampler.probabilities`."""
    logits = torch.linspace(-4, 4, 200)[torch.randperm(200)].to(dtype)[None].expand(6, -1)
    logits = logits if dtype == torch.float32 else logits + 0
    temperature, top_k, top_p, min_p = _settings(200)
    out = renormalise(logits, temperature, top_k, top_p, torch.zeros_like(min_p))
    if dtype == torch.bfloat16:  # 200 values do not fit bfloat16 without ties
        logits = logits.float()
        expected = renormalise_reference(logits, temperature, top_k, top_p, min_p * 0)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-7)
        return
    for row in range(6):
        params = SamplingParams(
            temperature=float(temperature[row]), top_k=int(top_k[row]), top_p=float(top_p[row])
        )
        expected = probabilities(logits[row : row + 1], params)[0]
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-7)
