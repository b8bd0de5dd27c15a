"""Where a head starts: close to what the target already does.

The layer is the target's last one and the output norm its final norm; the projection lets the
normed state through at the size the layer is used to (`state_rms`), with a share of the token's
embedding. So before any training the head answers like the target's last layer run once more over
its own state, with logits scaled down by `output_scale`.

A norm that is switched off is folded into the weights behind it, with the usual size of its input
in place of each row's own: without that a head without norms would start far from where one with
them does, and an ablation would measure the start.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..layer import read_layer
from ..norm import RMSNorm
from ..trunk import Trunk, tensor_files
from .config import InitConfig

_READERS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
_WRITERS = ("o_proj.weight", "down_proj.weight")


class Start:
    """What a fresh head takes from its target.

    Args:
        init: the choices. target_folder: the target's checkpoint. state_rms: RMS of its raw states
            at boundary L, > 0. draft_ids: [Vd] of a reduced draft vocabulary, or None.
    Raises:
        ValueError: a state_rms that is not positive, an unknown choice.
    """

    def __init__(
        self,
        init: InitConfig,
        target_folder: Path,
        target_config: Any,
        state_rms: float,
        draft_ids: Tensor | None,
    ) -> None:
        if not state_rms > 0:
            raise ValueError(
                f"state_rms {state_rms}: must be positive; measure it on the cached states"
            )
        if init.layer not in ("target-last", "random"):
            raise ValueError(f"head.init.layer {init.layer!r}: choose target-last or random")
        if init.projection not in ("pass-through", "random"):
            raise ValueError(
                f"head.init.projection {init.projection!r}: choose pass-through or random"
            )
        self.init = init
        self.folder = target_folder
        self.config = target_config
        self.state_rms = state_rms
        self.draft_ids = draft_ids
        self.passes_through = init.projection == "pass-through"

    @cached_property
    def trunk(self) -> Trunk:
        """The target's frozen parts in float32."""
        return Trunk.load(self.folder, torch.float32)

    @cached_property
    def embedding_rms(self) -> float:
        """The usual RMS of an embedding: the median over the vocabulary."""
        rows = self.trunk.embedding.square().mean(-1).sqrt()
        return float(rows.median()) * abs(self.trunk.multiplier)

    @cached_property
    def normed_rms(self) -> float:
        """The usual RMS of a state after the target's final norm: that of the norm's weight."""
        return float(effective_weight(self.trunk.final_norm).square().mean().sqrt())

    def stream(self, output_norm: bool) -> float:
        """RMS that the residual stream of the head's layer starts with: the raw state's where an
        output norm follows, else that of what lm_head reads."""
        return self.state_rms if output_norm else self.normed_rms * self.init.output_scale

    def random(self, weight: Tensor) -> None:
        """Fill a matrix as the target's family does."""
        nn.init.normal_(weight, std=float(getattr(self.config, "initializer_range", 0.02)))

    def output_norm(self, norm: nn.Module) -> None:
        """The target's final norm, scaled down."""
        if isinstance(norm, RMSNorm):
            norm.load_state_dict(self.trunk.final_norm.state_dict())
            offset = 1.0 if norm.style == "gemma" else 0.0
            norm.weight.add_(offset).mul_(self.init.output_scale).sub_(offset)

    def layer(self, layer: nn.Module, stream: float) -> None:
        """The target's last layer, for a residual stream of another size where it has one.

        A missing `input_layernorm` (an identity) is folded into the projections that read it.

        Raises:
            ValueError: the target's tensors do not fit the layer.
        """
        if self.init.layer != "target-last":
            return
        tensors = self.last_layer()
        if isinstance(layer.input_layernorm, nn.Identity):
            gain = tensors.pop("input_layernorm.weight", None)
            if gain is not None:
                if _style(layer) == "gemma":
                    gain = gain + 1.0
                for name in (f"self_attn.{reader}.weight" for reader in _READERS):
                    if name in tensors:
                        tensors[name] = tensors[name] * (gain / stream)
        self._load(layer, tensors, stream)

    def wide_layer(
        self, layer: nn.Module, stream: float, embedding_norm: nn.Module, state_norm: nn.Module
    ) -> None:
        """The same for a layer whose attention reads [embedding ; state]: the target's projections
        for each half, its input norm for both norms (folded where one is an identity).

        Raises:
            ValueError: the target's tensors do not fit the layer.
        """
        if self.init.layer != "target-last":
            return
        tensors = self.last_layer()
        gain = tensors.pop("input_layernorm.weight", torch.ones(int(self.config.hidden_size)))
        parts: list[Tensor] = []
        sizes = (self.embedding_rms, self.state_rms)
        for norm, size in zip((embedding_norm, state_norm), sizes, strict=True):
            if isinstance(norm, RMSNorm):
                norm.load_state_dict({"weight": gain})
                parts.append(torch.ones_like(gain))
            else:
                parts.append((gain + 1.0 if _style(layer) == "gemma" else gain) / size)
        columns = torch.cat([parts[0] * self.init.embedding_share, parts[1]])
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"self_attn.{name}.weight"
            if key in tensors:
                tensors[key] = torch.cat([tensors[key], tensors[key]], 1) * columns
        self._load(layer, tensors, stream)

    def last_layer(self) -> dict[str, Tensor]:
        """The tensors of the target's last layer, float32."""
        files = tensor_files(self.folder)
        last = int(self.config.num_hidden_layers) - 1
        return {name: value.float() for name, value in read_layer(files, last).items()}

    def _load(self, layer: nn.Module, tensors: dict[str, Tensor], stream: float) -> None:
        odd = sorted(set(tensors) ^ set(layer.state_dict()))
        if odd:
            raise ValueError(
                f"{self.folder}: {odd[:4]} are in one of the target's last layer and the head's "
                "layer, not in both; use head.init.layer=random"
            )
        if stream != self.state_rms:
            for name in tensors:
                if name.endswith(_WRITERS):
                    tensors[name] = tensors[name] * (stream / self.state_rms)
        layer.load_state_dict(tensors)


def effective_weight(norm: nn.Module) -> Tensor:
    """What a norm multiplies by, [H]: w, or 1 + w in the gemma style."""
    weight = norm.get_parameter("weight").detach()
    return weight + 1.0 if getattr(norm, "style", "rms") == "gemma" else weight


def _style(layer: nn.Module) -> str:
    return next((m.style for m in layer.modules() if isinstance(m, RMSNorm)), "rms")
