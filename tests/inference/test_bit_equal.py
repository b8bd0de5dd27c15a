"""In bfloat16, too, a chain's rows are plain decoding's rows bit for bit, where the native forms
run: their sums do not depend on what is beside a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafting import Script, ScriptedDrafter

from draftsmith.inference.batch import Batch, PagedContext
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.kernels import few_rows
from draftsmith.kernels.decoder_pass import PagedLayers
from draftsmith.kernels.packed_linear import can_tile
from draftsmith.models.target import Target, TargetConfig

pytestmark = pytest.mark.skipif(
    not (few_rows.serves(torch.empty(0)) and can_tile(torch.zeros(1, 32).bfloat16())),
    reason="needs a C++ compiler and a processor that multiplies bfloat16",
)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5 + (7 * i + 31 * n) % 500 for i in range(n)] for n in (3, 17, 40)]


@pytest.fixture(scope="module")
def target(tiny_llama_folder: Callable[..., Path]) -> Target:
    """Heads of 64, which matrix tiles take, in bfloat16."""
    folder = tiny_llama_folder(
        hidden_size=128, num_attention_heads=4, head_dim=64, dtype="bfloat16", seed=3
    )
    return Target.load(TargetConfig(source=str(folder), dtype="bfloat16", device="cpu"))


def config(**changes: int) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings = {"pool_tokens": 1024, "page_size": 16, "poison": True, "max_batch": 3} | changes
    return EngineConfig(**settings)  # type: ignore[arg-type]


def test_logits_of_a_chain_are_those_of_its_rows(target: Target):
    """Three sequences' last four rows at once, and one row at a time."""
    engine = Engine(target, config(draft_tokens=0), None)
    running = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    while not all(sequence.decoding for sequence in running):
        engine.step()

    @torch.inference_mode()
    def logits(parts: list) -> torch.Tensor:
        batch = Batch.build(parts)
        context = PagedContext(engine.pool, batch)
        raw = target.forward(batch.tokens, batch.positions, context)[target.num_layers]
        return target.logits(target.trunk.norm(raw))

    last = [(one, one.num_computed - 2, one.tokens[-3:]) for one in running]
    together = logits(last)
    single = [
        logits([(one, first + j, [token])])
        for one, first, tokens in last
        for j, token in enumerate(tokens)
    ]
    assert torch.equal(together, torch.cat(single))


def test_layers_in_one_call_are_layers_in_turn(target: Target, monkeypatch: pytest.MonkeyPatch):
    """A whole run, prompts and all boundaries, with the calls of a pass made one by one."""
    called: list[int] = []

    class Spy(PagedContext):
        def few_rows(self, layers: range, like: torch.Tensor) -> PagedLayers | None:
            found = super().few_rows(layers, like)
            called.append(found is not None)
            return found

    def states(context: type[PagedContext]) -> list[dict[int, torch.Tensor]]:
        engine = Engine(target, config(draft_tokens=0), None)
        running = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
        while not all(sequence.decoding for sequence in running):
            engine.step()
        batch = Batch.build([(one, one.num_computed, one.tokens[-1:]) for one in running])
        here = context(engine.pool, batch)
        one = target.forward(batch.tokens, batch.positions, here, (0, 1, 2))
        engine.run([], GREEDY)
        return [one, {i: torch.tensor(each.tokens) for i, each in enumerate(running)}]

    fused = states(Spy)
    assert called == [True]
    monkeypatch.setattr(PagedContext, "few_rows", lambda *_: None)
    for one, other in zip(fused, states(PagedContext), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("pattern", [[0], [3], [1, 0, 2, 3]], ids=str)
def test_speculative_text_is_plain_text(target: Target, pattern: list[int]):
    """No near ties in bfloat16: the same tokens and the same leads, whatever is accepted."""
    plain = Engine(target, config(draft_tokens=0, max_batch=1), None).run(PROMPTS, GREEDY)
    answers = {tuple(p): one.output for p, one in zip(PROMPTS, plain, strict=True)}
    drafter = ScriptedDrafter(Script(answers, pattern, target.vocab_size))
    drafted = Engine(target, config(draft_tokens=3), drafter).run(PROMPTS, GREEDY)
    assert [one.output for one in drafted] == [one.output for one in plain]
