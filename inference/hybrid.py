"""Look-up first, a model behind it: where the text repeats itself the look-up's chain costs nothing
and is long; elsewhere a head (or a draft LM) drafts.

The model observes every target pass, whoever drafted, so its keys and what it carries are those of
the true text and it can draft the very next step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..models.target import Target
from .batch import Batch
from .drafters import Drafter, NgramDrafter, Proposal
from .pages import KVPool
from .sequence import Sequence


@dataclass(frozen=True)
class NgramConfig:
    """When look-up drafts in the model's place (drafters `ngram+head` and `ngram+draft-lm`)."""

    min_match: int = 3
    """Look-up drafts where at least so many of the last tokens occurred before, in this order;
    elsewhere the model does."""
    longest: int = 5
    """So many of the last tokens are looked up first, then fewer, down to min_match."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.longest:
            raise ValueError(
                f"ngram.min_match={self.min_match}, ngram.longest={self.longest}: need "
                "1 <= min_match <= longest"
            )


class HybridDrafter:
    """Two drafters as one `Drafter`.

    Args:
        config: how long a match must be. model: who drafts where there is none. name: how reports
            call it.
    """

    def __init__(self, config: NgramConfig, model: Drafter, name: str = "ngram+head") -> None:
        self.lookup = NgramDrafter(config.longest, config.min_match)
        self.model = model
        self.name = name
        self.num_layers = model.num_layers
        self.boundaries = model.boundaries
        self.lookahead = model.lookahead

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """See `Drafter`; layers in the pool are the model's."""
        self.model.attach(target, pool, first_layer)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`; each chain is of one drafter alone, with that one's law."""
        proposals = self.lookup.propose(sequences, counts)
        left = [
            index
            for index, proposal in enumerate(proposals)
            if counts[index] and not proposal.tokens
        ]
        if left:
            drafted = self.model.propose(
                [sequences[index] for index in left], [counts[index] for index in left]
            )
            for index, proposal in zip(left, drafted, strict=True):
                proposals[index] = proposal
        return proposals

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """See `Drafter`."""
        self.model.observe(batch, states, next_tokens)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self.lookup.forget(sequence)
        self.model.forget(sequence)
