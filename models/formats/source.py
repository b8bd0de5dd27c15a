"""What a folder holds: a head in whatever layout it has, and the head that `head.init.source` names
(the target's own MTP weights, or another head)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..files import content_hash, read_json, sha256_file
from ..heads.checkpoint import LoadedHead, compare_targets, load_head
from ..skeleton import text_config
from ..trunk import tensor_files
from . import MTP_LAYOUTS, layout
from .eagle_files import weight_names
from .mtp_layout import MTPLayout
from .vllm_eagle3 import IDS
from .written import NOTE

TARGET_MTP, NATIVE = "target-mtp", "native"


def own_layout(folder: Path | str) -> MTPLayout | None:
    """The layout of the MTP weights that a target's checkpoint brings, by the names of its tensors
    and its model_type; None where it brings none that is known.

    Plain transformers loading drops them without a word, so the files alone can tell.
    """
    names, kind = tensor_files(Path(folder)), read_json(Path(folder) / "config.json")["model_type"]
    config = text_config(folder)
    return next((one for one in MTP_LAYOUTS if one.belongs(str(kind), names, config)), None)


def read_head(
    folder: Path | str, target_folder: Path | str, marks: dict[str, str], named: str | None = None
) -> LoadedHead:
    """A head to be run, whatever layout its folder has; `meta["layout"]` says which.

    Args:
        target_folder, marks: the target that it is to draft for, and its fingerprint. named: the
            layout, where it is known; None finds it.
    Raises:
        ValueError: a layout that is not known, a head for another target, and whatever reading
            refuses.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if named is None and ("format" in config or (folder / "head.safetensors").exists()):
        loaded = load_head(folder, marks)
        return dataclasses.replace(loaded, meta={**loaded.meta, "layout": NATIVE})
    name = named or layout_of(folder)
    found = layout(name)[1](folder, target_folder)
    # An export says what the head was trained on; what comes from elsewhere belongs to this target.
    trained = found.meta.get("target_fingerprint", marks)
    compare_targets(folder, trained, marks)
    # How it began cannot be rebuilt: a layout has no place for head.init.
    training = {k: v for k, v in found.meta.get("training", {}).items() if k != "state_rms"}
    meta = {
        **found.meta,
        "layout": name,
        "head": dataclasses.asdict(found.head.config),
        "recycle": dataclasses.asdict(found.head.recycle),
        "target_fingerprint": trained,
        "training": training,
        "sha256": content_of(folder),
    }
    return dataclasses.replace(found, meta=meta)


def content_of(folder: Path | str) -> str:
    """A hash of what decides how the head in a folder is run: its weights and its config.json."""
    folder = Path(folder)
    if (folder / "head.safetensors").exists():
        return sha256_file(folder / "head.safetensors")
    kinds = ("*.safetensors", "*.bin", "*.pt")
    files = sorted(path for kind in kinds for path in folder.glob(kind))
    named = [folder / "config.json", folder / NOTE, *files]
    return content_hash({path.name: sha256_file(path) for path in named if path.exists()})


def layout_of(folder: Path | str) -> str:
    """The layout that a folder says it has: our note, a self-describing configuration, the engine's
    class that config.json names, or the names of its tensors.

    Raises:
        ValueError: nothing tells, or two things tell differently.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if (folder / NOTE).exists() and "layout" in (note := read_json(folder / NOTE)):
        return str(note["layout"])
    if "speculators_model_type" in config:
        return "speculators"
    named = str((config.get("architectures") or [""])[0])
    if config.get("model_type") == "medusa" and "num_heads" in config:
        return "vllm-medusa"
    if "medusa_num_heads" in config:
        return "medusa"
    names = weight_names(folder)
    inner = {name.removeprefix("model.") for name in names}
    if "d2t" in inner or any("midlayer." in n or n.endswith("hidden_norm.weight") for n in inner):
        return _eagle3_layout(folder, config, named)
    if "fc.weight" in inner:
        if named.endswith("Eagle"):
            return "sglang-eagle"
        # The authors' code takes a bias for granted unless this key says otherwise.
        plain = inner == names and not named.startswith("Eagle")
        return "eagle" if plain and ("fc.bias" in names or "bias" in config) else "vllm-eagle"
    own = own_layout(folder) if list(folder.glob("*.safetensors")) else None
    if own is not None:
        return own.name
    raise ValueError(
        f"{folder}: neither its config.json nor the names of its tensors tell a layout that is "
        "known: an EAGLE folder has fc.weight, one of EAGLE-3 d2t, midlayer.* or "
        "*.hidden_norm.weight, a checkpoint with MTP modules their projection (*.eh_proj.weight, "
        "mtp.fc.weight, *.input_proj.weight); name it, import_head.layout=…"
    )


def _eagle3_layout(folder: Path, config: dict[str, Any], named: str) -> str:
    """By where the ids of the fused states are, since engines count them otherwise."""
    entered = config.get(IDS)
    left = (config.get("eagle_config") or {}).get(IDS)
    if entered and left and list(entered) != [k + 1 for k in left]:
        raise ValueError(
            f"{folder}: config.json has {IDS}={entered} (read by vLLM: layers entered) and "
            f"{left} inside eagle_config (read by SGLang: layers that are left), which are not the "
            "same states; name the engine it was trained for, import_head.layout=vllm-eagle3 or "
            "sglang-eagle3"
        )
    if left and not entered:
        return "sglang-eagle3"
    return "vllm-eagle3" if entered or "Eagle3" in named else "eagle3"


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
