"""Where a head starts: close to what the target already does.

The layer is the target's last one and the output norm its final norm; the projection lets the
normed state through at the size the layer is used to (`state_rms`), with a share of the token's
embedding. So before any training the head answers like the target's last layer run once more over
its own state, with logits scaled down by `output_scale`.

A norm that is switched off is folded into the weights behind it, with the usual size of its input
in place of each row's own: without that a head without norms would start far from where one with
them does, and an ablation would measure the start above all.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..layer import norm_places, read_layer
from ..norm import RMSNorm
from ..skeleton import folder_config
from ..trunk import Trunk, load_final_norm, tensor_files
from .config import InitConfig

_READERS = {
    "before_attention": [
        f"self_attn.{name}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
    ],
    "before_mlp": [f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "gate_up_proj")],
}
"""What reads the stream, by the norm that it reads it through."""
_WRITERS = {"after_attention": "self_attn.", "after_mlp": "mlp."}
"""What adds to the stream, by the norm behind it."""
_INPUT_NORM = "input_layernorm.weight"
_LAST = (".o_proj", ".down_proj")


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
    def final_norm(self) -> RMSNorm:
        """The target's final norm, read alone."""
        return load_final_norm(self.folder)

    @cached_property
    def normed_rms(self) -> float:
        """The usual RMS of a state after the target's final norm: that of the norm's weight."""
        return float(effective_weight(self.final_norm).square().mean().sqrt())

    def frame(self, output_norm: nn.Module) -> Tensor:
        """[H]: what the residual stream of the head is multiplied by against the target's own. Ones
        where an output norm follows; else that norm's weight over the usual size of its input, so
        that the stream itself is what lm_head reads."""
        if isinstance(output_norm, RMSNorm):
            return torch.ones(int(self.config.hidden_size))
        weight = effective_weight(self.final_norm)
        least = 0.05 * self.normed_rms  # it is divided by
        weight = torch.where(weight.abs() < least, least, weight)
        return weight * (self.init.output_scale / self.state_rms)

    def random(self, weight: Tensor) -> None:
        """Fill a matrix as the target's family does."""
        nn.init.normal_(weight, std=float(getattr(self.config, "initializer_range", 0.02)))

    def output_norm(self, norm: nn.Module) -> None:
        """The target's final norm, scaled down."""
        if isinstance(norm, RMSNorm):
            norm.load_state_dict(self.final_norm.state_dict())
            offset = 1.0 if norm.style == "gemma" else 0.0
            norm.weight.add_(offset).mul_(self.init.output_scale).sub_(offset)

    def layer(self, layer: nn.Module, frame: Tensor) -> None:
        """The target's last layer, for a residual stream in `frame`.

        A missing `input_layernorm` (an identity) is folded into the projections that read it.

        Raises:
            ValueError: the target's tensors do not fit the layer.
        """
        if self.init.layer != "target-last":
            return
        tensors = self.last_layer()
        if isinstance(getattr(layer, "input_layernorm", None), nn.Identity):
            gain = _effective(tensors.pop(_INPUT_NORM), layer) / (self.state_rms * frame)
            _fold(tensors, "before_attention", gain)
        elif not bool((frame == 1).all()) and norm_places(layer).before_attention is None:
            _fold(tensors, "before_attention", 1 / frame)
        self._load(layer, tensors, frame)

    def wide_layer(
        self, layer: nn.Module, frame: Tensor, embedding_norm: nn.Module, state_norm: nn.Module
    ) -> None:
        """The same for a layer whose attention reads [embedding ; state]: the target's projections
        for each half, its input norm for both norms (folded where one is an identity).

        Raises:
            ValueError: the target's tensors do not fit the layer.
        """
        if self.init.layer != "target-last":
            return
        tensors = self.last_layer()
        if _INPUT_NORM in tensors:
            gain = _effective(tensors.pop(_INPUT_NORM), layer)
        else:  # the family's attention reads the stream as it is
            gain = torch.full_like(frame, self.state_rms)
        columns: list[Tensor] = []
        sizes = (self.embedding_rms * torch.ones_like(frame), self.state_rms * frame)
        for norm, size in zip((embedding_norm, state_norm), sizes, strict=True):
            if isinstance(norm, RMSNorm):
                norm.load_state_dict({"weight": gain - float(norm.style == "gemma")})
                columns.append(torch.ones_like(gain) if norm is embedding_norm else _undo(frame))
            else:
                columns.append(gain / size)
        columns[0] = columns[0] * self.init.embedding_share
        for name in _READERS["before_attention"]:
            if name in tensors:
                tensors[name] = torch.cat([tensors[name], tensors[name]], 1)
        _fold(tensors, "before_attention", torch.cat(columns))
        self._load(layer, tensors, frame)

    def last_layer(self) -> dict[str, Tensor]:
        """The tensors of the target's last layer, float32.

        Raises:
            ValueError: the files hold no such layer, or hold it quantised.
        """
        config = folder_config(self.folder)
        found = read_layer(config, tensor_files(self.folder))
        packed = sorted(name for name, value in found.items() if value.element_size() == 1)
        if packed:
            raise ValueError(
                f"{self.folder}: {packed[:4]} are stored in a quantised form; use "
                "head.init.layer=random or a checkpoint in bfloat16"
            )
        return {name: value.float() for name, value in found.items()}

    def _load(self, layer: nn.Module, tensors: dict[str, Tensor], frame: Tensor) -> None:
        odd = sorted(set(tensors) ^ set(layer.state_dict()))
        if odd:
            raise ValueError(
                f"{self.folder}: {odd[:4]} are in one of the target's last layer and the head's "
                "layer, not in both; use head.init.layer=random"
            )
        if not bool((frame == 1).all()):
            self._reframe(layer, tensors, frame)
        layer.load_state_dict(tensors)

    def _reframe(self, layer: nn.Module, tensors: dict[str, Tensor], frame: Tensor) -> None:
        """Read the stream out of `frame`, add to it inside of `frame`; in place."""
        places = norm_places(layer)._asdict()

        def scale(norm: str, factor: Tensor) -> None:
            name = f"{norm}.weight"
            if name in tensors:  # not where the head has none
                scaled = _effective(tensors[name], layer) * factor
                tensors[name] = scaled - _effective(torch.zeros_like(scaled), layer)

        for place in ("before_attention", "before_mlp"):
            if places[place] is not None:
                scale(places[place], _undo(frame))
        if places["before_mlp"] is None:
            _fold(tensors, "before_mlp", 1 / frame)
        for place, part in _WRITERS.items():
            if places[place] is not None:
                scale(places[place], frame)
                continue
            for name, value in tensors.items():
                if name.startswith(part) and name.removesuffix(".weight").endswith(_LAST):
                    tensors[name] = value * frame[:, None]  # experts: [E, H, I]
                elif name.startswith(part) and name.endswith(tuple(f"{x}.bias" for x in _LAST)):
                    tensors[name] = value * frame


def _fold(tensors: dict[str, Tensor], place: str, gain: Tensor) -> None:
    """Multiply the columns of what reads the stream at `place` by gain [width]; in place."""
    readers = [name for name in _READERS[place] if name in tensors]
    if not readers:
        raise ValueError(
            f"none of the target's tensors {sorted(tensors)[:6]} is known to read the stream "
            f"({place}); keep the head's norms, or use head.init.layer=random"
        )
    for name in readers:
        tensors[name] = tensors[name] * gain


def effective_weight(norm: nn.Module) -> Tensor:
    """What a norm multiplies by, [H]: w, or 1 + w in the gemma style."""
    weight = norm.get_parameter("weight").detach()
    return weight + 1.0 if getattr(norm, "style", "rms") == "gemma" else weight


def _effective(weight: Tensor, layer: nn.Module) -> Tensor:
    """What the norms of `layer` multiply by for a stored weight."""
    style = next((m.style for m in layer.modules() if isinstance(m, RMSNorm)), "rms")
    return weight + 1.0 if style == "gemma" else weight


def _undo(frame: Tensor) -> Tensor:
    """[H]: takes a normed stream out of its frame, at the size it has there."""
    return frame.square().mean().sqrt() / frame
