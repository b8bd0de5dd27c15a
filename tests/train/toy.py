"""A toy training run for these tests, importable (fixture `toy`) and runnable in a process of its
own.

python toy.py '{"target": FOLDER, "runs": [{"out": FOLDER, "config": {...}}, ...]}'
    train, one run after the other; final weights to out/final.safetensors; "eagle3": true in a run
    trains a head that fuses two boundaries and has an lm_head of its own; "batches": the batches in
    turn, each a list of rows [seed, length, whether anything is supervised]; "stop": the run ends
    like a failing one before it reads the batches of that step; "faults": rows (by name) whose
    loss, or gradient, is NaN: the run must be refused, and what it says is printed
python toy.py '{"target": FOLDER, "out": FOLDER, "config": {...}, "undisturbed": FOLDER, "kills":
    ["delay", "half", ...], "ranks": N}' one run killed and resumed, beside an undisturbed one; both
    end in final.safetensors
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from draftsmith.data.batches import PackedBatch
from draftsmith.models.heads import Head, HeadConfig, MTPHead, build_head
from draftsmith.models.trunk import Trunk
from draftsmith.train import engine
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer, TrainResult
from draftsmith.train.objective import Objective


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
        self.end: int | None = None

    def batch(self, index: int) -> PackedBatch:
        if self.end is not None and index >= self.end:
            raise Stop
        rows = [
            random_row(1000 * index + i, 9 + (7 * index + 5 * i) % 23, self.width)
            for i in range(self.num_rows)
        ]
        return packed(rows, [f"batch-{index}-row-{i}" for i in range(self.num_rows)])

    def state_dict(self, cursor: int) -> dict[str, Any]:
        return {"cursor": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        return int(state["cursor"])


class ListedPlan(NoisePlan):
    """The given batches in turn; each a list of (seed, length, supervised) rows."""

    def __init__(self, batches: list[list[tuple[int, int, bool]]], boundaries: int) -> None:
        super().__init__(boundaries=boundaries)
        self.batches = batches

    def batch(self, index: int) -> PackedBatch:
        rows = [(*random_row(seed, n, self.width), told) for seed, n, told in self.batches[index]]
        return packed(
            [(tokens, mask & told, states) for tokens, mask, states, told in rows],
            [f"row-{seed}" for seed, _, _ in self.batches[index]],
        )


class _Spoilt(torch.autograd.Function):
    """The identity, or NaN; its derivative is NaN."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        return loss * factor

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        return grad[0] * float("nan"), None


_CALL = Objective.__call__


def spoilt(what: str, rows: set[str]) -> Callable[..., Any]:
    """`Objective.__call__` whose `loss` or `gradient` is NaN for batches that hold one of the
    rows."""

    def call(self: Objective, head: Head, batch: PackedBatch, steps: int) -> Any:
        loss, stats = _CALL(self, head, batch, steps)
        if rows.isdisjoint(batch.row_ids):
            return loss, stats
        factor = float("nan") if what == "loss" else 1.0
        return _Spoilt.apply(loss, factor), stats._replace(loss=stats.loss * factor)

    return call


def make_head(target: Path, seed: int = 0) -> MTPHead:
    """A randomly initialised head of the target's family."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MTPHead(HeadConfig(), AutoConfig.from_pretrained(target))


class Stop(Exception):
    """A run is made to fail here."""


_CONFIG = engine.deepspeed_config


def _sharded(cfg: TrainConfig) -> dict[str, Any]:
    """Stage 3 keeps what has less than 100,000 elements whole on every rank, which is everything
    here; these runs shard all of it."""
    made = _CONFIG(cfg)
    if cfg.zero_stage == 3:
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return made


def train(
    target: Path,
    out: Path,
    eagle3: bool = False,
    batches: Any = None,
    stop: int | None = None,
    **config: Any,
) -> TrainResult | None:
    """Train on noise; the head's final weights go to out/final.safetensors (from rank 0)."""
    torch.set_num_threads(1)
    head: Head = make_head(target)
    boundaries: tuple[int, ...] = (2,)
    if eagle3:
        boundaries = (0, 1, 2)
        torch.manual_seed(0)
        head = build_head(HeadConfig("eagle3", boundaries=(0, 1)), target, 1.0)
    width = len(boundaries)
    plan = ListedPlan(batches, width) if batches else NoisePlan(boundaries=width)
    with mock.patch.object(engine, "deepspeed_config", _sharded):
        trainer = Trainer(
            head,
            Trunk.load(target, torch.float32),
            plan,
            TrainConfig(**config),
            out,
            boundaries=boundaries,
            progress=False,
        )
    if stop is not None:
        plan.end = stop * trainer.cfg.accumulation * trainer.sequence.count
    try:
        result = trainer.run()
    except Stop:
        return None
    weights = trainer.whole_head().state_dict()
    if os.environ.get("RANK", "0") == "0":
        save_file(
            {name: value.detach().contiguous() for name, value in weights.items()},
            out / "final.safetensors",
        )
    return result


def _launch(target: Path, out: Path, config: dict[str, Any], ranks: int) -> list[int]:
    """Process ids of a run's ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if ranks > 1:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_PORT": port}
                    os.environ["MASTER_ADDR"] = "127.0.0.1"
                train(target, out, **config)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    return pids


def _finish(pids: list[int], what: str) -> None:
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(statuses), f"{what} failed"


def _half_checkpoint(out: Path) -> bool:
    return any(
        not (folder / "complete.json").exists() for folder in (out / "checkpoints").glob("step-*")
    )


def _lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturbed(target: Path, out: Path, config: dict[str, Any], kills: list[str], ranks: int) -> int:
    """Train in child processes that are killed with SIGKILL, one rank after the other: "delay" at a
    random moment after progress was made, "half" while a checkpoint is being written. Returns how
    many launches died so; the last one is left to finish."""
    chance, died = random.Random(5), 0
    for kind in kills:
        before = _lines(out)
        pids = _launch(target, out, config, ranks)
        limit = time.monotonic() + 40
        while time.monotonic() < limit and _lines(out) <= before:
            time.sleep(0.002)
        if kind == "delay":
            time.sleep(chance.uniform(0.0, 0.3))
        else:
            while time.monotonic() < limit and not _half_checkpoint(out):
                pass
        for pid in chance.sample(pids, ranks):
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.02) if ranks > 1 else 0.0)
        died += any([os.WIFSIGNALED(os.waitpid(pid, 0)[1]) for pid in pids])
    _finish(_launch(target, out, config, ranks), "the last run")
    return died


def main(spec: dict[str, Any]) -> None:
    target = Path(spec["target"])
    if "runs" in spec:
        for run in spec["runs"]:
            extra = {name: run[name] for name in ("eagle3", "batches", "stop") if name in run}
            if "faults" not in run:
                train(target, Path(run["out"]), **extra, **run["config"])
                continue
            for what, rows in run["faults"].items():
                Objective.__call__ = spoilt(what, set(rows))
            try:
                train(target, Path(run["out"]), **extra, **run["config"])
            except ValueError as error:
                print(json.dumps(str(error)))
            Objective.__call__ = _CALL
        return
    out, config = Path(spec["out"]), spec["config"]
    import deepspeed  # noqa: F401  (once here, instead of once in every child)

    out.mkdir()
    ranks = spec.get("ranks", 1)
    died = disturbed(target, out, config, spec["kills"], ranks)
    _finish(_launch(target, Path(spec["undisturbed"]), config, ranks), "the undisturbed run")
    print(json.dumps({"died": died}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
