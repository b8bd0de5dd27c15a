"""What a target pass decides: which drafts of each sequence are kept, and the token that follows
them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.accept import accept_greedy, accept_sampled, draw
from .batch import Batch
from .drafters import Proposal
from .sampler import check_finite, probabilities
from .sequence import Lead, Sequence


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verify pass, by sequence.

    Attributes:
        kept: indices into the proposal's tokens, in the order of the text (a chain: 0, 1, …).
        following: the target's own token behind them.
    """

    kept: list[list[int]]
    following: list[int]


def sample(sequence: Sequence, logits: Tensor) -> int:
    """One token from one row of logits [V]; greedy rows also note their lead over the runner-up."""
    check_finite(logits[None], f"request {sequence.id!r} at position {len(sequence.tokens)}")
    if not sequence.params.greedy:
        return draw(probabilities(logits[None], sequence.params)[0], sequence.uniforms(1)[0])
    token = int(logits.argmax(-1))
    sequence.leads.append(_lead(logits, token))
    return token


def verify(
    batch: Batch, sequences: list[Sequence], proposals: list[Proposal], logits: Tensor
) -> Verdict:
    """Judge the drafts of every sequence. logits [N, V] of the batch's rows."""
    best, choices = logits.max(-1)
    if not bool(torch.isfinite(best).all()):
        check_finite(logits, f"verify rows of {[sequence.id for sequence in sequences][:4]}")
    longest = max(len(proposal.tokens) for proposal in proposals)
    table = torch.full((2, len(sequences), longest + 1), -1, dtype=torch.int64)
    decided = choices.cpu()
    for index, proposal in enumerate(proposals):
        table[0, index, : len(proposal.tokens)] = torch.tensor(proposal.tokens, dtype=torch.int64)
        rows = decided[batch.starts[index] : batch.starts[index + 1]]
        table[1, index, : len(rows)] = rows
    # A missing draft is -1 and must not meet a missing choice; the last column is never a
    # draft.
    greedy = (
        accept_greedy(table[0, :, :longest], table[1, :, :longest]).tolist() if longest else None
    )
    kept, following = [], []
    for index, sequence in enumerate(sequences):
        first, last = batch.starts[index], batch.starts[index + 1]
        if sequence.params.greedy:
            count = greedy[index] if greedy else 0
            kept.append(count)
            following.append(int(decided[first + count]))
            if last - first == 1:
                sequence.leads.append(_lead(logits[first], following[-1]))
            continue
        law = probabilities(logits[first:last], sequence.params)
        drafts = proposals[index].tokens
        if sequence.params.coupled:
            # One draw for each token of the answer, as in plain decoding.
            foreseen = zip(law, sequence.foreseen(last - first), strict=True)
            drawn = [draw(row, uniform) for row, uniform in foreseen]
            count = next((i for i, t in enumerate(drafts) if t != drawn[i]), len(drafts))
            sequence.uniforms(count + 1)
            kept.append(count)
            following.append(drawn[count])
        else:
            uniforms = sequence.uniforms(last - first)
            count, token = accept_sampled(drafts, proposals[index].law, law, uniforms)
            kept.append(count)
            following.append(token)
    return Verdict([list(range(count)) for count in kept], following)


def _lead(logits: Tensor, token: int) -> Lead:
    """How clearly `token` leads in logits [V]."""
    rest = logits.clone()
    rest[token] = float("-inf")
    top = float(logits[token])
    return Lead(top, top - float(rest.max()))
