"""Attention on latents: transformers' own function, from pages that hold latents alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_heads import away_from_its_start
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "models"))

from families import Exact, save_toy  # noqa: E402  # pyright: ignore[reportMissingImports]

from draftsmith.inference.batch import Batch, PagedContext  # noqa: E402
from draftsmith.inference.config import EngineConfig, SamplingParams  # noqa: E402
from draftsmith.inference.engine import Engine  # noqa: E402
from draftsmith.inference.head_drafter import HeadDrafter  # noqa: E402
from draftsmith.inference.pages import KVPool  # noqa: E402
from draftsmith.inference.sequence import Sequence  # noqa: E402
from draftsmith.models.heads import HeadConfig  # noqa: E402
from draftsmith.models.norm import use_own_norms  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402

RANK, ROPE = 16, 8
FORMS: dict[str, dict[str, Any]] = {
    "v2": {"name": "deepseek-v2"},
    "v2, queries of low rank": {"name": "deepseek-v2", "q_lora_rank": 24},
    "v3": {"name": "deepseek-v3"},
    "v3, queries of full rank, halves turned, biases": {
        "name": "deepseek-v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "attention_bias": True,
    },
    "v3, plain rope": {
        "name": "deepseek-v3",
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    },
    "glm4 lite": {"name": "deepseek-v3", "model_type": "glm4_moe_lite"},
    "youtu": {"name": "deepseek-v3", "model_type": "youtu"},
}
TEXTS = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 9)]


def load(folder: Path, layers: str = "auto") -> Target:
    """A toy in float64."""
    return Target.load(TargetConfig(str(folder), "float64", "cpu", layers=layers))


def logits_over_pages(target: Target, pool: KVPool, pages: list[list[int]]) -> list[Tensor]:
    """Two texts, together, in chunks of seven rows: [n, V] each."""
    sequences = [Sequence.create("text", row.tolist(), SamplingParams()) for row in TEXTS]
    for sequence, held in zip(sequences, pages, strict=True):
        sequence.pages, sequence.page_size = held, 4
    found: list[list[Tensor]] = [[], []]
    for first in range(0, 21, 7):
        live = [index for index, row in enumerate(TEXTS) if first < len(row)]
        parts = [(sequences[i], first, TEXTS[i][first : first + 7].tolist()) for i in live]
        batch = Batch.build(parts)
        states = target.forward(batch.tokens, batch.positions, PagedContext(pool, batch))
        logits = target.logits(target.trunk.norm(states[target.num_layers]))
        for place, index in enumerate(live):
            found[index].append(logits[batch.starts[place] : batch.starts[place + 1]])
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("form", FORMS)
def test_latents_give_what_transformers_does(form: str, tmp_path: Path):
    """Chunks over neighbouring and over scattered pages, 1e-9; the pool holds r + rope numbers a
    row and layer, and nothing else."""
    changes = dict(FORMS[form])
    folder = save_toy(changes.pop("name"), tmp_path, **changes)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    use_own_norms(plain)
    target, pool = load(folder), KVPool(3, 64, poison=True)
    with Exact(), torch.no_grad():
        ours = logits_over_pages(target, pool, [[0, 1, 2, 3, 4, 5], [9, 7, 12]])
        for row, logits in zip(TEXTS, ours, strict=True):
            right = plain(row[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, right, rtol=1e-9, atol=1e-9)
    held = [tensor for tensor in (*pool.keys, *pool.values) if tensor is not None]
    assert [tuple(tensor.shape) for tensor in held] == [(1, 64, RANK + ROPE)] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 toy."""
    return save_toy("deepseek-v3", tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("layers", ["auto", "transformers"])
def test_target_and_head_keep_one_form(folder: Path, layers: str):
    """Latents by default, expanded heads with target.layers=transformers: the same text, drafted
    and verified, with the head's keys in the target's form; its own module is left as trained."""
    prompts = [row.tolist() for row in TEXTS]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    settings = EngineConfig(page_size=4, pool_tokens=128, max_step_tokens=5, max_batch=2)
    with Exact():
        plain = Engine(load(folder, "transformers"), settings).run(prompts, params)
        target = load(folder, layers)
        head = away_from_its_start(HeadConfig(), target)
        names = list(head.state_dict())
        engine = Engine(target, settings, HeadDrafter(head, None))
        drafted = engine.run(prompts, params)
    assert [one.output for one in drafted] == [one.output for one in plain]
    assert list(head.state_dict()) == names
    shapes = {None if one is None else tuple(one.shape) for one in engine.pool.keys}
    values = {None if one is None else tuple(one.shape) for one in engine.pool.values}
    if layers == "auto":
        assert (shapes, values) == ({(1, 128, RANK + ROPE)}, {None})
    else:
        assert (shapes, values) == ({(4, 128, 16 + ROPE)}, {(4, 128, 24)})
