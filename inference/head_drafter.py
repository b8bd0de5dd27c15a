"""A trained head drafts a chain: true states first, then its own.

For a sequence whose tokens are x_0 .. x_n (x_n decided, not yet computed), module m of a head with
D modules writes its row p when x_{p+1+m} is known, at slot p and position p + m:

    observe   true rows: module 0 up to n-1, module m up to n-1-m (its next rows need drafts)
    propose   d_1 from module 0 at row n-1; step k < D: module k, rows n-k .. n-1, on d_1 .. d_k;
              step k >= D: module D-1 recycled, one row further each time

With D = 1 that is one row a step, at slot and position n-1+k. Whatever a step wrote from drafts is
written again from true states before it is read.

A sequence may begin behind row 0, on pages of rows that another computed: in all modules alike, for
what module m-1 recycled below them is not kept. The scheduler begins D-1 rows early for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.shift import shift_insert
from ..models.heads import Head, HeadFunction, HeadStep
from ..models.target import Target
from .batch import Batch, PagedContext
from .device_chains import DeviceChains, Draws
from .draft_chains import DraftChains
from .drafters import Proposal
from .pages import KVPool
from .sequence import Sequence
from .upload import upload


@dataclass
class _Carried:
    """What a sequence keeps between two target passes."""

    drafted: Tensor
    """[H]: the first draft comes from it."""
    recycled: list[Tensor]
    """By module: [1, H], what it recycles at its last true row; only modules that had one."""


class HeadDrafter:
    """Any head of `models.heads` as a `Drafter`; chains.

    Args:
        head: the trained (or training) module; its weights are copied here in the engine's form.
        draft_ids: [Vd] sorted target ids it may draft, None for all.
        name: how reports call it.
    """

    def __init__(self, head: Head, draft_ids: Tensor | None, name: str | None = None) -> None:
        self.head = head
        self.draft_ids = draft_ids
        self.name = name or head.kind
        self.num_layers = head.num_layers
        # Row p of module m holds x_{p+1+m}.
        self.lookahead = head.num_modules if head.num_layers else 0
        self.boundaries = head.boundaries
        self._carried: dict[Sequence, _Carried] = {}

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Fuse the head for this target's dtype and device; keep its lm_head, or the draft
        vocabulary's rows of the target's."""
        config = self.head.target_config
        if (int(config.hidden_size), int(config.num_hidden_layers)) != (
            target.hidden_size,
            target.num_layers,
        ):
            raise ValueError(
                f"the head is for {config.num_hidden_layers} layers of width {config.hidden_size}, "
                f"the target has {target.num_layers} of {target.hidden_size}: "
                "it was trained for another target"
            )
        self.trunk = target.trunk
        self.function: HeadFunction = target.head_function(self.head)
        own = self.head.lm_head
        self.lm_heads = [target.lm_head]
        if own is not None:
            rows = own.detach().to(target.device, target.dtype)
            self.lm_heads = [target.linear(one) for one in (rows if rows.dim() == 3 else [rows])]
        elif self.draft_ids is not None:
            self.lm_heads = [target.linear(target.trunk.lm_head_weight(self.draft_ids))]
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(target.device)
        self.pool, self.first_layer = pool, first_layer

    @torch.inference_mode()
    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """Refill rows from true states: row p holds (h_p, x_{p+1}) in the target's own slots."""
        following = upload(next_tokens, batch.tokens.device, torch.int64)
        tokens = shift_insert(batch.tokens, batch.borders, batch.last_rows, following)
        out = self._run(batch, tokens, self.function.feed(states, self.trunk), 0)
        before = {one: self._carried.get(one) for one in batch.sequences}
        for index, (sequence, row) in enumerate(
            zip(batch.sequences, out.drafted[batch.last_rows], strict=True)
        ):
            end = batch.starts[index + 1]
            self._carried[sequence] = _Carried(row, [out.recycled[end - 1 : end].clone()])
        if self.head.num_modules > 1:
            self._refill_modules(batch, tokens.tolist(), out.recycled, before)

    def _refill_modules(
        self,
        batch: Batch,
        tokens: list[int],
        recycled: Tensor,
        before: dict[Sequence, _Carried | None],
    ) -> None:
        """Modules 1 .. D-1 over the same tokens: row p of module m takes module m-1's state of that
        row, so each module's rows lie one before those of the module below."""
        spans = list(zip(batch.starts[:-1], batch.starts[1:], strict=True))
        ends = [int(batch.positions[b - 1]) + 1 for _, b in spans]
        # By sequence: its place in the batch, and the states of the module below.
        live = [(index, recycled[a:b]) for index, (a, b) in enumerate(spans)]
        for module in range(1, self.head.num_modules):
            parts, fed, places = [], [], []
            for index, below in live:
                sequence, old = batch.sequences[index], before[batch.sequences[index]]
                # First the row before this batch's, where the module below has had it.
                missed = old.recycled[module - 1 : module] if old else []
                hidden = torch.cat([*missed, below[:-1]])
                if len(hidden):
                    last = spans[index][1]
                    first = ends[index] - len(hidden) - module
                    parts.append((sequence, first, tokens[last - len(hidden) : last]))
                    fed.append(hidden)
                    places.append(index)
            if not parts:
                return
            later = Batch.build(parts, recycled.device)
            out = self._run(later, later.tokens, torch.cat(fed), module).recycled
            live = list(zip(places, out.split([len(hidden) for hidden in fed]), strict=True))
            for index, states in live:
                self._carried[batch.sequences[index]].recycled.append(states[-1:])

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`. Drafts are drawn from the head at T > 0 and their law recorded; argmax at
        T = 0."""
        longest = self.head.max_steps
        wanted = counts if longest is None else [min(count, longest) for count in counts]
        chains = DraftChains(sequences, self.draft_ids)
        carried = [self._carried[sequence] for sequence in sequences]
        drafted = [one.drafted for one in carried]
        # By sequence: the states of the rows that the step before ran (none before step 1).
        recycled = [one.drafted[None, :][:0] for one in carried]
        active = [index for index, count in enumerate(wanted) if count]
        step = 0
        while active:
            read = torch.stack([drafted[index] for index in active])
            self._take(chains, active, self.logits(read, step))
            step += 1
            active = [index for index in active if step < wanted[index]]
            if active:
                parts, fed = [], []
                for index in active:
                    known, run = carried[index], recycled[index]
                    first, hidden = self._rows(sequences[index], step, known, run)
                    parts.append((sequences[index], first, chains.tokens[index][-len(hidden) :]))
                    fed.append(hidden)
                batch = Batch.build(parts, fed[0].device)
                out = self._run(batch, batch.tokens, torch.cat(fed), step)
                pieces = out.recycled.split([len(hidden) for hidden in fed])
                last = out.drafted[batch.last_rows]
                for row, index in enumerate(active):
                    recycled[index], drafted[index] = pieces[row], last[row]
        return chains.proposals()

    def overlaps(self, sequences: list[Sequence], count: int) -> bool:
        """See `DeviceDrafter`; of several modules each needs rows of its own."""
        longest = self.head.max_steps
        return self.head.num_modules == 1 and (longest is None or count <= longest)

    @torch.inference_mode()
    def chains(self, sequences: list[Sequence], count: int, draws: Draws) -> DeviceChains:
        """See `DeviceDrafter`."""
        carried = [self._carried[sequence] for sequence in sequences]
        drafted = torch.stack([one.drafted for one in carried])
        hidden = torch.cat([one.recycled[0] for one in carried])
        columns, laws = [], []
        for step in range(count):
            column, law = self.choose(sequences, step, drafted, draws)
            columns.append(column)
            laws.append(law)
            if step + 1 < count:
                # Row n + step, as `propose` has it.
                parts = [(one, len(one.tokens) - 1 + step, [0]) for one in sequences]
                batch = Batch.build(parts, drafted.device)
                out = self._run(batch, self._ids_of(column), hidden, step + 1)
                hidden, drafted = out.recycled, out.drafted
        return DeviceChains.of(columns, laws, self.draft_ids)

    def choose(
        self, sequences: list[Sequence], step: int, drafted: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor | None]:
        """Draft k of every sequence from what lm_head reads [B, H]: see `Draws.take`."""
        return draws.take(sequences, step, self.logits(drafted, step))

    def logits(self, drafted: Tensor, step: int) -> Tensor:
        """What step k drafts from: [B, H] -> [B, Vd]; heads of their own lm_head read plainly."""
        logits = self.lm_heads[min(step, len(self.lm_heads) - 1)](drafted)
        return logits if self.head.lm_head is not None else self.trunk.finish_logits(logits)

    @torch.inference_mode()
    def rerun(
        self, batch: Batch, states: dict[int, Tensor], last_rows: Tensor, following: Tensor
    ) -> None:
        """See `RerunDrafter`."""
        tokens = shift_insert(batch.tokens, batch.borders, last_rows, following)
        out = self._run(batch, tokens, self.function.feed(states, self.trunk), 0)
        drafted, recycled = out.drafted[last_rows], out.recycled[last_rows]
        for index, sequence in enumerate(batch.sequences):
            self._carried[sequence] = _Carried(drafted[index], [recycled[index : index + 1]])

    def _ids_of(self, columns: Tensor) -> Tensor:
        return columns if self.draft_ids is None else self.draft_ids[columns]

    def _rows(
        self, sequence: Sequence, step: int, carried: _Carried, recycled: Tensor
    ) -> tuple[int, Tensor]:
        """The first row of draft step k >= 1 and the states [rows, H] that it is fed."""
        last = len(sequence.tokens) - 2  # row n-1
        deepest = self.head.num_modules - 1
        if step > deepest:
            own = recycled[-1:] if len(recycled) else carried.recycled[0]
            return last + step - deepest, own
        hidden = torch.cat([*carried.recycled[step - 1 : step], recycled])
        return last + 1 - len(hidden), hidden

    def forget(self, sequence: Sequence) -> None:
        """Drop the carried state."""
        self._carried.pop(sequence, None)

    def _run(self, batch: Batch, tokens: Tensor, hidden: Tensor, step: int) -> HeadStep:
        context = PagedContext(self.pool, batch, self.first_layer)
        module = min(step, self.head.num_modules - 1)
        positions = batch.positions + module if module else batch.positions
        return self.function(self.trunk.embed(tokens), hidden, positions, context, step)

    def _take(self, chains: DraftChains, active: list[int], logits: Tensor) -> None:
        chains.extend(active, logits)
