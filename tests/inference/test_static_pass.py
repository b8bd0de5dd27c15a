"""Passes in padded buffers, run without a graph, give the tokens of the engine's own passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documented_flashinfer import scattered
from small_heads import PROMPTS

from draftsmith.inference import engine as engine_module
from draftsmith.inference.batch import Batch, PagedContext
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.pages import KVPool
from draftsmith.inference.static_pass import Shape, StaticPasses, hindrance
from draftsmith.inference.tree import TreeConfig
from draftsmith.kernels import jit
from draftsmith.models.heads import Head
from draftsmith.models.target import Target, TargetConfig
from draftsmith.scripts.acceptance import head_drafter

CHAIN = EngineConfig(draft_tokens=3, max_batch=3, max_step_tokens=24, pool_tokens=256, poison=True)
KINDS = {
    "plain": replace(CHAIN, draft_tokens=0),
    "chain": CHAIN,
    "chain, overlapped": replace(CHAIN, schedule="overlapped"),
    "chain, in halves": replace(CHAIN, micro_batches=2),
    "static tree": replace(CHAIN, tree=TreeConfig("static", "comb", top_k=2)),
    "dynamic tree": replace(CHAIN, tree=TreeConfig("dynamic", top_k=3, nodes=7)),
}


class Recorded:
    """A `Capture` that calls again and, as a graph does, leaves the results where they were."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        owner: Any = call.__self__  # pyright: ignore
        call()
        kept = owner.states

        def replay() -> None:
            self.replayed += 1
            call()
            for boundary, states in owner.states.items():
                kept[boundary].copy_(states)
            owner.states = kept

        return replay


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Engines made now run static passes."""
    capture = Recorded()
    monkeypatch.setattr(engine_module, "hindrance", lambda target, config: None)
    monkeypatch.setattr(engine_module, "CudaGraphs", lambda: capture)
    return capture


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_engine_writes_its_text(
    kind: str, page_size: int, target: Target, head: Head, recorded: Recorded
):
    """Greedy and sampled requests of unequal lengths in a pool that is NaN where nothing was
    written; they join and leave, so that rows are filled up by other counts from step to step."""
    settings, texts = replace(KINDS[kind], page_size=page_size), []
    for static in (False, True):
        drafter = head_drafter(head, None, settings.tree) if settings.draft_tokens else None
        engine = Engine(target, replace(settings, cuda_graphs=static), drafter)
        running = [
            engine.add(
                prompt, SamplingParams(3 * n + 4, temperature=0.9 * (n % 2), ignore_eos=True)
            )
            for n, prompt in enumerate(PROMPTS[:4])
        ]
        while not engine.scheduler.idle:
            engine.step()
        texts.append([one.output for one in running])
        assert engine.scheduler.allocator.num_pages == 256 // page_size
        assert (recorded.replayed > 3) == static
    assert texts[0] == texts[1]
    # Of 4 to 16 steps two or three shapes, each captured once.
    assert 1 <= recorded.captured < recorded.replayed


TREES = [[-1, 0, 0, 1, 1, 2, 4], [-1], [-1, 0, 1, 1]]


@torch.inference_mode()
@pytest.mark.parametrize("page_size", [1, 16])
def test_states_and_pages_are_those_of_the_pass_itself(target: Target, page_size: int):
    """To 1e-12 in float64."""
    batches = [
        ([7, 3, 5], None),
        ([6, 4, 1], None),
        ([7, 1, 4], TREES),
        ([4, 1, 4], [TREES[2], *TREES[1:]]),
        ([6, 3, 6], None),
    ]
    assert _same_states_and_pages(target, page_size, 1e-12, batches) == 3


@torch.inference_mode()
def test_triton_reads_the_same_buffers(
    tiny_llama_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """The kernels that a graph would hold, in the interpreter, against the reference in float32."""
    pytest.importorskip("triton")
    folder = str(tiny_llama_folder(num_hidden_layers=2, hidden_size=32, vocab_size=64))
    small = Target.load(TargetConfig(source=folder, folder=folder, dtype="float32", device="cpu"))
    asked: list[str] = ["reference"]
    monkeypatch.setattr(jit, "choice", lambda: asked[0])
    call = StaticPasses.__call__

    def by_triton(self: StaticPasses, batch: Batch) -> dict[int, torch.Tensor] | None:
        asked[0] = "triton"
        try:
            return call(self, batch)
        finally:
            asked[0] = "reference"

    monkeypatch.setattr(StaticPasses, "__call__", by_triton)
    batches = [([3, 1, 1], None), ([4, 1, 1], [TREES[2], *TREES[1:]])]
    assert _same_states_and_pages(small, 16, 1e-5, batches) == 2


def _same_states_and_pages(
    target: Target,
    page_size: int,
    tolerance: float,
    batches: list[tuple[list[int], list[list[int]] | None]],
) -> int:
    """How many shapes serve these batches, each by its rows and the trees they are the last of.
    Padding rows are finite; nothing but the rows' own slots is written, beside the spare page."""
    running = scattered([40, 40, 40], page_size)
    pools = [
        KVPool(target.num_layers, 128 * page_size, poison=True, spare=spare)
        for spare in (page_size, 0)
    ]
    begun = Batch.build([(one, 0, [5] * 20) for one in running])
    for pool in pools:
        target.forward(begun.tokens, begun.positions, PagedContext(pool, begun))
    passes = StaticPasses(target, pools[0], (0, 2), page_size, 8, Recorded())
    for rows, parents in batches:
        parts = [(one, 20, [7] * count) for one, count in zip(running, rows, strict=True)]
        batch = Batch.build(parts, parents=parents)
        got = passes(batch)
        context = PagedContext(pools[1], batch)
        want = target.forward(batch.tokens, batch.positions, context, (0, 2))
        assert got is not None and sorted(got) == sorted(want)
        for boundary, states in want.items():
            torch.testing.assert_close(got[boundary], states, atol=tolerance, rtol=0)
        for one in passes.passes.values():
            assert all(states.isfinite().all() for states in one.states.values())
    for layer in range(target.num_layers):
        for held in ("keys", "values"):
            one, other = (getattr(pool, held)[layer] for pool in pools)
            same = one[:, : pools[0].num_slots]
            torch.testing.assert_close(same, other, atol=tolerance, rtol=0, equal_nan=True)
    return len(passes.passes)


