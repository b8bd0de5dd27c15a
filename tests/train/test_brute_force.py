"""Training against its definition, written out from nothing: one mask over all rows of all steps,
every logit, plain autograd, in float64. Of the code under test it borrows the head's own modules
alone."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.batches import PackedBatch
from draftsmith.kernels.losses import LossConfig
from draftsmith.models.heads import Head, HeadConfig, NormConfig, build_head
from draftsmith.models.trunk import Trunk
from draftsmith.train.objective import Objective

WEIGHTS = [1.0, 0.5, 0.25]
STEPS = len(WEIGHTS)
NO_NORMS = NormConfig(False, False, False, False)
FAMILIES = {
    "mtp": HeadConfig(),
    "mtp of 2 modules": HeadConfig(modules=2),
    "eagle as published": HeadConfig("eagle", norms=NO_NORMS),
    "eagle restored": HeadConfig("eagle"),
    "eagle3": HeadConfig("eagle3", boundaries=(0, 1, 2)),
    "eagle3 of 2 layers": HeadConfig(
        "eagle3", num_layers=2, boundaries=(0, 1), norm_before_residual=True, norm_output=True
    ),
    "medusa": HeadConfig("medusa", modules=STEPS, norms=NO_NORMS),
}
LOSSES = ["kl", "ce", "tv", "lk-lambda", "smooth-l1"]
LENGTHS = (13, 1, 22)
IDS = torch.arange(0, 512, 3)


class _Dense:
    """Attention over the keys of all steps under one mask [K*N, K*N]. Row (k, p) sees key (j, p')
    of its document where step j is the first of that layer and p' <= p, or j is a later step up to
    k and p' = p."""

    def __init__(self, starts: list[int], module_steps: bool) -> None:
        self.document = torch.zeros(starts[-1], dtype=torch.long)
        for border in starts[1:-1]:
            self.document[border:] += 1
        self.module_steps = module_steps  # layer m is first called at step m
        self.written: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def mask(self, first: int) -> Tensor:
        n = len(self.document)
        step = torch.arange(STEPS).repeat_interleave(n)
        place = torch.arange(n).repeat(STEPS)
        document = self.document.repeat(STEPS)
        own = document[:, None] == document[None, :]
        committed = (step[None, :] == first) & (place[None, :] <= place[:, None])
        chain = (step[None, :] > first) & (step[None, :] <= step[:, None])
        return own & (committed | (chain & (place[None, :] == place[:, None])))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        assert window is None and softcap is None
        first = layer if self.module_steps else 0
        written = self.written.setdefault(layer, [])
        written.append((k, v))
        n, step = q.shape[2], first + len(written) - 1
        keys, values = (torch.cat(parts, 2) for parts in zip(*written, strict=True))
        groups = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        seen = self.mask(first)[step * n : (step + 1) * n, first * n : (step + 1) * n]
        scores = (q @ keys.mT * scaling).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2)


def _value(kind: str, z: Tensor, target: Tensor, state: Tensor, wanted: Tensor) -> Tensor:
    """The formula of docs/losses.md for one row."""
    log_q, log_p = z.log_softmax(-1), target.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum()
    if kind == "kl":
        return -(p * log_q).sum()
    if kind == "ce":
        return -log_q[target.argmax()]
    if kind == "tv":
        return (p - q).abs().sum() / 2
    if kind == "lk-lambda":
        share = torch.exp(-3.0 * alpha.detach())
        return share * (p * (log_p - log_q)).sum() + (1 - share) * (1 - alpha)
    assert kind == "smooth-l1"
    return F.smooth_l1_loss(state, wanted)


