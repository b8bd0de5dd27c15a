"""Chains of drafts that stay on the device, and the random numbers that go there beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels.accept import draw_rows
from .batch import Batch
from .sampler import laws
from .sequence import Sequence
from .upload import upload


@dataclass(frozen=True)
class DeviceChains:
    """K drafts of each of B sequences, on the device.

    Attributes:
        tokens: [B, K] int64 target ids. law: [B, K, Vd] what they were drawn from, one-hot rows for
            greedy requests; None when all are greedy. ids: [Vd] target ids of its columns, None for
            all. sound: [] bool, whether every draft could be drawn.
    """

    tokens: Tensor
    law: Tensor | None
    ids: Tensor | None
    sound: Tensor

    @classmethod
    def of(
        cls, columns: list[Tensor], laws: list[Tensor | None], ids: Tensor | None
    ) -> DeviceChains:
        """From K drafts, [B] columns and their laws [B, Vd]; a column -1 was drawn from what is not
        finite."""
        chosen = torch.stack(columns, 1)
        drawn = [law for law in laws if law is not None]
        if not drawn:
            tokens = chosen if ids is None else ids[chosen]
            return cls(tokens, None, ids, torch.ones((), dtype=torch.bool, device=tokens.device))
        law, wrong = torch.stack(drawn, 1), chosen < 0
        # What is refused at the step's end must not trip the verdict before: a law that draws it.
        law[..., 0].masked_fill_(wrong, 1)
        chosen = chosen.clamp(min=0)
        return cls(chosen if ids is None else ids[chosen], law, ids, ~wrong.any())


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter whose chains need nothing from the host."""

    def overlaps(self, sequences: list[Sequence], count: int) -> bool:
        """Whether it has chains of `count` drafts for all of them."""
        ...

    def chains(self, sequences: list[Sequence], count: int, draws: Draws) -> DeviceChains:
        """`count` drafts of every sequence."""
        ...

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """See `drafters.Drafter`."""
        ...


@runtime_checkable
class RerunDrafter(DeviceDrafter, Protocol):
    """One that can be refilled before the lengths are known."""

    def rerun(
        self, batch: Batch, states: dict[int, Tensor], last_rows: Tensor, following: Tensor
    ) -> None:
        """`observe` without knowing what was kept: over all rows of the batch, of which each
        sequence's true ones end at last_rows [B] and are followed by `following` [B]."""
        ...


class Draws:
    """The random numbers of a step, drawn on the host before it begins.

    Args:
        sequences: B requests. count: K.
    Attributes:
        count: K. drafts: [B, K] float64 on `device`. verdict: [B, K + 1].
    """

    def __init__(self, sequences: list[Sequence], count: int, device: torch.device) -> None:
        self.count = count
        self.greedy = all(sequence.params.greedy for sequence in sequences)
        if self.greedy:
            return
        rows = [
            [0.0] * (2 * count + 1)
            if sequence.params.greedy
            else sequence.uniforms(count) + sequence.uniforms(count + 1)
            for sequence in sequences
        ]
        table = upload(rows, device, torch.float64)
        self.drafts, self.verdict = table.split([count, count + 1], 1)

    def take(
        self, sequences: list[Sequence], step: int, logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Draft k of every sequence from logits [B, Vd]: columns [B] and, unless all are greedy,
        the law [B, Vd]."""
        if self.greedy:
            return logits.argmax(-1), None
        wide = logits if logits.dtype == torch.float64 else logits.float()
        law = laws(wide, [sequence.params for sequence in sequences])
        return draw_rows(law, self.drafts[:, step]), law