def test_shapes_are_rounded_up_and_long_passes_left_out(target: Target):
    """Few shapes serve all batches; a prompt's rows are none of them."""
    running = scattered([1100, 200, 200], 16)

    def shape(*rows: int) -> Shape:
        parts = [(one, 20, [3] * count) for one, count in zip(running, rows, strict=False)]
        return Shape.of(Batch.build(parts))

    assert shape(1) == Shape(1, 1, 1024, 0)
    assert shape(3, 4, 1) == shape(3, 3) == Shape(8, 4, 1024, 0) != shape(4)
    assert shape(40, 30, 3) == Shape(128, 64, 1024, 0)
    assert shape(1050).keys == 2048
    pool = KVPool(target.num_layers, 2048, spare=16)
    passes = StaticPasses(target, pool, (), 16, 4, Recorded())
    assert passes(Batch.build([(running[0], 0, [3] * 5)])) is None


def test_where_graphs_cannot_be_captured(
    target: Target, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    """On a CPU they are off, silently where nobody asked; each other hindrance has its name."""
    for asked in (None, False):
        assert Engine(target, EngineConfig(cuda_graphs=asked)).pool.spare == 0
    assert not recwarn.list
    with pytest.warns(UserWarning, match="cuda_graphs is ignored: the target is on cpu"):
        Engine(target, EngineConfig(cuda_graphs=True))
    given: Any = SimpleNamespace(
        device=torch.device("cuda"), trunk=target.trunk, stack=target.stack
    )
    assert "plans every pass" in str(hindrance(given, EngineConfig(attention="flashinfer")))
    assert "DRAFTSMITH_KERNELS=triton" in str(hindrance(given, EngineConfig()))
    monkeypatch.setattr("draftsmith.inference.static_pass.use_triton", lambda like: True)
    assert hindrance(given, EngineConfig()) is None
    monkeypatch.setattr(target.stack.rotary, "fixed", False)  # pyright: ignore
    assert "longest position" in str(hindrance(given, EngineConfig()))
    given.stack = None
    assert "transformers' own" in str(hindrance(given, EngineConfig()))
