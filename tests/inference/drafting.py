"""Drafters whose drafts are known beforehand, to drive every accept pattern through the engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.data.batches import PackedBatch
from draftsmith.inference.batch import Batch
from draftsmith.inference.capture import capture
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_chains import DraftChains
from draftsmith.inference.drafters import Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.inference.pages import KVPool
from draftsmith.inference.sequence import Sequence
from draftsmith.models.heads import Head, HeadStep
from draftsmith.models.target import Target
from draftsmith.train.unroll import split_states, unroll

Answers = dict[tuple[int, ...], list[int]]
"""prompt -> the target's own greedy continuation."""
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)


class Script:
    """Which drafts are right: round r of a sequence offers `pattern[r % len]` right tokens, then
    wrong ones.

    Args:
        answers: prompt (as a tuple) -> the target's own greedy continuation.
    """

    def __init__(self, answers: Answers, pattern: list[int], vocab_size: int) -> None:
        self.answers = answers
        self.pattern = pattern
        self.vocab_size = vocab_size
        self.round: dict[str, int] = {}

    def token(self, sequence: Sequence, step: int) -> int:
        """The draft of step `step` (0-based) in this sequence's present round."""
        answer = self.answers[tuple(sequence.tokens[: sequence.num_prompt])]
        place = len(sequence.output) + step
        right = answer[place] if place < len(answer) else 0
        keep = self.pattern[self.round.get(sequence.id, 0) % len(self.pattern)]
        return right if step < keep else (right + 1) % self.vocab_size

    def next_round(self, sequence: Sequence) -> None:
        """The sequence's round is over."""
        self.round[sequence.id] = self.round.get(sequence.id, 0) + 1


class ScriptedDrafter:
    """Proposes the script; no model."""

    name = "scripted"
    num_layers = 0
    lookahead = 0
    boundaries = ()

    def __init__(self, script: Script) -> None:
        self.script = script

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Nothing to prepare."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """The script's tokens."""
        chains = []
        for sequence, count in zip(sequences, counts, strict=True):
            chains.append(Proposal([self.script.token(sequence, step) for step in range(count)]))
            self.script.next_round(sequence)
        return chains

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """Nothing to refill."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class ForcedHeadDrafter(HeadDrafter):
    """A real head that computes everything, but whose drafts are the script's.

    `rows` records what it would draft from: (sequence id, position p, step k) -> [H]. A row of step
    k is kept only while all drafts before it were right, for then its inputs are those of the true
    text.
    """

    def __init__(self, head, draft_ids: Tensor | None, script: Script) -> None:
        super().__init__(head, draft_ids)
        self.script = script
        self.rows: dict[tuple[str, int, int], Tensor] = {}
        self._drafting = False

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """The head's own computation along the script."""
        self._drafting = True
        proposals = super().propose(sequences, counts)
        for sequence in sequences:
            self.script.next_round(sequence)
        self._drafting = False
        return proposals

    def _take(self, chains: DraftChains, active: list[int], logits: Tensor) -> None:
        for index in active:
            chain, sequence = chains.tokens[index], chains.sequences[index]
            chain.append(self.script.token(sequence, len(chain)))

    def _run(self, batch: Batch, tokens: Tensor, hidden: Tensor, step: int) -> HeadStep:
        out = super()._run(batch, tokens, hidden, step)
        modules = self.head.num_modules
        # Slots are rows; a module that is recycled moves one slot on at every further step.
        shift = max(0, step - (modules - 1))
        for index, sequence in enumerate(batch.sequences):
            for row in range(batch.starts[index], batch.starts[index + 1]):
                slot = int(batch.positions[row])
                if self._drafting and self._tokens_wrong(sequence, slot, step, shift):
                    continue
                self.rows[sequence.id, slot - shift, step] = out.drafted[row]
        return out

    def _tokens_wrong(self, sequence: Sequence, slot: int, step: int, shift: int) -> bool:
        """Whether the row's newest token is a draft that is not the text's own."""
        drafts = slot - shift + 1 + step - (len(sequence.tokens) - 1)
        pattern = self.script.pattern
        return drafts > pattern[self.script.round.get(sequence.id, 0) % len(pattern)]


def answers_of(
    target: Target, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> Answers:
    """What the target says without drafts."""
    plain = Engine(target, EngineConfig(draft_tokens=0, pool_tokens=1024)).run(prompts, params)
    return {tuple(s.tokens[: s.num_prompt]): s.output for s in plain}


def worst_difference(
    target: Target, head: Head, steps: int, chunk: int, answers: Answers
) -> torch.Tensor:
    """[K]: how far any row of a training unroll lies from the engine's own, with prefill in chunks
    and every accept count forced in turn.

    Step-0 rows are those written last (after each refill from true states); step-k rows those whose
    drafts so far were the text's own.
    """
    prompts = [list(prompt) for prompt in answers]
    wanted = replace(GREEDY, max_new_tokens=max(len(answer) for answer in answers.values()))
    script = Script(answers, [*range(steps + 1), steps], target.vocab_size)
    drafter = ForcedHeadDrafter(head, None, script)
    # One request at a time: with chunks of one row, a batch could not even hold one row of each.
    engine = Engine(
        target,
        EngineConfig(
            draft_tokens=steps,
            max_batch=1,
            max_step_tokens=chunk,
            page_size=4,
            pool_tokens=256,
            poison=True,
        ),
        drafter,
    )
    texts = engine.run(prompts, wanted)
    worst = torch.zeros(steps, dtype=torch.float64)
    compared = [0] * steps
    boundaries = tuple(sorted({*head.boundaries, target.num_layers}))
    for sequence in texts:
        tokens = torch.tensor(sequence.tokens)
        captured = capture(target, [tokens], boundaries)
        hidden = torch.cat([captured[k] for k in boundaries], -1)
        batch = PackedBatch(
            tokens=tokens,
            supervised=torch.ones(len(tokens), dtype=torch.bool),
            hidden=hidden,
            starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
            positions=torch.arange(len(tokens)),
            row_ids=(sequence.id,),
        )
        with torch.no_grad():
            read = split_states(hidden, boundaries, target.hidden_size)
            states = unroll(head, target.trunk, batch, steps, states=read)
        for (identity, position, step), row in drafter.rows.items():
            if identity == sequence.id and step < steps and position + 1 + step < len(tokens):
                compared[step] += 1
                worst[step] = max(worst[step], (states[step, position] - row).abs().max().double())
    assert compared[0] >= sum(len(p) for p in prompts) and all(compared)
    return worst
