"""RMSNorm in the two styles that targets use, with statistics in at least float32.

rms     y = x / sqrt(mean(x^2) + eps) * w
gemma   y = x / sqrt(mean(x^2) + eps) * (1 + w)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        weight = (self.weight if self.style == "rms" else 1.0 + self.weight).to(x.dtype)
        if torch.is_grad_enabled() or x.dim() != 2:
            return F.rms_norm(x, self.weight.shape, weight, self.eps)
        return rms_norm(x, weight, self.eps)


def norm_style(module: nn.Module) -> str:
    """The style of a transformers norm module, by its class."""
    return "gemma" if type(module).__name__.startswith(("Gemma", "Qwen3Next", "Qwen3_5")) else "rms"


def own_norm(module: Any) -> RMSNorm:
    """Our norm with a transformers RMSNorm's weight, eps and style.

    Raises:
        ValueError: the module is not an RMSNorm (LayerNorm targets are not supported).
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or not isinstance(getattr(module, "weight", None), Tensor):
        raise ValueError(
            f"the target's norm is a {type(module).__name__}; only RMSNorm targets are supported"
        )
    norm = RMSNorm(module.weight.shape[0], float(eps), norm_style(module))
    norm.weight = nn.Parameter(
        module.weight.detach().clone(), requires_grad=module.weight.requires_grad
    )
    return norm


def use_own_norms(module: nn.Module) -> None:
    """Replace every RMSNorm below `module`; parameter names stay as they are."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, RMSNorm):
                setattr(parent, name, own_norm(child))
