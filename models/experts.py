"""How transformers' layers run their experts: in one grouped product where that is sound, else one
expert after the other.

The library's own choice is the grouped product everywhere. It does not know float64, refuses some
gradients on a CPU, and pays off on a GPU alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

IMPLEMENTATION = "draftsmith"


def _experts(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    weight = next(module.parameters())
    if weight.is_cuda and weight.dtype == torch.bfloat16:
        return grouped_mm_experts_forward(module, *args, **kwargs)
    return inspect.unwrap(type(module).forward)(module, *args, **kwargs)


def group(module: nn.Module) -> None:
    """Let the experts below `module` run as one grouped product wherever they are: their loop asks
    which experts have rows, and tensors without data cannot tell."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if getattr(config, "_experts_implementation", None) == IMPLEMENTATION:
            config._experts_implementation = "grouped_mm"


def register() -> None:
    """Make the function known to transformers; calling it twice is harmless."""
    ExpertsInterface.register(IMPLEMENTATION, _experts)
