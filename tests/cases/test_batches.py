"""Field faults of packing, masks, preparation and waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from draftsmith.data.batches import BatchPlan, PackedBatch
from draftsmith.data.runs import RunIndex, supervised_runs
from draftsmith.kernels.shift import supervision
from draftsmith.models.heads import Head, HeadConfig, build_head
from draftsmith.models.trunk import Trunk
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import read_metrics
from draftsmith.train.objective import Objective


class NoiseRows:
    """Rows of random tokens and states; which tokens are supervised is given by the test."""

    def __init__(self, *masks: Tensor, seeds: tuple[int, ...] = ()) -> None:
        self.masks = masks
        self.seeds = seeds or tuple(range(len(masks)))
        self.lengths = np.array([len(mask) for mask in masks])
        self.ids = [f"row-{number}" for number in range(len(masks))]
        self.boundaries = (2,)
        runs = [supervised_runs(mask.numpy()) for mask in masks]
        self.runs = RunIndex(np.array(sum(runs, []), np.int64), np.cumsum([0, *map(len, runs)]))

    def supervised_counts(self, steps: int) -> np.ndarray:
        return self.runs.counts(steps)

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        tokens, states = [], []
        for index in indices:
            generator = torch.Generator().manual_seed(self.seeds[index])
            size = len(self.masks[index])
            tokens.append(torch.randint(0, 512, (size,), generator=generator))
            states.append(torch.randn(size, 64, generator=generator))
        return tokens, [self.masks[index] for index in indices], torch.cat(states)


def all_of(length: int) -> Tensor:
    return torch.ones(length, dtype=torch.bool)


def none_of(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.bool)


@pytest.fixture(scope="module")
def toy(tiny_llama_folder: Callable[..., Path]) -> Path:
    """A random Llama of two layers."""
    return tiny_llama_folder(num_hidden_layers=2)


def make_head(toy: Path) -> Head:
    torch.manual_seed(0)
    return build_head(HeadConfig(), toy, 1.0, AutoConfig.from_pretrained(toy))


def packed(source: NoiseRows) -> PackedBatch:
    """All rows of a source in one batch."""
    plan = BatchPlan(source, tokens_per_batch=int(source.lengths.sum()))
    assert plan.num_batches() == 1
    return plan.batch(0)


def test_case_13_a_packed_document_learns_what_it_learns_alone(toy: Path) -> None:
    """B beside A and after a copy of itself: the same loss at every step as by itself, so no
    neighbour is seen; and step k has no label within k + 2 tokens of the end of a document."""
    steps = 3
    objective = Objective(Trunk.load(toy, torch.float32), [1.0] * steps, dtype=torch.float32)
    head = make_head(toy)

    def losses(source: NoiseRows) -> Tensor:
        return objective(head, packed(source), steps)[1].loss

    alone = losses(NoiseRows(all_of(30), seeds=(7,)))
    beside = losses(NoiseRows(none_of(21), all_of(30), seeds=(5, 7)))
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=0)
    twice = losses(NoiseRows(all_of(30), all_of(30), seeds=(7, 7)))
    torch.testing.assert_close(twice, 2 * alone, rtol=1e-5, atol=0)
    other = losses(NoiseRows(all_of(30), seeds=(8,)))
    assert not torch.allclose(other, alone, rtol=1e-3)

    batch = packed(NoiseRows(all_of(21), all_of(30)))
    mask = supervision(batch.supervised, batch.starts, steps)
    for start, end in zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True):
        for step in range(steps):
            assert mask[step, start : end - 2 - step].all()
            assert not mask[step, end - 2 - step : end].any()


def train(toy: Path, plan: Any, out: Path, **config: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The trained head and the lines of metrics."""
    settings = {"warmup_steps": 0, "log_every": 1, "precision": "fp32", "checkpoint_every": 0}
    cfg = TrainConfig(**{**settings, **config})
    head = make_head(toy)
    Trainer(head, Trunk.load(toy, torch.float32), plan, cfg, out, progress=False).run()
    return head, list(read_metrics(out / "metrics.jsonl"))


