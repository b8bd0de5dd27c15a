"""Look-up and a model together: where the text repeats itself look-up costs nothing and goes far;
elsewhere a head (or a draft LM) drafts.

    chains   look-up drafts in the model's place where its match is long
    trees    what look-up finds is one branch more beside the model's drafts, whatever its match:
             both are verified in one pass

Drafts that were drawn stand alone, since a branch beside them would have another law: there look-up
drafts in the model's place under trees, too.

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
from .tree import TreeConfig, grafted
from .tree_drafter import TreeHeadDrafter


@dataclass(frozen=True)
class NgramConfig:
    """When look-up drafts in the model's place (drafters `ngram+head` and `ngram+draft-lm`); as a
    branch of a tree (`engine.tree.lookup`) any match will do."""

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
        config: how long a match must be. model: who drafts where there is none. tree: whether
            look-up's branch stands beside the model's drafts, and how long it is. name: how reports
            call it.
    """

    def __init__(
        self,
        config: NgramConfig,
        model: Drafter,
        tree: TreeConfig | None = None,
        name: str = "ngram+head",
    ) -> None:
        self.config = config
        self.tree = tree or TreeConfig()
        self.branching = self.tree.kind != "none" and self.tree.lookup > 0
        self.lookup = NgramDrafter(config.longest, 1 if self.branching else config.min_match)
        self.model = model
        self.name = name
        self.num_layers = model.num_layers
        self.boundaries = model.boundaries
        self.lookahead = model.lookahead

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """See `Drafter`; layers in the pool are the model's."""
        self.model.attach(target, pool, first_layer)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`; a branch may be longer than `counts`, which are the model's levels."""
        proposals = [Proposal([])] * len(sequences)
        asked = [index for index, count in enumerate(counts) if count]
        beside = {index for index in asked if self._beside(sequences[index])}
        left = []
        for index in asked:
            alone: list[int] = []
            if index not in beside:
                least = self.config.min_match
                alone = self.lookup.find(sequences[index], counts[index], least)
            if alone:
                proposals[index] = Proposal(alone)
            else:
                left.append(index)
        if not left:
            return proposals
        drafted = self.model.propose([sequences[i] for i in left], [counts[i] for i in left])
        for index, proposal in zip(left, drafted, strict=True):
            if index in beside and proposal.law is None:
                # The last token of a step is the target's own.
                most = min(self.tree.lookup, sequences[index].remaining - 1)
                branch = self.lookup.find(sequences[index], most)
                if branch:
                    whole = grafted(proposal.tokens, proposal.parents, branch)
                    proposal = Proposal(whole[0], None, whole[1], cut=most < self.tree.lookup)
            proposals[index] = proposal
        return proposals

    def _beside(self, sequence: Sequence) -> bool:
        """Whether look-up's branch stands beside the model's drafts."""
        if isinstance(self.model, TreeHeadDrafter):
            return self.branching and not self.model.draws(sequence)
        return self.branching and not sequence.params.draws_drafts

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """See `Drafter`."""
        self.model.observe(batch, states, next_tokens)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self.lookup.forget(sequence)
        self.model.forget(sequence)
