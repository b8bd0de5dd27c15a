"""Who drafts. One interface: propose a chain per sequence, then observe what the target really
computed.

The engine calls `observe` after every target pass with the rows that count and the token that
follows each sequence, so that a drafter's own keys and values are always built from true target
states (rows made from drafted states are overwritten before they are read).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..kernels.accept import DraftLaw
from ..models.target import Target
from .batch import Batch
from .pages import KVPool
from .sequence import Sequence


@dataclass(frozen=True)
class Proposal:
    """One sequence's chain or tree. `law` is None when the tokens were chosen (argmax, look-up),
    not drawn; of a tree it has one row for every node with children, the root first.

    `parents` is None for a chain; else parents[i] < i is the node that node i follows, -1 the root,
    which is the sequence's newest token. Siblings stand in the order in which they are tried. `cut`
    says that a path was made shorter for the limit of the answer.
    """

    tokens: list[int]
    law: DraftLaw | None = None
    parents: list[int] | None = None
    cut: bool = False


class Drafter(Protocol):
    """What the engine needs of a drafter."""

    name: str
    num_layers: int
    """Layers of keys and values it keeps in the shared pool."""
    lookahead: int
    """How many tokens behind position p its rows p depend on: pages are shared by requests that
    agree so far. 0 without keys."""
    boundaries: tuple[int, ...]
    """The target's states that `observe` reads."""

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Called once by the engine: the target, the pool, and where the drafter's layers begin in
        it."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """A chain of at most `counts` drafts for each sequence, or a tree of so many levels."""
        ...

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """The target computed `batch` (true tokens only) with raw states [N, H] by boundary, L
        among them; `next_tokens` [B] follow each sequence's last row."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over, or gave its pages up: if it comes back, `observe` begins anew, at
        whichever row its pages are known up to."""
        ...


class NgramDrafter:
    """Prompt look-up: what followed the latest earlier occurrence of the last n tokens, and should
    that reach the end of the text, the same again. No model, no keys.

    Args:
        longest: the n-gram tried first; shorter ones follow down to `shortest`.
    """

    name = "ngram"
    num_layers = 0
    lookahead = 0
    boundaries = ()

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"ngram lengths {shortest}..{longest}: need 1 <= shortest <= longest")
        self.sizes = range(longest, shortest - 1, -1)
        self._seen: dict[Sequence, tuple[int, dict[tuple[int, ...], int]]] = {}

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Needs nothing of the target."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`; an empty chain where nothing matches."""
        return [
            Proposal(self.find(sequence, count) if count else [])
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """Look-up reads the sequences themselves."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's table."""
        self._seen.pop(sequence, None)

    def find(self, sequence: Sequence, count: int, shortest: int = 1) -> list[int]:
        """`count` tokens that followed the last n, where the text ends before again from their
        first; none where no n >= `shortest` occurred."""
        tokens = sequence.tokens
        done, table = self._seen.get(sequence, (0, {}))
        # Grams that end before the last token, so that the last one cannot find itself.
        for end in range(max(done, 1), len(tokens)):
            for size in self.sizes:
                if size <= end:
                    table[tuple(tokens[end - size : end])] = end
        self._seen[sequence] = (len(tokens), table)
        for size in self.sizes:
            if shortest <= size < len(tokens):
                follow = table.get(tuple(tokens[-size:]))
                if follow is not None:
                    # What ends the text repeats itself, maybe a single token.
                    period = len(tokens) - follow
                    return [tokens[follow + step % period] for step in range(count)]
        return []
