"""The plain form of temperature, min-p, top-k and top-p against a sort of each row in Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.renormalise import PREFIX, renormalise_reference


def _by_hand(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """token -> probability, by one sort; equal logits stay or go together."""
    best = float(logits.max())
    weights = {
        token: torch.e ** ((float(z) - best) / temperature)
        for token, z in enumerate(logits)
        if float(z) > -torch.inf
    }
    weights = {token: w for token, w in weights.items() if w >= min_p}
    ordered = sorted(weights.values(), reverse=True)
    if top_k:
        edge = ordered[min(top_k, len(ordered)) - 1]
        weights = {token: w for token, w in weights.items() if w >= edge * (1 - 1e-12)}
    if top_p < 1:
        total, edge, mass = sum(weights.values()), 0.0, 0.0
        for w in sorted(weights.values(), reverse=True):
            if mass < top_p * total:
                edge = w
            mass += w
        weights = {token: w for token, w in weights.items() if w >= edge * (1 - 1e-12)}
    total = sum(weights.values())
    return {token: w / total for token, w in weights.items()}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [1, 6, 40, 3 * PREFIX])
def test_equals_a_sort_by_hand(size: int, ties: bool):
    """Each filter alone and all together; flat rows whose mass passes any prefix; masked tokens."""
    settings = [
        (1.0, 0, 1.0, 0.0),
        (0.7, 3, 1.0, 0.0),
        (1.5, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.3),
        (2.0, 5, 0.7, 0.1),
        (1.0, 700, 0.95, 0.0),
        (9.0, 0, 0.9, 0.0),
        (1.0, 0, 0.5, 0.4),
        (1.0, 2, 0.99, 1.0),
    ]
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(len(settings), size, generator=generator, dtype=torch.float64) * 2
    logits = (logits * 2).round() / 2 if ties else logits
    if size > 1:
        logits[:, size // 2] = -torch.inf
    temperature, top_p, min_p = (
        torch.tensor([one[place] for one in settings], dtype=torch.float64) for place in (0, 2, 3)
    )
    top_k = torch.tensor([one[1] for one in settings])
    out = renormalise_reference(logits, temperature, top_k, top_p, min_p)
    for row, (law, asked) in enumerate(zip(out, settings, strict=True)):
        expected = torch.zeros(size, dtype=torch.float64)
        for token, share in _by_hand(logits[row], *asked).items():
            expected[token] = share
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-12)
        assert torch.equal(law > 0, expected > 0)
        alone = renormalise_reference(
            logits[row : row + 1], *(s[row : row + 1] for s in (temperature, top_k, top_p, min_p))
        )
        assert torch.equal(alone[0], law)
