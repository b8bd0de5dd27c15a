"""One decoder layer of the target's own family, for a head: its class, its rotary embedding, its
weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from . import attention
from .attention import AttentionContext
from .norm import use_own_norms


def one_layer_model(config: Any) -> Any:
    """The base model (`LlamaModel`, …) of this family with one layer of the last one's kind, on the
    meta device, attention registered."""
    attention.register()
    small = copy.deepcopy(config)
    if getattr(small, "first_k_dense_replace", None):  # DeepSeek: experts from that layer on
        small.first_k_dense_replace = int(small.first_k_dense_replace >= small.num_hidden_layers)
    small.num_hidden_layers = 1
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[-1:]
    small._attn_implementation = attention.IMPLEMENTATION
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            small, attn_implementation=attention.IMPLEMENTATION
        ).get_decoder()


def decoder_layer(config: Any, index: int = 0) -> tuple[Any, nn.Module]:
    """A randomly initialised decoder layer in float32 on the CPU, and its rotary module; under
    `torch.device("meta")` the same without data.

    `index` is how the attention context knows it. The layer calls our attention; its norms are
    `models.norm.RMSNorm`. The rotary module is built anew from the configuration, since its buffers
    are not in any checkpoint.
    """
    model = one_layer_model(config)
    device = "meta" if torch.get_default_device().type == "meta" else "cpu"
    layer = model.layers[0].to_empty(device=device).float()
    layer.self_attn.layer_idx = index
    use_own_norms(layer)
    spread = float(getattr(config, "initializer_range", 0.02))
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=spread)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.constant_(parameter, 1.0)
    for module in layer.modules():
        if getattr(module, "style", None) == "gemma":
            nn.init.zeros_(module.weight)
    rotary = type(model.rotary_emb)(config=config)
    return layer, rotary


def widen(layer: Any) -> None:
    """Let the attention of a decoder layer read 2H: its q, k and v projections are made anew, twice
    as wide.

    Raises:
        ValueError: the family's attention has no such projections.
    """
    attention_module = layer.self_attn
    spread = float(getattr(attention_module.config, "initializer_range", 0.02))
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(attention_module, name, None)
        if not isinstance(old, nn.Linear):
            raise ValueError(
                f"the attention of {type(layer).__name__} has no {name}; a head that attends over "
                "2H needs q, k and v projections"
            )
        new = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
        nn.init.normal_(new.weight, std=spread)
        if new.bias is not None:
            nn.init.zeros_(new.bias)
        setattr(attention_module, name, new)


def residual_step(
    layer: Any,
    read: Tensor,
    residual: Tensor,
    rotary: tuple[Tensor, Tensor],
    context: AttentionContext,
) -> Tensor:
    """A pre-norm layer whose attention reads something else than the norm of its residual.

    read [N, H] or [N, 2H] -> residual [N, H] + attention(read), then + mlp of its norm: [N, H].
    """
    mixed = layer.self_attn(
        hidden_states=read[None],
        attention_mask=None,
        position_embeddings=rotary,
        draftsmith=context,
    )[0]
    x = residual + mixed[0]
    return x + layer.mlp(layer.post_attention_layernorm(x))


def read_layer(files: dict[str, Path], index: int) -> dict[str, Tensor]:
    """The tensors of target layer `index` (0-based) by their names inside the layer, from those
    files alone."""
    prefix = f"model.layers.{index}."
    found: dict[str, Tensor] = {}
    for name, path in files.items():
        if name.startswith(prefix):
            with safe_open(path, framework="pt") as file:
                found[name.removeprefix(prefix)] = file.get_tensor(name)
    if not found:
        raise ValueError(
            f"no tensor {prefix}* in {sorted({str(path) for path in files.values()})[:2]}"
        )
    return found
