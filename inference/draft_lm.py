"""Any small causal LM with the target's tokenizer drafts beside the target: nothing to train.

The draft LM keeps keys and values of its own, in layers of the engine's pool that follow the
target's; a page id addresses the same rows in both. For tokens x_0 .. x_n (x_n decided, not yet
computed by the target):

    observe   rows up to n from true tokens, x_n among them; its state is carried over
    propose   d_1 from the carried state; row n+k of d_k gives d_{k+1}

A chain of K writes the rows of d_1 .. d_{K-1}. Of these the next `observe` keeps the accepted ones
and writes again from the first that was not: one row mostly, two where all K were kept, for d_K was
never fed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..models.target import (
    Target,
    TargetConfig,
    has_tokenizer,
    load_tokenizer,
    longest_text,
    tokenizer_hash,
)
from .batch import Batch, PagedContext
from .device_chains import DeviceChains, Draws
from .draft_chains import DraftChains
from .drafters import Proposal
from .pages import KVPool
from .sequence import Sequence


@dataclass(frozen=True)
class DraftLMConfig:
    """Which small language model drafts beside the target, and how it is held."""

    source: str | None = None
    """A Hugging Face folder, a GGUF file, hf://owner/name or pkg://package/file; null is none."""
    dtype: str = "bfloat16"
    """bfloat16, float32 or float64."""
    device: str = "auto"
    """auto takes a GPU where there is one."""
    folder: str = "work/draft-lm"
    """Where a GGUF file is converted to, once."""
    layers: str = "auto"
    """auto | lean | transformers, as for the target."""

    def model(self) -> TargetConfig:
        """What `Target.load` takes.

        Raises:
            ValueError: no source.
        """
        if self.source is None:
            raise ValueError(
                "the drafter draft-lm needs a model: give draft_lm.source=… (a checkpoint folder, "
                "a GGUF file, hf://owner/name or pkg://package/file of a small language model "
                "with the target's tokenizer)"
            )
        return TargetConfig(self.source, self.dtype, self.device, self.folder, self.layers)


@dataclass(frozen=True)
class DraftLM:
    """A language model whose ids mean what the target's mean.

    Attributes:
        model: the draft LM. num_ids: it drafts ids 0 .. num_ids-1: those that both vocabularies
            have and, where there is a tokenizer, that are tokens and not padding.
    """

    model: Target
    num_ids: int

    @classmethod
    def paired(cls, model: Target, target: Target) -> DraftLM:
        """Hold the two tokenizers against each other, id by id; the widths of embeddings and
        lm_heads may differ.

        Raises:
            ValueError: an id means different tokens, or nothing says what the ids mean.
        """
        num_ids = min(model.vocab_size, target.vocab_size)
        known = [has_tokenizer(folder) for folder in (target.folder, model.folder)]
        if not any(known):
            if model.vocab_size != target.vocab_size:
                raise ValueError(
                    f"draft LM {model.folder}: {model.vocab_size} ids against the target's "
                    f"{target.vocab_size}, and neither folder holds a tokenizer that says which "
                    "of them are padding: put tokenizer.json into both"
                )
            return cls(model, num_ids)
        if not all(known):
            without = model.folder if known[0] else target.folder
            raise ValueError(
                f"draft LM {model.folder}: {without} holds no tokenizer, so nothing says that its "
                "ids mean the same tokens; put its tokenizer.json there"
            )
        tokens = _tokens(target.folder)
        if tokenizer_hash(model.folder) != tokenizer_hash(target.folder):
            _require_same(tokens, _tokens(model.folder), model.folder)
        last = max(tokens)
        if model.vocab_size <= last:
            warnings.warn(
                f"draft LM {model.folder}: the tokenizer's ids go up to {last}, the model's to "
                f"{model.vocab_size - 1}; the rest is never drafted",
                stacklevel=2,
            )
        return cls(model, min(num_ids, last + 1))


@dataclass
class _Carried:
    """What a sequence keeps between two target passes."""

    rows: int
    """Rows of the draft LM in the pages: of true tokens, then of drafts."""
    normed: Tensor
    """[H]: the first draft comes from it."""


