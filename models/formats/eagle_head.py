"""The head that an EAGLE or EAGLE-3 folder holds, as the engine's class would run it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..heads.checkpoint import LoadedHead
from ..heads.config import HeadConfig, NormConfig
from ..heads.families import head_class
from .eagle_config import layer_config
from .eagle_files import LM_HEAD, draft_ids, targets_own
from .eagle_tensors import layout_names
from .loaders import Loader, Report
from .written import read_note


def never_run(kind: str, runs: dict[str, Any]) -> list[str]:
    """What the engine runs and this one does not."""
    told = [
        f"it runs {name} {runs[name]}, which no {kind} head here does"
        for name, only in (("modules", 1), ("factors", (1.0, 1.0, 1.0)))
        if runs.get(name, only) != only
    ]
    if kind == "eagle" and runs["layers"] != 1:
        told.append(f"it has {runs['layers']} layers, an eagle head here has one")
    return told


def read_head(
    kind: str,
    folder: Path,
    report: Report,
    loader: Loader,
    tensors: dict[str, Tensor],
    target: Any,
    midlayer: bool,
) -> LoadedHead:
    """The head that the engine would run from a folder that its loader took.

    Args:
        kind: eagle or eagle3. report: of the loader, a class of the engine. target: transformers'
            configuration. midlayer: see `layout_names`.
    Raises:
        ValueError: a tensor that no head here has a place for, or maps that do not fit.
    """
    runs, vocab_size = report.runs, int(target.vocab_size)
    norms = NormConfig(**{name: name in runs["norms"] for name in vars(NormConfig())})
    after = runs["recycled"] == "its output after the norm"
    bias = tensors.get(f"{loader.prefix}fc.bias")
    biased = bias is not None and bool(bias.any())  # zeros are none
    if kind == "eagle":
        config = HeadConfig(
            "eagle",
            norms=norms,
            recycle_raw="output" in runs["norms"] and not after,
            projection_bias=biased,
        )
    else:
        chosen = tuple(runs["boundaries"])
        usual = head_class("eagle3").reads
        layers = int(target.num_hidden_layers)
        plain = layers >= 7 and usual(HeadConfig("eagle3"), layers) == chosen
        config = HeadConfig(
            "eagle3",
            num_layers=runs["layers"],
            boundaries=() if plain else chosen,
            norm_before_residual=runs["residual"] == "post-norm",
            norm_output=after,
            norm_before_fc=runs["fed"],
            projection_bias=biased,
        )
    ids = draft_ids(folder, tensors, vocab_size) if kind == "eagle3" else None
    layer = layer_config(runs, tensors, target)
    head = head_class(kind)(config, layer, None if ids is None else len(ids))
    names = {
        name: loader.rename(theirs) for name, theirs in layout_names(head, loader, midlayer).items()
    }
    found = {loader.rename(name): value for name, value in tensors.items()}
    state = {name: found[theirs].float() for name, theirs in names.items()}
    _refuse_unheld(folder, found, set(names.values()), loader)
    head.load_state_dict(state)
    note, noted = read_note(folder, vocab_size)
    return LoadedHead(head, ids if noted is None else noted, note)


def _refuse_unheld(folder: Path, found: dict[Any, Tensor], used: set[Any], loader: Loader) -> None:
    """Whatever is left must be without effect: fillers, zero biases, twins of a norm."""
    for name, value in found.items():
        if name in used or name in (None, "d2t", "t2d"):
            continue
        if loader.fills.get(str(name), "zeros") != "zeros":
            continue  # never run, or the target's
        twin = found.get(str(name).replace("hidden_norm", "input_layernorm"))
        if str(name).endswith("hidden_norm.weight") and twin is not None:
            if torch.equal(value, twin):
                continue
            raise ValueError(
                f"{folder}: {name} differs from the input_layernorm beside it, of which "
                "engines read one or the other; the folder would run differently in each"
            )
        if str(name).endswith(".bias") and not bool(value.any()):
            continue
        raise ValueError(
            f"{folder}: {name} is not zero, and no head here has it; it cannot be held"
        )


def share_lm_head(folder: Path, tensors: dict[str, Tensor], target: Path) -> list[str]:
    """The target's lm_head, which engines take for a whole vocabulary where the folder has none."""
    if "d2t" in tensors:
        return [f"there is no {LM_HEAD} for the ids of d2t"]
    warnings.warn(f"{folder}: no {LM_HEAD}; the target's own is taken", stacklevel=3)
    tensors[LM_HEAD] = targets_own(target, LM_HEAD)
    return []
