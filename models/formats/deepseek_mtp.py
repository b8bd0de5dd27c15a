"""The DeepSeek-style MTP layout: extra layers from index L on inside a target checkpoint.

    model.layers.{L}.enorm.weight                 [H]      on the embedding of x_{p+1}
    model.layers.{L}.hnorm.weight                 [H]      on the target's final-normed state h_p
    model.layers.{L}.eh_proj.weight               [H, 2H]  input order [embedding ; hidden], no bias
    model.layers.{L}.<decoder layer>.*                     names of the family's own layer
    model.layers.{L}.shared_head.norm.weight      [H]
    model.layers.{L}.embed_tokens.weight          [V, H]   a copy of the target's embedding
    model.layers.{L}.shared_head.head.weight      [V, H]   a copy of the target's lm_head

A head of D modules has the layers L .. L+D-1, and config.json says so in
`num_nextn_predict_layers`. vLLM zeroes the embedding at position 0, SGLang does not; our heads are
trained without (position 0 is a template token). The layout has no place for a reduced vocabulary:
since the lm_head is the target's own, the head drafts from all of it, and only the folder's
`draftsmith.json` keeps the ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import AutoConfig

from ..files import atomic_write_bytes, atomic_write_json, read_json
from ..heads.checkpoint import LoadedHead, read_vocabulary, vocabulary_maps
from ..heads.config import HeadConfig
from ..heads.mtp import MTPHead
from ..trunk import Trunk

_FILE = "mtp.safetensors"
_NOTE = "draftsmith.json"
_OWN = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def export_deepseek_mtp(
    loaded: LoadedHead, target_folder: Path | str, out: Path | str
) -> dict[str, str]:
    """Write the layer's tensors and the target's configuration extended by it.

    Args:
        loaded: the head. target_folder: its target (embedding and lm_head are copied from it). out:
            folder to write.
    Returns:
        tensor name -> `trained` or `copied from the target`, for the table that the command prints.
    Raises:
        ValueError: a norm is switched off (the layout requires all four).
    """
    head, out = loaded.head, Path(out)
    if head.kind != "mtp":
        raise ValueError(
            f"the DeepSeek MTP layout holds mtp heads, this one is of kind {head.kind}: keep "
            "the native folder"
        )
    off = [name for name, on in loaded.meta["head"]["norms"].items() if not on]
    if off:
        raise ValueError(
            f"the DeepSeek MTP layout has the norms {', '.join(off)}, which this head was trained "
            "without; an engine "
            "would leave them uninitialised: train with head.norms.*=true or keep the native folder"
        )
    first = int(head.target_config.num_hidden_layers)
    tensors: dict[str, Tensor] = {}
    for name, value in head.state_dict().items():
        tensors[_foreign(name, first)] = value.float().contiguous()
    origin = dict.fromkeys(tensors, "trained")
    trunk = Trunk.load(target_folder, torch.bfloat16)
    for index in range(first, first + head.num_modules):
        prefix = f"model.layers.{index}."
        tensors[prefix + "embed_tokens.weight"] = trunk.embedding.clone()
        tensors[prefix + "shared_head.head.weight"] = trunk.lm_head.clone()
    origin |= {name: "copied from the target" for name in tensors if name not in origin}
    out.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(out / _FILE, save(tensors, metadata={"format": "pt"}))
    config = read_json(Path(target_folder) / "config.json") | {
        "num_nextn_predict_layers": head.num_modules
    }
    atomic_write_json(out / "config.json", config)
    note: dict[str, Any] = {key: value for key, value in loaded.meta.items() if key != "sha256"}
    note["draft_ids"] = None if loaded.draft_ids is None else loaded.draft_ids.tolist()
    atomic_write_json(out / _NOTE, note)
    return origin


def import_deepseek_mtp(folder: Path | str) -> LoadedHead:
    """Read the layout back, from our export or from a checkpoint that holds such a layer.

    Raises:
        ValueError: no MTP layer, a tensor missing, unknown or of a wrong shape.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    if not raw.get("num_nextn_predict_layers"):
        raise ValueError(
            f"{folder}: config.json has no num_nextn_predict_layers; it holds no MTP layer"
        )
    target_config = AutoConfig.from_pretrained(folder)
    count, first = int(raw["num_nextn_predict_layers"]), int(target_config.num_hidden_layers)
    head = MTPHead(HeadConfig("mtp", count), target_config)
    prefixes = tuple(f"model.layers.{index}." for index in range(first, first + count))
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name.startswith(prefixes) and not name.endswith(_SHARED):
                    found[name] = file.get_tensor(name)
    expected = {_foreign(name, first): (name, value) for name, value in head.state_dict().items()}
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(f"{folder}: the MTP layers lack {missing} and hold unknown {unknown}")
    for foreign, (_, value) in expected.items():
        if found[foreign].shape != value.shape:
            raise ValueError(
                f"{folder}: {foreign} has shape {list(found[foreign].shape)}, the target's "
                "family needs "
                f"{list(value.shape)}"
            )
    head.load_state_dict({name: found[foreign] for foreign, (name, _) in expected.items()})
    meta = read_json(folder / _NOTE) if (folder / _NOTE).exists() else {}
    draft_ids = meta.pop("draft_ids", None)
    if draft_ids is not None:
        maps = vocabulary_maps(torch.tensor(draft_ids), int(target_config.vocab_size))
        draft_ids = read_vocabulary(maps, int(target_config.vocab_size), str(folder / _NOTE))
    return LoadedHead(head, draft_ids, meta)


def _foreign(name: str, first: int) -> str:
    """Our tensor name `blocks.D.…` -> the layout's, in layer first + D."""
    _, module, rest = name.split(".", 2)
    own = rest.removeprefix("layer.") if rest.startswith("layer.") else _OWN[rest]
    return f"model.layers.{first + int(module)}.{own}"
