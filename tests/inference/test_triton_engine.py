"""The engine over Triton's kernels writes the text that it writes without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference import batch
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.tree import TreeConfig
from draftsmith.kernels import jit
from draftsmith.kernels.paged_attention import paged_attention
from draftsmith.models.heads import HeadConfig, build_head
from draftsmith.models.target import Target, TargetConfig
from draftsmith.scripts.acceptance import head_drafter

PROMPTS = [[1, 5, 9, 200, 7, 31, 4], [1, 300, 8], list(range(20, 45))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft_tokens", "tree"),
    [
        (0, TreeConfig()),
        (2, TreeConfig()),
        (2, TreeConfig("static", "comb", top_k=2)),
    ],
    ids=["plain", "chain", "tree"],
)
def test_paged_attention_and_append_in_the_engine(
    draft_tokens: int,
    tree: TreeConfig,
    tiny_llama_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
):
    """Chunked prefill, a batch that requests join and leave, verification, paths closed up and
    refill, over pages that are NaN where nothing was written; float32, greedy."""
    pytest.importorskip("triton")
    folder = tiny_llama_folder(dtype="float32")
    target = Target.load(TargetConfig(source=str(folder), folder=str(folder), dtype="float32"))
    torch.manual_seed(0)
    head = build_head(HeadConfig(), folder, 1.0)
    settings = EngineConfig(
        draft_tokens=draft_tokens,
        max_batch=2,
        max_step_tokens=9,
        page_size=4,
        pool_tokens=256,
        poison=True,
        tree=tree,
    )
    launched: list[int] = []

    def counted(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        launched.append(q.shape[1])
        return paged_attention(q, *arguments, **options)

    monkeypatch.setattr(batch, "paged_attention", counted)
    texts = []
    for form in ("reference", "triton"):
        monkeypatch.setattr(jit, "choice", lambda form=form: form)
        drafter = head_drafter(head, None, tree) if draft_tokens else None
        short = tree.kind != "none"
        results = Engine(target, settings, drafter).run(
            PROMPTS[: 2 if short else 3],
            SamplingParams(max_new_tokens=4 if short else 6, ignore_eos=True),
        )
        texts.append([sequence.output for sequence in results])
        assert bool(launched) == (form == "triton")
    assert texts[0] == texts[1]
