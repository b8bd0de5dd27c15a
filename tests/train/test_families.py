"""Every head family against brute force: dense masks, all logits, one chain and step at a time."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from draftsmith.data.batches import PackedBatch
from draftsmith.kernels.ttt_attention import ttt_attention_dense
from draftsmith.models.heads import Head, HeadConfig, NormConfig, build_head
from draftsmith.models.trunk import Trunk
from draftsmith.train.objective import Objective
from draftsmith.train.unroll import UnrollContext, split_states, unroll

WEIGHTS = [1.0, 0.5, 0.25]
NO_NORMS = NormConfig(False, False, False, False)
FAMILIES = {
    "mtp": HeadConfig(),
    "mtp of 2 modules": HeadConfig(modules=2),
    "eagle": HeadConfig("eagle", norms=NO_NORMS),
    "eagle3": HeadConfig("eagle3", boundaries=(0, 1, 2)),
    "eagle3 of 2 layers": HeadConfig(
        "eagle3", num_layers=2, boundaries=(0, 1), norm_before_residual=True, norm_output=True
    ),
    "medusa": HeadConfig("medusa", modules=3, norms=NO_NORMS),
    "medusa, own lm_heads": HeadConfig("medusa", modules=3, own_lm_heads=True, norms=NO_NORMS),
}
IDS = torch.arange(0, 512, 3)


def make(name: str, target: Path, ids: Tensor | None) -> Head:
    """A head in float64, away from its start."""
    head = build_head(FAMILIES[name], target, 2.0, draft_ids=ids)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return head.double()


def boundaries_of(head: Head) -> tuple[int, ...]:
    """What its batches hold; the target has two layers."""
    return tuple(sorted({*head.boundaries, 2}))


def wide_batch(toy: ModuleType, head: Head) -> PackedBatch:
    """Three documents with states of all boundaries, float64."""
    width = 64 * len(boundaries_of(head))
    batch = toy.packed([toy.random_row(seed, n, width) for seed, n in ((1, 13), (2, 1), (3, 22))])
    hidden = batch.hidden.double()
    return PackedBatch(
        batch.tokens, batch.supervised, hidden, batch.starts, batch.positions, batch.row_ids
    )


def by_hand(head: Head, trunk: Trunk, batch: PackedBatch, ids: Tensor | None) -> Tensor:
    """The loss as the alignment table has it."""
    states = split_states(batch.hidden, boundaries_of(head), 64)
    context = UnrollContext(batch.starts, ttt_attention_dense)
    drafted = unroll(head, trunk, batch, len(WEIGHTS), states=states, context=context)
    normed, own = trunk.norm(states[2]), head.lm_head
    loss = drafted.new_zeros(())
    starts = batch.starts.tolist()
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        for p in range(start, end):
            for k, weight in enumerate(WEIGHTS):
                span = range(p + 1, p + 3 + k)  # x_{p+1} ... x_{p+2+k}
                if span[-1] < end and all(bool(batch.supervised[i]) for i in span):
                    teacher = trunk.logits(normed[p + 1 + k], ids).softmax(-1)
                    state = drafted[k, p]
                    rows = own[k] if own is not None and own.dim() == 3 else own
                    logits = trunk.logits(state, ids) if rows is None else rows @ state
                    loss = loss - weight * (teacher * logits.log_softmax(-1)).sum()
    return loss


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_equal_brute_force_in_float64(
    target: Path, toy: ModuleType, name: str, reduced: bool
) -> None:
    """Loss and the gradient of every tensor, over the whole and over a reduced vocabulary; a head's
    own lm_head learns too."""
    ids = IDS if reduced else None
    head, trunk = make(name, target, ids), Trunk.load(target, torch.float64)
    batch = wide_batch(toy, head)
    objective = Objective(
        trunk, WEIGHTS, boundaries=boundaries_of(head), draft_ids=ids, dtype=torch.float64
    )
    loss, stats = objective(head, batch, len(WEIGHTS))
    exact = by_hand(head, trunk, batch, ids)
    torch.testing.assert_close(loss, exact, rtol=1e-11, atol=0)
    assert stats.rows[0] > stats.rows[2] > 0
    named = dict(head.named_parameters())
    assert ("lm_head" in named) == (head.kind == "eagle3" or head.config.own_lm_heads)
    ours = torch.autograd.grad(loss, list(named.values()))
    right = torch.autograd.grad(exact, list(named.values()))
    for tensor, a, b in zip(named, ours, right, strict=True):
        scale = float(b.abs().max())
        assert scale > 0, tensor
        assert float((a - b).abs().max()) < 1e-10 * max(1.0, scale), tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_packing_changes_no_loss_of_any_family(target: Path, toy: ModuleType, name: str) -> None:
    """[A, B] is A plus B, in float64."""
    head, trunk = make(name, target, None), Trunk.load(target, torch.float64)
    boundaries = boundaries_of(head)
    rows = [toy.random_row(seed, n, 64 * len(boundaries)) for seed, n in ((1, 13), (2, 22))]
    rows = [(tokens, mask, hidden.double()) for tokens, mask, hidden in rows]
    objective = Objective(trunk, WEIGHTS, boundaries=boundaries, dtype=torch.float64)
    with torch.no_grad():
        together, _ = objective(head, toy.packed(rows), 3)
        apart = [objective(head, toy.packed([row]), 3)[0] for row in rows]
    torch.testing.assert_close(together, apart[0] + apart[1], rtol=1e-12, atol=0)


def test_a_batch_without_the_boundaries_is_refused(target: Path, toy: ModuleType) -> None:
    """By its width, with the boundaries that are missing."""
    head, trunk = make("eagle3", target, None), Trunk.load(target, torch.float64)
    objective = Objective(trunk, WEIGHTS, boundaries=boundaries_of(head), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"64 wide; boundaries \[0, 1, 2\]"):
        objective(head, toy.packed([toy.random_row(1, 9)]), 3)


def test_more_steps_than_medusa_has_heads_are_refused(target: Path, toy: ModuleType) -> None:
    """Nothing would be trained there."""
    head, trunk = make("medusa", target, None), Trunk.load(target, torch.float64)
    with pytest.raises(ValueError, match="train.steps=4: this medusa head has 3 steps"):
        unroll(head, trunk, wide_batch(toy, head), 4)
