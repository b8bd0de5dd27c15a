"""What only a GPU can show of the engine's backends: FlashInfer reads our pages as our definition
does, and replayed graphs write the text of passes that are called (`gpu_check`)."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import torch
from torch import Tensor

from ..inference.batch import Batch, PagedContext
from ..inference.config import EngineConfig, SamplingParams
from ..inference.engine import Engine
from ..inference.flashinfer_pages import FlashInfer
from ..inference.head_drafter import HeadDrafter
from ..inference.pages import KVPool
from ..inference.sequence import Sequence
from ..kernels.paged_attention import paged_attention_reference
from ..models.heads import Head
from ..models.target import Target

TREE = [-1, 0, 0, 1, 1, 2, 4]
BATCHES: dict[str, tuple[list[tuple[int, int]], list[list[int]] | None]] = {
    "decode": ([(1200, 1), (1, 1), (33, 1)], None),
    "chains": ([(300, 4), (5, 1), (32, 4)], None),
    "chunks": ([(200, 200), (310, 90), (18, 1)], None),
    "trees": ([(300, 7), (1, 1), (40, 7)], [TREE, [-1], TREE]),
}
"""Of each sequence its keys and the rows among them, and the trees."""
SETTINGS: list[tuple[int | None, float | None]] = [(None, None), (5, None), (None, 30.0)]


def flashinfer_checks(device: str, read: FlashInfer, dtype: torch.dtype) -> dict[str, str]:
    """By name `good` or what is wrong; outputs may differ by 2e-2 of the largest."""
    found = {}
    for name, size in itertools.product(BATCHES, (1, 16)):
        try:
            worst = max(_apart(name, size, *each, device, read, dtype) for each in SETTINGS)
            told = "good" if worst <= 2e-2 else f"differs by {worst:.1e}"
        except Exception as fault:  # what does not run is a finding, and others follow
            told = f"{type(fault).__name__}: {fault}"[:300]
        found[f"flashinfer, {name}, pages of {size}"] = told
    return found


def _apart(
    name: str,
    size: int,
    window: int | None,
    softcap: float | None,
    device: str,
    read: FlashInfer,
    dtype: torch.dtype,
) -> float:
    spans, parents = BATCHES[name]
    generator = torch.Generator().manual_seed(0)
    pages = 2048 // size
    free = torch.randperm(pages, generator=generator).tolist()
    running = []
    for index, (length, _) in enumerate(spans):
        one = Sequence.create(str(index), [1], SamplingParams())
        one.page_size, one.pages = size, [free.pop() for _ in range(-(-length // size))]
        running.append(one)
    parts = [
        (one, length - rows, [3] * rows) for one, (length, rows) in zip(running, spans, strict=True)
    ]
    batch = Batch.build(parts, device, parents)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pool = KVPool(1, pages * size)
    pool.attention = read
    keys, values = pool.layer(0, normal(2, 1, 64), normal(2, 1, 64))
    keys.copy_(normal(*keys.shape))
    values.copy_(normal(*values.shape))
    count = batch.starts[-1]
    q, k, v = normal(1, 8, count, 64), normal(1, 2, count, 64), normal(1, 2, count, 64)
    settings: dict[str, Any] = {"scaling": 0.125, "window": window, "softcap": softcap}
    out = PagedContext(pool, batch).attend(0, q, k, v, **settings)[0].double()
    want = paged_attention_reference(
        q[0].double(), keys.double(), values.double(), batch.paged, **settings
    )
    gap = float((out - want).abs().max() / want.abs().max().clamp(min=1))
    return gap if gap == gap else float("inf")


def graph_checks(target: Target, head: Head, prompts: list[list[int]]) -> dict[str, str]:
    """Greedy chains of 3 with replayed passes and with called ones, four requests: row counts are
    powers of two, so both compute the same products."""
    texts, static = [], None
    for graphs in (False, True):
        settings = EngineConfig(max_batch=len(prompts), pool_tokens=8192, cuda_graphs=graphs)
        engine = Engine(target, settings, HeadDrafter(head, None))
        try:
            done = engine.run(prompts, SamplingParams(max_new_tokens=64, ignore_eos=True))
        except RuntimeError as fault:  # a capture that fails is a finding
            return {"engine, graphs": f"{fault}"[:300]}
        texts.append([one.output for one in done])
        static = getattr(engine.schedule, "static", None)
    if static is None or not any(one.replay for one in static.passes.values()):
        return {"engine, graphs": "no pass was replayed"}
    return {"engine, graphs": "good" if texts[0] == texts[1] else f"{texts[1]}, not {texts[0]}"}


def backends(target: Target, head: Head, prompts: list[list[int]], device: str) -> dict[str, str]:
    """All of them; FlashInfer where it is installed."""
    found = graph_checks(target, head, prompts) if device == "cuda" else {}
    if device == "cuda" and importlib.util.find_spec("flashinfer"):
        found |= flashinfer_checks(device, FlashInfer(), torch.bfloat16)
    return found
