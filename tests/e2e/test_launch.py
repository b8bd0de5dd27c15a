"""`draftsmith train` over several processes: caches, and the target on ranks of its own. A small
random target with the real tokenizer, and toy conversations. torchrun and deepspeed start two ranks
once each; the ranks of every other run are forked with what these would announce to them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from draftsmith.data.batches import BatchPlan
from draftsmith.data.cache import Cache
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.online import OnlineRows
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.models.heads import HeadConfig, build_head
from draftsmith.models.target import Target, TargetConfig, load_tokenizer
from draftsmith.models.trunk import Trunk
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import read_metrics

pytestmark = pytest.mark.e2e

WORDS = "seven wizards boil black quartz while a lazy dog jumps over the quick brown fox".split()
MODULE = "draftsmith.scripts.train"
SETTINGS = [
    "target.dtype=float32",
    "target.device=cpu",
    "data.rows.holdout=4",
    "train.max_steps=4",
    "train.tokens_per_batch=256",
    "train.draft_vocab_size=512",
    "train.log_every=1",
    "train.precision=fp32",
    "train.validate_every=0",
    "validate.engine=false",
    "tracker=none",
]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def torchrun(ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return [*launcher, "--standalone", f"--nproc-per-node={ranks}", "-m"]


def deepspeed(ranks: int) -> list[str]:
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [program, "--num_gpus", str(ranks), "--master_port", free_port(), "--module"]


def chat(number: int) -> dict[str, Any]:
    turns = []
    for turn in range(2 + 2 * (number % 2)):
        words = [WORDS[(number * (turn + 1) + k) % len(WORDS)] for k in range(5 + number % 17)]
        turns.append({"from": ("human", "gpt")[turn % 2], "value": f"{number}: {' '.join(words)}"})
    return {"id": f"chat-{number}", "conversations": turns}


class Prepared:
    """A target and a work folder with its rows."""

    def __init__(self, folder: Path, target: Path, forked: Callable[..., Any]) -> None:
        self.forked = forked
        self.inputs = folder / "inputs"
        self.folder = folder
        self.target = Target.load(TargetConfig(source=str(target), dtype="float32", device="cpu"))
        chats = folder / "chats.json"
        chats.write_text(json.dumps([chat(number) for number in range(44)]))
        tokenizer = load_tokenizer(target)
        config = RowsConfig(str(chats), holdout=4, max_length=2048)
        prepare(config, tokenizer, self.target.fingerprint, self.inputs / "rows")
        self.rows = Rows.open(self.inputs / "rows")

    def words(self, name: str, *further: str) -> list[str]:
        """The command line of a training run in a work folder of its own."""
        places = [f"work={self.folder / name}", f"inputs={self.inputs}"]
        places.append(f"target.source={self.target.folder}")
        return [MODULE, *SETTINGS, *places, *further]

    def start(self, ranks: int, name: str, *further: str) -> list[Any]:
        """Begin a training run: its ranks."""
        env: dict[str, str] = {}
        if ranks > 1:
            env = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        return [
            self.forked(
                self.words(name, *further),
                self.folder,
                **env,
                **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            )
            for rank in range(ranks)
        ]

    def run(self, ranks: int, name: str, *further: str) -> Path:
        """A training run that must end well; its folder."""
        processes = self.start(ranks, name, *further)
        for process in processes:
            out, errors = process.communicate()
            assert process.poll() == 0, out[-2000:] + errors[:9000]
        return self.folder / name / "train"

    def launch(self, launcher: list[str], name: str, *further: str) -> Path:
        """The same through a launcher, which starts the ranks."""
        launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        env = {name: value for name, value in os.environ.items() if name not in launched}
        done = subprocess.run(
            [*launcher, *self.words(name, *further)],
            cwd=self.folder,
            env=env | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:9000]
        return self.folder / name / "train"

    def dump(self, tokens_per_batch: int) -> None:
        """The caches of both splits."""
        config = DumpConfig(tokens_per_batch=tokens_per_batch, overwrite=True)
        for split, name in (("train", "cache"), ("heldout", "cache-heldout")):
            dump(config, Rows.open(self.inputs / "rows", split), self.target, self.inputs / name)


@pytest.fixture(scope="module")
def prepared(
    tiny_llama_folder: Callable[..., Path],
    smollm2_folder: Path,
    forked: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Prepared:
    """Rows of toy conversations for a random Llama that speaks SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("launch")
    target = folder / "target"
    weights = tiny_llama_folder(vocab_size=49152, num_hidden_layers=2, hidden_size=32)
    shutil.copytree(weights, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / name, target / name)
    return Prepared(folder, target, forked)


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]


def equal_heads(one: Path, two: Path) -> bool:
    left, right = (load_file(folder / "head" / "head.safetensors") for folder in (one, two))
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_cache_of_two_dumping_ranks_trains_on_one_and_on_three(prepared: Prepared) -> None:
    """Three batches a step either way, in turn or side by side: the same tokens, losses and head,
    validated, and written."""
    for split, name in (("train", "cache"), ("heldout", "cache-heldout")):
        rows = Rows.open(prepared.inputs / "rows", split)
        for rank in (1, 0):
            config = DumpConfig(shard_tokens=512, rank=rank, world_size=2, overwrite=True)
            dump(config, rows, prepared.target, prepared.inputs / name)
    assert len(Cache.open(prepared.inputs / "cache").manifest["shards"]) > 2
    three = prepared.run(3, "three")
    one = prepared.run(1, "one", "train.accumulation=3")
    records = list(read_metrics(three / "metrics.jsonl"))
    assert [r["step"] for r in records] == [1, 2, 3, 4, 4] and records[-1]["kind"] == "validation"
    plan = BatchPlan(Cache.open(prepared.inputs / "cache"), tokens_per_batch=256)
    read = [sum(plan.tokens(3 * step + part) for part in range(3)) for step in range(4)]
    assert [r["tokens"] for r in records[:4]] == read
    assert losses(three) == pytest.approx(losses(one), rel=1e-5)
    left, right = (load_file(run / "head" / "head.safetensors") for run in (three, one))
    for name, value in left.items():
        assert torch.allclose(value.float(), right[name].float(), rtol=1e-4, atol=1e-5), name
    assert json.loads((three / "run.json").read_text())["finished"] == 4
    assert (three / "head" / "config.json").exists()


