"""The unroll feeds what the engine feeds, sees what the engine sees, and keeps documents apart."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.kernels.ttt_attention import ttt_attention_dense
from draftsmith.models.attention import AttentionContext, PackedContext
from draftsmith.models.heads import Head, HeadConfig, HeadStep, MTPHead, build_head
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
    1e-5 of their size in fp32 (14)."""
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
    size = max(1.0, float(states.abs().max()))
    torch.testing.assert_close(states, torch.cat(drafted), rtol=0, atol=1e-5 * size)


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


@pytest.mark.parametrize("config", [HeadConfig(modules=2), HeadConfig("eagle3", boundaries=(1,))])
def test_the_causal_context_is_each_step_for_itself(
    target: Path, trunk: Trunk, toy: ModuleType, config: HeadConfig
) -> None:
    """Step k attends to the rows of step k alone, as a packed pass without a past; step 0 is what
    it is anyway, and so is a module's first step."""
    batch = toy.packed([toy.random_row(1, 9), toy.random_row(2, 20)])
    head = build_head(config, target, 2.0)
    states = {1: torch.randn(29, 64), 2: batch.hidden}
    with torch.no_grad():
        context = UnrollContext(batch.starts, causal=True)
        causal = unroll(head, trunk, batch, 3, states=states, context=context)
        engine = unroll(head, trunk, batch, 3, states=states)
        hidden = head.feed(states, trunk)
        for step in range(3):
            ahead = torch.zeros(29, dtype=torch.long)
            for start, end in ((0, 9), (9, 29)):
                kept = end - start - 1 - step
                ahead[start : start + kept] = batch.tokens[start + 1 + step : end]
            out = head(
                trunk.embed(ahead),
                hidden,
                batch.positions + step,
                PackedContext(batch.starts.tolist()),
                step,
            )
            hidden = out.recycled
            torch.testing.assert_close(causal[step], out.drafted, rtol=0, atol=1e-5)
    own = max(1, config.modules)
    torch.testing.assert_close(causal[:own], engine[:own], rtol=0, atol=1e-5)
    assert float((causal[own:] - engine[own:]).abs().max()) > 1e-2


def _kept_bytes(head: MTPHead, trunk: Trunk, toy: ModuleType, recompute: bool) -> int:
    """What autograd keeps of a forward pass, without parameters."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in head.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        unroll(head, trunk, toy.packed([toy.random_row(1, 300)]), 3, recompute=recompute)
    return sum(kept.values())


@pytest.mark.parametrize("causal", [False, True])
def test_steps_computed_again_give_the_same_gradients_and_keep_little(
    target: Path, trunk: Trunk, toy: ModuleType, causal: bool
) -> None:
    """Backward runs every step again and sees what the step saw: no key is written twice, none of
    a later step is read, whichever step comes first; 1e-6 in fp32. Without gradients nothing is
    computed again."""
    batch = toy.packed([toy.random_row(1, 9), toy.random_row(2, 20)])
    head = toy.make_head(target)
    pull = torch.randn(4, 29, 64, generator=torch.Generator().manual_seed(0))
    parameters = list(head.parameters())
    grads = []
    for recompute in (False, True):
        context = UnrollContext(batch.starts, causal=causal)
        states = unroll(head, trunk, batch, 4, context=context, recompute=recompute)
        written = [keys for seen in context.seen.values() for keys in seen.keys]
        grads.append(torch.autograd.grad((states * pull).sum(), parameters))
        after = [keys for seen in context.seen.values() for keys in seen.keys]
        assert len(written) == (0 if causal else 4)
        assert all(a is b for a, b in zip(written, after, strict=True))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * max(1.0, float(b.abs().max())))
    with torch.no_grad():
        assert unroll(head, trunk, batch, 4, recompute=True).shape == (4, 29, 64)
    assert _kept_bytes(head, trunk, toy, True) < _kept_bytes(head, trunk, toy, False) / 4


def test_noise_is_added_to_what_step_0_is_fed(trunk: Trunk, toy: ModuleType) -> None:
    """And to nothing else: step 1 is fed the head's own state."""
    batch, head = toy.packed([toy.random_row(1, 6)]), _Recorder()
    noise = torch.randn(6, 64)
    unroll(head, trunk, batch, 2, noise=noise)
    assert torch.equal(head.fed[0][1], trunk.norm(batch.hidden) + noise)
    assert torch.equal(head.fed[1][1], torch.ones(6, 64))


def test_zero_steps_are_refused(target: Path, trunk: Trunk, toy: ModuleType) -> None:
    """An unroll has at least step 0."""
    with pytest.raises(ValueError, match="steps 0"):
        unroll(toy.make_head(target), trunk, toy.packed([toy.random_row(1, 5)]), 0)
