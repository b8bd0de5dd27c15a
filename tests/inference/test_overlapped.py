"""The schedules that do not wait for the device give the tokens of the one that does, with one copy
to the host a step."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import GREEDY, Script, answers_of
from small_heads import HEAD_CONFIGS, PROMPTS, away_from_its_start
from torch import Tensor

from draftsmith.data.batches import PackedBatch
from draftsmith.inference.capture import capture
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMDrafter
from draftsmith.inference.drafters import Drafter
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.inference.overlapped import Draws, Overlapped
from draftsmith.inference.sequence import Sequence
from draftsmith.models.target import Target
from draftsmith.train.unroll import split_states, unroll

SAMPLED = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.95, seed=3)
DRAFTERS = [*HEAD_CONFIGS, "reduced eagle3", "draft-lm"]


def config(schedule: str, **changes: Any) -> EngineConfig:
    settings = {"pool_tokens": 1024, "page_size": 4, "poison": True, "max_batch": 3}
    return EngineConfig(**{**settings, "schedule": schedule, **changes})


def make(name: str, target: Target) -> Drafter:
    if name == "draft-lm":
        return DraftLMDrafter(DraftLM(target, 300))
    ids = torch.arange(0, 512, 3) if name.startswith("reduced") else None
    return HeadDrafter(
        away_from_its_start(HEAD_CONFIGS[name.removeprefix("reduced ")], target, ids), ids
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_are_the_oracles(target: Target, name: str, params: SamplingParams):
    """Every drafter that it takes, one draft and several, greedy and drawn requests in one batch;
    those it does not take run synchronously."""
    for draft_tokens, page_size in ((1, 1), (3, 16)):
        texts = []
        for schedule in ("synchronous", "overlapped"):
            changes = {"draft_tokens": draft_tokens, "page_size": page_size}
            engine = Engine(target, config(schedule, **changes), make(name, target))
            sequences = [
                engine.add(prompt, replace(params if place % 2 else GREEDY, seed=place))
                for place, prompt in enumerate(PROMPTS)
            ]
            while not engine.scheduler.idle:
                engine.step()
            texts.append([(one.output, one.tokens_per_step) for one in sequences])
        assert texts[0] == texts[1]
        assert isinstance(engine.schedule, Overlapped)
        taken = engine.schedule.steps
        assert taken == engine.schedule.copies
        assert (taken > 0) == ("modules" not in name)


class ForcedDrafter(HeadDrafter):
    """A real head that computes everything, but whose drafts are the script's; `rows` are what it
    would draft from, (sequence, place of the draft) -> [H]."""

    def __init__(self, head, script: Script) -> None:
        super().__init__(head, None)
        self.script = script
        self.rows: dict[tuple[str, int], Tensor] = {}

    def choose(
        self, sequences: list[Sequence], step: int, drafted: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor | None]:
        """The script's token."""
        for sequence, row in zip(sequences, drafted, strict=True):
            if step == 0:
                self.rows[sequence.id, len(sequence.tokens)] = row.clone()
        tokens = torch.tensor([self.script.token(one, step) for one in sequences])
        for sequence in sequences if step + 1 == draws.count else []:
            self.script.next_round(sequence)
        return tokens, None


