"""One launch judges a batch as the definition judges chain after chain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.accept_chains import accept_chains, accept_chains_reference
from draftsmith.kernels.chains import Chains

LENGTHS = (3, 0, 2, 3, 1, 2)


def _batch(seed: int, size: int, reduced: int | None) -> tuple[Chains, Tensor, Tensor]:
    """Six chains, greedy and sampled, drawn and chosen, one without drafts."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, most = len(LENGTHS), max(LENGTHS)
    starts = torch.tensor([0, *(length + 1 for length in LENGTHS)]).cumsum(0)
    target = torch.softmax(random(int(starts[-1]), size) * 2, -1)
    choices = target.argmax(-1)
    ids = columns = None
    if reduced is not None:
        ids = torch.randperm(size, generator=generator)[:reduced].sort().values
        columns = torch.full((size,), -1)
        columns[ids] = torch.arange(reduced)
    law = torch.softmax(random(batch, most, reduced or size), -1)
    drafts = torch.full((batch, most), -1)
    for index, length in enumerate(LENGTHS):
        for step in range(length):
            token = torch.multinomial(law[index, step], 1, generator=generator)[0]
            drafts[index, step] = token if ids is None else ids[token]
            if step == 0 and seed % 2:  # so that chains of every kept length occur
                drafts[index, 0] = choices[starts[index]] if ids is None else drafts[index, 0]
    chains = Chains(
        drafts,
        starts,
        torch.tensor([True, False, False, False, False, True]),
        torch.tensor([True, True, True, False, True, False]),
        torch.rand(batch, most + 1, generator=generator, dtype=torch.float64),
        law,
        columns,
    )
    return chains, choices, target


@pytest.mark.parametrize("reduced", [None, 20])
def test_kept_and_next_are_those_of_the_definition(reduced: int | None):
    """Many random batches: every kept length from 0 to 3 occurs, among greedy and sampled."""
    lengths = set()
    for seed in range(10):
        batch = _batch(seed, 37, reduced)
        kept, following = accept_chains(*batch)
        expected = accept_chains_reference(*batch)
        assert torch.equal(kept, expected[0]) and torch.equal(following, expected[1])
        lengths |= set(kept.tolist())
    assert lengths >= {0, 1, 2}


@pytest.mark.parametrize("size", [49152, 151936])
def test_real_vocabularies(size: int):
    """The draw goes over many blocks; one chain kept whole, one refused."""
    target = torch.softmax(torch.randn(3, size) * 3, -1)
    law = torch.softmax(torch.randn(2, 1, size), -1)
    drafts = torch.stack([law[0, 0].argmax(), target[2].argmin()])[:, None]
    chains = Chains(
        drafts,
        torch.tensor([0, 1, 3]),
        torch.zeros(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([[0.3, 0.0], [0.999999, 0.73]], dtype=torch.float64),
        law,
    )
    choices = target.argmax(-1)
    got, expected = (
        accept_chains(chains, choices, target),
        accept_chains_reference(chains, choices, target),
    )
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_greedy_alone_needs_no_probabilities():
    """The target's law may be missing, and then no law of the drafts is read either."""
    drafts = torch.tensor([[7, 8, 9], [7, 1, 9], [4, -1, -1]])
    chains = Chains(
        drafts,
        torch.tensor([0, 4, 8, 10]),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.bool),
        torch.full((3, 4), float("nan"), dtype=torch.float64),
    )
    choices = torch.tensor([7, 8, 9, 10, 7, 8, 9, 10, 5, 6])
    kept, following = accept_chains(chains, choices, None)
    assert kept.tolist() == [3, 1, 0] and following.tolist() == [10, 8, 5]


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.9, 1 - 1e-12])
def test_edges_of_the_draw(uniform: float):
    """Tokens without mass are never drawn, not even at the ends of [0, 1)."""
    target = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    chains = Chains(
        torch.empty(1, 0, dtype=torch.int64),
        torch.tensor([0, 1]),
        torch.tensor([False]),
        torch.tensor([False]),
        torch.tensor([[uniform]], dtype=torch.float64),
    )
    _, following = accept_chains(chains, torch.tensor([3]), target)
    assert following.tolist() == [1 if uniform < 0.25 else 3]


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), 0.0])
def test_weights_without_a_law_give_no_token(fault: float):
    """-1, and the count as in the definition; the neighbour is not touched by it."""
    target = torch.tensor([[0.5, 0.5], [fault, 0.0], [1.0, 0.0]])
    chains = Chains(
        torch.tensor([[0], [-1]]),
        torch.tensor([0, 2, 3]),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor([[0.1, 0.5], [0.5, 0.5]], dtype=torch.float64),
    )
    got = accept_chains(chains, torch.tensor([0, 0, 0]), target)
    expected = accept_chains_reference(chains, torch.tensor([0, 0, 0]), target)
    assert [t.tolist() for t in got] == [t.tolist() for t in expected] == [[1, 0], [-1, 0]]


def test_rows_behind_the_reach_of_32_bits(far_memory: Callable[[int], Tensor]):
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
    choices = torch.zeros(8193, dtype=torch.int64)
    kept, following = accept_chains(chains, choices, target)
    assert kept.tolist() == [1] and following.tolist() == [2**18 - 2]
