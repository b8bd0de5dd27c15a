"""The objective judges each student by the teacher of its own prefix, and learns the language it is
shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from draftsmith.data.batches import PackedBatch
from draftsmith.kernels.losses import LossConfig
from draftsmith.models.heads import HeadConfig, build_head
from draftsmith.models.heads.mtp import MTPHead
from draftsmith.models.norm import RMSNorm
from draftsmith.models.trunk import Trunk
from draftsmith.train.objective import Objective, chain_rows
from draftsmith.train.unroll import unroll

WEIGHTS = [1.0, 0.5, 0.25]


def _by_hand(head: MTPHead, trunk: Trunk, batch: PackedBatch, draft_ids: Tensor | None) -> Tensor:
    """The loss as the alignment table has it, one chain row and step at a time."""
    states = unroll(head, trunk, batch, len(WEIGHTS))
    normed = trunk.norm(batch.hidden)
    loss = states.new_zeros(())
    starts = batch.starts.tolist()
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        for p in range(start, end):
            for k, weight in enumerate(WEIGHTS):
                span = range(p + 1, p + 2 + k + 1)  # x_{p+1} ... x_{p+2+k}
                if span[-1] < end and all(bool(batch.supervised[i]) for i in span):
                    teacher = trunk.logits(normed[p + 1 + k], draft_ids).softmax(-1)
                    student = trunk.logits(states[k, p], draft_ids).log_softmax(-1)
                    loss = loss - weight * (teacher * student).sum()
    return loss


@pytest.mark.parametrize("reduced", [False, True])
def test_loss_and_gradient_follow_the_alignment_table(
    target: Path, trunk: Trunk, toy: ModuleType, reduced: bool
) -> None:
    """Every (row, step) by hand against the objective, over the whole and over a reduced draft
    vocabulary."""
    ids = torch.arange(0, 512, 3) if reduced else None
    batch = toy.packed([toy.random_row(1, 13), toy.random_row(2, 1), toy.random_row(3, 22)])
    head = toy.make_head(target)
    loss, stats = Objective(trunk, WEIGHTS, draft_ids=ids, dtype=torch.float32)(head, batch, 3)
    exact = _by_hand(head, trunk, batch, ids)
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)
    assert stats.rows[0] >= stats.rows[1] >= stats.rows[2] > 0
    parameters = list(head.parameters())
    ours, right = torch.autograd.grad(loss, parameters), torch.autograd.grad(exact, parameters)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * max(1.0, float(b.abs().max())))


def _alignment(batch: PackedBatch) -> Iterator[tuple[int, int, float]]:
    """(chain row p, step k, weight) of everything that is supervised."""
    starts = batch.starts.tolist()
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        for p in range(start, end):
            for k, weight in enumerate(WEIGHTS):
                span = range(p + 1, p + 2 + k + 1)
                if span[-1] < end and all(bool(batch.supervised[i]) for i in span):
                    yield p, k, weight


@pytest.mark.parametrize("reduced", [False, True])
def test_data_labels_are_the_tokens_the_steps_predict(
    target: Path, trunk: Trunk, toy: ModuleType, reduced: bool
) -> None:
    """Hard cross-entropy on x_{p+2+k}; a token outside the draft vocabulary adds nothing."""
    ids = torch.arange(0, 512, 3) if reduced else None
    batch = toy.packed([toy.random_row(1, 13), toy.random_row(2, 1), toy.random_row(3, 22)])
    head = toy.make_head(target)
    loss = LossConfig("ce", labels="data")
    objective = Objective(trunk, WEIGHTS, draft_ids=ids, dtype=torch.float32, loss=loss)
    states, exact, skipped = unroll(head, trunk, batch, 3), torch.zeros(()), 0
    for p, k, weight in _alignment(batch):
        token = int(batch.tokens[p + 2 + k])
        if ids is not None and token not in ids:
            skipped += 1
            continue
        column = token if ids is None else ids.tolist().index(token)
        exact = exact - weight * trunk.logits(states[k, p], ids).log_softmax(-1)[column]
    assert (skipped > 0) == reduced
    torch.testing.assert_close(objective(head, batch, 3)[0], exact, rtol=1e-5, atol=0)


def test_eagle_one_compares_states_of_the_same_prefix(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """Smooth-L1 between the state of step k at row p and the target's normed state p + 1 + k, and a
    tenth of the soft cross-entropy."""
    batch = toy.packed([toy.random_row(1, 13), toy.random_row(3, 22)])
    head = toy.make_head(target)
    states, normed = unroll(head, trunk, batch, 3), trunk.norm(batch.hidden)
    exact = 0.1 * _by_hand(head, trunk, batch, None)
    for p, k, weight in _alignment(batch):
        exact = exact + weight * nn.functional.smooth_l1_loss(states[k, p], normed[p + 1 + k])
    loss = LossConfig("smooth-l1+0.1*kl")
    ours, _ = Objective(trunk, WEIGHTS, dtype=torch.float32, loss=loss)(head, batch, 3)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=0)
    parameters = list(head.parameters())
    grads, right = torch.autograd.grad(ours, parameters), torch.autograd.grad(exact, parameters)
    for a, b in zip(grads, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * max(1.0, float(b.abs().max())))


def test_a_head_with_its_own_lm_head_trains_it(target: Path, trunk: Trunk, toy: ModuleType) -> None:
    """`lm_head` reads the states in place of the target's lm_head and gets its gradient; the
    teacher keeps the target's rows of the draft vocabulary."""
    ids = torch.arange(0, 512, 3)
    batch = toy.packed([toy.random_row(1, 13), toy.random_row(3, 22)])
    head = toy.make_head(target)
    rows = trunk.lm_head_weight(ids).float()
    head.lm_head = nn.Parameter(rows + 0.01 * torch.randn(rows.shape))
    states, normed = unroll(head, trunk, batch, 3), trunk.norm(batch.hidden)
    exact = torch.zeros(())
    for p, k, weight in _alignment(batch):
        teacher = trunk.logits(normed[p + 1 + k], ids).softmax(-1)
        student = (states[k, p] @ head.lm_head.T).log_softmax(-1)
        exact = exact - weight * (teacher * student).sum()
    ours, _ = Objective(trunk, WEIGHTS, draft_ids=ids, dtype=torch.float32)(head, batch, 3)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=0)
    parameters = list(head.parameters())
    grads, right = torch.autograd.grad(ours, parameters), torch.autograd.grad(exact, parameters)
    for a, b in zip(grads, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * max(1.0, float(b.abs().max())))


