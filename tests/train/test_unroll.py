"""The unroll feeds what the engine feeds, sees what the engine sees, and keeps documents apart."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.kernels.ttt_attention import ttt_attention_dense
from draftsmith.models.attention import AttentionContext
from draftsmith.models.heads import Head, HeadConfig, HeadStep
from draftsmith.models.trunk import Trunk
from draftsmith.train.unroll import UnrollContext, unroll


class _Recorder(Head):
    """A head that writes down what it is fed and answers with a state of its own."""

    def __init__(self) -> None:
        super().__init__(HeadConfig(), LlamaConfig())
        self.weight = nn.Parameter(torch.zeros(1))
        self.fed: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        assert step == len(self.fed)
        self.fed.append((embeds, hidden, positions))
        return HeadStep(hidden * 0 + len(self.fed), hidden * 0 - len(self.fed))


def test_each_step_is_fed_the_text_and_its_own_last_state(trunk: Trunk, toy: ModuleType) -> None:
    """Step k of row p: embedding of x_{p+1+k}, position p+k, what step k-1 recycled (step 0: the
    normed state); what it drafted is returned. The text's own token is fed even when the step
    before was wrong, so input prefix and label prefix agree (102)."""
    batch = toy.packed([toy.random_row(1, 6), toy.random_row(2, 4)])
    head = _Recorder()
    states = unroll(head, trunk, batch, 3)
    assert states[:, :, 0].tolist() == [[-1.0] * 10, [-2.0] * 10, [-3.0] * 10]
    first, second = batch.tokens[:6], batch.tokens[6:]
    for step, (embeds, hidden, positions) in enumerate(head.fed):
        for start, row in ((0, first), (6, second)):
            known = len(row) - 1 - step  # rows whose token lies in the document
            expected = trunk.embed(row[1 + step : 1 + step + known])
            assert torch.equal(embeds[start : start + known], expected)
        assert positions.tolist() == [p + step for p in [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
        fed = trunk.norm(batch.hidden) if step == 0 else torch.full((10, 64), float(step))
        assert torch.equal(hidden, fed)


class _Drafting:
    """Attention over what was written so far, one pass after another: an engine for one sequence
    without pages."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def attend(self, layer, q, k, v, *, scaling, window, softcap) -> Tensor:
        past = 0 if self.keys is None else self.keys.shape[2]
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 2)
        self.values = v if self.values is None else torch.cat([self.values, v], 2)
        groups = q.shape[1] // k.shape[1]
        keys, values = (
            self.keys.repeat_interleave(groups, 1),
            self.values.repeat_interleave(groups, 1),
        )
        scores = q @ keys.mT * scaling
        query, key = torch.arange(q.shape[2])[:, None] + past, torch.arange(keys.shape[2])
        probabilities = scores.masked_fill(key > query, float("-inf")).softmax(-1)
        return (probabilities @ values).transpose(1, 2)


@pytest.mark.parametrize("row", [0, 3, 11])
def test_case_14_every_step_equals_real_drafting_from_the_same_prefix(
    target: Path, trunk: Trunk, toy: ModuleType, row: int
) -> None:
    """Committed rows 0..p in one pass, then one draft after the other: the states are the unroll's,
    1e-5 in fp32 (14)."""
    steps = 4
    batch = toy.packed([toy.random_row(1, 9), toy.random_row(2, 20)])
    head = toy.make_head(target)
    with torch.no_grad():
        states = unroll(head, trunk, batch, steps)[:, 9 + row]
        tokens, hidden = batch.tokens[9:], trunk.norm(batch.hidden[9:])
        context = _Drafting()
        state = head(
            trunk.embed(tokens[1 : row + 2]), hidden[: row + 1], torch.arange(row + 1), context
        ).recycled[-1:]
        drafted = [state]
        for step in range(1, steps):
            state = head(
                trunk.embed(tokens[row + 1 + step : row + 2 + step]),
                state,
                torch.tensor([row + step]),
                context,
            ).recycled
            drafted.append(state)
    torch.testing.assert_close(states, torch.cat(drafted), rtol=0, atol=1e-5)


def test_a_document_does_not_see_its_neighbours(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """[A, B, C] packed gives B the states that B has alone; NaN in A and C does not reach B
    (13)."""
    rows = [toy.random_row(seed, length) for seed, length in ((1, 9), (2, 20), (3, 5))]
    head = toy.make_head(target)
    with torch.no_grad():
        alone = unroll(head, trunk, toy.packed(rows[1:2]), 3)
        together = unroll(head, trunk, toy.packed(rows), 3)[:, 9:29]
        for poisoned in (rows[0], rows[2]):
            poisoned[2].fill_(float("nan"))
        beside_nan = unroll(head, trunk, toy.packed(rows), 3)[:, 9:29]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert torch.equal(beside_nan, together)


def test_gradients_reach_the_head_through_every_step(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """Backward through four recycled steps equals backward through the dense attention, and no
    graph tensor was written in place (88)."""
    batch = toy.packed([toy.random_row(1, 9), toy.random_row(2, 20)])
    head = toy.make_head(target)
    pull = torch.randn(4, 29, 64, generator=torch.Generator().manual_seed(0))
    parameters = list(head.parameters())
    ours = torch.autograd.grad((unroll(head, trunk, batch, 4) * pull).sum(), parameters)
    context = UnrollContext(batch.starts, ttt_attention_dense)
    dense = torch.autograd.grad(
        (unroll(head, trunk, batch, 4, context=context) * pull).sum(), parameters
    )
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(1.0, float(b.abs().max())))


def test_zero_steps_are_refused(target: Path, trunk: Trunk, toy: ModuleType) -> None:
    """An unroll has at least step 0."""
    with pytest.raises(ValueError, match="steps 0"):
        unroll(toy.make_head(target), trunk, toy.packed([toy.random_row(1, 5)]), 0)
