"""The head that `head.init.source` names: the target's own MTP weights, or another head."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..files import read_json
from ..heads.checkpoint import LoadedHead, compare_targets, load_head
from ..skeleton import text_config
from ..trunk import tensor_files
from . import MTP_LAYOUTS
from .mtp_layout import MTPLayout

TARGET_MTP = "target-mtp"


def own_layout(folder: Path | str) -> MTPLayout | None:
    """The layout of the MTP weights that a target's checkpoint brings, by the names of its tensors
    and its model_type; None where it brings none that is known.

    Plain transformers loading drops them without a word, so the files alone can tell.
    """
    names, kind = tensor_files(Path(folder)), read_json(Path(folder) / "config.json")["model_type"]
    config = text_config(folder)
    return next((one for one in MTP_LAYOUTS if one.belongs(str(kind), names, config)), None)


def find_source(
    source: str | None, target_folder: Path | str, marks: dict[str, str]
) -> LoadedHead | None:
    """The head that another one is to start from, with its weights; None for a fresh start.

    Args:
        source: `head.init.source`. marks: the target's fingerprint.
    Returns:
        a head whose `meta["content"]` identifies the weights wherever they lie.
    Raises:
        ValueError: a target without MTP weights, a folder that is no native head, a head for
            another tokenizer, and whatever reading refuses.
    """
    if source is None:
        return None
    if source == TARGET_MTP:
        layout = own_layout(target_folder)
        if layout is None:
            raise ValueError(
                f"head.init.source={TARGET_MTP}: {target_folder} holds no MTP weights of a known "
                f"layout ({', '.join(one.title for one in MTP_LAYOUTS)}){_hint(target_folder)}; "
                "leave it out to start from the target's last layer"
            )
        return _marked(layout.read(target_folder), f"{TARGET_MTP} {marks['weights']}")
    folder = Path(source).expanduser()
    config = folder / "config.json"
    if not config.exists():
        raise ValueError(
            f"head.init.source={source}: no head there (no config.json); give {TARGET_MTP} or the "
            "folder of a native head (`draftsmith import` makes one of other layouts)"
        )
    meta: Any = read_json(config)
    if "format" not in meta or "sha256" not in meta:
        raise ValueError(
            f"head.init.source={source} is no native head folder; `draftsmith import` makes one of "
            "another layout"
        )
    loaded = load_head(folder)
    compare_targets(folder, meta["target_fingerprint"], marks)
    return _marked(loaded, meta["sha256"])


def _marked(loaded: LoadedHead, content: str) -> LoadedHead:
    return dataclasses.replace(loaded, meta={**loaded.meta, "content": content})


def _hint(folder: Path | str) -> str:
    """Tensors that look like MTP weights of a layout that is not known."""
    odd = sorted(name for name in tensor_files(Path(folder)) if "mtp" in name or "nextn" in name)
    return f"; it has {odd[:3]}, which belong to none of them" if odd else ""
