"""Validation figures against their definitions, counted by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batches import PackedBatch
from draftsmith.kernels.losses import LossConfig
from draftsmith.models.heads import Head, HeadConfig, HeadStep
from draftsmith.models.trunk import Trunk
from draftsmith.train.objective import Objective
from draftsmith.train.unroll import unroll
from draftsmith.train.validation import Validator, summary

STEPS = 3


class _Noisy(Head):
    """A head that answers with its input state plus noise, so that it agrees with the target on
    some rows."""

    def __init__(self, scale: float) -> None:
        super().__init__(HeadConfig(), LlamaConfig())
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, context: Any, step: int = 0
    ) -> HeadStep:
        generator = torch.Generator().manual_seed(int(positions[0]))
        out = hidden.roll(-1, 0) + self.scale * torch.randn(hidden.shape, generator=generator)
        return HeadStep(out, out)


def _by_hand(
    head: Head, trunk: Trunk, batches: list[PackedBatch], ids: Tensor | None
) -> dict[str, Any]:
    """Agreement per step over its rows, chains supervised at all steps, how long each chain held,
    mass outside."""
    agreed, rows, chains, held, outside, teachers = [0] * STEPS, [0] * STEPS, 0, [0] * STEPS, 0.0, 0
    buckets: dict[str, list[Any]] = {}
    for batch in batches:
        with torch.no_grad():
            states, normed = unroll(head, trunk, batch, STEPS), trunk.norm(batch.hidden)
        starts = batch.starts.tolist()
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            for p in range(start, end):
                right: list[bool] = []
                context = p - start + 2  # x_0 .. x_{p+1} are known before the first draft
                low = max((edge for edge in (0, 256, 512, 1024) if edge <= context), default=0)
                for k in range(STEPS):
                    if p + 2 + k >= end or not all(
                        bool(batch.supervised[i]) for i in range(p + 1, p + 3 + k)
                    ):
                        break
                    drafted = trunk.logits(states[k, p], ids).argmax()
                    drafted = drafted if ids is None else ids[drafted]
                    logits = trunk.logits(normed[p + 1 + k])
                    right.append(bool(drafted == logits.argmax()))
                    rows[k] += 1
                    agreed[k] += right[-1]
                    bucket = buckets.setdefault(str(low), [[0] * STEPS, [0] * STEPS, 0])
                    bucket[0][k] += 1
                    bucket[1][k] += right[-1]
                    if k == 0:
                        teachers += 1
                        outside += (
                            0.0 if ids is None else 1.0 - float(logits.softmax(-1)[ids].sum())
                        )
                if len(right) == STEPS:
                    chains += 1
                    buckets[str(low)][2] += 1
                    for k in range(STEPS):
                        held[k] += all(right[: k + 1])
    before = [chains, *held[:-1]]
    return {
        "rows": rows[0],
        "chains": chains,
        "agreement": [a / r for a, r in zip(agreed, rows, strict=True)],
        "conditional_agreement": [h / max(b, 1) for h, b in zip(held, before, strict=True)],
        "joint_agreement": held[-1] / chains,
        "mass_outside_draft_vocabulary": outside / teachers,
        "buckets": {low: tuple(counts) for low, counts in buckets.items()},
        "greedy": 1 + sum(held) / chains,
    }


@pytest.mark.parametrize("reduced", [False, True])
def test_figures_equal_a_count_by_hand(trunk: Trunk, toy: ModuleType, reduced: bool) -> None:
    """Agreement is with the whole vocabulary's argmax even where the head drafts over a third of
    it."""
    ids = torch.arange(0, 512, 3) if reduced else None
    batches = [toy.packed([toy.random_row(s, 40), toy.random_row(s + 1, 23)]) for s in (1, 5)]
    batches.append(toy.packed([toy.random_row(9, 12), toy.random_row(10, 530)]))
    head = _Noisy(0.1)
    objective = Objective(trunk, [1.0, 0.5, 0.25], draft_ids=ids, dtype=torch.float32)
    figures = Validator(objective, batches)(head)
    by_hand = _by_hand(head, trunk, batches, ids)
    buckets, greedy = by_hand.pop("buckets"), by_hand.pop("greedy")
    for name, right in by_hand.items():
        assert figures[name] == pytest.approx(right, abs=1e-6), name
    assert set(buckets) == {"0", "256", "512"}
    assert buckets == {
        low: (bucket["rows_per_step"], bucket["agreed_per_step"], bucket["chains"])
        for low, bucket in figures["by_context"].items()
    }
    expected = figures["expected_tokens_per_call"]
    assert expected["greedy"] == pytest.approx(greedy)
    alphas = figures["expected_acceptance"]
    independent = 1 + alphas[0] + alphas[0] * alphas[1] + alphas[0] * alphas[1] * alphas[2]
    assert expected["sampled"] == pytest.approx(independent)
    assert 0 < figures["agreement"][0] < 1
    assert figures["mass_outside_draft_vocabulary"] > 0.1 if reduced else True
    product = torch.tensor(figures["conditional_agreement"], dtype=torch.float64).prod()
    assert float(product) == pytest.approx(figures["joint_agreement"], abs=1e-12)


def test_loss_is_the_objective_per_supervised_weight(
    trunk: Trunk, target: Path, toy: ModuleType
) -> None:
    """Batches add up before they are divided; validation leaves the head in training mode and
    without gradients."""
    batches = [toy.packed([toy.random_row(s, 30)]) for s in (1, 2)]
    head = toy.make_head(target).train()
    objective = Objective(trunk, [1.0, 0.5, 0.25], dtype=torch.float32)
    figures = Validator(objective, batches)(head)
    loss = sum(float(objective(head, b, STEPS)[0].detach()) for b in batches)
    weight = sum(float(objective.weights(b, STEPS).sum()) for b in batches)
    assert figures["loss"] == pytest.approx(loss / weight, rel=1e-6)
    assert figures["score"] == -figures["loss"]
    assert head.training and all(p.grad is None for p in head.parameters())


@pytest.mark.parametrize("kind", ["tv", "0.5*lk-alpha+ce"])
def test_loss_stays_the_soft_cross_entropy_whatever_is_trained(
    trunk: Trunk, target: Path, toy: ModuleType, kind: str
) -> None:
    """So runs of different losses compare, and one score chooses among their checkpoints; what is
    trained is `objective`."""
    batches = [toy.packed([toy.random_row(s, 30)]) for s in (1, 2)]
    head = toy.make_head(target)
    weights = [1.0, 0.5, 0.25]
    usual = Validator(Objective(trunk, weights, dtype=torch.float32), batches)(head)
    trained = Objective(trunk, weights, dtype=torch.float32, loss=LossConfig(kind))
    figures = Validator(trained, batches)(head)
    for name in ("loss", "score", "kl", "expected_acceptance", "conditional_agreement"):
        assert figures[name] == pytest.approx(usual[name], rel=1e-5), name
    loss = sum(float(trained(head, b, STEPS)[0].detach()) for b in batches)
    weight = sum(float(trained.weights(b, STEPS).sum()) for b in batches)
    assert figures["objective"] == pytest.approx(loss / weight, rel=1e-6)
    assert usual["objective"] == usual["loss"] != figures["objective"]


def test_acceptance_from_the_engine_decides_the_score(
    trunk: Trunk, target: Path, toy: ModuleType
) -> None:
    """The hook gets the live head; its figures are kept whole and its score replaces the loss's."""
    head = toy.make_head(target)
    seen: list[nn.Module] = []

    def acceptance(live: nn.Module) -> dict[str, Any]:
        seen.append(live)
        return {"score": 2.25, "tokens_per_call": 2.25, "measured_with": {"prompts": "p"}}

    objective = Objective(trunk, [1.0], dtype=torch.float32)
    figures = Validator(objective, [toy.packed([toy.random_row(1, 30)])], acceptance)(head)
    assert seen == [head]
    assert figures["score"] == 2.25 and figures["acceptance"]["tokens_per_call"] == 2.25
    assert figures["measured_with"] == {"prompts": "p"} and "measured_with" not in str(
        figures["acceptance"]
    )
    alone = Validator(objective, [toy.packed([toy.random_row(1, 30)])])(head)
    assert alone["measured_with"]["score"] == "-loss"
    assert alone["basis"] != figures["basis"]


