"""The traced step is the step: attention's stand-in keeps and gives what attention does, and the
bytes followed are those of real tensors."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from draftsmith.kernels.ttt_attention import ttt_attention
from draftsmith.models.heads import HeadConfig
from draftsmith.models.shape import TargetShape
from draftsmith.train import trace
from draftsmith.train.config import TrainConfig
from draftsmith.train.forecast import loss_bytes, loss_flops, training_memory
from draftsmith.train.trace import trace_step

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=3,
    vocab_size=512,
    tie_word_embeddings=False,
)
TRAIN = TrainConfig(tokens_per_batch=96, draft_vocab_size=128)


def test_the_stand_in_keeps_what_attention_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes alive for the backward pass with the blocks of the real attention are the same; its
    scratch comes on top while it runs."""
    short = trace_step(HeadConfig(), CONFIG, TRAIN, row_tokens=32)
    monkeypatch.setattr(
        trace._Attention, "__call__", lambda _, *args, **kwargs: ttt_attention(*args, **kwargs)
    )
    real = trace_step(HeadConfig(), CONFIG, TRAIN, row_tokens=32)
    assert short.saved == real.saved
    assert short.unroll <= real.unroll


def test_parameters_and_products_are_counted() -> None:
    """By hand for one MTP module: projections, norms, and 2 operations a parameter and token."""
    step = trace_step(HeadConfig(), CONFIG, TRAIN, row_tokens=32)
    matrices = 2 * 64 * 64 + (64 * 64 * 2 + 2 * 64 * 32) + 3 * 64 * 128
    assert step.parameters == matrices + 5 * 64
    scores = 3 * 3 * (32 * 33 // 2) * 2 * (4 * 32)  # K, documents, pairs, products of a pair
    assert step.forward_flops == 3 * 96 * 2 * matrices + scores
    assert (step.query_width, step.key_width) == (4 * 32, 2 * 32)


def test_memory_of_the_stages() -> None:
    """What is split goes down with the ranks, what is not stays; a reduced vocabulary has rows."""
    shape = TargetShape.counted(CONFIG, "here")
    step = trace_step(HeadConfig(), CONFIG, TRAIN, row_tokens=32)

    def parts(stage: int, ranks: int) -> dict[str, int]:
        train = TrainConfig(tokens_per_batch=96, draft_vocab_size=128, zero_stage=stage)
        sizes = {"ranks": ranks, "gpu": True, "boundaries": 1, "heldout": 0}
        return training_memory(train, shape, step, **sizes).parts

    weights = 4 * step.parameters
    assert parts(0, 8)["optimiser"] == 2 * weights and "bucket" not in parts(0, 8)
    assert parts(2, 8)["optimiser"] == 3 * (weights // 8)
    assert parts(3, 8)["head"] == weights // 8 and parts(2, 8)["head"] == weights
    assert parts(2, 8)["bucket"] == 2 * 10**9
    assert parts(0, 1)["trunk"] == 2 * 64 * (512 + 512 + 128)


def test_a_head_of_its_own_costs_more() -> None:
    """An lm_head that learns has a copy, a gradient and a third product."""
    shape = TargetShape.counted(CONFIG, "here")
    shared = trace_step(HeadConfig(), CONFIG, TRAIN, row_tokens=32)
    own = trace_step(HeadConfig("eagle3", boundaries=(1, 2)), CONFIG, TRAIN, row_tokens=32)
    assert own.own_head and not shared.own_head
    more = loss_bytes(TRAIN, shape, own, False) - loss_bytes(TRAIN, shape, shared, False)
    assert more == 128 * 64 * 8
    assert loss_flops(TRAIN, shape, own, 1.0) * 7 == loss_flops(TRAIN, shape, shared, 1.0) * 10
