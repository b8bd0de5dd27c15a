"""The tensors of an EAGLE or EAGLE-3 folder, made of a head for a class of an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..heads.checkpoint import LoadedHead, vocabulary_maps
from ..heads.protocol import Head
from .eagle_files import LM_HEAD, targets_own
from .loaders import Loader

_EAGLE_NAMES = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "input_norm1.weight",
    "hnorm.weight": "input_norm2.weight",
    "norm.weight": "norm.weight",
    "eh_proj.bias": "fc.bias",
}


def layout_names(head: Head, loader: Loader, midlayer: bool) -> dict[str, str]:
    """Our tensor names -> the layout's.

    Args:
        midlayer: an only layer of an EAGLE-3 head is called so.
    """
    if head.kind == "eagle":
        found = {}
        for name in head.state_dict():
            inside = name.removeprefix("blocks.0.")
            rest = inside.removeprefix("layer.")
            theirs = _EAGLE_NAMES[inside] if rest == inside else loader.layer + rest
            found[name] = loader.prefix + theirs
        return found
    first = "midlayer." if midlayer and head.num_layers == 1 else "layers.0."
    own = {
        "enorm.weight": f"{first}input_layernorm.weight",
        "hnorm.weight": f"{first}hidden_norm.weight",
        "lm_head": LM_HEAD,
    }
    whole = head.config.norm_before_fc == "all"
    for index in range(len(head.boundaries)):
        name = f"fed_norms.{index}.weight"
        own[name] = "input_norm.weight" if whole else f"fc_norm.{index}.weight"
    return {
        name: own.get(name, first + name.removeprefix("layers.0."))
        if name in own or name.startswith("layers.0.")
        else name
        for name in head.state_dict()
    }


def layout_tensors(
    loaded: LoadedHead, loader: Loader, folder: Path, midlayer: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors for a class, and where each is from.

    Args:
        folder: the target's; not read for a head on the meta device. midlayer: see `layout_names`.
    """
    head = loaded.head
    state = {name: value.detach() for name, value in head.state_dict().items()}
    tensors = {
        theirs: state[name].contiguous()
        for name, theirs in layout_names(head, loader, midlayer).items()
    }
    origin = dict.fromkeys(tensors, "trained")
    for index in range(1, head.num_layers):  # some classes call it by the one, some by the other
        name = f"layers.{index}.input_layernorm.weight"
        if name in tensors:
            twin = f"layers.{index}.hidden_norm.weight"
            tensors[twin], origin[twin] = tensors[name].clone(), f"trained (equal to {name})"
    if loader.all_biases:
        for name in [name for name in tensors if name.endswith("q_proj.bias")]:
            lacking = name.replace("q_proj", "o_proj")
            if lacking not in tensors:
                size, kind = int(head.target_config.hidden_size), tensors[name].dtype
                tensors[lacking] = torch.zeros(size, dtype=kind)
                origin[lacking] = "filler: zeros, the class has a bias here"
    size, dtype = int(head.target_config.hidden_size), next(iter(state.values())).dtype
    for name, what in loader.fills.items():
        if name in tensors:
            continue
        if what in ("zeros", "ones"):
            tensors[name] = getattr(torch, what)(size, dtype=dtype)
            origin[name] = f"filler: {what}, the class has a parameter here"
        else:
            shape = (int(head.target_config.vocab_size), size)
            tensors[name] = (
                torch.empty(shape, device="meta")
                if next(head.parameters()).is_meta
                else targets_own(folder, what).clone()
            )
            origin[name] = "copied from the target"
    if head.kind == "eagle3" and loaded.draft_ids is not None:
        maps = vocabulary_maps(loaded.draft_ids, int(head.target_config.vocab_size))
        tensors |= maps
        origin |= dict.fromkeys(maps, "map")
    return tensors, origin