@pytest.mark.parametrize("name", ["mtp", "eagle", "eagle3 of 2 layers"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_one_token_from_the_teacher_forced_head(target: Target, name: str, page_size: int):
    """Whatever is accepted, what the head drafts from is its row of the final text: rejected rows
    that were re-run leave no trace."""
    answers = answers_of(target, PROMPTS)
    head = away_from_its_start(HEAD_CONFIGS[name], target)
    for pattern in itertools.product(range(2), repeat=3):
        drafter = ForcedDrafter(head, Script(answers, list(pattern), target.vocab_size))
        settings = config("overlapped", draft_tokens=1, page_size=page_size)
        engine = Engine(target, settings, drafter)
        texts = engine.run(PROMPTS, GREEDY)
        assert [one.output for one in texts] == [answers[tuple(prompt)] for prompt in PROMPTS]
        assert isinstance(engine.schedule, Overlapped) and engine.schedule.steps
        for sequence in texts:
            rows = teacher_forced(target, head, sequence.tokens)
            drafted = {
                place: row for (who, place), row in drafter.rows.items() if who == sequence.id
            }
            assert drafted
            for place, row in drafted.items():
                torch.testing.assert_close(row, rows[place - 2], rtol=0, atol=1e-9)
                best = drafter.lm_heads[0](row[None]).argmax(-1)
                assert torch.equal(best, drafter.lm_heads[0](rows[place - 2][None]).argmax(-1))


def teacher_forced(target: Target, head, tokens: list[int]) -> Tensor:
    """What a head drafts with at every row of a text, [N, H]."""
    text = torch.tensor(tokens)
    boundaries = tuple(sorted({*head.boundaries, target.num_layers}))
    captured = capture(target, [text], boundaries)
    hidden = torch.cat([captured[k] for k in boundaries], -1)
    batch = PackedBatch(
        tokens=text,
        supervised=torch.ones(len(text), dtype=torch.bool),
        hidden=hidden,
        starts=torch.tensor([0, len(text)], dtype=torch.int32),
        positions=torch.arange(len(text)),
        row_ids=("text",),
    )
    with torch.no_grad():
        states = split_states(hidden, boundaries, target.hidden_size)
        return unroll(head, target.trunk, batch, 1, states=states)[0]


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_one_read_a_step(target: Target, monkeypatch: pytest.MonkeyPatch, draft_tokens: int):
    """Of all ways a tensor's values reach the host, one is used once in a decode-only step."""
    engine = Engine(
        target, config("overlapped", draft_tokens=draft_tokens, poison=False), make("mtp", target)
    )
    for prompt in PROMPTS[:3]:
        engine.add(prompt, GREEDY)
    engine.step()
    assert all(sequence.decoding for sequence in engine.scheduler.running)
    reads: list[str] = []
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), name, reads))
    for _ in range(3):
        reads.clear()
        engine.step()
        assert reads == ["tolist"]
    assert isinstance(engine.schedule, Overlapped) and engine.schedule.copies == 3


def counted(method: Any, name: str, reads: list[str]) -> Any:
    def read(self: Tensor, *arguments: Any, **named: Any) -> Any:
        reads.append(name)
        return method(self, *arguments, **named)

    return read


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_one_way_to_the_device(target: Target, monkeypatch: pytest.MonkeyPatch, draft_tokens: int):
    """What the host knows goes there by `upload`, which does not wait; on a GPU any other way of
    making a tensor of a list would."""
    settings = config("overlapped", draft_tokens=draft_tokens, poison=False)
    engine = Engine(target, settings, make("mtp", target))
    for place, prompt in enumerate(PROMPTS[:3]):
        engine.add(prompt, SAMPLED if place else GREEDY)
    engine.step()
    assert all(sequence.decoding for sequence in engine.scheduler.running)
    makers: list[str] = []
    plain = torch.tensor

    def made(*arguments: Any, **named: Any) -> Tensor:
        makers.append(sys._getframe(1).f_code.co_name)
        return plain(*arguments, **named)

    monkeypatch.setattr(torch, "tensor", made)
    for _ in range(3):
        engine.step()
    assert set(makers) == {"upload"}


def test_logits_that_are_not_finite(target: Target, monkeypatch: pytest.MonkeyPatch):
    """Found at the step's one copy, by name."""
    engine = Engine(target, config("overlapped", draft_tokens=1), make("mtp", target))
    engine.add(PROMPTS[1], GREEDY, "broken")
    engine.step()
    whole = target.logits
    monkeypatch.setattr(target, "logits", lambda normed: whole(normed) * float("nan"))
    with pytest.raises(ValueError, match="'broken' at position 8: logits are not finite"):
        engine.step()


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped"])
def test_two_halves_are_one_batch(target: Target, schedule: str):
    """The target runs a decode-only batch in two passes; the tokens are the same, with one request
    and with several."""
    texts = []
    for parts in (1, 2):
        settings = config(schedule, draft_tokens=1, micro_batches=parts, max_batch=5)
        passes: list[int] = []
        engine = Engine(target, settings, make("mtp", target))
        run = engine.target.forward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, "forward", lambda *a: (passes.append(len(a[0])), run(*a))[1])  # noqa: B023
            texts.append([one.output for one in engine.run(PROMPTS, GREEDY)])
        assert (max(passes[1:]) > 6) == (parts == 1)
    assert texts[0] == texts[1]
