"""A training step of an EAGLE-3 head here against other trainers' own code, on the same rows.

K = 3 steps on one row of random states, every token supervised, the shapes of SmolLM2-135M: fused
boundaries 2, 15 and 27, bf16 autocast over fp32 weights, gradient clipping, AdamW. All start from
the same weights. The target itself is not run. What each computes in its step:

    draftsmith   kl; the teacher over the draft vocabulary, a chunk at a time; argmax agreement,
    expected acceptance
    speculators  kl_div (the form that needs no GPU); the teacher over the draft vocabulary, whole;
    argmax accuracy. Published with a frozen lm_head, as here by default
    EAGLE        soft cross-entropy where the teacher's argmax is a draft word; the teacher over all
    words, whole; argmax accuracy. Published with a trained lm_head (lm_head=trained)

    tokens/s     each in a process of its own, taking turns; medians of REPEATS steps, by the clock
    and (cpu-s) by the processor's time, which other processes hardly change (with one thread: those
    of a pool that wait burn it too)
    peak memory  of the same processes: ru_maxrss after all steps, less what was resident before
    the first

python -m draftsmith.scripts.bench.peers [OUT.json] [peers=PYTHON] [eagle=FOLDER] …
    further settings: DEFAULTS
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from ...data.batches import PackedBatch
from ...models.files import atomic_write_json
from ...models.heads.config import HeadConfig
from ...models.heads.eagle3 import Eagle3Head
from ...models.norm import RMSNorm
from ...models.trunk import Trunk
from ...train.objective import Objective
from ._peer_steps import serve

STEPS = 3
WARM_UP = 2
REPEATS = 3
TARGET = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
DEFAULTS = {
    "peers": "",  # the interpreter that has them
    "eagle": "",  # a checkout of SafeAILab/EAGLE
    "only": "speculators,eagle",
    "lengths": "2048,4096",
    "vocabularies": "8192,49152",
    "lm_head": "frozen",  # as speculators has it; trained: everyone's is
    "checkpointed": "false",  # ours and EAGLE's: activations are computed again in backward
}
ENVIRONMENT = """\
only draftsmith is measured: peers=PYTHON names the interpreter that has the others. To make one:
    python -m venv peers
    peers/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    peers/bin/pip install speculators==0.9.0 transformers==5.19.0
and for eagle=FOLDER: git clone https://github.com/SafeAILab/EAGLE FOLDER (commit cb7e084)
"""


def make_rows(path: Path, length: int, vocabulary: int) -> None:
    """One row of random tokens and states, the target's frozen parts and the head's first weights,
    for everyone to read."""
    torch.manual_seed(0)
    size, tokens = TARGET["hidden_size"], TARGET["vocab_size"]
    table = torch.randn(tokens, size).mul_(0.1).bfloat16()
    head = Eagle3Head(HeadConfig(kind="eagle3"), LlamaConfig(**TARGET), vocabulary)
    weights = {f"head.{name}": value.detach() for name, value in head.named_parameters()}
    weights["head.lm_head"] = table[:vocabulary].float()
    rows = {
        "tokens": torch.randint(0, tokens, (length,)),
        "fused": torch.randn(length, 3 * size).bfloat16(),
        "last": torch.randn(length, size).bfloat16(),
        "table": table,
        "norm": torch.ones(size),
    }
    save_file(rows | weights, path)


def ours(rows: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Serve steps of this package's trainer: `Objective` with its default loss, AdamW."""
    config, vocabulary = LlamaConfig(**settings["target"]), settings["vocabulary"]
    head = Eagle3Head(HeadConfig(kind="eagle3"), config, vocabulary)
    head.load_state_dict(
        {n.removeprefix("head."): value for n, value in rows.items() if n.startswith("head.")}
    )
    assert head.lm_head is not None
    head.lm_head.requires_grad_(settings["train_lm_head"])
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps).bfloat16()
    trunk = Trunk(rows["table"], norm, rows["table"])
    ids = None if vocabulary == config.vocab_size else torch.arange(vocabulary)
    length = len(rows["tokens"])
    objective = Objective(
        trunk,
        [0.8**k for k in range(settings["steps"])],
        boundaries=(2, 15, 27, 30),
        draft_ids=ids,
        dtype=torch.bfloat16,
    )
    objective.recompute = settings["checkpointed"]
    batch = PackedBatch(
        rows["tokens"],
        torch.ones(length, dtype=torch.bool),
        torch.cat([rows["fused"], rows["last"]], 1),
        torch.tensor([0, length], dtype=torch.int32),
        torch.arange(length),
        ("row",),
    )

    def forward() -> tuple[Tensor, dict[str, Any]]:
        loss, stats = objective(head, batch, settings["steps"])
        weights = objective.step_weights * stats.rows
        figures = {"kl": stats.kl / stats.rows, "cross": stats.cross / weights}
        return loss / length, {name: value.tolist() for name, value in figures.items()}

    learnt = [p for p in head.parameters() if p.requires_grad]
    serve(head, forward, torch.optim.AdamW(learnt, lr=1e-4), {"form": "draftsmith"})


