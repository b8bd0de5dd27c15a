"""Rotary values looked up in a table are the very ones that the family's module gives."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.models.lean import LeanRotary

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def module(rope: dict[str, object] | None) -> LlamaRotaryEmbedding:
    """Of heads 16 wide and 64 positions."""
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=rope
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rope", [None, LLAMA3, DYNAMIC], ids=["default", "llama3", "dynamic"])
def test_a_table_holds_what_the_module_gives(dtype: torch.dtype, rope: dict[str, object] | None):
    """Positions in any order, beyond the table so far, and in another dtype than before."""
    ours, theirs = LeanRotary(module(rope)), module(rope)
    for wanted in (torch.float32, dtype):
        for positions in ([3], [0, 9, 2], [50, 1], [2500, 7], [63]):
            like, place = torch.zeros(len(positions), 64, dtype=wanted), torch.tensor(positions)
            cos, sin = ours(like, place)
            expected, turned = theirs(like[None], place[None])
            turned = turned[0].clone()
            turned[:, :8].neg_()
            assert cos.dtype == sin.dtype == wanted
            assert torch.equal(cos, expected[0]) and torch.equal(sin, turned)
