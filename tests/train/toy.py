"""A toy training run for these tests, importable (fixture `toy`) and runnable in a process of its
own.

python toy.py '{"target": FOLDER, "runs": [{"out": FOLDER, "config": {...}}, ...]}'
    train, one run after the other; final weights to out/final.safetensors; "eagle3": true in a run
    trains a head that fuses two boundaries and has an lm_head of its own
python toy.py '{"target": FOLDER, "out": FOLDER, "config": {...}, "undisturbed": FOLDER, "kills":
    ["delay", "half", ...]}' one run killed and resumed, beside an undisturbed one; both end in
    final.safetensors
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from draftsmith.data.batches import PackedBatch
from draftsmith.models.heads import Head, HeadConfig, MTPHead, build_head
from draftsmith.models.trunk import Trunk
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer, TrainResult


def packed(
    rows: list[tuple[Tensor, Tensor, Tensor]], names: list[str] | None = None
) -> PackedBatch:
    """Rows of (tokens [n], supervised [n], hidden [n, H]) end to end."""
    lengths = [len(tokens) for tokens, _, _ in rows]
    tokens, supervised, hidden = (torch.cat(parts) for parts in zip(*rows, strict=True))
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    names = names or [f"row-{i}" for i in range(len(rows))]
    return PackedBatch(tokens, supervised, hidden, starts, positions, tuple(names))


def random_row(
    seed: int, length: int, hidden_size: int = 64, vocab_size: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """A row of noise; about four tokens of five are supervised."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (length,), generator=generator)
    supervised = torch.rand(length, generator=generator) < 0.8
    return tokens, supervised, torch.randn(length, hidden_size, generator=generator)


class NoisePlan:
    """Endless batches of two random rows; a batch follows from its index alone."""

    def __init__(self, rows: int = 2, boundaries: int = 1) -> None:
        self.num_rows = rows
        self.width = 64 * boundaries

    def batch(self, index: int) -> PackedBatch:
        rows = [
            random_row(1000 * index + i, 9 + (7 * index + 5 * i) % 23, self.width)
            for i in range(self.num_rows)
        ]
        return packed(rows, [f"batch-{index}-row-{i}" for i in range(self.num_rows)])

    def state_dict(self, cursor: int) -> dict[str, Any]:
        return {"cursor": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        return int(state["cursor"])


def make_head(target: Path, seed: int = 0) -> MTPHead:
    """A randomly initialised head of the target's family."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MTPHead(HeadConfig(), AutoConfig.from_pretrained(target))


def train(target: Path, out: Path, eagle3: bool = False, **config: Any) -> TrainResult:
    """Train on noise; the head's final weights go to out/final.safetensors (from rank 0)."""
    torch.set_num_threads(1)
    head: Head = make_head(target)
    boundaries: tuple[int, ...] = (2,)
    if eagle3:
        boundaries = (0, 1, 2)
        torch.manual_seed(0)
        head = build_head(HeadConfig("eagle3", boundaries=(0, 1)), target, 1.0)
    trainer = Trainer(
        head,
        Trunk.load(target, torch.float32),
        NoisePlan(boundaries=len(boundaries)),
        TrainConfig(**config),
        out,
        boundaries=boundaries,
        progress=False,
    )
    result = trainer.run()
    if os.environ.get("RANK", "0") == "0":
        save_file(
            {name: value.detach().contiguous() for name, value in head.state_dict().items()},
            out / "final.safetensors",
        )
    return result


def _child(target: Path, out: Path, config: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            train(target, out, **config)
            status = 0
        finally:
            os._exit(status)
    return pid


def _half_checkpoint(out: Path) -> bool:
    return any(
        not (folder / "complete.json").exists() for folder in (out / "checkpoints").glob("step-*")
    )


def _lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturbed(target: Path, out: Path, config: dict[str, Any], kills: list[str]) -> int:
    """Train in child processes that are killed with SIGKILL: "delay" at a random moment after
    progress was made, "half" while a checkpoint is being written. Returns how many died so; the
    last one is left to finish."""
    chance, died = random.Random(5), 0
    for kind in kills:
        before = _lines(out)
        pid = _child(target, out, config)
        limit = time.monotonic() + 20
        while time.monotonic() < limit and _lines(out) <= before:
            time.sleep(0.002)
        if kind == "delay":
            time.sleep(chance.uniform(0.0, 0.3))
        else:
            while time.monotonic() < limit and not _half_checkpoint(out):
                pass
        os.kill(pid, signal.SIGKILL)
        died += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    _, status = os.waitpid(_child(target, out, config), 0)
    assert status == 0, "the last run failed"
    return died


def main(spec: dict[str, Any]) -> None:
    target = Path(spec["target"])
    if "runs" in spec:
        for run in spec["runs"]:
            train(target, Path(run["out"]), run.get("eagle3", False), **run["config"])
        return
    out, config = Path(spec["out"]), spec["config"]
    import deepspeed  # noqa: F401  (once here, instead of once in every child)

    out.mkdir()
    died = disturbed(target, out, config, spec["kills"])
    _, status = os.waitpid(_child(target, Path(spec["undisturbed"]), config), 0)
    assert status == 0, "the undisturbed run failed"
    print(json.dumps({"died": died}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
