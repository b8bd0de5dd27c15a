"""What a folder with MTP modules has of its target: configuration, embedding, lm_head."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..files import changes
from ..skeleton import text_config
from ..trunk import tensor_files

_SAID_APART = (
    "_name_or_path",
    "dtype",
    "quantization_config",
    "transformers_version",
)
"""Keys of a config.json that have no part in how a head is run or found by an engine."""
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def compare_copy(name: str, theirs: str, files: dict[str, Path], place: Path) -> None:
    """Warn where a copy of the target's embedding or lm_head is no copy."""
    target = files if place == files[name].parent else tensor_files(place)
    if theirs == _LM_HEAD and theirs not in target:
        theirs = _EMBEDDING  # tied
    if theirs not in target:
        return
    copy, original = read_tensor(files, name), read_tensor(target, theirs)
    if copy.shape != original.shape or not torch.equal(copy.float(), original.float()):
        warnings.warn(
            f"{name} differs from the target's own {theirs}; the head reads the target's, as "
            "engines do, so it may draft worse than it was trained to",
            stacklevel=3,
        )


def compare_configs(folder: Path, config: Any, place: Path | str, count: str) -> None:
    """ValueError where the folder's configuration says another thing than the target's, whose layer
    the modules have; a key that is missing there stands at its default."""
    apart = {*_SAID_APART, count}
    told, known = (
        {key: value for key, value in one.to_dict().items() if key not in apart}
        for one in (config, text_config(place))
    )
    differing = changes(known, told)
    if differing:
        raise ValueError(
            f"{folder}: its config.json is not that of the target {place}: "
            f"{'; '.join(differing)}. Copy it whole from there, or name the target it is of, "
            "target.source=…"
        )


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that is about text, where a model has several."""
    return config.get("text_config") or config


def read_tensor(files: dict[str, Path], name: str) -> Tensor:
    """One tensor; a tied lm_head is the embedding."""
    if name == _LM_HEAD and name not in files:
        name = _EMBEDDING
    if name not in files:
        raise ValueError(f"no tensor {name!r} in {sorted({str(path) for path in files.values()})}")
    with safe_open(files[name], framework="pt") as file:
        if name not in file.keys():
            raise ValueError(
                f"{files[name]} has no tensor {name!r}, which the index beside it places there; "
                "the two are of different checkpoints"
            )
        return file.get_tensor(name)
