"""The native head folder: `head.safetensors`, `config.json`, `provenance.json`, `README.md` (the
model card). Self-contained; nothing pickled.

config.json holds the head's configuration, the `RecycleSpec`, the target's transformers
configuration and fingerprint, the trained length, and the SHA-256 of head.safetensors. A reduced
draft vocabulary lies beside the weights as `d2t` (int64 [Vd], target id = i + d2t[i]) and `t2d`
(bool [V]).
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import AutoConfig

from ..files import (
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    read_json,
    sha256_file,
)
from ..provenance import provenance
from ..skeleton import text_config
from .card import model_card
from .config import HeadConfig
from .families import head_class
from .protocol import Head

FORMAT = 2
_SHAPE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)
"""What a head's target and the one that it comes to must agree on."""
_NEEDED = ("head", "recycle", "target_config", "target_fingerprint", "trained_length", "sha256")
"""What a head's config.json has in every format."""
_READABLE = (1, 2)
"""Format 1 knew one recycled `mtp` module, whose tensors had no `blocks.0.` before their names."""


@dataclass
class LoadedHead:
    """A head read from its folder.

    Attributes:
        head: the module, float32, CPU. draft_ids: int64 [Vd] target ids of a reduced vocabulary, or
            None.
        meta: config.json as it stands.
    """

    head: Head
    draft_ids: Tensor | None
    meta: dict[str, Any]


