"""Speed and memory of a training step against the form one would write first in plain PyTorch.

Both train the same head (the sizes of a 135M target: H = 576, 9 query heads, 3 key-value heads) for
K = 3 steps on one row of random states, three tokens of four supervised, bf16 autocast, AdamW. The
plain form materialises the mask of every step for scaled_dot_product_attention, the logits of every
row and step, and the teacher's distribution.

    tokens/s     both forms in one process, taking turns; the ratio is that of the medians
    peak memory  each case in a fresh process: ru_maxrss after two steps, less what was resident
    before the first

python -m draftsmith.scripts.bench.train [OUT.json]
python -m draftsmith.scripts.bench.train --call '["measure_memory", FORM, LENGTH, VOCABULARY]'
    one peak alone, MiB; FORM is ours, plain, or checkpointed (train.checkpoint_activations)
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from ...data.batches import PackedBatch
from ...models.files import atomic_write_json
from ...models.heads.config import HeadConfig
from ...models.heads.mtp import MTPHead
from ...models.norm import RMSNorm
from ...models.trunk import Trunk
from ...train.objective import Objective
from ...train.unroll import UnrollContext, unroll

STEPS = 3
VOCABULARY = 49152
DRAFT_VOCABULARY = 8192
LENGTH = 2048
REPEATS = 3
FORMS = ("ours", "plain")


def sdpa_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    chain_k: Sequence[Tensor],
    chain_v: Sequence[Tensor],
    starts: Sequence[int],
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`kernels.ttt_attention` for one document, by a boolean mask [N, (k+1)N] and PyTorch's
    attention."""
    assert window is None and softcap is None and len(starts) == 2
    num_tokens = q.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    mask = torch.cat([causal, torch.eye(num_tokens, dtype=torch.bool).repeat(1, len(chain_k))], 1)
    keys, values = torch.cat([k0, *chain_k], 1), torch.cat([v0, *chain_v], 1)
    return F.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=True
    )[0]


def plain_loss(objective: Objective, head: MTPHead, batch: PackedBatch) -> Tensor:
    """`Objective` with every logit of every row written out."""
    trunk, ids = objective.trunk, objective.draft_ids
    context = UnrollContext(batch.starts, sdpa_attention)
    normed = trunk.norm(batch.hidden)
    states = unroll(head, trunk, batch, STEPS, context=context)
    with torch.no_grad():
        teacher = trunk.logits(normed, ids).float().softmax(-1)  # [N, V]
    loss = states.new_zeros((), dtype=torch.float32)
    for step, weight in enumerate(objective.weights(batch, STEPS)):
        log_q = trunk.logits(states[step], ids).float().log_softmax(-1)  # [N, V]
        loss = loss - (weight[:, None] * teacher.roll(-(1 + step), 0) * log_q).sum()
    return loss


class Case:
    """A head, its optimiser, and one batch of one row."""

    def __init__(self, length: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_attention_heads=9,
            num_key_value_heads=3,
            num_hidden_layers=1,
            vocab_size=VOCABULARY,
            max_position_embeddings=8192,
        )
        self.head = MTPHead(HeadConfig(), config)
        table = torch.randn(VOCABULARY, 576).mul_(0.1).bfloat16()
        trunk = Trunk(table, RMSNorm(576, 1e-5).bfloat16(), table)
        ids = None if vocabulary == VOCABULARY else torch.arange(vocabulary)
        self.objective = Objective(
            trunk, [0.8**k for k in range(STEPS)], draft_ids=ids, dtype=torch.bfloat16
        )
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-4)
        self.batch = PackedBatch(
            torch.randint(0, VOCABULARY, (length,)),
            torch.arange(length) % 512 >= 128,
            torch.randn(length, 576).bfloat16(),
            torch.tensor([0, length], dtype=torch.int32),
            torch.arange(length),
            ("row",),
        )

    def step(self, form: str) -> float:
        """One optimiser step; returns the loss."""
        with torch.autocast("cpu", torch.bfloat16):
            if form == "plain":
                loss = plain_loss(self.objective, self.head, self.batch)
            else:
                self.objective.recompute = form == "checkpointed"
                loss, _ = self.objective(self.head, self.batch, STEPS)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def measure_speed(length: int, vocabulary: int) -> dict[str, float]:
    """Tokens per second of both forms, and how far their first losses lie apart (relative)."""
    case = Case(length, vocabulary)
    first = {form: Case(length, vocabulary).step(form) for form in FORMS}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(REPEATS):
        for form in FORMS:
            began = time.perf_counter()
            case.step(form)
            seconds[form].append(time.perf_counter() - began)
    speed = {form: length / statistics.median(seconds[form]) for form in FORMS}
    return speed | {"loss_difference": abs(first["ours"] / first["plain"] - 1)}


def measure_memory(form: str, length: int, vocabulary: int) -> float:
    """Peak growth of the resident set over two steps, MiB (Linux counts ru_maxrss in KiB)."""
    case = Case(length, vocabulary)
    # What is resident now: ru_maxrss would be the peak of building the case, which hides growth.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    for _ in range(2):
        case.step(form)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - resident / 2**20


def _in_fresh_process(function: Callable, *arguments: object):
    call = json.dumps([function.__name__, *arguments])
    command = [sys.executable, "-m", "draftsmith.scripts.bench.train", "--call", call]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    """Measure everything, print a table, and write it as JSON where a path is given."""
    if arguments[:1] == ["--call"]:
        name, *rest = json.loads(arguments[1])
        function = {"measure_speed": measure_speed, "measure_memory": measure_memory}[name]
        print(json.dumps(function(*rest)))
        return 0
    results = []
    title = f"one training step, K = {STEPS}, {torch.get_num_threads()} threads"
    print(f"{title}, torch {torch.__version__}; memory in MiB")
    lengths = (LENGTH, 2 * LENGTH)
    columns = "".join(f"{f'at {length}':>9}" for length in lengths)
    print(f"{'vocabulary':>10}  {'form':<6}{'tokens/s':>9}{columns}{'growth':>9}")
    for vocabulary in (DRAFT_VOCABULARY, VOCABULARY):
        speed = _in_fresh_process(measure_speed, LENGTH, vocabulary)
        memory = [
            _in_fresh_process(measure_memory, "ours", length, vocabulary) for length in lengths
        ]
        plain = _in_fresh_process(measure_memory, "plain", LENGTH, vocabulary)
        growth = memory[1] / memory[0]
        figures = f"{speed['ours']:>9.0f}{memory[0]:>9.0f}{memory[1]:>9.0f}{growth:>8.2f}x"
        print(f"{vocabulary:>10}  {'ours':<6}{figures}")
        print(f"{'':>10}  {'plain':<6}{speed['plain']:>9.0f}{plain:>9.0f}")
        ratio = speed["ours"] / speed["plain"]
        saved = plain / memory[0]
        print(
            f"{'':>10}  {ratio:.2f}x the tokens/s, 1/{saved:.1f} of the memory; "
            f"losses differ by {speed['loss_difference']:.0e}"
        )
        results.append(
            {
                "vocabulary": vocabulary,
                "length": LENGTH,
                "tokens_per_second": {form: speed[form] for form in FORMS},
                "speed_ratio": ratio,
                "peak_mib": {"ours": dict(zip(map(str, lengths), memory, strict=True))}
                | {"plain": {str(LENGTH): plain}},
                "memory_growth": growth,
                "loss_difference": speed["loss_difference"],
            }
        )
    if arguments:
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        atomic_write_json(Path(arguments[0]), machine | {"steps": STEPS, "cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
