"""An unroll in chunks of rows gives what an unroll of all rows gives, and keeps less."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from draftsmith.data.batches import PackedBatch
from draftsmith.kernels import ttt_attention
from draftsmith.models.heads import Head, HeadConfig, NormConfig, build_head
from draftsmith.models.trunk import Trunk
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import read_metrics
from draftsmith.train.objective import Objective
from draftsmith.train.row_chunks import unroll_in_chunks
from draftsmith.train.unroll import unroll

WEIGHTS = [1.0, 0.5, 0.25]
FAMILIES = {
    "mtp": HeadConfig(),
    "mtp of 2 modules": HeadConfig(modules=2),
    "eagle": HeadConfig("eagle", norms=NormConfig(False, False, False, False)),
    "eagle3 of 2 layers": HeadConfig("eagle3", num_layers=2, boundaries=(0, 1)),
    "medusa": HeadConfig("medusa", modules=3, norms=NormConfig(False, False, False, False)),
}
LENGTHS = ((1, 13), (2, 1), (3, 22), (4, 5))


def _loss(
    head: Head, trunk: Trunk, batch: PackedBatch, rows: int | None
) -> tuple[Tensor, list[Tensor]]:
    run = unroll if rows is None else partial(unroll_in_chunks, rows=rows)
    boundaries = tuple(sorted({*head.boundaries, 2}))
    objective = Objective(trunk, WEIGHTS, boundaries=boundaries, dtype=trunk.dtype, unroll=run)
    loss, _ = objective(head, batch, 3)
    return loss.detach(), list(torch.autograd.grad(loss, list(head.parameters())))


@pytest.mark.parametrize("rows", [5, 13, 100])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_all_rows_at_once(
    target: Path, toy: ModuleType, name: str, rows: int
) -> None:
    """Every family in float64, documents that straddle chunks and chunks that hold several."""
    head = build_head(FAMILIES[name], target, 2.0).double()
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter += 0.05 * noise
    width = 64 * len({*head.boundaries, 2})
    noise = [toy.random_row(seed, n, width) for seed, n in LENGTHS]
    batch = toy.packed([(tokens, mask, hidden.double()) for tokens, mask, hidden in noise])
    trunk = Trunk.load(target, torch.float64)
    whole, right = _loss(head, trunk, batch, None)
    ours, grads = _loss(head, trunk, batch, rows)
    torch.testing.assert_close(ours, whole, rtol=1e-12, atol=0)
    for a, b in zip(grads, right, strict=True):
        assert float(b.abs().max()) > 0
        assert float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


def test_what_is_kept_for_the_backward_pass_is_not_the_activations(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """Autograd keeps for all rows what the loss needs, [K, N, H], and step-0 keys and values; an
    unroll of all rows at once keeps several times that."""
    head = toy.make_head(target)
    batch = toy.packed([toy.random_row(1, 256)])

    def kept(rows: int | None) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run = unroll if rows is None else partial(unroll_in_chunks, rows=rows)
            drafted = run(head, trunk, batch, 3)
        assert drafted.requires_grad
        return sum(storages.values())

    assert kept(16) < 256 * 64 * 4 < 0.05 * kept(None)


def test_bf16_sums_of_many_chunks_stay_exact_enough(
    target: Path, toy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that 16 chunks look at collect their gradient in fp32: under autocast the chunked
    gradients are as near to those of fp64 as the gradients of one piece are, both in the form of
    attention that chunks have."""
    monkeypatch.setattr(ttt_attention, "flash_serves", lambda *_: False)
    head = toy.make_head(target)
    noise = toy.random_row(1, 160)
    exact = _loss(
        toy.make_head(target).double(),
        Trunk.load(target, torch.float64),
        toy.packed([(noise[0], noise[1], noise[2].double())]),
        None,
    )[1]
    errors = []
    for rows in (None, 10):
        with torch.autocast("cpu", torch.bfloat16):
            grads = _loss(head, Trunk.load(target, torch.bfloat16), toy.packed([noise]), rows)[1]
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(grads, exact, strict=True)])
    for whole, chunked in zip(*errors, strict=True):
        assert chunked < 1.3 * whole + 1e-3


def test_a_run_in_chunks_follows_a_run_without(
    target: Path, trunk: Trunk, toy: ModuleType, tmp_path: Path
) -> None:
    """The trainer with train.chunk_tokens: loss and gradient norm of every step within 1e-5."""
    curves = []
    for rows in (None, 7):
        cfg = TrainConfig(max_steps=3, log_every=1, precision="fp32", chunk_tokens=rows)
        out = tmp_path / str(rows)
        Trainer(toy.make_head(target), trunk, toy.NoisePlan(), cfg, out, progress=False).run()
        curves.append([(r["loss"], r["grad_norm"]) for r in read_metrics(out / "metrics.jsonl")])
    for ours, right in zip(curves[1], curves[0], strict=True):
        assert ours == pytest.approx(right, rel=1e-5)


def test_settings_that_cannot_be(target: Path, trunk: Trunk, toy: ModuleType) -> None:
    """No rows in a chunk; chunks, which run in order, with ranks that run at once, or with
    weights that all ranks gather at once; no step."""
    with pytest.raises(ValueError, match="chunk_tokens=0: must be at least 1"):
        TrainConfig(chunk_tokens=0)
    with pytest.raises(ValueError, match=r"chunk_tokens=64 with train\.zero_stage=3"):
        TrainConfig(chunk_tokens=64, zero_stage=3)
    with pytest.raises(ValueError, match="chunk_tokens=64 with train.sequence_parallel=2"):
        TrainConfig(chunk_tokens=64, sequence_parallel=2)
    batch = toy.packed([toy.random_row(1, 5)])
    with pytest.raises(ValueError, match="steps 0"):
        unroll_in_chunks(toy.make_head(target), trunk, batch, 0, rows=4)
