"""What FlashInfer is told of a batch means, by its documentation, our attention over the pages."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from documented_flashinfer import Plain, scattered
from small_heads import PROMPTS
from torch import Tensor

from draftsmith.inference.batch import Batch, PagedContext
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.flashinfer_pages import FlashInfer, as_pages
from draftsmith.inference.pages import KVPool
from draftsmith.inference.parallel import Leader
from draftsmith.inference.tree import TreeConfig
from draftsmith.kernels.paged_attention import paged_attention_reference
from draftsmith.models.heads import Head
from draftsmith.models.target import Target
from draftsmith.scripts.acceptance import head_drafter

CHAINS = {
    "decode": [(16, 1), (1, 1), (33, 1)],
    "verify, some shorter": [(17, 4), (5, 1), (32, 4)],
    "chunks of prompts beside plain rows": [(20, 20), (31, 9), (18, 1)],
}
"""Of every sequence the keys and the rows among them."""
TREES = [[-1, 0, 0, 1, 1, 2, 4], [-1], [-1, 0, 1, 1]]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 3.0)])
@pytest.mark.parametrize("name", [*CHAINS, "trees", "the last rows of trees"])
def test_a_plan_means_our_attention(
    name: str, page_size: int, window: int | None, softcap: float | None
):
    """Outputs to 1e-12 in float64 over a pool that is NaN where nothing was written; the key's and
    the value's width differ."""
    parents = None
    spans = CHAINS.get(name)
    if spans is None:
        parents = TREES
        rows = [4, 1, 2] if name.startswith("the last") else [7, 1, 4]
        spans = [(20, rows[0]), (1, rows[1]), (16, rows[2])]
    running = scattered([length for length, _ in spans], page_size)
    parts = [
        (one, length - rows, [3] * rows) for one, (length, rows) in zip(running, spans, strict=True)
    ]
    batch = Batch.build(parts, parents=parents)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    pool = KVPool(1, 128 * page_size, poison=True)
    pool.attention = read = Plain()
    keys, values = pool.layer(0, normal(2, 1, 8), normal(2, 1, 6))
    for one, (length, rows) in zip(running, spans, strict=True):
        slots = [one.slot(place) for place in range(length - rows)]
        keys[:, slots], values[:, slots] = normal(2, len(slots), 8), normal(2, len(slots), 6)
    count = batch.starts[-1]
    q, k, v = normal(1, 4, count, 8), normal(1, 2, count, 8), normal(1, 2, count, 6)
    settings: dict[str, Any] = {"scaling": 0.4, "window": window, "softcap": softcap}
    context = PagedContext(pool, batch)
    for _ in range(2):
        out = context.attend(0, q, k, v, **settings)
        want = paged_attention_reference(q[0], keys, values, batch.paged, **settings)
        torch.testing.assert_close(out[0], want, atol=1e-12, rtol=0)
    assert [one.plans for one in read.made] == [1]


def test_pages_are_views():
    """Nothing is copied, in any layer of the pool."""
    pool = torch.arange(2 * 12 * 3.0).view(2, 12, 3)
    seen = as_pages(pool, 4)
    assert seen.shape == (3, 2, 4, 3) and seen.data_ptr() == pool.data_ptr()
    assert torch.equal(seen[2, 1], pool[1, 8:])


@pytest.mark.parametrize("tree", [TreeConfig(), TreeConfig("static", "comb", top_k=2)], ids=str)
def test_the_engine_writes_its_text(target: Target, head: Head, tree: TreeConfig):
    """Chunked prefill, drafts, verification and refill; each batch is planned once, not once a
    layer."""
    settings = EngineConfig(
        draft_tokens=2,
        max_batch=2,
        max_step_tokens=9,
        page_size=4,
        pool_tokens=256,
        poison=True,
        tree=tree,
    )
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    texts, read, batches = [], Plain(), []
    for own in (True, False):
        engine = Engine(target, settings, head_drafter(head, None, tree))
        if not own:
            engine.pool.attention = lambda *given, **options: (
                batches.append(given[3]) or read(*given, **options)
            )
        texts.append([one.output for one in engine.run(PROMPTS[:3], params)])
    assert texts[0] == texts[1]
    # Attention of three layers of the target and of one of the head; a prefill's head runs the
    # target's own batch.
    planned = len({id(batch) for batch in batches})
    assert sum(one.plans for one in read.made) == planned
    assert 2 * planned < len(batches) and len(read.made) == 1


def test_it_is_refused_where_it_cannot_run(target: Target, monkeypatch: pytest.MonkeyPatch):
    """An unknown name, no GPU, no package, a dtype and widths it does not take."""
    with pytest.raises(ValueError, match="engine.attention 'flash': choose auto or flashinfer"):
        EngineConfig(attention="flash")
    with pytest.raises(ValueError, match="the target is on cpu.*set target.device=cuda"):
        Engine(target, EngineConfig(attention="flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"pip install draftsmith\[flashinfer\]"):
        FlashInfer.open(torch.device("cuda"))
    keys = torch.zeros(2, 8, 80)
    with pytest.raises(ValueError, match="keys are torch.float32.*target.dtype=bfloat16"):
        FlashInfer().wrapper(keys, keys, keys)
    keys = keys.bfloat16()
    with pytest.raises(ValueError, match="80 and 80 wide, it takes 64, 128, 192, 256"):
        FlashInfer().wrapper(keys, keys, keys)


def test_several_ranks_are_refused():
    """The others would read their pages by other kernels."""
    pool = KVPool(1, 16)
    pool.attention = Plain()
    batch = Batch.build([(scattered([3], 16)[0], 0, [1, 2, 3])])
    with pytest.raises(ValueError, match="runs in one process; over several ranks"):
        Leader.__new__(Leader).batch(PagedContext(pool, batch))