def test_the_deepspeed_launcher_trains_what_its_ranks_would(prepared: Prepared) -> None:
    """Two ranks at ZeRO 2 either way: the same losses and the same head, bit for bit."""
    prepared.dump(tokens_per_batch=256)
    settings = ["train.zero_stage=2", "train.checkpoint_every=2"]
    right = prepared.run(2, "by-hand", *settings)
    ours = prepared.launch(deepspeed(2), "by-deepspeed", *settings)
    assert losses(ours) == losses(right) and len(losses(ours)) == 4
    assert equal_heads(ours, right)


def test_a_target_rank_serves_what_the_trainer_would_make(prepared: Prepared) -> None:
    """One process with the target in it, and one trainer beside one target rank, under torchrun:
    the same losses and the same head, bit for bit; neither reads a cache."""
    shutil.rmtree(prepared.inputs / "cache", ignore_errors=True)
    shutil.rmtree(prepared.inputs / "cache-heldout", ignore_errors=True)
    alone = prepared.run(1, "alone", "data.source=online")
    online = ["data.source=online", "data.online.target_ranks=1"]
    served = prepared.launch(torchrun(2), "served", *online)
    assert losses(alone) == losses(served) and len(losses(alone)) == 4
    assert equal_heads(alone, served)
    identity = json.loads((served / "run.json").read_text())["identity"]
    assert identity["data.source"] == "online"
    assert identity["rows"] == prepared.rows.key
    assert identity["target.weights"] == prepared.target.fingerprint["weights"]


def test_two_trainers_share_one_target_rank(prepared: Prepared) -> None:
    """All three processes end, and the trainers read two batches a step."""
    folder = prepared.run(3, "shared", "data.source=online", "data.online.target_ranks=1")
    plan = BatchPlan(OnlineRows(prepared.rows, prepared.target), tokens_per_batch=256)
    read = [plan.tokens(2 * step) + plan.tokens(2 * step + 1) for step in range(4)]
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["tokens"] for r in records] == read


def test_a_target_rank_that_dies_ends_the_run_with_its_name(prepared: Prepared) -> None:
    """SIGKILL to the target rank while training: the trainer does not hang, ends with the exit
    code of a refusal, and says which rank is gone."""
    online = ["data.source=online", "data.online.target_ranks=1", "train.max_steps=100000"]
    trainer, server = prepared.start(2, "killed", *online)
    try:
        metrics = prepared.folder / "killed" / "train" / "metrics.jsonl"
        limit = time.monotonic() + 300
        while time.monotonic() < limit and not (metrics.exists() and metrics.stat().st_size):
            assert trainer.poll() is None and server.poll() is None
            time.sleep(0.05)
        server.kill()
        _, errors = trainer.communicate(timeout=120)
        assert trainer.poll() == 2, errors[-3000:]
        assert "rank 1 (127.0.0.1:" in errors and "which serves the target's states" in errors
    finally:
        trainer.kill()
        server.kill()


def train(prepared: Prepared, plan: BatchPlan, out: Path) -> tuple[list[float], nn.Module]:
    """Ten steps in this process: losses and the trained head."""
    folder = prepared.target.folder
    torch.manual_seed(0)
    head = build_head(HeadConfig(), folder, 1.0, AutoConfig.from_pretrained(folder))
    cfg = TrainConfig(max_steps=10, warmup_steps=2, log_every=1, precision="fp32")
    trunk = Trunk.load(folder, torch.float32)
    Trainer(head, trunk, plan, cfg, out, progress=False).run()
    return losses(out), head


def test_online_and_cache_train_the_same_head(prepared: Prepared, tmp_path: Path) -> None:
    """Each row a forward pass of its own, in the dump and in training: losses and weights are equal
    bit for bit, since online states pass through the cache's bf16."""
    prepared.dump(tokens_per_batch=1)
    cache = Cache.open(prepared.inputs / "cache")
    outcomes = []
    for name, source in (("cache", cache), ("online", OnlineRows(prepared.rows, prepared.target))):
        with pytest.warns(UserWarning, match="stay whole"):
            plan = BatchPlan(source, tokens_per_batch=1)
        outcomes.append(train(prepared, plan, tmp_path / name))
    (stored, one), (live, two) = outcomes
    assert stored == live and stored[-1] != stored[0]
    for (name, left), right in zip(one.state_dict().items(), two.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_passes_of_other_rows_change_the_losses_by_rounding_alone(
    prepared: Prepared, tmp_path: Path
) -> None:
    """A dump of other passes than the batches: a float32 target's states differ where rounding to
    bf16 tips over, and ten steps' losses by less than 1e-4 of their size."""
    prepared.dump(tokens_per_batch=512)
    cache = BatchPlan(Cache.open(prepared.inputs / "cache"), tokens_per_batch=256)
    online = BatchPlan(OnlineRows(prepared.rows, prepared.target), tokens_per_batch=256)
    stored, _ = train(prepared, cache, tmp_path / "cache")
    live, _ = train(prepared, online, tmp_path / "online")
    assert live == pytest.approx(stored, rel=1e-4)
