"""Expert weights as checkpoints spell them, one tensor an expert, and as modules hold them, fused.

<mlp>.experts.gate_up_proj    [E, 2I, H]   =  <mlp>.experts.{e}.gate_proj.weight  [I, H]
                                              <mlp>.experts.{e}.up_proj.weight    [I, H]
<mlp>.experts.down_proj       [E, H, I]    =  <mlp>.experts.{e}.down_proj.weight  [H, I]
"""

from __future__ import annotations

import torch
from torch import Tensor

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every fused tensor as one for each expert (views); the others as they are."""
    split: dict[str, Tensor] = {}
    for name, value in tensors.items():
        base = name.rpartition(".")[0]
        if name.endswith(_GATE_UP) and value.dim() == 3:
            half = value.shape[1] // 2
            for expert, rows in enumerate(value):
                split[f"{base}.{expert}.gate_proj.weight"] = rows[:half]
                split[f"{base}.{expert}.up_proj.weight"] = rows[half:]
        elif name.endswith(_DOWN) and value.dim() == 3:
            for expert, rows in enumerate(value):
                split[f"{base}.{expert}.down_proj.weight"] = rows
        else:
            split[name] = value
    return split


def fuse_experts(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The reverse, for a module whose tensors have these names and shapes; `tensors` holds every
    expert."""
    fused: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        base, experts = name.rpartition(".")[0], range(shape[0] if shape else 0)
        if name.endswith(_GATE_UP) and len(shape) == 3:
            parts = ("gate_proj", "up_proj")
        elif name.endswith(_DOWN) and len(shape) == 3:
            parts = ("down_proj",)
        else:
            fused[name] = tensors[name]
            continue
        fused[name] = torch.stack(
            [torch.cat([tensors[f"{base}.{e}.{part}.weight"] for part in parts]) for e in experts]
        )
    return fused
