"""The pieces of a foreign EAGLE folder: its tensors, its vocabulary map, its copies of the target's
tensors."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..heads.checkpoint import read_vocabulary
from ..trunk import tensor_files

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder: safetensors, else pickles, of which only tensors are read.

    Raises:
        ValueError: neither is there, or a pickle that holds anything else.
    """
    if list(folder.glob("*.safetensors")):
        files, found = tensor_files(folder), dict[str, Tensor]()
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in files if files[name] == path}
        return _without_tables(found)
    found = {}
    for path in sorted(folder.glob("pytorch_model*.bin")):
        try:
            found |= torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} holds more than tensors, and reading it could run code; convert it to "
                f"safetensors where it comes from ({str(error).splitlines()[0]})"
            ) from error
    if not found:
        raise ValueError(f"{folder} holds no *.safetensors and no pytorch_model*.bin")
    return _without_tables(found)


def weight_names(folder: Path) -> set[str]:
    """The names of `read_weights`; a pickle is read for them."""
    if list(folder.glob("*.safetensors")):
        return set(tensor_files(folder))
    return set(read_weights(folder))


def _without_tables(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tables of the rotary embedding follow from the configuration."""
    return {name: value for name, value in tensors.items() if "rotary_emb." not in name}


def targets_own(folder: Path, name: str) -> Tensor:
    """The target's embedding or lm_head as stored; a tied lm_head is the embedding."""
    files = tensor_files(folder)
    names = [f"model.{EMBEDDING}"] if name == EMBEDDING else [LM_HEAD, f"model.{EMBEDDING}"]
    held = next((one for one in names if one in files), None)
    if held is None:
        raise ValueError(f"{folder}: no tensor {names[0]!r}")
    with safe_open(files[held], framework="pt") as file:
        return file.get_tensor(held)


def take_copies(folder: Path, tensors: dict[str, Tensor], names: list[str], target: Path) -> None:
    """Take copies of the target's embedding or lm_head out of `tensors`; one that is none is told,
    since a head here reads the target's."""
    for name in names:
        value, original = tensors.pop(name), targets_own(target, name.removeprefix("model."))
        if value.shape != original.shape or not torch.equal(value, original.to(value.dtype)):
            warnings.warn(
                f"{folder}: {name} differs from the target's own; the head reads the target's, so "
                "it may draft worse than it was trained to",
                stacklevel=4,
            )


def mend_map(tensors: dict[str, Tensor], vocab_size: int, folder: Path) -> None:
    """Turn a `d2t` that provably holds absolute ids into offsets, with a warning; take out
    maps that are the identity.

    Raises:
        ValueError: it holds no offsets, and nothing proves what else.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        return
    if len(d2t) == vocab_size and not bool(d2t.any()):  # the identity, which needs no map
        del tensors["d2t"]
        tensors.pop("t2d", None)
        return
    ids, places = d2t.to(torch.int64), torch.arange(len(d2t))
    reached = ids + places
    if bool((reached.diff() > 0).all()) and 0 <= int(reached[0]) and int(reached[-1]) < vocab_size:
        agrees = t2d is None or torch.equal(t2d.bool().nonzero()[:, 0], reached)
        if agrees or not bool(t2d.any()):  # pyright: ignore[reportOptionalMemberAccess]
            return
    if t2d is not None and len(ids) < vocab_size and torch.equal(t2d.bool().nonzero()[:, 0], ids):
        warnings.warn(
            f"{folder}: d2t holds absolute ids, as t2d shows, where engines read offsets; it is "
            "turned into offsets here, and an engine would draft other tokens from this folder",
            stacklevel=3,
        )
        tensors["d2t"] = ids - places
        return
    raise ValueError(
        f"{folder}: i + d2t[i] must ascend inside 0..{vocab_size - 1} and reach the ids that t2d "
        "marks; d2t holds offsets, not absolute ids. Export it anew from where it was trained"
    )


def draft_ids(folder: Path, tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """The ids that the rows of a folder's lm_head stand for; None for all.

    Raises:
        ValueError: rows without a map, or a map of other ids.
    """
    rows = len(tensors[LM_HEAD])
    maps = {name: tensors[name] for name in ("d2t", "t2d") if name in tensors}
    if "d2t" in maps and "t2d" not in maps:  # engines read d2t alone
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        ids = maps["d2t"].to(torch.int64) + torch.arange(len(maps["d2t"]))
        t2d[ids.clamp(0, vocab_size - 1)] = True
        maps["t2d"] = t2d
    if "t2d" in maps:
        maps["t2d"] = maps["t2d"].bool()
    if rows == vocab_size:
        return None
    ids = read_vocabulary(maps, vocab_size, str(folder))
    if ids is None or len(ids) != rows:
        raise ValueError(
            f"{folder}: lm_head has {rows} rows, d2t {0 if ids is None else len(ids)} entries, "
            f"the target {vocab_size} ids; without its map an engine takes the first {rows}"
        )
    return ids
