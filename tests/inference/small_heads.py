"""Heads of every family for a target of three layers, and prompts."""

from __future__ import annotations

import torch

from draftsmith.models.heads import Head, HeadConfig, NormConfig, build_head
from draftsmith.models.target import Target

PROMPTS = [
    torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (1, 7, 16, 17, 33)
]
NO_NORMS = NormConfig(False, False, False, False)
HEAD_CONFIGS = {
    "mtp": HeadConfig(),
    "mtp of 3 modules": HeadConfig(modules=3),
    "eagle": HeadConfig("eagle", norms=NO_NORMS),
    "eagle3": HeadConfig("eagle3", boundaries=(1, 2, 3)),
    "eagle3 of 2 layers": HeadConfig(
        "eagle3", num_layers=2, boundaries=(0, 2), norm_before_residual=True, norm_output=True
    ),
    "medusa": HeadConfig("medusa", modules=4, num_layers=2, norms=NO_NORMS),
}
"""Every family; boundaries that a target of three layers has."""


def away_from_its_start(
    config: HeadConfig, target: Target, draft_ids: torch.Tensor | None = None
) -> Head:
    """A head in float64 whose every weight was moved; it drafts badly, which must not matter."""
    head = build_head(config, target.folder, 2.0, draft_ids=draft_ids)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head.double()
