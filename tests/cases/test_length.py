"""Known faults of long texts, each under its number: positions are the target's, whatever a head
was trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.inference.acceptance import PromptSet
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.models.heads import HeadConfig, LoadedHead, build_head
from draftsmith.models.target import Target, TargetConfig
from draftsmith.scripts.acceptance import warn_beyond_training


@pytest.fixture(scope="module")
def target(tiny_llama_folder: Callable[..., Path]) -> Target:
    """Three layers, float64."""
    return Target.load(TargetConfig(str(tiny_llama_folder()), dtype="float64", device="cpu"))


@pytest.mark.parametrize("length", [10, 500, 1000])
def test_case_112_fused_states_of_long_prompts(target: Target, length: int) -> None:
    """A buffer of the fused width where the hidden width belongs crashes on long prompts alone.
    Right: any length, prefilled in chunks, gives the target's text."""
    torch.manual_seed(length)
    prompt = torch.randint(3, 512, (length,)).tolist()
    config = EngineConfig(draft_tokens=2, max_step_tokens=192, pool_tokens=2048)
    torch.manual_seed(0)
    head = build_head(HeadConfig("eagle3", boundaries=(0, 1, 2)), target.folder, 1.0)
    texts = [
        Engine(target, config, drafter).run([prompt], SamplingParams(6, ignore_eos=True))[0].output
        for drafter in (None, HeadDrafter(head.double(), None))
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 6


def test_case_113_texts_beyond_the_trained_length_warn(target: Target) -> None:
    """A head's configuration says 2,048 positions, prompts are longer: garbage. Right: positions
    follow the target's; beyond the trained length a warning, with both lengths."""
    head = build_head(HeadConfig(), target.folder, 1.0)
    assert head.target_config.max_position_embeddings == 1024
    prompts = PromptSet("chat", "as it is", ["a", "b"], [[5] * 10, [5] * 30])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_beyond_training(LoadedHead(head, None, {"trained_length": 40}), prompts, 10)
        warn_beyond_training(LoadedHead(head, None, {}), prompts, 10)
    with pytest.warns(UserWarning, match="up to 41 tokens, and the head was trained on 40"):
        warn_beyond_training(LoadedHead(head, None, {"trained_length": 40}), prompts, 11)