def test_mass_outside_the_draft_vocabulary_while_training(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """Summed over the rows of each step where it is asked for; a head over the whole vocabulary
    has nothing to measure and says so."""
    ids, batch = torch.arange(0, 512, 3), toy.packed([toy.random_row(1, 13)])
    loss, head = LossConfig(measure_outside=True), toy.make_head(target)
    normed, right = trunk.norm(batch.hidden), [0.0] * 3
    for p, k, _ in _alignment(batch):
        right[k] += 1 - float(trunk.logits(normed[p + 1 + k]).softmax(-1)[ids].sum())
    _, stats = Objective(trunk, WEIGHTS, draft_ids=ids, dtype=torch.float32, loss=loss)(
        head, batch, 3
    )
    torch.testing.assert_close(stats.outside, torch.tensor(right), rtol=1e-5, atol=1e-5)
    with pytest.warns(UserWarning, match="whole vocabulary"):
        Objective(trunk, WEIGHTS, dtype=torch.float32, loss=loss)


def test_packing_changes_no_loss(target: Path, trunk: Trunk, toy: ModuleType) -> None:
    """[A, B] is A plus B: no label crosses the border, no state leaks over it (13)."""
    rows = [toy.random_row(1, 13), toy.random_row(2, 22)]
    head = toy.make_head(target)
    objective = Objective(trunk, WEIGHTS, dtype=torch.float32)
    together, _ = objective(head, toy.packed(rows), 3)
    apart = [objective(head, toy.packed([row]), 3)[0] for row in rows]
    torch.testing.assert_close(together, apart[0] + apart[1], rtol=1e-5, atol=0)


def test_an_all_masked_batch_adds_exactly_zero(target: Path, trunk: Trunk, toy: ModuleType) -> None:
    """Loss 0 with a gradient of zeros, so that a rank with nothing to learn still joins (34)."""
    batch = toy.packed([toy.random_row(1, 13)])
    batch.supervised.zero_()
    head = toy.make_head(target)
    loss, stats = Objective(trunk, WEIGHTS, dtype=torch.float32)(head, batch, 3)
    loss.backward()
    assert float(loss.detach()) == 0.0 and stats.rows.tolist() == [0, 0, 0]
    assert all(p.grad is not None and not bool(p.grad.any()) for p in head.parameters())


def test_fewer_steps_use_the_first_weights(target: Path, trunk: Trunk, toy: ModuleType) -> None:
    """An unroll warm-up trains step 0 with step 0's weight."""
    batch = toy.packed([toy.random_row(1, 13)])
    head = toy.make_head(target)
    _, one = Objective(trunk, WEIGHTS, dtype=torch.float32)(head, batch, 1)
    _, three = Objective(trunk, WEIGHTS, dtype=torch.float32)(head, batch, 3)
    torch.testing.assert_close(one.loss[0], three.loss[0], rtol=1e-5, atol=0)


def test_nothing_of_logits_or_attention_grows_with_all_tokens(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """What autograd keeps of a forward pass: no [N, V] and no [N, N] tensor, and twice the bytes
    for twice the row (74, 75)."""
    head = toy.make_head(target)
    objective = Objective(trunk, WEIGHTS, dtype=torch.float32, chunk=64)

    def kept_bytes(length: int) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            assert tensor.numel() < length * min(length, trunk.vocab_size)
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            objective(head, toy.packed([toy.random_row(1, length)]), 3)
        return sum(kept.values())

    short, middle, long = (kept_bytes(n) for n in (600, 1200, 1800))
    assert long - middle == pytest.approx(middle - short, rel=0.05)


def _counting(vocab: int, size: int) -> Trunk:
    """A trunk whose lm_head reads token v out of the state lm_head[v]."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(2, vocab, size, generator=generator)
    return Trunk(tables[0], RMSNorm(size, 1e-6), tables[1])


def _counting_row(trunk: Trunk, first: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """x_{p+1} = x_p + 1 mod V, and the states of a target that knows it: h_p says x_{p+1}."""
    tokens = torch.arange(first, first + length) % trunk.vocab_size
    hidden = trunk.lm_head[(tokens + 1) % trunk.vocab_size]
    return tokens, torch.ones(length, dtype=torch.bool), hidden


@pytest.mark.parametrize("corrupted", [False, True])
def test_case_11_the_counting_language_pins_the_offset_of_every_step(
    target: Path, toy: ModuleType, corrupted: bool
) -> None:
    """x_{n+1} = x_n + 1: a head trained on it predicts x_{p+2+k} at step k, not +1 and not +3, at
    99 % and more (11). Still so when step 0 gets no weight and is free to be wrong: the label is
    that of the true prefix (102)."""
    trunk = _counting(31, 64)
    head = toy.make_head(target)
    objective = Objective(trunk, [0.0 if corrupted else 1.0, 1.0, 1.0], dtype=torch.float32)
    optimizer = torch.optim.Adam(head.parameters(), lr=4e-3)
    for step in range(120):
        batch = toy.packed(
            [_counting_row(trunk, 7 * step, 40), _counting_row(trunk, 3 * step + 11, 25)]
        )
        loss, _ = objective(head, batch, 3)
        optimizer.zero_grad()
        (loss / 65).backward()
        optimizer.step()
    batch = toy.packed([_counting_row(trunk, 5, 40)])
    with torch.no_grad():
        predicted = trunk.logits(unroll(head, trunk, batch, 3)).argmax(-1)  # [K, N]
    for step in range(1 if corrupted else 0, 3):
        rows = 40 - 2 - step
        right = [
            float((predicted[step, :rows] == (batch.tokens[:rows] + ahead) % 31).float().mean())
            for ahead in range(6)
        ]
        assert right[2 + step] >= 0.99
        assert max(right[:2]) < 0.1


def test_chain_rows_undo_the_roll_to_teachers() -> None:
    """out[k, p] is what stood at teacher p + 1 + k."""
    aligned = torch.arange(10).repeat(3, 1)
    assert chain_rows(aligned)[:, :5].tolist() == [
        [1, 2, 3, 4, 5],
        [2, 3, 4, 5, 6],
        [3, 4, 5, 6, 7],
    ]


def _few_tokens(toy: ModuleType, ids: Tensor, lengths: tuple[int, ...]) -> PackedBatch:
    """Noise over the tokens `ids` alone, so that a random head is often right."""
    rows = []
    for seed, length in enumerate(lengths):
        tokens, supervised, hidden = toy.random_row(seed, length)
        rows.append((ids[tokens % len(ids)], supervised, hidden))
    return replace(toy.packed(rows), index=0)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_survivors_are_trained_up_to_their_first_draft_that_is_not_the_texts(
    target: Path, toy: ModuleType, reduced: bool, own: bool
) -> None:
    """By hand, chain by chain: step k of row p counts where every draft 0..k-1 is the text's own
    token, read from the lm_head that drafts; values and gradients, and the divisor stays."""
    trunk = Trunk.load(target, torch.float32) if reduced else _counting(4, 64)
    ids = torch.tensor([3, 70, 200]) if reduced else None
    batch = _few_tokens(toy, torch.arange(4) if ids is None else ids, (70, 1, 90))
    head = toy.make_head(target)
    if own:
        head.lm_head = nn.Parameter(torch.randn(4 if ids is None else 3, 64))
    lm_head = trunk.lm_head_weight(ids) if head.lm_head is None else head.lm_head
    states, normed = unroll(head, trunk, batch, 3), trunk.norm(batch.hidden)
    known = list(range(4)) if ids is None else ids.tolist()
    exact, rows = torch.zeros(()), [0, 0, 0]
    for p, k, weight in _alignment(batch):
        drafts = [known[int((lm_head @ states[j, p]).argmax())] for j in range(k)]
        if drafts == batch.tokens[p + 2 : p + 2 + k].tolist():
            teacher = trunk.logits(normed[p + 1 + k], ids).softmax(-1)
            exact = exact - weight * (teacher * (lm_head @ states[k, p]).log_softmax(-1)).sum()
            rows[k] += 1
    assert rows[0] > rows[1] > rows[2] > 0
    objective = Objective(
        trunk, WEIGHTS, draft_ids=ids, dtype=torch.float32, survivors=1.0, chunk=5
    )
    loss, stats = objective(head, batch, 3)
    assert stats.rows.tolist() == rows
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)
    parameters = list(head.parameters())
    ours, right = torch.autograd.grad(loss, parameters), torch.autograd.grad(exact, parameters)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * max(1.0, float(b.abs().max())))
    usual = Objective(trunk, WEIGHTS, draft_ids=ids, dtype=torch.float32)
    assert torch.equal(objective.weights(batch, 3), usual.weights(batch, 3))
    _, judged = objective(head.eval(), batch, 3)  # validation measures every row
    assert judged.rows.tolist() == (usual.weights(batch, 3) > 0).sum(1).tolist()


def test_a_share_of_chains_ends_at_a_wrong_draft(target: Path, toy: ModuleType) -> None:
    """Half of them: more rows than of survivors alone and fewer than all; the choice follows from
    seed and number of the batch."""
    trunk, head = _counting(4, 64), toy.make_head(target)
    batch = _few_tokens(toy, torch.arange(4), (200, 150))

    def rows(survivors: float, seed: int = 0, index: int = 0) -> list[int]:
        objective = Objective(trunk, WEIGHTS, dtype=torch.float32, survivors=survivors, seed=seed)
        return objective(head, replace(batch, index=index), 3)[1].rows.tolist()

    none, half, every = rows(0.0), rows(0.5), rows(1.0)
    assert none[0] == half[0] == every[0]
    for k in (1, 2):
        assert half[k] == pytest.approx((none[k] + every[k]) / 2, abs=4 * 350**0.5 / 2)
        assert every[k] < half[k] < none[k]
    assert rows(0.5) == half
    assert rows(0.5, seed=1) != half and rows(0.5, index=1) != half
    with pytest.raises(ValueError, match="give it an index"):
        rows(0.5, index=None)  # pyright: ignore[reportArgumentType]


def test_feature_noise_is_uniform_and_follows_from_the_batch(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """Within a/2, of a uniform's spread, the same for the same seed and number; teachers stay
    clean, and a head that is judged is fed without it."""
    batch = replace(toy.packed([toy.random_row(1, 130), toy.random_row(2, 70)]), index=3)
    head = toy.make_head(target)

    def objective(seed: int = 0, width: float = 0.2) -> Objective:
        return Objective(trunk, WEIGHTS, dtype=torch.float32, feature_noise=width, seed=seed)

    noise = objective()._noise(batch)
    assert float(noise.abs().max()) <= 0.1 and noise.shape == (200, 64)
    assert float(noise.std()) == pytest.approx(0.2 / 12**0.5, rel=0.02)
    assert abs(float(noise.mean())) < 3 * 0.2 / 12**0.5 / 12800**0.5
    with torch.no_grad():
        loss = objective()(head, batch, 3)[0]
        clean = objective(width=0.0)(head, batch, 3)[0]
        assert torch.equal(loss, objective()(head, batch, 3)[0])
        for other in (
            objective(seed=1)(head, batch, 3)[0],
            objective()(head, replace(batch, index=4), 3)[0],
            clean,
        ):
            assert not torch.equal(loss, other)
        students = unroll(head, trunk, batch, 3, noise=noise)
        rolled = torch.stack([students[k].roll(1 + k, 0) for k in range(3)])
        usual = objective(width=0.0)
        normed, weights = trunk.norm(batch.hidden), usual.weights(batch, 3)
        assert torch.equal(loss, usual.judge(rolled, normed, weights)[0])
        assert torch.equal(clean, objective()(head.eval(), batch, 3)[0])
        head.train()
    with pytest.raises(ValueError, match="give it an index"):
        objective()(head, replace(batch, index=None), 3)


def test_the_causal_context_is_for_training_alone(
    target: Path, trunk: Trunk, toy: ModuleType
) -> None:
    """Step 0 is the same, later steps are not; a head that is judged sees what the engine shows. A
    head whose steps have keys of their own, or none, is told that nothing changes."""
    batch, head = toy.packed([toy.random_row(1, 30)]), toy.make_head(target)
    engine = Objective(trunk, WEIGHTS, dtype=torch.float32)
    causal = Objective(trunk, WEIGHTS, dtype=torch.float32, context="causal")
    causal.check(head)
    with torch.no_grad():
        a, b = engine(head, batch, 3)[1].loss, causal(head, batch, 3)[1].loss
        assert torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1])
        assert torch.equal(a, causal(head.eval(), batch, 3)[1].loss)
    with pytest.warns(UserWarning, match="context=causal has no effect: each step of this mtp"):
        causal.check(build_head(HeadConfig(modules=3), target, 2.0))
