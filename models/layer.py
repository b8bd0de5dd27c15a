"""One decoder layer of the target's own family, for a head: its class, its norms, its rotary
embedding, its weights."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import AttentionContext, PackedContext
from .norm import RMSNorm, added, use_own_norms
from .rotary import Rotary
from .skeleton import name_of, read_tensors, skeleton


class NormPlaces(NamedTuple):
    """The names of a layer's norms by where they sit; None where the family has none.

    x = x + after_attention(attention(before_attention(x)))
    x = x + after_mlp(mlp(before_mlp(x)))
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


_PLACES = (
    NormPlaces("input_layernorm", None, "post_attention_layernorm", None),  # most families
    NormPlaces(  # Gemma-2, Gemma-3
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    NormPlaces(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo-2, -3
    NormPlaces(  # GLM-4
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)

_QKV = ("q_proj", "k_proj", "v_proj")


def norm_places(layer: nn.Module) -> NormPlaces:
    """Where the norms of a decoder layer sit.

    Raises:
        ValueError: norms of other names than the known families'.
    """
    norms = {
        name for name, child in layer.named_children() if isinstance(child, RMSNorm | nn.Identity)
    }
    for places in _PLACES:
        if norms == set(places) - {None}:
            return places
    raise ValueError(
        f"{type(layer).__name__} has the norms {sorted(norms)}, whose places are not known; use a "
        "head with its output norm and head.init.layer=random, of kind mtp, eagle or medusa"
    )


def decoder_layer(config: Any, index: int = 0) -> tuple[Any, Rotary]:
    """A decoder layer as the target's last one is, and its rotary embedding; float32 on the CPU, or
    without data under `torch.device("meta")`.

    The weights are drawn as the family draws them. The layer calls our attention and its norms are
    `models.norm.RMSNorm`.

    Args:
        config: transformers' text configuration of the target. index: how the attention context
            knows the layer.
    Raises:
        ValueError: a family whose layers have no attention or no rotary embedding, or leave a
            tensor without a value.
    """
    decoder = skeleton(config).get_decoder()
    layer = decoder.layers[-1]
    kind = type(layer).__name__
    if not hasattr(layer, "self_attn") or not hasattr(decoder, "rotary_emb"):
        raise ValueError(
            f"the target's last layer ({kind}) has no self_attn with a rotary embedding; its "
            "family is not supported for heads with a layer: use head.kind=medusa"
        )
    if torch.get_default_device().type == "meta":
        layer = layer.float()
    else:
        layer = layer.to_empty(device="cpu").float()
        with torch.no_grad():
            _fill(decoder, layer)
    layer.self_attn.layer_idx = index
    use_own_norms(layer)
    types = getattr(config, "layer_types", None)
    tables = type(decoder.rotary_emb)(config=config)
    return layer.train(), Rotary(tables, types[-1] if types else None)


def _fill(decoder: Any, layer: nn.Module) -> None:
    """Draw every parameter and buffer; what keeps the mark it gets first was forgotten."""
    named = dict(chain(layer.named_parameters(), layer.named_buffers()))
    for tensor in named.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    for module in layer.modules():
        decoder._init_weights(module)
    left = [
        name
        for name, value in named.items()
        if bool((value.isnan() if value.is_floating_point() else value == -1).any())
    ]
    if left:
        raise ValueError(
            f"{type(layer).__name__} leaves {left[:4]} without a value; its family is not "
            "supported for heads with a layer: use head.kind=medusa"
        )


def drop_input_norm(layer: Any) -> None:
    """Let the attention read the stream itself; nothing to do where the family has no such norm."""
    if hasattr(layer, "input_layernorm"):
        layer.input_layernorm = nn.Identity()


def widen(layer: Any, rotary: Rotary) -> None:
    """Let the attention of a decoder layer read 2H: its q, k and v projections are made anew, twice
    as wide.

    Raises:
        ValueError: the family's attention has no such projections, or its layer does something
            else than `residual_step`.
    """
    attention_module = layer.self_attn
    for name in _QKV:
        if not isinstance(getattr(attention_module, name, None), nn.Linear):
            raise ValueError(
                f"the attention of {type(layer).__name__} has no {name}; a head that attends over "
                "2H needs q, k and v projections: use head.kind=mtp or head.kind=eagle"
            )
    if not attention_module.q_proj.weight.is_meta:
        _check_residual_step(layer, rotary)
    spread = float(getattr(attention_module.config, "initializer_range", 0.02))
    for name in _QKV:
        old = getattr(attention_module, name)
        new = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
        nn.init.normal_(new.weight, std=spread)
        if new.bias is not None:
            nn.init.zeros_(new.bias)
        setattr(attention_module, name, new)


def residual_step(
    layer: Any,
    read: Tensor | None,
    residual: Tensor,
    rotary: Any,
    context: AttentionContext,
) -> Tensor:
    """A layer whose attention may read something else than the norm of its residual.

    read [N, H] or [N, 2H] -> residual [N, H] + attention(read), then + mlp: [N, H]; norms and the
    factor of what is added are the family's. read None: the layer as it is.
    """
    places, factor = norm_places(layer), float(getattr(layer, "residual_multiplier", 1.0))

    def normed(place: str | None, x: Tensor) -> Tensor:
        return x if place is None else getattr(layer, place)(x)

    mixed = layer.self_attn(
        hidden_states=(normed(places.before_attention, residual) if read is None else read)[None],
        attention_mask=None,
        position_embeddings=rotary,
        draftsmith=context,
    )[0][0]
    mixed = normed(places.after_attention, mixed)
    before_mlp = None if places.before_mlp is None else getattr(layer, places.before_mlp)
    read, x = added(mixed if factor == 1.0 else factor * mixed, residual, before_mlp)
    return x + factor * normed(places.after_mlp, layer.mlp(read[None])[0])


@torch.no_grad()
def _check_residual_step(layer: Any, rotary: Rotary) -> None:
    """Hold `residual_step` against the layer's own forward.

    Raises:
        ValueError: the layer does something else (parallel branches, factors of its own).
    """
    size = layer.self_attn.q_proj.in_features
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3)
    turned = rotary(x[None], positions[None])
    own = layer(
        x[None],
        attention_mask=None,
        position_ids=positions[None],
        position_embeddings=turned,
        draftsmith=PackedContext([0, 3]),
    )
    own = (own[0] if isinstance(own, tuple) else own)[0]
    ours = residual_step(layer, None, x, turned, PackedContext([0, 3]))
    if not torch.allclose(ours, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        raise ValueError(
            f"{type(layer).__name__} adds its attention and mlp to the stream in a way of its own; "
            "an eagle3 head cannot run it: use head.kind=mtp or head.kind=eagle"
        )


def read_layer(config: Any, files: dict[str, Path]) -> dict[str, Tensor]:
    """The tensors of the target's last layer by their names inside the layer, from its files alone.

    Args:
        config: the folder's whole configuration. files: tensor name -> file.
    """
    model = skeleton(config)
    prefix = name_of(model, model.get_decoder().layers[-1]) + "."
    found = read_tensors(model, files, prefix)
    if not found:
        raise ValueError(
            f"no tensor {prefix}* in {sorted({str(path) for path in files.values()})[:2]}"
        )
    return {name.removeprefix(prefix): value for name, value in found.items()}
