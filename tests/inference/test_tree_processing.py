"""Penalties, biases and masks act on every node of a tree with that node's own path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafting import GREEDY
from small_heads import PROMPTS, away_from_its_start

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.tree import TreeConfig
from draftsmith.inference.tree_drafter import TreeHeadDrafter
from draftsmith.models.heads import HeadConfig
from draftsmith.models.target import Target


class NoRepeat:
    """A grammar: a token may not follow itself."""

    def allowed(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """See `TokenMask`."""
        free = torch.ones(512, dtype=torch.bool)
        free[(prompt + output)[-1]] = False
        return free


ASKED = {
    "penalties": replace(
        GREEDY, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2
    ),
    "bias": replace(GREEDY, logit_bias=((7, 3.0), (100, -2.0))),
    "mask": replace(GREEDY, mask=NoRepeat()),
    "log-probabilities": replace(GREEDY, logprobs=3),
    "coupled": SamplingParams(
        max_new_tokens=20, ignore_eos=True, temperature=0.8, coupled=True, repetition_penalty=1.3
    ),
}


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name", list(ASKED))
def test_the_text_is_that_of_plain_decoding(target: Target, name: str, kind: str):
    """Token for token, and the log-probabilities of each."""
    params, found = ASKED[name], []
    head = away_from_its_start(HeadConfig(), target)
    for drafts in (0, 3):
        tree = TreeConfig(kind=kind, shape="full", top_k=2, nodes=8)  # type: ignore[arg-type]
        config = EngineConfig(draft_tokens=drafts, pool_tokens=1024, max_batch=3, tree=tree)
        drafter = TreeHeadDrafter(head, None, tree) if drafts else None
        texts = Engine(target, config, drafter).run(PROMPTS, params)
        found.append([one.output for one in texts])
        told = [[round(row.token, 9) for row in one.logprobs] for one in texts]
        found[-1].append(told)
        assert all(len(one.logprobs) == (20 if name.startswith("log") else 0) for one in texts)
    assert found[0] == found[1]