class Runner:
    """A process that does steps when it is told to."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()
        self.steps: list[dict[str, Any]] = []

    def step(self) -> None:
        """One optimiser step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.steps.append(self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")

    def end(self) -> None:
        """Stop it, whatever it does."""
        self.process.kill()
        self.process.wait()

    def result(self, length: int) -> dict[str, Any]:
        """What it measured on a row of `length` tokens."""
        seconds = [step["seconds"] for step in self.steps[WARM_UP:]]
        worked = [step["cpu_seconds"] for step in self.steps[WARM_UP:]]
        first = {name: self.steps[0].get(name) for name in ("kl", "cross")}
        return self.about | {
            "tokens_per_second": length / statistics.median(seconds),
            "tokens_per_cpu_second": length / statistics.median(worked),
            "seconds": seconds,
            "cpu_seconds": worked,
            "peak_mib": self.steps[-1]["mib"],
            "first": first,
        }


def compare(
    length: int, peers: dict[str, str], settings: dict[str, Any], *, folder: Path
) -> dict[str, dict[str, Any]]:
    """Measure ours and the peers (name -> interpreter) on one row, step by step in turn."""
    rows, given = folder / "rows.safetensors", json.dumps(settings)
    make_rows(rows, length, settings["vocabulary"])
    here = [sys.executable, "-m", "draftsmith.scripts.bench.peers", "--ours", str(rows), given]
    script = str(Path(__file__).with_name("_peer_steps.py"))
    runners: dict[str, Runner] = {}
    try:
        runners["ours"] = Runner(here)
        for name, python in peers.items():
            runners[name] = Runner([python, "-P", script, name, str(rows), given])
        for _ in range(WARM_UP + REPEATS):
            for runner in runners.values():
                runner.step()
    finally:
        for runner in runners.values():
            runner.end()
    return {name: runner.result(length) for name, runner in runners.items()}


def main(arguments: list[str]) -> int:
    """Measure everything, print a table, and write it as JSON where a path is given."""
    if arguments[:1] == ["--ours"]:
        ours(load_file(arguments[1]), json.loads(arguments[2]))
        return 0
    named = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    outputs = [argument for argument in arguments if "=" not in argument]
    unknown = [name for name in named if name not in DEFAULTS]
    if unknown or len(outputs) > 1 or ("eagle" in named and "peers" not in named):
        print(
            f"{' '.join(arguments)}: give at most one OUT.json, settings among "
            f"{', '.join(DEFAULTS)}, and eagle=FOLDER only beside peers=PYTHON",
            file=sys.stderr,
        )
        return 2
    given = DEFAULTS | named
    peers = {name: given["peers"] for name in given["only"].split(",") if given["peers"]}
    if not given["eagle"]:
        peers.pop("eagle", None)
    if not peers:
        print(ENVIRONMENT)
    results = []
    print(f"one training step of an EAGLE-3 head, K = {STEPS}; memory in MiB")
    head = (
        f"{'tokens':>7}{'draft words':>12}  {'form':<18}{'trained':>12}{'tokens/s':>9}{'ours':>7}"
    )
    print(f"{head}{'/cpu-s':>8}{'ours':>7}{'memory':>8}{'ours':>7}")
    for vocabulary in map(int, given["vocabularies"].split(",")):
        for length in map(int, given["lengths"].split(",")):
            settings = {
                "steps": STEPS,
                "vocabulary": vocabulary,
                "target": TARGET,
                "train_lm_head": given["lm_head"] == "trained",
                "checkpointed": given["checkpointed"] == "true",
                "eagle": given["eagle"],
            }
            with tempfile.TemporaryDirectory() as folder:
                measured = compare(length, peers, settings, folder=Path(folder))
            for form in measured.values():
                print(f"{length:>7}{vocabulary:>12}  {_row(form, measured['ours'])}", flush=True)
            results.append({"length": length, "settings": settings, "measured": measured})
    if outputs:
        atomic_write_json(Path(outputs[0]), {"cases": results})
    return 0


def _row(form: dict[str, Any], own: dict[str, Any]) -> str:
    """Figures of one form, each with how many times better ours is."""
    names = ("tokens_per_second", "tokens_per_cpu_second")
    speed, work = (form[name] for name in names)
    faster, leaner = (own[name] / form[name] for name in names)
    smaller = form["peak_mib"] / own["peak_mib"]
    return (
        f"{form['form']:<18}{form['trained']:>12,}{speed:>9.0f}{faster:>6.2f}x{work:>8.0f}"
        f"{leaner:>6.2f}x{form['peak_mib']:>8.0f}{smaller:>6.2f}x"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
