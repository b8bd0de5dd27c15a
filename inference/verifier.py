"""What a target pass decides: which drafts of each sequence are kept, and the token that follows
them.

Every row is judged by its own law (`sampler.row_laws`). A request is greedy or coupled (a draft is
kept where it equals the token that plain decoding takes), or it judges its drafts by `verification`
(`kernels.accept_chains`, `accept_block`, `accept_typical`), all requests of a kind in one call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..kernels.accept import DraftLaw, draw_rows
from ..kernels.accept_block import accept_block
from ..kernels.accept_chains import accept_chains
from ..kernels.accept_typical import accept_typical
from ..kernels.chains import Chains
from ..kernels.top_two import top_two
from .batch import Batch
from .drafters import Proposal
from .processors import Row, row_logits
from .sampler import check_finite, laws
from .sequence import Lead, Sequence, TokenLogprobs
from .upload import upload


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verify pass, by sequence.

    Attributes:
        kept: indices into the proposal's tokens, in the order of the text (a chain: 0, 1, …).
        following: the target's own token behind them.
    """

    kept: list[list[int]]
    following: list[int]


def sample(sequences: list[Sequence], logits: Tensor) -> list[int]:
    """One token for each of several sequences from one row of logits each, [n, V]; greedy rows also
    note their lead over the runner-up."""
    starts = list(range(len(sequences) + 1))
    return _Judge(sequences, [Proposal([])] * len(sequences), starts, logits).verdict().following


def verify(
    batch: Batch, sequences: list[Sequence], proposals: list[Proposal], logits: Tensor
) -> Verdict:
    """Judge the drafts of every sequence. logits [N, V] of the batch's rows."""
    return _Judge(sequences, proposals, batch.starts, logits).verdict()


class _Judge:
    """One pass. See `verify`; `starts` are the borders of the sequences' rows."""

    def __init__(
        self,
        sequences: list[Sequence],
        proposals: list[Proposal],
        starts: list[int],
        logits: Tensor,
    ) -> None:
        self.sequences = sequences
        self.drafts = [proposal.tokens for proposal in proposals]
        self.proposals = proposals
        self.starts = starts
        self.raw = logits
        self.logits = logits
        self.kept = [0] * len(sequences)
        self.following = [-1] * len(sequences)

    def verdict(self) -> Verdict:
        """Judge all."""
        if any(sequence.params.edits_logits for sequence in self.sequences):
            rows = [
                Row(sequence, drafts[:count])
                for sequence, drafts in zip(self.sequences, self.drafts, strict=True)
                for count in range(len(drafts) + 1)
            ]
            self.logits = row_logits(self.raw, rows)
        kinds: dict[str, list[int]] = {}
        for index, sequence in enumerate(self.sequences):
            params = sequence.params
            kind = "coupled" if params.coupled else params.verification
            kinds.setdefault("greedy" if params.greedy else kind, []).append(index)
        if "greedy" in kinds:
            self._greedy(kinds["greedy"])
        else:
            check_finite(self.logits, self._place())
        for kind, judge in (
            ("coupled", self._coupled),
            ("rejection", self._rejection),
            ("block", self._block),
            ("typical", self._typical),
        ):
            if kind in kinds:
                judge(kinds[kind])
        verdict = Verdict([list(range(count)) for count in self.kept], self.following)
        note_logprobs(self.sequences, self.drafts, self.starts, verdict, self.raw)
        return verdict

    def _greedy(self, indices: list[int]) -> None:
        """One pass over all rows, which also finds those that are not finite."""
        plain = [index for index in indices if not self.drafts[index]]
        best, choices, second = best_of(self.logits, leads=bool(plain))
        # One transfer to the host says both.
        decided = torch.where(torch.isfinite(best), choices, -1).tolist()
        if min(decided) < 0:
            check_finite(self.logits, self._place())
        self._match(indices, decided)
        if plain:
            leads = torch.stack([best, best - second], 1).tolist()
            for index in plain:
                self.sequences[index].leads.append(Lead(*leads[self.starts[index]]))

    def _coupled(self, indices: list[int]) -> None:
        """One draw for each token of the answer, as in plain decoding."""
        law = self._law(indices)
        uniforms = [u for i in indices for u in self.sequences[i].foreseen(len(self.drafts[i]) + 1)]
        drawn = draw_rows(law, upload(uniforms, law.device, torch.float64)).tolist()
        decided = [-1] * self.starts[-1]
        for index in indices:
            first, end = self.starts[index], self.starts[index + 1]
            decided[first:end], drawn = drawn[: end - first], drawn[end - first :]
        self._match(indices, decided)
        for index in indices:
            self.sequences[index].uniforms(self.kept[index] + 1)

    def _match(self, indices: list[int], decided: list[int]) -> None:
        """Keep drafts while they are what the target decides, by row."""
        for index in indices:
            first, drafts = self.starts[index], self.drafts[index]
            differs = (step for step, t in enumerate(drafts) if t != decided[first + step])
            count = next(differs, len(drafts))
            self.kept[index], self.following[index] = count, decided[first + count]

    def _rejection(self, indices: list[int]) -> None:
        law, chains = self._law(indices), self._chains(indices)
        unread = chains.drafts.new_zeros(len(law))
        self._settle(indices, accept_chains(chains, unread, law))

    def _block(self, indices: list[int]) -> None:
        law = self._law(indices)
        self._settle(indices, accept_block(self._chains(indices), law))

    def _typical(self, indices: list[int]) -> None:
        law = self._law(indices)
        asked = [self.sequences[index].params for index in indices]
        limits = [(one.typical_threshold, one.typical_scale) for one in asked]
        threshold, scale = upload(limits, law.device, torch.float64).T
        self._settle(indices, accept_typical(self._chains(indices), law, threshold, scale))

    def _settle(self, indices: list[int], judged: tuple[Tensor, Tensor]) -> None:
        kept, following = torch.stack(judged).tolist()
        for index, count, token in zip(indices, kept, following, strict=True):
            if token < 0:
                raise ValueError(
                    f"request {self.sequences[index].id!r}: cannot sample: the weights have no "
                    "mass or are not finite; try target.dtype=float32"
                )
            self.kept[index], self.following[index] = count, token

    def _law(self, indices: list[int]) -> Tensor:
        """[n, V] of the rows of some sequences, end to end."""
        params = [
            self.sequences[index].params
            for index in indices
            for _ in range(self.starts[index], self.starts[index + 1])
        ]
        if len(indices) == len(self.sequences):
            return laws(self.logits, params)
        rows = [
            row for index in indices for row in range(self.starts[index], self.starts[index + 1])
        ]
        return laws(self.logits[upload(rows, self.logits.device)], params)

    def _chains(self, indices: list[int]) -> Chains:
        """What was drafted for some sequences, with their draws."""
        device, size = self.logits.device, self.logits.shape[1]
        drafts = [self.drafts[index] for index in indices]
        most = max(len(chain) for chain in drafts)
        starts = [0, *itertools.accumulate(len(chain) + 1 for chain in drafts)]
        uniforms = [
            self.sequences[index].uniforms(len(chain) + 1)
            for index, chain in zip(indices, drafts, strict=True)
        ]
        known = [self.proposals[index].law for index in indices]
        law, columns = _packed(known, size)
        padded = [chain + [-1] * (most - len(chain)) for chain in drafts]
        greedy, drawn = upload([[False] * len(known), [one is not None for one in known]], device)
        return Chains(
            upload(padded, device, torch.int64),
            upload(starts, device),
            greedy,
            drawn,
            upload(
                [one + [0.0] * (most + 1 - len(one)) for one in uniforms], device, torch.float64
            ),
            law,
            columns,
        )

    def _place(self) -> str:
        """For an error."""
        places = [f"{one.id!r} at position {len(one.tokens)}" for one in self.sequences[:4]]
        return f"requests {', '.join(places)}"


