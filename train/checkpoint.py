"""Checkpoints of a run: whole or not there.

```
checkpoints/step-00000100/
    weights.safetensors              fp32 weights
    optimizer-00000.safetensors ...  optimiser states, a file a rank (one file at ZeRO 0)
    rng-00000.json ...               random states of each rank
    complete.json                    written last: step, data cursor, score; size and SHA-256 of the
                                     other files
```
A folder without complete.json is half a checkpoint: it is reported, removed and never loaded. No
"latest" file exists; the newest whole folder is found by its marker. Nothing is pickled, and
`state` reads the files at any ZeRO stage and on any number of ranks. Several nodes need one shared
folder.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..models.files import atomic_write_json, read_json, sha256_file
from .ranks import barrier, rank, world_size
from .state import load_state, save_state

FORMAT = 2
_MARKER = "complete.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, as its marker tells."""

    folder: Path
    step: int
    """Optimiser steps done."""
    data: dict[str, Any]
    """Where the batch plan goes on: its own `state_dict`."""
    score: float | None
    """What the best checkpoint is chosen by, higher is better; None where this step was not
    validated."""
    unimproved: int
    """Validations without a better score up to here, the last ones in a row."""
    world_size: int
    zero_stage: int
    config: dict[str, Any]
    """The run's `TrainConfig`."""
    basis: str | None = None
    """Hash of what the score was measured with; scores of another basis do not compare."""


class Checkpoints:
    """The checkpoints of one run. Every method that takes the engine must be called by all ranks.

    Args:
        folder: holds step-NNNNNNNN folders. keep: newest ones to keep; the best by score is kept
            besides.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        engine: Any,
        step: int,
        *,
        data: dict[str, Any],
        unimproved: int = 0,
        config: dict[str, Any],
    ) -> Checkpoint:
        """Write a checkpoint after `step` optimiser steps, then drop what need not be kept. Its
        score is None until `judge` is told it."""
        folder = self.folder / f"step-{step:08d}"
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        barrier()
        save_state(engine, folder)
        atomic_write_json(folder / f"rng-{rank():05d}.json", _random_state())
        barrier()
        stage = engine.zero_optimization_stage()
        saved = Checkpoint(folder, step, data, None, unimproved, world_size(), stage, config)
        if rank() == 0:
            files = {}
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                _flush(path)
                name = path.relative_to(folder).as_posix()
                files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            marker = {
                "format": FORMAT,
                "step": step,
                "data": data,
                "score": None,
                "unimproved": unimproved,
                "world_size": saved.world_size,
                "zero_stage": stage,
                "config": config,
                "basis": None,
                "files": files,
            }
            atomic_write_json(folder / _MARKER, marker)
            self._prune()
        barrier()
        return saved

    def judge(
        self, saved: Checkpoint, score: float, unimproved: int, basis: str | None = None
    ) -> None:
        """Add the score of a validation, and the hash of what it was measured with, to a checkpoint
        in one stroke; then drop what need not be kept. The scores of rank 0 count."""
        if rank() == 0:
            marker = read_json(saved.folder / _MARKER)
            marker |= {"score": score, "unimproved": unimproved, "basis": basis}
            atomic_write_json(saved.folder / _MARKER, marker)
            self._prune()
        barrier()

    def whole(self) -> list[Checkpoint]:
        """Checkpoints with a marker, oldest first; contents are not verified."""
        found = []
        for folder in sorted(self.folder.glob("step-*")):
            if (folder / _MARKER).exists():
                marker = read_json(folder / _MARKER)
                if marker["format"] != FORMAT:
                    raise ValueError(
                        f"{folder / _MARKER}: format {marker['format']}, this version reads "
                        f"{FORMAT}; resume with the version that wrote it, or use another folder"
                    )
                names = [field.name for field in fields(Checkpoint)[1:]]
                found.append(Checkpoint(folder, *(marker[name] for name in names)))
        return found

    def best(self) -> Checkpoint | None:
        """The checkpoint of the highest score, the newer of equals, among those that were measured
        as the last was; None where none was validated."""
        scored = [c for c in self.whole() if c.score is not None]
        alike = [c for c in scored if c.basis == scored[-1].basis]
        return max(alike, key=lambda c: (c.score, c.step), default=None)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole and undamaged; half ones are reported and removed."""
        if rank() == 0:
            for folder in sorted(self.folder.glob("step-*")):
                if not (folder / _MARKER).exists():
                    warnings.warn(
                        f"{folder} is half a checkpoint (no {_MARKER}); it is ignored and removed",
                        stacklevel=2,
                    )
                    shutil.rmtree(folder)
        barrier()
        for found in reversed(self.whole()):
            fault = damage(found.folder)
            if fault is None:
                return found
            warnings.warn(f"{found.folder} is damaged and ignored: {fault}", stacklevel=2)
        return None

    def load(self, engine: Any, found: Checkpoint) -> None:
        """Put weights, optimiser and random states of a checkpoint back: bit for bit where stage
        and ranks are those that wrote it, else the same numbers held elsewhere."""
        load_state(engine, found.folder)
        state = found.folder / f"rng-{rank():05d}.json"
        if state.exists():
            _restore_random_state(read_json(state))
        else:
            warnings.warn(
                f"{found.folder} was written by {found.world_size} ranks and has no random "
                f"state for rank {rank()}; this rank goes on with its own seed",
                stacklevel=2,
            )

    def _prune(self) -> None:
        whole, best = self.whole(), self.best()
        for old in whole[: -self.keep]:
            if best is None or old.folder != best.folder:
                # The marker goes first, so that a kill in between leaves half a checkpoint and not
                # a damaged one.
                (old.folder / _MARKER).unlink()
                shutil.rmtree(old.folder)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files against its marker; None where nothing is."""
    for name, facts in read_json(folder / _MARKER)["files"].items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, the marker says {facts['bytes']}"
        if sha256_file(path) != facts["sha256"]:
            return f"the SHA-256 of {name} differs from the marker's"
    return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """What the block draws does not count."""
    state = _random_state()
    try:
        yield
    finally:
        _restore_random_state(state)


def _random_state() -> dict[str, Any]:
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, internal, gauss_next = random.getstate()
    return {
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "numpy": [str(kind), np.asarray(keys).tolist(), int(place), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))
    kind, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
