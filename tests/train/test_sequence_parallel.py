"""Ranks that share a batch train what one rank trains of it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data.batch_slice import slice_batch
from draftsmith.kernels.shift import shift_tokens
from draftsmith.models.trunk import Trunk
from draftsmith.train.objective import Objective
from draftsmith.train.sequence import SequenceGroup
from draftsmith.train.validation import Validator

SUMS = ("loss", "agreement", "kl", "expected_acceptance")
FIGURES = (
    "objective",
    "conditional_agreement",
    "joint_agreement",
    "rows",
    "chains",
    "mass_outside_draft_vocabulary",
)
_PROGRAM = Path(__file__).with_name("sharing.py")


@pytest.fixture(scope="module")
def sharing() -> ModuleType:
    """The module sharing.py."""
    spec = importlib.util.spec_from_file_location("sharing", _PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def launched(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks found; see sharing.py."""
    out = tmp_path_factory.mktemp("sharing")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env |= {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env |= {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    spec = json.dumps({"target": str(target), "out": str(out), "ranks": 4})
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), spec], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (out / "done").exists()
    return out


@pytest.mark.slow
def test_loss_and_every_gradient_are_those_of_one_rank(
    launched: Path, sharing: ModuleType, target: Path
) -> None:
    """Every family, 9 query heads on 3, a sliding window, latent attention, losses of states and of
    samples, groups of 2 and of 4, documents that straddle pieces, in float64: 1e-10 of the largest
    entry; each row is counted once."""
    for name in sharing.CASES:
        alone = sharing.loss_and_gradients(name, target)
        assert int(alone["rows"][2]) > 0
        for size, number in ((2, 0), (2, 1), (4, 0)):
            shared = load_file(launched / f"{name}-{size}-{number}.safetensors")
            assert set(shared) == set(alone)
            for tensor, right in alone.items():
                far = float((shared[tensor] - right).abs().max())
                scale = float(right.abs().max())
                assert scale > 0, (name, tensor)
                assert far <= 1e-10 * max(1.0, scale), (name, size, tensor, far)


def _lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 2])
def test_a_run_of_groups_follows_a_run_of_one(
    launched: Path, sharing: ModuleType, target: Path, tmp_path: Path, size: int
) -> None:
    """One group of four at ZeRO 0, two groups of two at ZeRO 2, against one rank that accumulates
    as many batches: loss, gradient norm, tokens and supervised rows of every step, and the figures
    of the validation."""
    sharing.train(target, tmp_path, accumulation=4 // size)
    ours, alone = _lines(launched / f"run-{size}"), _lines(tmp_path)
    assert [line["kind"] for line in ours] == [*["train"] * 4, "validation"]
    for line, right in zip(ours, alone, strict=True):
        for name in (*SUMS, *(FIGURES if line["kind"] == "validation" else ("grad_norm",))):
            assert line[name] == pytest.approx(right[name], rel=1e-5, abs=1e-7), name
        for name in ("tokens", "supervised", "lr"):
            assert line.get(name) == right.get(name), name


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("lengths", [(13, 1, 22, 4), (3,), (1, 1), (40,)])
def test_shares_hold_every_row_once_and_what_it_learns_from(
    toy: ModuleType, size: int, lengths: tuple[int, ...]
) -> None:
    """Own rows of all shares are the batch's rows, equally many for each rank; tokens that a row
    and its chain read, and what they are judged by, are those of the whole batch."""
    steps = 3
    batch = toy.packed([toy.random_row(n, length) for n, length in enumerate(lengths)])
    total = int(batch.starts[-1])
    whole = batch.chains(steps)
    shares = [slice_batch(batch, index, size, steps) for index in range(size)]
    assert len({int(share.own.sum()) for share in shares}) == 1
    assert sum(share.num_tokens for share in shares) == total
    assert sum(int(share.chains(steps).sum()) for share in shares) == int(whole.sum())
    taken = []
    for share in shares:
        rows = torch.cat([torch.arange(begin, stop) for begin, _, stop in share.pieces])
        assert share.borders[-1] % (2 * size) == 0
        assert int(share.starts[-1]) == len(rows) == len(share.hidden) == len(share.tokens)
        real = share.own & (rows < total)
        taken += rows[real].tolist()
        at = rows[real]
        assert torch.equal(share.hidden[real], batch.hidden[at])
        assert torch.equal(share.positions[real], batch.positions[at])
        assert torch.equal(share.chains(steps)[:, real], whole[:, at])
        for offset in range(1, steps + 2):
            ours = shift_tokens(share.tokens, share.starts, offset, fill=-1)[real]
            assert torch.equal(ours, shift_tokens(batch.tokens, batch.starts, offset, fill=-1)[at])
    assert sorted(taken) == list(range(total))


@pytest.mark.parametrize("size", [2, 4])
def test_a_validation_of_shares_counts_what_one_of_the_whole_counts(
    sharing: ModuleType, target: Path, size: int
) -> None:
    """Every sum of `Validator`, of a head that looks at no other row; a teacher row behind a piece,
    which chains of two shares need, counts once."""
    head, batch, _ = sharing.case("medusa", target)
    trunk, ids = Trunk.load(target, torch.float64), torch.arange(0, 512, 3)
    objective = Objective(trunk, sharing.WEIGHTS, draft_ids=ids, dtype=torch.float64)
    validator = Validator(objective, [batch])
    with torch.no_grad():
        whole = validator._measure(head, batch, 3)
        shares = [slice_batch(batch, index, size, 3) for index in range(size)]
        parts = [validator._measure(head, share, 3) for share in shares]
    assert float(whole[1][0]) > 0
    for right, found in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(found).sum(0), right, rtol=1e-10, atol=1e-10)


def test_a_group_that_the_ranks_do_not_fill_is_refused() -> None:
    """One rank is no group of two."""
    with pytest.raises(ValueError, match="sequence_parallel=2 does not divide the 1 training"):
        SequenceGroup(2, 3)