def test_case_34_an_all_masked_batch_adds_zero_and_is_counted(toy: Path, tmp_path: Path) -> None:
    """A batch without a label beside one with labels: bit for bit the weights of the latter alone,
    no NaN, and each metrics line counts it. A data set without any label is refused."""
    mixed = BatchPlan(NoiseRows(none_of(40), all_of(40)), tokens_per_batch=40)
    alone = BatchPlan(NoiseRows(all_of(40), seeds=(1,)), tokens_per_batch=40)
    one, with_empty = train(toy, mixed, tmp_path / "mixed", max_steps=3, accumulation=2)
    two, without = train(toy, alone, tmp_path / "alone", max_steps=3)
    for (name, left), right in zip(one.state_dict().items(), two.parameters(), strict=True):
        assert torch.equal(left, right), name
    assert [r["unsupervised_batches"] for r in with_empty] == [1, 1, 1]
    assert [r["unsupervised_batches"] for r in without] == [0, 0, 0]
    for left, right in zip(with_empty, without, strict=True):
        assert left["supervised"] == right["supervised"] == 38
        assert left["loss"] == right["loss"] > 0
    with pytest.raises(ValueError, match="none of the 2 rows holds two supervised tokens"):
        BatchPlan(NoiseRows(none_of(40), none_of(9)), tokens_per_batch=64)


_PREPARE = """
import json, sys
from draftsmith.scripts.prepare import main
sys.argv = ["prepare", *json.loads(sys.argv[1])]
code = main()
import torch.distributed
assert code == 0 and not torch.distributed.is_initialized() and "deepspeed" not in sys.modules
"""


def test_case_67_preparation_forms_no_process_group(smollm2_folder: Path, tmp_path: Path) -> None:
    """Preparation is a command by itself: even where a launcher announces a group whose other
    ranks never come, it waits for nobody, and no timeout can strike it."""
    chats = [
        {"id": str(n), "conversations": [{"from": "human", "value": f"Question {n}?"},
                                         {"from": "gpt", "value": f"Answer {n}."}]}
        for n in range(5)
    ]  # fmt: skip
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    arguments = [
        f"work={tmp_path / 'work'}",
        f"target.source={smollm2_folder}",
        f"data.rows.source={tmp_path / 'chats.json'}",
        "data.rows.holdout=1",
    ]
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE, json.dumps(arguments)],
        env={**os.environ, **launched, "MASTER_PORT": "9", "PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "work" / "rows" / "manifest.json").exists()


class SlowPlan(BatchPlan):
    """Batches that take `seconds` to read."""

    seconds = 0.0

    def batch(self, index: int) -> PackedBatch:
        time.sleep(self.seconds)
        return super().batch(index)


def test_case_127_waiting_is_shown_apart_from_computing(toy: Path, tmp_path: Path) -> None:
    """Batches that take 0.8 s to read: the metrics say how long the trainer waited and for which
    share of the time, and one warning names the remedy; quick ones say nothing."""
    slow = SlowPlan(NoiseRows(all_of(20)), tokens_per_batch=20)
    slow.seconds = 0.8  # more than a step, on a busy machine too
    with pytest.warns(UserWarning, match="waiting for data: raise train.prefetch=2") as caught:
        _, lines = train(toy, slow, tmp_path / "slow", max_steps=9, log_every=3)
    assert sum("waiting for data" in str(warning.message) for warning in caught) == 1
    for line in lines:
        assert line["seconds"]["wait"] > 1.0 and line["wait_share"] > 0.1
        assert {"forward", "backward", "step"} <= line["seconds"].keys()
    quick = SlowPlan(NoiseRows(all_of(20)), tokens_per_batch=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, lines = train(toy, quick, tmp_path / "quick", max_steps=6, log_every=6)
    assert lines[-1]["seconds"]["wait"] < 1.0