def test_the_basis_follows_what_the_score_is_measured_with(
    trunk: Trunk, target: Path, toy: ModuleType
) -> None:
    """Other held-out rows or step weights are another basis; how rows are packed and what the
    weights are is not."""
    rows = [toy.random_row(seed, 20) for seed in (1, 2)]
    whole = [toy.packed(rows, ["a", "b"])]
    apart = [toy.packed([rows[1]], ["b"]), toy.packed([rows[0]], ["a"])]
    others = [toy.packed(rows, ["a", "c"])]
    objective = Objective(trunk, [1.0], dtype=torch.float32)

    def basis(objective: Objective, batches: list[PackedBatch], seed: int = 0) -> str:
        return Validator(objective, batches)(toy.make_head(target, seed))["basis"]

    right = basis(objective, whole)
    assert basis(objective, apart) == right == basis(objective, whole, seed=1)
    assert basis(objective, others) != right
    assert basis(Objective(trunk, [1.0, 0.5], dtype=torch.float32), whole) != right


def test_summary_leaves_out_what_is_long() -> None:
    """A head's folder keeps figures, not texts and counts by bucket."""
    acceptance = {"score": 1.5, "runs": {"p": {}}, "samples": [{"answer": "long"}]}
    figures = {"loss": 1.0, "by_context": {"0": {}}, "acceptance": acceptance}
    assert summary(figures) == {"loss": 1.0, "acceptance": {"score": 1.5}}
    assert summary({"loss": 1.0}) == {"loss": 1.0}


