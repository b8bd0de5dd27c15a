"""Block and typical acceptance in the launch of `accept_chains`, against their definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.accept_block import accept_block, accept_block_reference
from draftsmith.kernels.accept_typical import accept_typical, accept_typical_reference
from draftsmith.kernels.chains import Chains

LENGTHS = (3, 0, 2, 3, 1, 2)
Judge = Callable[[Chains, Tensor], tuple[Tensor, Tensor]]


def _typical(form: Callable[..., tuple[Tensor, Tensor]]) -> Judge:
    """With limits that differ by sequence."""

    def judge(chains: Chains, target: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(len(chains.drafts), dtype=torch.float64)
        return form(chains, target, 0.01 + 0.1 * order, 0.6 - 0.1 * order)

    return judge


RULES: dict[str, tuple[Judge, Judge]] = {
    "block": (accept_block, accept_block_reference),
    "typical": (_typical(accept_typical), _typical(accept_typical_reference)),
}


def _batch(seed: int, size: int, reduced: int | None) -> tuple[Chains, Tensor]:
    """Six chains, drawn from laws near the target's or chosen, one without drafts; what no rule
    may read is NaN."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    batch, most = len(LENGTHS), max(LENGTHS)
    starts = torch.tensor([0, *(length + 1 for length in LENGTHS)]).cumsum(0)
    logits = torch.randn(int(starts[-1]), size, generator=generator) * 2
    ids = torch.arange(size) if reduced is None else torch.randperm(size, generator=generator)
    ids = ids[: reduced or size].sort().values
    columns = None
    if reduced is not None:
        columns = torch.full((size,), -1)
        columns[ids] = torch.arange(reduced)
    drafts = torch.full((batch, most), -1)
    law = torch.full((batch, most, len(ids)), float("nan"))
    uniforms = torch.full((batch, most + 1), float("nan"), dtype=torch.float64)
    for index, length in enumerate(LENGTHS):
        uniforms[index, : length + 1] = torch.rand(
            length + 1, generator=generator, dtype=torch.float64
        )
        for step in range(length):
            near = logits[starts[index] + step, ids]
            near = near + 0.7 * torch.randn(len(ids), generator=generator)
            law[index, step] = torch.softmax(near, -1)
            drafts[index, step] = ids[torch.multinomial(law[index, step], 1, generator=generator)]
    chains = Chains(
        drafts,
        starts,
        torch.ones(batch, dtype=torch.bool),
        torch.tensor([True, True, True, False, True, False]),
        uniforms,
        law,
        columns,
    )
    return chains, torch.softmax(logits, -1)


@pytest.mark.parametrize("reduced", [None, 20])
@pytest.mark.parametrize("rule", list(RULES))
def test_kept_and_next_are_those_of_the_definition(rule: str, reduced: int | None):
    """Random batches: every kept length from 0 to 3 occurs; a block goes on behind a refusal."""
    fast, plain = RULES[rule]
    seen = set()
    for seed in range(8):
        chains, target = _batch(seed, 37, reduced)
        kept, following = fast(chains, target)
        expected = plain(chains, target)
        assert torch.equal(kept, expected[0]) and torch.equal(following, expected[1])
        seen |= set(kept.tolist())
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", list(RULES))
def test_chosen_drafts_have_no_law(rule: str):
    """Nor columns; one batch without any draft at all."""
    fast, plain = RULES[rule]
    chains, target = _batch(1, 37, None)
    chosen = dataclasses.replace(chains, law=None, drawn=torch.zeros_like(chains.drawn))
    none = Chains(
        torch.empty(2, 0, dtype=torch.int64),
        torch.tensor([0, 1, 2]),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor([[0.3], [0.9]], dtype=torch.float64),
    )
    for batch, rows in ((chosen, target), (none, target[:2])):
        for got, expected in zip(fast(batch, rows), plain(batch, rows), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("size", [49152, 151936])
@pytest.mark.parametrize("rule", list(RULES))
def test_real_vocabularies(rule: str, size: int):
    """Sums over the vocabulary and the draw go over many blocks, the last of them not full."""
    fast, plain = RULES[rule]
    target = torch.softmax(torch.randn(3, size) * 3, -1)
    law = (target[:2] ** 0.8)[None]
    law /= law.sum(-1, keepdim=True)
    chains = Chains(
        target[:2].argmax(-1)[None],
        torch.tensor([0, 3]),
        torch.tensor([False]),
        torch.tensor([True]),
        torch.tensor([[0.4, 0.99999, 0.73]], dtype=torch.float64),
        law,
    )
    got, expected = fast(chains, target), plain(chains, target)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("rule", list(RULES))
def test_weights_without_a_law_give_no_token(rule: str, fault: float):
    """As in the definition; the neighbour is not touched by it."""
    fast, plain = RULES[rule]
    target = torch.tensor([[0.75, 0.25], [fault, 0.0], [1.0, 0.0]])
    chains = Chains(
        torch.tensor([[0], [-1]]),
        torch.tensor([0, 2, 3]),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor([[0.1, 0.5], [0.5, 0.5]], dtype=torch.float64),
    )
    got, expected = fast(chains, target), plain(chains, target)
    assert [t.tolist() for t in got] == [t.tolist() for t in expected] == [[1, 0], [-1, 0]]


def test_a_block_with_nothing_left_draws_from_the_targets_row():
    """w p = q everywhere: the refused draft is drawn again."""
    target = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    chains = Chains(
        torch.tensor([[0, 1]]),
        torch.tensor([0, 3]),
        torch.tensor([False]),
        torch.tensor([True]),
        torch.tensor([[1.0, 1.0, 0.1]], dtype=torch.float64),  # refuses whatever comes
        target[None, :2].clone(),
    )
    got, expected = accept_block(chains, target), accept_block_reference(chains, target)
    assert [t.tolist() for t in got] == [t.tolist() for t in expected] == [[0], [0]]


@pytest.mark.parametrize("rule", list(RULES))
def test_rows_behind_the_reach_of_32_bits(rule: str, far_memory: Callable[[int], Tensor]):
    """Row 8,192 of 2**18 columns begins at element 2**31."""
    target = far_memory(2**18).view(8193, 2**18)
    target[8191, 5], target[8192, 2**18 - 2] = 1, 1
    chains = Chains(
        torch.tensor([[5]]),
        torch.tensor([8191, 8193]),
        torch.tensor([False]),
        torch.tensor([False]),
        torch.tensor([[0.5, 0.5]], dtype=torch.float64),
    )
    kept, following = RULES[rule][0](chains, target)
    assert kept.tolist() == [1] and following.tolist() == [2**18 - 2]