def _brute_force(
    head: Head, trunk: Trunk, batch: PackedBatch, kinds: list[str], ids: Tensor | None
) -> list[Tensor]:
    """The summed loss of each kind, of one graph."""
    boundaries = _boundaries(head)
    columns = dict(zip(boundaries, batch.hidden.split(64, 1), strict=True))
    starts, n = batch.starts.tolist(), len(batch.tokens)
    ends = [next(b for b in starts[1:] if b > p) for p in range(n)]
    rows = torch.arange(512) if ids is None else ids
    lm_head, normed = trunk.lm_head[rows], trunk.norm(columns[2])
    context = _Dense(starts, head.num_modules > 1)
    hidden, drafted = head.feed(columns, trunk), []
    for k in range(STEPS):
        ahead = [int(batch.tokens[p + 1 + k]) if p + 1 + k < ends[p] else 0 for p in range(n)]
        positions = batch.positions + k
        out = head(trunk.embedding[torch.tensor(ahead)], hidden, positions, context, k)
        hidden = out.recycled
        drafted.append(out.drafted)
    losses = [torch.zeros((), dtype=torch.float64) for _ in kinds]
    own = lm_head if head.lm_head is None else head.lm_head
    for k, weight in enumerate(WEIGHTS):
        for p in range(n):
            known = range(p + 1, p + 3 + k)  # x_{p+1} ... x_{p+2+k}
            if known[-1] < ends[p] and bool(batch.supervised[known[0] : known[-1] + 1].all()):
                teacher, state = normed[p + 1 + k], drafted[k][p]
                for number, kind in enumerate(kinds):
                    value = _value(kind, own @ state, lm_head @ teacher, state, teacher)
                    losses[number] = losses[number] + weight * value
    return losses


def _boundaries(head: Head) -> tuple[int, ...]:
    return tuple(sorted({*head.boundaries, 2}))


def _head(name: str, target: Path, ids: Tensor | None = None) -> Head:
    """In float64, away from its start."""
    head = build_head(FAMILIES[name], target, 2.0, draft_ids=ids)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return head.double()


def _rows(toy: ModuleType, head: Head) -> list[tuple[Tensor, Tensor, Tensor]]:
    width = 64 * len(_boundaries(head))
    rows = [toy.random_row(seed, n, width) for seed, n in enumerate(LENGTHS)]
    return [(tokens, mask, hidden.double()) for tokens, mask, hidden in rows]


def _near(ours: tuple, right: tuple, names: list[str], tolerance: float) -> None:
    for name, a, b in zip(names, ours, right, strict=True):
        a, b = (torch.zeros(()) if x is None else x for x in (a, b))
        assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max())), name


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_the_definition(
    target: Path, toy: ModuleType, name: str, reduced: bool
) -> None:
    """Every loss of every family over three packed documents, 1e-9; the walk goes in chunks."""
    ids = IDS if reduced else None
    head, trunk = _head(name, target, ids), Trunk.load(target, torch.float64)
    batch, parameters = toy.packed(_rows(toy, head)), dict(head.named_parameters())
    for kind, exact in zip(LOSSES, _brute_force(head, trunk, batch, LOSSES, ids), strict=True):
        objective = Objective(
            trunk,
            WEIGHTS,
            boundaries=_boundaries(head),
            draft_ids=ids,
            dtype=torch.float64,
            chunk=16,
            loss=LossConfig(kind),
        )
        loss, stats = objective(head, batch, STEPS)
        assert stats.rows[0] > stats.rows[2] > 0
        torch.testing.assert_close(loss, exact, rtol=1e-11, atol=0)
        names, tensors = list(parameters), list(parameters.values())
        ours = torch.autograd.grad(loss, tensors, allow_unused=True)
        right = torch.autograd.grad(exact, tensors, retain_graph=True, allow_unused=True)
        assert any(g is not None and bool(g.any()) for g in right)
        _near(ours, right, [f"{kind} {n}" for n in names], 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_gradients_by_other_ways(target: Path, toy: ModuleType, name: str) -> None:
    """One document a batch and summed, one teacher row a chunk, activations computed again in
    backward: 1e-12 of the packed, whole, kept form."""
    head, trunk = _head(name, target), Trunk.load(target, torch.float64)
    rows, parameters = _rows(toy, head), dict(head.named_parameters())

    def gradients(batches: list[PackedBatch], chunk: int, recompute: bool = False) -> tuple:
        objective = Objective(
            trunk,
            WEIGHTS,
            boundaries=_boundaries(head),
            dtype=torch.float64,
            chunk=chunk,
            recompute=recompute,
        )
        loss = sum(objective(head, batch, STEPS)[0] for batch in batches)
        assert isinstance(loss, Tensor)
        return torch.autograd.grad(loss, list(parameters.values()))

    packed = toy.packed(rows)
    usual = gradients([packed], 10**6)
    for other in (
        gradients([toy.packed([row]) for row in rows], 10**6),
        gradients([packed], 2),
        gradients([packed], 10**6, recompute=True),
    ):
        _near(other, usual, list(parameters), 1e-12)
