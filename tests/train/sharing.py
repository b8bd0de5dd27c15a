"""Four gloo ranks that train shares of the same batches; run by test_sequence_parallel.py in a
process of its own, which imports everything once and then forks the ranks.

python sharing.py '{"target": FOLDER, "out": FOLDER, "ranks": 4}'
    out/FAMILY-S.safetensors: loss and gradients of every family in float64, summed over a group of
    S; out/run-S: a trained run
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, DeepseekV3Config, MistralConfig

from draftsmith.data.batches import PackedBatch
from draftsmith.kernels.losses import LossConfig
from draftsmith.models.heads import Head, HeadConfig, MTPHead, NormConfig, build_head
from draftsmith.models.trunk import Trunk
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer
from draftsmith.train.objective import Objective
from draftsmith.train.ranks import start, sum_over_ranks
from draftsmith.train.sequence import SequenceGroup
from draftsmith.train.validation import Validator

WEIGHTS = [1.0, 0.5, 0.25]
FAMILIES = {
    "mtp": HeadConfig(),
    "mtp-modules": HeadConfig(modules=2),
    "eagle3": HeadConfig("eagle3", boundaries=(0, 1)),
    "eagle3-layers": HeadConfig("eagle3", num_layers=2, boundaries=(0, 1)),
    "medusa": HeadConfig("medusa", modules=3, norms=NormConfig(False, False, False, False)),
}
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}
SHAPES = {
    "window": MistralConfig(
        num_attention_heads=9, num_key_value_heads=3, head_dim=8, sliding_window=6, **_SHAPE
    ),
    "latent": DeepseekV3Config(
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=1,
        **_SHAPE,
    ),
}
LOSSES = {"states": "smooth-l1+0.1*kl", "chance": "lk-alpha"}
CASES = (*FAMILIES, *SHAPES, *LOSSES)
LENGTHS = ((1, 13), (2, 1), (3, 22), (4, 3))  # 39 rows: pieces of 5 or 10, and one row of filling
RUNS = {4: 0, 2: 2}  # ranks a group -> ZeRO stage


def the_toy() -> ModuleType:
    """The module toy.py beside this file."""
    spec = importlib.util.spec_from_file_location("toy", Path(__file__).with_name("toy.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case(name: str, target: Path) -> tuple[Head, PackedBatch, tuple[int, ...]]:
    """A head in float64 away from its start, a batch, and the boundaries of its states."""
    torch.manual_seed(3)
    if name in FAMILIES:
        head = build_head(FAMILIES[name], target, 2.0)
    else:
        shape = SHAPES.get(name) or AutoConfig.from_pretrained(target)
        head = MTPHead(HeadConfig(), shape)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    boundaries = (0, 1, 2) if head.kind == "eagle3" else (2,)
    toy = the_toy()
    rows = [toy.random_row(seed, n, 64 * len(boundaries)) for seed, n in LENGTHS]
    wide = [(tokens, mask, hidden.double()) for tokens, mask, hidden in rows]
    return head.double(), toy.packed(wide), boundaries


def loss_and_gradients(
    name: str, target: Path, group: SequenceGroup | None = None
) -> dict[str, Tensor]:
    """Of this process alone, or summed over a group."""
    head, batch, boundaries = case(name, target)
    options: dict[str, Any] = {} if group is None else {"unroll": group.unroll}
    if name in LOSSES:
        options["loss"] = LossConfig(LOSSES[name])
    objective = Objective(
        Trunk.load(target, torch.float64),
        WEIGHTS,
        boundaries=boundaries,
        dtype=torch.float64,
        **options,
    )
    loss, stats = objective(head, batch if group is None else group.share(batch), 3)
    named = dict(head.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    found = {"loss": loss.detach().clone(), "rows": stats.rows.double()}
    found |= {name: grad.contiguous() for name, grad in zip(named, grads, strict=True)}
    if group is not None:
        for value in found.values():
            dist.all_reduce(value, group=group.handle)
    return found


def train(target: Path, out: Path, **config: Any) -> None:
    """Four steps on noise, and a validation of three held-out batches at the end."""
    toy = the_toy()
    cfg = TrainConfig(max_steps=4, log_every=1, precision="fp32", checkpoint_every=0, **config)
    trunk = Trunk.load(target, torch.float32)
    trainer = Trainer(
        toy.make_head(target),
        trunk,
        toy.NoisePlan(),
        cfg,
        out,
        boundaries=(2,),
        draft_ids=torch.arange(0, 512, 3),
        progress=False,
    )
    held_out = [toy.packed([toy.random_row(90 + n, 12 + 9 * n)]) for n in range(4)]
    trainer.validate = Validator(trainer.objective, held_out, sequence=trainer.sequence)
    trainer.run()


def _refusal(size: int) -> str:
    try:
        SequenceGroup(size, 3)
    except ValueError as error:
        return str(error)
    return ""


def _rank(target: Path, out: Path) -> None:
    torch.set_num_threads(1)
    start(torch.device("cpu"))
    number = dist.get_rank()
    for size in (2, 4):
        group = SequenceGroup(size, 3)
        for name in CASES:
            found = loss_and_gradients(name, target, group)
            if group.index == 0:
                save_file(found, out / f"{name}-{size}-{group.number}.safetensors")
    for size, stage in RUNS.items():
        train(target, out / f"run-{size}", zero_stage=stage, sequence_parallel=size)
    refused = torch.tensor(float("does not divide the 4 training ranks" in _refusal(3)))
    assert float(sum_over_ranks(refused)) == 4
    if number == 0:
        (out / "done").touch()
    dist.barrier()


def main(spec: dict[str, Any]) -> None:
    from draftsmith.train.ranks import import_deepspeed

    import_deepspeed(torch.device("cpu"))  # once here, instead of once in every rank
    children = []
    for number in range(spec["ranks"]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
                _rank(Path(spec["target"]), Path(spec["out"]))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    assert not any(statuses), statuses


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