def save_head(
    folder: Path | str,
    head: Head,
    *,
    target_fingerprint: dict[str, str],
    draft_ids: Tensor | None,
    trained_length: int,
    config: dict[str, Any],
    training: dict[str, Any] | None = None,
) -> None:
    """Write a native head folder; config.json comes last and names the weights' checksum.

    Args:
        draft_ids: sorted int64 [Vd] ids that the head may draft, None for all.
        trained_length: longest row seen in training, tokens. config: the run's resolved
            configuration.
        training: facts worth keeping (steps, tokens, best acceptance, …).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().float().cpu().contiguous() for name, value in head.state_dict().items()
    }
    vocab_size = int(head.target_config.vocab_size)
    if draft_ids is not None:
        tensors |= vocabulary_maps(draft_ids, vocab_size)
    weights = folder / "head.safetensors"
    atomic_write_bytes(weights, save(tensors, metadata={"format": "pt", "draftsmith": str(FORMAT)}))
    atomic_write_json(folder / "provenance.json", provenance(config))
    meta: dict[str, Any] = {
        "format": FORMAT,
        "head": dataclasses.asdict(head.config),
        "recycle": dataclasses.asdict(head.recycle),
        "target_config": head.target_config.to_dict(),
        "target_fingerprint": target_fingerprint,
        "draft_vocab_size": vocab_size if draft_ids is None else len(draft_ids),
        "trained_length": trained_length,
        "training": training or {},
        "sha256": sha256_file(weights),
    }
    atomic_write_text(folder / "README.md", model_card(meta, config))
    atomic_write_json(folder / "config.json", meta)


def load_head(folder: Path | str, target_fingerprint: dict[str, str] | None = None) -> LoadedHead:
    """Read a native head folder.

    Args:
        target_fingerprint: of the target it is to draft for; a difference in tokenizer is refused,
            other differences warn.
    Raises:
        ValueError: not a head folder, another format, settings of another version, damaged weights,
            a tensor missing or unknown, a wrong map, or a head for another tokenizer.
    """
    folder = Path(folder)
    meta = read_json(folder / "config.json")
    if meta.get("format") not in _READABLE:
        raise ValueError(
            f"{folder}: head format {meta.get('format')!r}, this version reads "
            f"{', '.join(map(str, _READABLE))}"
        )
    lacking = [name for name in _NEEDED if name not in meta]
    if lacking:
        raise ValueError(
            f"{folder}: config.json has no {', '.join(lacking)}; it is not as it was written, copy "
            "the whole folder again"
        )
    weights = folder / "head.safetensors"
    if not weights.exists():
        raise ValueError(f"{folder}: head.safetensors is missing; copy the whole folder")
    if sha256_file(weights) != meta["sha256"]:
        raise ValueError(
            f"{weights}: its checksum differs from config.json; the file is damaged, copy it again"
        )
    if target_fingerprint is not None:
        compare_targets(folder, meta["target_fingerprint"], target_fingerprint)
    target_config = AutoConfig.for_model(**meta["target_config"])
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    draft_ids = read_vocabulary(tensors, int(target_config.vocab_size), str(weights))
    if meta["format"] == 1:
        tensors = {f"blocks.0.{name}": value for name, value in tensors.items()}
    config = HeadConfig.from_dict(meta["head"], str(folder))
    head = head_class(config.kind)(
        config, target_config, None if draft_ids is None else len(draft_ids)
    )
    _same_inputs(folder, meta["recycle"], head)
    missing, unknown = set(head.state_dict()) - set(tensors), set(tensors) - set(head.state_dict())
    if missing or unknown:
        raise ValueError(
            f"{weights}: missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}"
        )
    for name, value in head.state_dict().items():
        if tensors[name].shape != value.shape:
            raise ValueError(
                f"{weights}: {name} has shape {list(tensors[name].shape)}, config.json asks for "
                f"{list(value.shape)}; the two files are of different heads"
            )
    head.load_state_dict(tensors)
    return LoadedHead(head, draft_ids, meta)


def vocabulary_maps(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` offsets [Vd] and `t2d` flags [V] of sorted draft ids."""
    ids = draft_ids.to(torch.int64).cpu()
    assert bool((ids.diff() > 0).all()) and 0 <= int(ids[0]) and int(ids[-1]) < vocab_size
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def read_vocabulary(tensors: dict[str, Tensor], vocab_size: int, place: str) -> Tensor | None:
    """Take d2t and t2d out of `tensors` and return the draft ids [Vd], or None when there are none.

    Raises:
        ValueError: one map without the other, ids outside the vocabulary or not ascending (absolute
            ids where offsets belong look like this), or maps that disagree.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and t2d is None:
        return None
    if d2t is None or t2d is None:
        raise ValueError(f"{place}: d2t and t2d belong together; one is missing")
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"{place}: i + d2t[i] must ascend inside 0..{vocab_size - 1}; d2t holds offsets, not "
            "absolute ids"
        )
    if not torch.equal(t2d.nonzero()[:, 0], ids):
        raise ValueError(
            f"{place}: t2d marks other ids than d2t reaches; the maps are of two vocabularies"
        )
    return ids


def _same_inputs(folder: Path, trained: dict[str, Any], head: Head) -> None:
    """Refuse a head that was trained with other inputs than this version would give it."""
    present = dataclasses.asdict(head.recycle)
    for name, value in trained.items():
        now = present.get(name)
        if (list(now) if isinstance(now, tuple) else now) != value:
            raise ValueError(
                f"{folder}: the head was trained with {name}={value!r}, this version runs a "
                f"{head.kind} head with {now!r}; use the version that trained it"
            )


def compare_shapes(source: Path, trained: Any, target_folder: Path | str) -> None:
    """Hold the configuration of the target that the head in `source` was made for against that of
    the one it comes to.

    Raises:
        ValueError: they are of another shape; all differing values are told.
    """
    present = text_config(target_folder)
    differing = [
        f"{name} {getattr(trained, name, None)!r}, the target {getattr(present, name, None)!r}"
        for name in _SHAPE
        if getattr(trained, name, None) != getattr(present, name, None)
    ]
    if differing:
        raise ValueError(
            f"{source} holds a head for another target than {target_folder}: the head has "
            f"{'; '.join(differing)}. Name the target it was trained for, target.source=…"
        )


def compare_targets(folder: Path, trained: dict[str, str], present: dict[str, str]) -> None:
    """Hold the fingerprint of the target that the head in `folder` was trained for against that of
    the one it is to draft for; what differs beside the tokenizer warns.

    Raises:
        ValueError: another tokenizer.
    """
    differing = [key for key in trained if trained[key] != present.get(key)]
    if "tokenizer" in differing:
        raise ValueError(
            f"{folder}: the head was trained with another tokenizer ({trained['tokenizer']}) than "
            "this target's "
            f"({present.get('tokenizer')}); its ids mean other tokens: use the target it was "
            "trained for"
        )
    for key in differing:
        warnings.warn(
            f"{folder}: the head was trained on another {key} ({trained[key]}, now "
            f"{present.get(key)}); output "
            "stays the target's, acceptance may fall",
            stacklevel=3,
        )
