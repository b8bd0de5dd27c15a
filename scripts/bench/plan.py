"""The forecast of `plan` against training runs: memory above the process's own, and time.

Each case trains the head of a target of SmolLM2's shapes (random weights: they hold and compute as
much) for a few steps in a fresh process, through the whole training loop. Measured is ru_maxrss
less what was resident when everything was imported and nothing was made; forecast is
`training_memory` less its `process`.

    python -m draftsmith.scripts.bench.plan [OUT.json]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...data.batches import PackedBatch
from ...models.files import atomic_write_json
from ...models.heads import HeadConfig, head_class
from ...models.norm import RMSNorm
from ...models.shape import TargetShape
from ...models.trunk import Trunk
from ...train import forecast as facts
from ...train.config import TrainConfig
from ...train.loop import Trainer
from ...train.metrics import read_metrics
from ...train.ranks import start
from ...train.trace import trace_step

ROW = 1024
STEPS = 2


@dataclass(frozen=True)
class Case:
    """One setting."""

    tokens: int
    vocabulary: int | None
    steps: int
    stage: int = 0
    precision: str = "bf16"
    kind: str = "mtp"

    def train(self) -> TrainConfig:
        """Its training run."""
        return TrainConfig(
            steps=self.steps,
            draft_vocab_size=self.vocabulary,
            tokens_per_batch=self.tokens,
            max_steps=STEPS,
            zero_stage=self.stage,
            precision=self.precision,
            log_every=1,
            validate_every=0,
            checkpoint_every=0,
        )


CASES = (
    Case(1024, 8192, 3),
    Case(4096, 8192, 3),
    Case(4096, 8192, 1),
    Case(1024, None, 3),
    Case(4096, None, 3),
    Case(4096, 8192, 3, stage=2),
    Case(4096, 8192, 3, precision="fp32"),
    Case(4096, 8192, 3, kind="eagle3"),
)


class Batches:
    """Random batches of rows of ROW tokens, three tokens of four supervised."""

    def __init__(self, tokens: int, size: int, vocabulary: int, boundaries: int) -> None:
        self.tokens, self.size = tokens, size * boundaries
        self.vocabulary = vocabulary

    def batch(self, index: int) -> PackedBatch:
        """See `train.loop.BatchSource`."""
        places = torch.arange(self.tokens) % ROW
        return PackedBatch(
            torch.randint(0, self.vocabulary, (self.tokens,)),
            places % 512 >= 128,
            torch.randn(self.tokens, self.size).bfloat16(),
            torch.arange(0, self.tokens + 1, ROW, dtype=torch.int32),
            places,
            ("row",),
        )

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """See `train.loop.BatchSource`."""
        return {"cursor": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """See `train.loop.BatchSource`."""
        return int(state["cursor"])


def smollm2() -> TargetShape:
    """The shapes of SmolLM2-135M."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=30,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    return TargetShape.counted(config, "this file")


def forecast(case: Case) -> dict[str, float]:
    """Bytes above the process's own, and operations of a token."""
    shape, train, head = smollm2(), case.train(), HeadConfig(case.kind)
    step = trace_step(head, shape.config, train, row_tokens=ROW)
    memory = facts.training_memory(
        train,
        shape,
        step,
        ranks=1,
        gpu=False,
        boundaries=4 if case.kind == "eagle3" else 1,
        heldout=0,
    )
    work = facts.train_flops(train, shape, step, 0.75) / train.max_steps
    parts = {name: size for name, size in memory.parts.items() if name != "process"}
    return {"bytes": sum(parts.values()), "flops": work / case.tokens, **parts}


def measure(case: Case) -> dict[str, float]:
    """Peak bytes above those resident before anything was made, and tokens a second."""
    shape, train = smollm2(), case.train()
    device = torch.device("cpu")
    start(device)
    _warm_up()
    before = _resident()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    table = torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype).normal_(std=0.1)
    norm = RMSNorm(shape.hidden_size, 1e-5)
    norm.weight = nn.Parameter(torch.ones(shape.hidden_size, dtype=dtype))
    trunk = Trunk(table, norm, table)
    head = head_class(case.kind)(HeadConfig(case.kind), shape.config, case.vocabulary)
    boundaries = tuple(sorted({*head.boundaries, shape.num_layers}))
    ids = None if case.vocabulary is None else torch.arange(case.vocabulary)
    plan = Batches(case.tokens, shape.hidden_size, shape.vocab_size, len(boundaries))
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            head,
            trunk,
            plan,
            train,
            Path(out),
            boundaries=boundaries,
            draft_ids=ids,
            progress=False,
        )
        began = time.perf_counter()
        trainer.run()
        seconds = time.perf_counter() - began
        rates = [line["tokens_per_second"] for line in read_metrics(Path(out) / "metrics.jsonl")]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": peak - before, "process": before, "rate": max(rates), "seconds": seconds}


def _warm_up() -> None:
    """What torch makes at the first backward pass and matrix product belongs to the process."""
    weight = torch.ones(64, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (weight @ weight).sum().backward()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measured(case: Case) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "draftsmith.scripts.bench.plan", "--call"]
    done = subprocess.run(
        [*command, json.dumps(asdict(case))], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    """Measure every case, print a table, and write it as JSON where a path is given."""
    if arguments[:1] == ["--call"]:
        print(json.dumps(measure(Case(**json.loads(arguments[1])))))
        return 0
    print(f"MiB above the process; {torch.get_num_threads()} threads, torch {torch.__version__}")
    names = ("tokens", "vocabulary", "K", "stage", "", "head", "forecast", "measured", "ratio")
    print(" ".join(f"{name:>10}" for name in (*names, "GFLOP/s")), flush=True)
    results = []
    for case in CASES:
        expected, found = forecast(case), measured(case)
        ratio = expected["bytes"] / found["bytes"]
        speed = expected["flops"] * found["rate"] / 1e9
        cells = (*asdict(case).values(),)
        words = [str("all" if cell is None else cell) for cell in cells]
        sizes = [f"{one['bytes'] / 2**20:.0f}" for one in (expected, found)]
        print(
            " ".join(f"{w:>10}" for w in (*words, *sizes, f"{ratio:.2f}", f"{speed:.0f}")),
            flush=True,
        )
        results.append({**asdict(case), "forecast": expected, "measured": found, "ratio": ratio})
    if arguments:
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        ratios = [
            {
                "what": f"bytes foreseen, {one['kind']}, {one['tokens']} tokens, K {one['steps']}, "
                f"stage {one['stage']}, {one['precision']}",
                "ratio": one["ratio"],
                "against": "measured",
            }
            for one in results
        ]
        atomic_write_json(Path(arguments[0]), machine | {"cases": results, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
