"""A target's checkpoint with other MTP modules in it: one file and an index are written, the
weights of the target are linked.

Engines read every tensor of every file that the index names, whatever name it is under there, so a
file in which the target's own MTP modules lie is written anew without them. All others are hard
links: they take no room, and stay when the target's folder goes. On another filesystem they are
symbolic links, which is told.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..files import atomic_write_bytes, atomic_write_json
from ..trunk import tensor_files

FILE = "mtp.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Weights: those that count are linked, those in other forms left where they are."""
_OURS = ("config.json", _INDEX, "provenance.json", "draftsmith.json")


def merge(
    target: Path, out: Path, tensors: dict[str, Tensor], stale: Callable[[str], bool]
) -> None:
    """Write `out`: the target's checkpoint, with `tensors` in place of its own that are `stale`.

    Raises:
        ValueError: `out` is the target's own folder.
    """
    if out.exists() and out.samefile(target):
        raise ValueError(
            f"{out} is the target's own folder, which stays as it is: choose another, "
            "export.folder=…"
        )
    files = tensor_files(target)
    shards = {path: [n for n, place in files.items() if place == path] for path in files.values()}
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for path, names in sorted(shards.items()):
        kept = [name for name in names if not stale(name) and name not in tensors]
        if not kept:
            continue
        name = f"target-{path.name}" if path.name == FILE else path.name
        if len(kept) == len(names) and _holds_only(path, names):
            _link(path, out / name)
        else:
            with safe_open(path, framework="pt") as file:
                rest = {key: file.get_tensor(key) for key in kept}
            atomic_write_bytes(out / name, save(rest, metadata={"format": "pt"}))
        index |= dict.fromkeys(kept, name)
    atomic_write_bytes(out / FILE, save(tensors, metadata={"format": "pt"}))
    index |= dict.fromkeys(tensors, FILE)
    size = sum(_bytes(out / name) for name in set(index.values()))
    atomic_write_json(out / _INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    for path in target.iterdir():
        beside = path.is_file() and path.suffix not in _OTHERS and path.name not in _OURS
        if beside and not path.name.startswith("."):
            shutil.copyfile(path, out / path.name)  # small, and may be edited


def _holds_only(path: Path, names: list[str]) -> bool:
    """Whether a file has no tensor that the index does not name."""
    with safe_open(path, framework="pt") as file:
        return set(file.keys()) == set(names)


def _link(path: Path, place: Path) -> None:
    source = path.resolve()  # a hub cache has links itself
    if place.exists() and place.samefile(source):
        return
    place.unlink(missing_ok=True)
    try:
        os.link(source, place)
    except OSError as error:
        place.symlink_to(source)
        warnings.warn(
            f"{place} is a symbolic link to {source} ({error.strerror}): keep the target where it "
            "is, or export to a folder on its filesystem",
            stacklevel=4,
        )


def _bytes(path: Path) -> int:
    """Of a file's tensors."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(
        one["data_offsets"][1] - one["data_offsets"][0]
        for name, one in header.items()
        if name != "__metadata__"
    )