class DraftLMDrafter:
    """A `DraftLM` as a `Drafter`; chains. Texts past the model's own positions go on undrafted.

    Args:
        lm: the model, paired with the target that the engine runs.
    """

    name = "draft-lm"
    boundaries = ()

    def __init__(self, lm: DraftLM) -> None:
        self.model = lm.model
        self.num_ids = lm.num_ids
        self.num_layers = lm.model.num_layers
        self.lookahead = 0
        self.longest = longest_text(lm.model.folder)
        self._carried: dict[Sequence, _Carried] = {}

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """See `Drafter`; the pool's layers take the draft LM's own widths and dtype."""
        assert self.num_ids <= target.vocab_size, "paired with another target"
        self.pool, self.first_layer = pool, first_layer
        self.ids = None
        if self.num_ids < target.vocab_size:
            self.ids = torch.arange(self.num_ids, device=target.device)
        self.device = target.device

    @torch.inference_mode()
    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """Fill rows up to the token that follows each sequence's last; drafts that were accepted
        are there already."""
        parts = []
        for index, (sequence, upto) in enumerate(zip(batch.sequences, batch.lengths, strict=True)):
            if sequence.finished:
                continue
            held = self._carried.get(sequence)
            # Rows before a sequence's first batch lie in pages that another filled.
            begun = upto - (batch.starts[index + 1] - batch.starts[index])
            first = min(held.rows, upto) if held else begun
            end = upto + 1 if self.longest is None else min(upto + 1, self.longest)
            if first < end:
                parts.append((sequence, first, sequence.tokens[first:end]))
        if parts:
            for (sequence, first, tokens), row in zip(parts, self._run(parts), strict=True):
                self._carried[sequence] = _Carried(first + len(tokens), row)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`. Drafts are drawn from the model at T > 0 and their law recorded; argmax at
        T = 0."""
        wanted = [
            self._wanted(sequence, count) for sequence, count in zip(sequences, counts, strict=True)
        ]
        chains = DraftChains(sequences, self.ids)
        active = [index for index, count in enumerate(wanted) if count]
        normed = [self._carried[sequences[index]].normed for index in active]
        step = 0
        while active:
            logits = self.model.logits(torch.stack(normed))[:, : self.num_ids]
            chains.extend(active, logits.to(self.device))
            step += 1
            active = [index for index in active if step < wanted[index]]
            if active:
                parts = []
                for index in active:
                    place = len(sequences[index].tokens) - 1 + step
                    parts.append((sequences[index], place, chains.tokens[index][-1:]))
                    self._carried[sequences[index]].rows = place + 1
                normed = list(self._run(parts))
        return chains.proposals()

    def overlaps(self, sequences: list[Sequence], count: int) -> bool:
        """See `DeviceDrafter`; near its own last position a sequence gets fewer drafts."""
        one_device = self.model.device == self.device
        return one_device and all(self._wanted(one, count) == count for one in sequences)

    @torch.inference_mode()
    def chains(self, sequences: list[Sequence], count: int, draws: Draws) -> DeviceChains:
        """See `DeviceDrafter`."""
        normed = torch.stack([self._carried[sequence].normed for sequence in sequences])
        columns, laws = [], []
        for step in range(count):
            logits = self.model.logits(normed)[:, : self.num_ids]
            column, law = draws.take(sequences, step, logits)
            columns.append(column)
            laws.append(law)
            if step + 1 < count:
                parts = [(one, len(one.tokens) + step, [0]) for one in sequences]
                for sequence, place, _ in parts:
                    self._carried[sequence].rows = place + 1
                normed = self._run(parts, column)
        return DeviceChains.of(columns, laws, self.ids)

    def forget(self, sequence: Sequence) -> None:
        """Drop the carried state."""
        self._carried.pop(sequence, None)

    def _wanted(self, sequence: Sequence, count: int) -> int:
        """The drafts that the model's positions leave room for."""
        if self.longest is None:
            return count
        return max(0, min(count, self.longest - len(sequence.tokens) + 1))

    def _run(
        self, parts: list[tuple[Sequence, int, list[int]]], drafts: Tensor | None = None
    ) -> Tensor:
        """Rows of several sequences through the model; the normed state of each one's last,
        [B, H]. drafts: their tokens, where only the device knows them."""
        batch = Batch.build(parts, self.model.device)
        # A padding id of a wider target has no row here; its stand-in costs acceptance alone.
        tokens = (batch.tokens if drafts is None else drafts).clamp(
            max=self.model.trunk.embedding.shape[0] - 1
        )
        context = PagedContext(self.pool, batch, self.first_layer)
        raw = self.model.forward(tokens, batch.positions, context)
        return self.model.trunk.norm(raw[self.model.num_layers][batch.last_rows])


def _tokens(folder: Path) -> dict[int, str]:
    """Every id of a folder's tokenizer with its token, added tokens among them."""
    return {index: token for token, index in load_tokenizer(folder).get_vocab().items()}


def _require_same(target: dict[int, str], draft: dict[int, str], folder: Path) -> None:
    """Refuse two vocabularies that differ in any id, naming the first."""
    for index in sorted({*target, *draft}):
        ours, theirs = target.get(index), draft.get(index)
        if ours != theirs:
            raise ValueError(
                f"draft LM {folder}: another tokenizer than the target's; id {index} is "
                f"{_named(theirs)} here and {_named(ours)} there: use a model of the target's "
                "family, with the same tokenizer"
            )


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)
