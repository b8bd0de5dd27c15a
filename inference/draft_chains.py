"""Chains of drafts while a model makes them, a token a step for all of them at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.accept import DraftLaw, draw_rows
from .drafters import Proposal
from .processors import Row, row_logits
from .sampler import laws
from .sequence import Sequence
from .upload import upload


class DraftChains:
    """Drafts of several sequences: drawn as each request asks for, with their laws noted, or the
    likeliest where the request is greedy, coupled or typical.

    Args:
        sequences: whose tokens the chains follow. ids: [Vd] ascending target ids of the drafter's
            logits, None for all.
    """

    def __init__(self, sequences: list[Sequence], ids: Tensor | None) -> None:
        self.sequences = sequences
        self.ids = ids
        self.tokens: list[list[int]] = [[] for _ in sequences]
        self._laws: list[tuple[list[int], Tensor]] = []

    def extend(self, active: list[int], logits: Tensor) -> None:
        """One draft more for some of the chains.

        Args:
            active: which chains. logits: [len(active), Vd], any floating dtype.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        rows = [Row(self.sequences[index], self.tokens[index]) for index in active]
        logits = row_logits(logits, rows, self.ids)
        drawing = [row for row, one in enumerate(rows) if one.sequence.params.draws_drafts]
        if len(drawing) < len(active):
            columns = logits.argmax(-1)
        else:
            columns = torch.empty(len(active), dtype=torch.int64, device=logits.device)
        if drawing:
            at = upload(drawing, logits.device)
            chosen = logits if len(drawing) == len(active) else logits[at]
            params = [rows[row].sequence.params for row in drawing]
            law = laws(chosen, params)
            uniforms = [rows[row].sequence.uniforms(1)[0] for row in drawing]
            columns[at] = draw_rows(law, upload(uniforms, logits.device, torch.float64))
            self._laws.append(([active[row] for row in drawing], law))
        tokens = columns if self.ids is None else self.ids[columns]
        for index, column, token in zip(active, columns.tolist(), tokens.tolist(), strict=True):
            if column < 0:
                raise ValueError(
                    f"request {self.sequences[index].id!r}: the drafter's logits are not finite; "
                    "its weights are damaged or the dtype overflows: try target.dtype=float32"
                )
            self.tokens[index].append(token)

    def proposals(self) -> list[Proposal]:
        """The chains with what they were drawn from."""
        if not self._laws:
            return [Proposal(chain) for chain in self.tokens]
        _, first = self._laws[0]
        shape = len(self.sequences), max(len(chain) for chain in self.tokens), first.shape[1]
        table = first.new_empty(shape)
        for step, (drawn, law) in enumerate(self._laws):
            table[upload(drawn, table.device), step] = law
        drew = set(self._laws[0][0])
        return [
            Proposal(chain, DraftLaw(table[index, : len(chain)], self.ids))
            if index in drew
            else Proposal(chain)
            for index, chain in enumerate(self.tokens)
        ]