def _packed(known: list[DraftLaw | None], size: int) -> tuple[Tensor | None, Tensor | None]:
    """The laws of several chains [B, K, Vd], and the column of each of `size` tokens in them."""
    drawn = [law for law in known if law is not None]
    if not drawn:
        return None, None
    ids, none = drawn[0].ids, drawn[0].probabilities[:0]
    for law in drawn:
        assert law.ids is ids or (
            ids is not None and law.ids is not None and torch.equal(law.ids, ids)
        ), "chains of one batch are drawn from one vocabulary"
    table = pad_sequence(
        [none if law is None else law.probabilities for law in known], batch_first=True
    )
    if ids is None:
        return table, None
    columns = torch.full((size,), -1, device=ids.device)
    columns[ids] = torch.arange(len(ids), device=ids.device)
    return table, columns


def best_of(logits: Tensor, leads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The target's own choices: see `top_two`. The next best is right only where `leads` asks for
    it, since on a GPU it takes another read of all logits."""
    if leads or logits.device.type == "cpu":
        return top_two(logits)
    best, choices = logits.max(-1)
    return best, choices, best


def note_logprobs(
    sequences: list[Sequence],
    drafts: list[list[int]],
    starts: list[int],
    verdict: Verdict,
    logits: Tensor,
) -> None:
    """Write down the log-probabilities of what was decided, for the requests that ask: log-softmax
    of the target's own logits, before anything acts on them.

    Args:
        drafts, starts: the tokens that a sequence's rows hold behind its first, and the borders of
            those rows. logits: [N, V].
    """
    asking = [i for i, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    if not asking:
        return
    rows, tokens = [], []
    for index in asking:
        kept = verdict.kept[index]
        rows += [starts[index], *(starts[index] + 1 + i for i in kept)]
        tokens += [*(drafts[index][i] for i in kept), verdict.following[index]]
    most = max(sequences[index].params.logprobs or 0 for index in asking)
    law = torch.log_softmax(logits[upload(rows, logits.device)], -1)
    taken = law.gather(1, upload(tokens, logits.device)[:, None])[:, 0].tolist()
    values, ids = (found.tolist() for found in law.topk(min(most, law.shape[1]), -1))
    place = 0
    for index in asking:
        sequence, count = sequences[index], len(verdict.kept[index]) + 1
        wanted = sequence.params.logprobs
        for row in range(place, place + count):
            top = list(zip(ids[row][:wanted], values[row][:wanted], strict=True))
            sequence.logprobs.append(TokenLogprobs(taken[row], top))
        place += count
