"""Norms beside each other and norms of sums: what the parts give, gradients too, and in one launch
where kernels run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.kernels.jit import recorded
from draftsmith.models.attention import PackedContext
from draftsmith.models.heads import HeadConfig
from draftsmith.models.heads.eagle3 import Eagle3Head
from draftsmith.models.heads.mtp import MTPHead
from draftsmith.models.lean import LeanLayer
from draftsmith.models.norm import RMSNorm, added, side_by_side

SIZE = 24


def _norm(style: str) -> nn.Module:
    if style == "none":
        return nn.Identity()
    norm = RMSNorm(SIZE, 1e-5, style).double()
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


def _alike(ours: Tensor, plain: Tensor, leaves: list[Tensor]) -> None:
    pull = torch.randn(plain.shape, dtype=torch.float64)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, pull, retain_graph=True),
        torch.autograd.grad(plain, leaves, pull, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("first", ["rms", "gemma", "none"])
@pytest.mark.parametrize("second", ["rms", "gemma", "none"])
def test_two_norms_side_by_side(first: str, second: str):
    """All pairs of styles, in float64."""
    torch.manual_seed(0)
    a, b = (torch.randn(5, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2))
    one, other = _norm(first), _norm(second)
    leaves = [a, b, *one.parameters(), *other.parameters()]
    plain = torch.cat([one(a), other(b)], -1)
    _alike(side_by_side(one, a, other, b), plain, leaves)


@pytest.mark.parametrize("style", ["rms", "gemma", "none"])
def test_the_norm_of_a_sum(style: str):
    """Both results carry gradients."""
    torch.manual_seed(1)
    x, y = (torch.randn(5, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2))
    norm = _norm(style)
    read, total = added(x, y, norm)
    leaves = [x, y, *norm.parameters()]
    _alike(torch.cat([read, total], -1), torch.cat([norm(x + y), x + y], -1), leaves)


def test_states_of_two_dtypes_are_promoted():
    """As a concatenation and a sum promote them."""
    norm, wide = RMSNorm(SIZE, 1e-5), torch.randn(3, SIZE)
    assert side_by_side(norm, wide.bfloat16(), norm, wide).dtype == torch.float32
    assert added(wide.bfloat16(), wide, norm)[1].dtype == torch.float32


def test_heads_and_layers_ask_for_the_fused_kernels():
    """An MTP module's input, an eagle3 layer's input and its sum, a lean layer's sum where no
    product takes it along."""
    config = LlamaConfig(
        hidden_size=SIZE,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
    )
    x, positions, context = torch.randn(3, SIZE), torch.arange(3), PackedContext([0, 3])
    mtp, eagle3 = MTPHead(HeadConfig(), config), Eagle3Head(HeadConfig("eagle3"), config)
    lean = LeanLayer(mtp.blocks[0].layer, 0)
    lean.sum_rides = False
    turn = torch.ones(3, SIZE // 2)

    def kernels(call) -> list[str]:
        with torch.no_grad(), recorded() as launches:
            call()
        return [launch.kernel.function.__name__ for launch in launches]

    assert "norm_concat_kernel" in kernels(lambda: mtp(x, x, positions, context))
    found = kernels(lambda: eagle3(x, x, positions, context))
    assert "norm_concat_kernel" in found and "add_norm_kernel" in found
    assert "add_norm_kernel" in kernels(lambda: lean(x, turn, turn, context))
