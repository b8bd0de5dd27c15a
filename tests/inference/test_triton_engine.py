"""The engine over Triton's kernels writes the text that it writes without them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models"))

from families import save_toy  # noqa: E402  # pyright: ignore[reportMissingImports]

from draftsmith.inference import batch  # noqa: E402
from draftsmith.inference.config import EngineConfig, SamplingParams  # noqa: E402
from draftsmith.inference.engine import Engine  # noqa: E402
from draftsmith.inference.tree import TreeConfig  # noqa: E402
from draftsmith.kernels import jit  # noqa: E402
from draftsmith.kernels.paged_attention import paged_attention  # noqa: E402
from draftsmith.models.heads import HeadConfig, build_head  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402
from draftsmith.scripts.acceptance import head_drafter  # noqa: E402

PROMPTS = [[1, 5, 9, 200, 7, 31, 4], [1, 300, 8], list(range(20, 45))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft_tokens", "tree", "family"),
    [
        (0, TreeConfig(), "llama"),
        (2, TreeConfig(), "llama"),
        (2, TreeConfig("static", "comb", top_k=2), "llama"),
        (2, TreeConfig("dynamic", top_k=2, nodes=5), "deepseek-v3"),
    ],
    ids=["plain", "chain", "tree", "tree on latents"],
)
def test_paged_attention_and_append_in_the_engine(
    draft_tokens: int,
    tree: TreeConfig,
    family: str,
    tiny_llama_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Chunked prefill, a batch that requests join and leave, verification, paths closed up and
    refill, over pages that are NaN where nothing was written; float32, greedy; DeepSeek's on
    latents."""
    pytest.importorskip("triton")
    latents = family != "llama"
    folder = save_toy(family, tmp_path) if latents else tiny_llama_folder(dtype="float32")
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
