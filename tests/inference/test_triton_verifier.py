"""Verification over Triton's kernels decides what it decides without them."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.batch import Batch
from draftsmith.inference.config import SamplingParams
from draftsmith.inference.drafters import Proposal
from draftsmith.inference.sequence import Sequence
from draftsmith.inference.verifier import Verdict, sample, verify
from draftsmith.kernels import accept_chains, jit, renormalise
from draftsmith.kernels.accept import DraftLaw

PARAMS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=5, seed=2),
    SamplingParams(),
    SamplingParams(temperature=1.2, top_p=0.8, min_p=0.02, seed=3, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4, coupled=True),
]


@pytest.mark.parametrize("reduced", [False, True])
def test_mixed_requests_are_judged_alike(reduced: bool, monkeypatch: pytest.MonkeyPatch):
    """Drawn and chosen chains of several lengths, float32 logits, every kind of request."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(3)
    size, ids = 37, torch.arange(0, 37, 3) if reduced else None
    width = size if ids is None else len(ids)
    proposals = []
    for length, params in zip((3, 1, 2, 0, 3), PARAMS, strict=True):
        law = torch.softmax(torch.randn(length, width, generator=generator), -1)
        columns = law.multinomial(1, generator=generator)[:, 0] if length else torch.zeros(0).long()
        tokens = (columns if ids is None else ids[columns]).tolist()
        own = DraftLaw(law, ids) if params.draws_drafts and length != 1 else None
        proposals.append(Proposal(tokens, own))
    starts = [0]
    for proposal in proposals:
        starts.append(starts[-1] + len(proposal.tokens) + 1)
    logits = torch.randn(starts[-1], size, generator=generator) * 2
    empty = torch.empty(0, dtype=torch.int64)
    said: dict[str, tuple[Verdict, list[int]]] = {}
    launched: list[str] = []
    for module, kernel in (
        (accept_chains, "accept_chains_kernel"),
        (renormalise, "renormalise_kernel"),
    ):
        real = getattr(module, kernel)
        monkeypatch.setattr(module, kernel, _Counted(real, kernel, launched))
    for form in ("reference", "triton"):
        monkeypatch.setattr(jit, "choice", lambda form=form: form)
        sequences = [Sequence.create(str(i), [1, 2, 3], one) for i, one in enumerate(PARAMS)]
        batch = Batch(sequences, starts, empty, empty, empty, [])
        verdict = verify(batch, sequences, proposals, logits)
        said[form] = verdict, sample(sequences, logits[: len(sequences)])
        assert bool(launched) == (form == "triton")
    assert said["reference"] == said["triton"]
    assert set(launched) == {"accept_chains_kernel", "renormalise_kernel"}


class _Counted:
    """A kernel that writes its launches down and runs."""

    def __init__(self, kernel: jit.Kernel, name: str, launched: list[str]) -> None:
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid: tuple[int, ...]):
        self.launched.append(self.name)
        return self.kernel[grid]