def test_buckets_add_up_to_the_whole(trunk: Trunk, target: Path, toy: ModuleType) -> None:
    """Their losses, weighed by what was supervised, are the loss; a bucket without a whole chain
    has no expected tokens, and every figure can be written as JSON."""
    head, weights = toy.make_head(target), torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    objective = Objective(trunk, weights.tolist(), dtype=torch.float32)
    last = toy.random_row(3, 257)
    last[1][:] = False
    last[1][254:] = True  # rows 253 and 254 predict tokens 255 and 256: contexts of 255 and 256
    figures = Validator(objective, [toy.packed([toy.random_row(2, 300)]), toy.packed([last])])(head)
    buckets = figures["by_context"]
    shares = {
        low: torch.tensor(bucket["rows_per_step"], dtype=torch.float64) @ weights
        for low, bucket in buckets.items()
    }
    whole = sum(float(shares[low]) * buckets[low]["loss"] for low in buckets)
    assert whole / sum(map(float, shares.values())) == pytest.approx(figures["loss"], rel=1e-6)
    json.dumps(figures, allow_nan=False)
    alone = Validator(objective, [toy.packed([last])])(head)
    assert {low: bucket["rows_per_step"] for low, bucket in alone["by_context"].items()} == {
        "0": [1, 1, 0],
        "256": [1, 0, 0],
    }
    assert alone["by_context"]["256"]["expected_tokens_per_call"] is None
    assert alone["by_context"]["256"]["agreement"][1] is None
    assert alone["expected_tokens_per_call"]["greedy"] is None
    json.dumps(alone, allow_nan=False)


def test_nothing_to_measure_is_refused(trunk: Trunk, target: Path, toy: ModuleType) -> None:
    """No held-out batch, or none with a supervised row: an error, not a perfect score."""
    objective = Objective(trunk, [1.0], dtype=torch.float32)
    with pytest.raises(ValueError, match="no held-out batch"):
        Validator(objective, [])
    batch = toy.packed([toy.random_row(1, 30)])
    batch.supervised.zero_()
    with pytest.raises(ValueError, match="no held-out row is supervised"):
        Validator(objective, [batch])(toy.make_head(target))


def test_states_of_a_cache_validate_an_fp32_run(trunk: Trunk, toy: ModuleType) -> None:
    """A trunk in fp32 takes bf16 states, and gives the figures of the same states in fp32."""
    batch = toy.packed([toy.random_row(1, 40)])
    rounded = dataclasses.replace(batch, hidden=batch.hidden.bfloat16())
    widened = dataclasses.replace(batch, hidden=batch.hidden.bfloat16().float())
    objective = Objective(trunk, [1.0] * STEPS, dtype=torch.float32)
    figures = [Validator(objective, [one])(_Noisy(0.1)) for one in (rounded, widened)]
    assert figures[0] == figures[1]
