"""RMSNorm in the two styles that targets use, with statistics in at least float32.

rms     y = x / sqrt(mean(x^2) + eps) * w
gemma   y = x / sqrt(mean(x^2) + eps) * (1 + w)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..kernels.add_norm import add_norm
from ..kernels.norm_concat import norm_concat
from ..kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension; float64 input is computed in float64 (transformers' own
    drops to float32).

    Args:
        size: width H. eps: added to the mean square. style: `rms` or `gemma`.
    """

    def __init__(self, size: int, eps: float, style: str = "rms") -> None:
        super().__init__()
        if style not in ("rms", "gemma"):
            raise ValueError(f"norm style {style!r}: choose rms or gemma")
        self.weight = nn.Parameter(torch.ones(size) if style == "rms" else torch.zeros(size))
        self.eps = eps
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], the dtype of x."""
        if self.style == "gemma":  # rounded once, after the weight, as transformers' is
            wide = torch.promote_types(x.dtype, torch.float32)
            return rms_norm(x.to(wide), 1.0 + self.weight.to(wide), self.eps).to(x.dtype)
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


def side_by_side(first: nn.Module, a: Tensor, second: nn.Module, b: Tensor) -> Tensor:
    """[first(a) ; second(b)] of two norms, either of which may be the identity: a, b [N, H] ->
    [N, 2H], written once on a GPU."""
    norms = [module for module in (first, second) if isinstance(module, RMSNorm)]
    if a.dtype != b.dtype or any(_unlike(norm, norms[0]) for norm in norms):
        return torch.cat([first(a), second(b)], -1)
    of_a, of_b = (
        module.weight.to(a.dtype) if isinstance(module, RMSNorm) else None
        for module in (first, second)
    )
    return norm_concat(a, b, of_a, of_b, norms[0].eps if norms else 0.0)


def added(x: Tensor, residual: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x), [N, H] each, in one pass on a GPU; the sum itself where
    there is no norm."""
    if isinstance(norm, RMSNorm) and not _unlike(norm, norm) and x.dtype == residual.dtype:
        return add_norm(x, residual, norm.weight.to(x.dtype), norm.eps)
    total = residual + x
    return (total if norm is None else norm(total)), total


def _unlike(norm: RMSNorm, other: RMSNorm) -> bool:
    """Whether the fused forms cannot take them together: Gemma's are rounded elsewhere."""
    return norm.style != "rms" or norm.eps != other.eps


def own_norm(module: Any) -> RMSNorm:
    """Our norm with an RMSNorm's weight, eps and style; the style is what the module does to a
    row, since its name does not tell.

    Args:
        module: of transformers (its weight may lie on the meta device), or one of ours.
    Raises:
        ValueError: the module is not an RMSNorm (LayerNorm targets are not supported).
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if eps is None or not isinstance(weight, Tensor):
        raise _unknown(module)
    style = module.style if isinstance(module, RMSNorm) else _style(module, eps)
    norm = RMSNorm(weight.shape[0], float(eps), style)
    norm.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    return norm


@torch.no_grad()
def _style(module: Any, eps: float) -> str:
    size = module.weight.shape[0]
    # On the CPU even where modules are being made on the meta device.
    row = torch.linspace(0.5, 1.5, size, device="cpu")
    weight = torch.full((size,), 0.5, device="cpu")
    normed = row * torch.rsqrt(row.square().mean() + eps)
    out = functional_call(module, {"weight": weight}, row)
    for style, factor in (("rms", 0.5), ("gemma", 1.5)):
        if torch.allclose(out, normed * factor, rtol=1e-3):
            return style
    raise _unknown(module)


def _unknown(module: Any) -> ValueError:
    return ValueError(
        f"the target's norm is a {type(module).__name__}; only RMSNorm targets are supported"
    )


def use_own_norms(module: nn.Module) -> None:
    """Replace every RMSNorm below `module`; parameter names stay as they are."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, RMSNorm):
                setattr(parent, name, own_norm(child))
