"""GGUF files, converted once into a Hugging Face safetensors folder.

transformers reads GGUF (and undoes the row permutation of Llama's q and k), but refuses to save
what it read. The result is stored in bfloat16, so that the same values stand in bfloat16, float32
and float64 runs.
"""

from __future__ import annotations

import fcntl
import functools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from .files import atomic_write_json, sha256_file


def convert_gguf(path: Path, folder: Path) -> Path:
    """Convert `path` into `folder` unless it already holds this very file's conversion. Of several
    processes that want the same folder one converts, and the others wait.

    Returns:
        `folder`, with model.safetensors, config.json, tokenizer files and chat template, and
        `converted.json`, which is written last and names the source's SHA-256.
    Raises:
        ValueError: transformers cannot read the file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file, whatever ends the process
        return _converted(path, folder)


def _converted(path: Path, folder: Path) -> Path:
    marker, digest = folder / "converted.json", sha256_file(path)
    if marker.exists() and json.loads(marker.read_text()).get("sha256") == digest:
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _read_once():
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise ValueError(f"{path}: transformers cannot read this GGUF file ({error})") from error
    tensors = {
        name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(partial)
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path")
    }
    config |= {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    atomic_write_json(partial / "config.json", config)
    atomic_write_json(partial / "converted.json", {"source": path.name, "sha256": digest})
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
    return folder


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers parses the file three times and makes the table of names for every module; in
    here both are done once, which takes a third of the time."""
    names = "GGUFReader", "get_tensor_name_map"
    before = [getattr(gguf, name) for name in names]
    for name, made in zip(names, before, strict=True):
        setattr(gguf, name, functools.cache(made))
    try:
        yield
    finally:
        for name, made in zip(names, before, strict=True):
            setattr(gguf, name, made)
