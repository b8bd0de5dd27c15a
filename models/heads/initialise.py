"""Where a head starts: close to what the target already does.

The layer is the target's last one and the output norm its final norm; the projection lets the
normed hidden state through, scaled to the size the layer is used to, plus a share of the token's
embedding:

    W = state_rms * [share * I ; I]

so that before any training the head answers like the target's last layer run once more over its own
state, with logits scaled down by `output_scale`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..layer import read_layer
from ..norm import RMSNorm
from ..trunk import Trunk, tensor_files
from .mtp import MTPHead


@torch.no_grad()
def initialise(head: MTPHead, target_folder: Path, state_rms: float) -> None:
    """Set the weights of a fresh head in place.

    Args:
        head: in float32. target_folder: the target's checkpoint. state_rms: RMS of its raw states
            at boundary L, > 0.
    Raises:
        ValueError: an unknown choice, a non-positive state_rms, or a target layer whose tensors do
        not fit.
    """
    init, config = head.config.init, head.target_config
    if not state_rms > 0:
        raise ValueError(
            f"state_rms {state_rms}: must be positive; measure it on the cached states"
        )
    files = tensor_files(target_folder)
    size = int(config.hidden_size)
    if init.layer == "target-last":
        tensors = read_layer(files, int(config.num_hidden_layers) - 1)
        own = head.layer.state_dict()
        if not head.config.norms.attention_input:
            tensors.pop("input_layernorm.weight", None)
        odd = sorted(set(tensors) ^ set(own))
        if odd:
            raise ValueError(
                f"{target_folder}: {odd[:4]} are in one of the target's last layer and the head's "
                "layer, not in both; use head.init.layer=random"
            )
        head.layer.load_state_dict({name: value.float() for name, value in tensors.items()})
    elif init.layer != "random":
        raise ValueError(f"head.init.layer {init.layer!r}: choose target-last or random")
    if init.projection == "pass-through":
        identity = torch.eye(size)
        head.eh_proj.weight.copy_(
            torch.cat([init.embedding_share * identity, identity], 1) * state_rms
        )
    elif init.projection == "random":
        nn.init.normal_(head.eh_proj.weight, std=float(getattr(config, "initializer_range", 0.02)))
    else:
        raise ValueError(f"head.init.projection {init.projection!r}: choose pass-through or random")
    if isinstance(head.norm, RMSNorm):
        trunk = Trunk.load(target_folder, torch.float32)
        head.norm.load_state_dict(trunk.final_norm.state_dict())
        offset = 1.0 if head.norm.style == "gemma" else 0.0
        head.norm.weight.add_(offset).mul_(init.output_scale).sub_(offset)
