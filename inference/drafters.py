"""Who drafts. One interface: propose a chain per sequence, then observe what the target really
computed.

The engine calls `observe` after every target pass with the rows that count and the token that
follows each sequence, so that a drafter's own keys and values are always built from true target
states (rows made from drafted states are overwritten before they are read).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.accept import DraftLaw, draw
from ..kernels.packed_linear import PackedLinear
from ..kernels.shift import shift_insert
from ..models.heads import HeadFunction, MTPHead
from ..models.target import Target
from .batch import Batch, PagedContext
from .pages import KVPool
from .sampler import probabilities
from .sequence import Sequence


@dataclass(frozen=True)
class Proposal:
    """One sequence's chain. `law` is None when the tokens were chosen (argmax, look-up), not
    drawn."""

    tokens: list[int]
    law: DraftLaw | None = None


class Drafter(Protocol):
    """What the engine needs of a drafter."""

    name: str
    num_layers: int
    """Layers of keys and values it keeps in the shared pool."""

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Called once by the engine: the target, the pool, and where the drafter's layers begin in
        it."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """At most `counts` drafts for each sequence, in order."""
        ...

    def observe(self, batch: Batch, states: Tensor, next_tokens: list[int]) -> None:
        """The target computed `batch` (true tokens only) with final-normed states [N, H];
        `next_tokens` [B] follow each sequence's last row."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        ...


class NgramDrafter:
    """Prompt look-up: what followed the latest earlier occurrence of the last n tokens. No model,
    no keys.

    Args:
        longest: the n-gram tried first; shorter ones follow down to `shortest`.
    """

    name = "ngram"
    num_layers = 0

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"ngram lengths {shortest}..{longest}: need 1 <= shortest <= longest")
        self.sizes = range(longest, shortest - 1, -1)
        self._seen: dict[str, tuple[int, dict[tuple[int, ...], int]]] = {}

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Needs nothing of the target."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`; an empty chain where nothing matches."""
        return [
            Proposal(self._lookup(sequence, count) if count else [])
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def observe(self, batch: Batch, states: Tensor, next_tokens: list[int]) -> None:
        """Look-up reads the sequences themselves."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's table."""
        self._seen.pop(sequence.id, None)

    def _lookup(self, sequence: Sequence, count: int) -> list[int]:
        tokens = sequence.tokens
        done, table = self._seen.get(sequence.id, (0, {}))
        # Grams that end before the last token, so that the last one cannot find itself.
        for end in range(max(done, 1), len(tokens)):
            for size in self.sizes:
                if size <= end:
                    table[tuple(tokens[end - size : end])] = end
        self._seen[sequence.id] = (len(tokens), table)
        for size in self.sizes:
            if size < len(tokens):
                follow = table.get(tuple(tokens[-size:]))
                if follow is not None:
                    return tokens[follow : follow + count]
        return []


class HeadDrafter:
    """A recycled head drafts a chain: true states first, then its own.

    State between steps: for each sequence the head's output at its last true row, from which the
    first draft comes.

    Args:
        head: the trained (or training) module; its weights are copied here in the engine's form.
        draft_ids: [Vd] sorted target ids it may draft, None for all.
        name: how reports call it.
    """

    def __init__(self, head: MTPHead, draft_ids: Tensor | None, name: str | None = None) -> None:
        self.head = head
        self.draft_ids = draft_ids
        self.name = name or head.kind
        self.num_layers = head.num_layers
        self._carried: dict[str, Tensor] = {}

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Fuse the head for this target's dtype and device; keep the draft vocabulary's rows of its
        lm_head."""
        if int(self.head.target_config.hidden_size) != target.hidden_size:
            raise ValueError(
                f"the head is {self.head.target_config.hidden_size} wide, the target "
                f"{target.hidden_size}: "
                "it was trained for another target"
            )
        self.trunk = target.trunk
        lean = type(target.stack).__name__ == "LeanStack"
        self.function: HeadFunction = self.head.for_inference(target.dtype, target.device, lean)
        self.lm_head = PackedLinear(target.trunk.lm_head_weight(self.draft_ids))
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(target.device)
        self.pool, self.first_layer = pool, first_layer

    @torch.inference_mode()
    def observe(self, batch: Batch, states: Tensor, next_tokens: list[int]) -> None:
        """Refill rows from true states: row p holds (h_p, x_{p+1}) in the target's own slots."""
        starts = torch.tensor(batch.starts)
        following = torch.tensor(next_tokens, dtype=torch.int64, device=batch.tokens.device)
        tokens = shift_insert(batch.tokens, starts, batch.last_rows, following)
        out = self._run(batch, tokens, states)
        for sequence, row in zip(batch.sequences, out[batch.last_rows], strict=True):
            self._carried[sequence.id] = row

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`. Drafts are drawn from the head at T > 0 and their law recorded; argmax at
        T = 0."""
        chains: list[list[int]] = [[] for _ in sequences]
        laws: list[list[Tensor]] = [[] for _ in sequences]
        active = [index for index, count in enumerate(counts) if count]
        hidden = [self._carried[sequence.id] for sequence in sequences]
        while active:
            stacked = torch.stack([hidden[index] for index in active])
            logits = self.trunk.finish_logits(self.lm_head(stacked))
            greedy = logits.argmax(-1)
            for row, index in enumerate(active):
                chains[index].append(
                    self._take(sequences[index], logits[row], greedy[row], laws[index])
                )
            active = [index for index in active if len(chains[index]) < counts[index]]
            if active:
                parts = [
                    (sequences[i], len(sequences[i].tokens) - 2 + len(chains[i]), [chains[i][-1]])
                    for i in active
                ]
                batch = Batch.build(parts, stacked.device)
                out = self._run(batch, batch.tokens, torch.stack([hidden[i] for i in active]))
                for row, index in enumerate(active):
                    hidden[index] = out[row]
        return [
            Proposal(chain, DraftLaw(torch.stack(law), self.draft_ids) if law else None)
            for chain, law in zip(chains, laws, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Drop the carried state."""
        self._carried.pop(sequence.id, None)

    def _run(self, batch: Batch, tokens: Tensor, hidden: Tensor) -> Tensor:
        context = PagedContext(self.pool, batch, self.first_layer)
        return self.function(self.trunk.embed(tokens), hidden, batch.positions, context)

    def _take(self, sequence: Sequence, logits: Tensor, best: Tensor, law: list[Tensor]) -> int:
        if sequence.params.greedy:
            index = int(best)
        else:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            q = probabilities(wide[None], sequence.params)[0]
            law.append(q)
            index = draw(q, sequence.uniforms(1)[0])
        return index if self.draft_ids is None else int(self.draft_ids[index])
