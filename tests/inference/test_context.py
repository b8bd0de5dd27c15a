"""What the head is trained on is what the engine gives it: rows of training = rows of the engine,
one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafting import GREEDY, ForcedHeadDrafter, Script, answers_of, worst_difference
from small_heads import PROMPTS, away_from_its_start

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.models.attention import PackedContext
from draftsmith.models.heads import Head, HeadConfig, NormConfig
from draftsmith.models.target import Target, TargetConfig


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_training_rows_equal_the_engines_rows(
    target: Target, any_head: Head, steps: int, chunk: int
):
    """Every family, K = 1, 2, 4 drafts, prefill in chunks of 1, 3 and whole, float64."""
    worst = worst_difference(target, any_head, steps, chunk, answers_of(target, PROMPTS))
    assert float(worst.max()) < 1e-9, worst


RECYCLED = {
    "mtp, hidden first": HeadConfig(hidden_first=True),
    "mtp, recycled raw": HeadConfig(recycle_raw=True),
    "mtp, masked": HeadConfig(mask_position_zero=True),
    "mtp of 3 modules, all three": HeadConfig(
        modules=3, hidden_first=True, recycle_raw=True, mask_position_zero=True
    ),
    "eagle without norms, masked": HeadConfig(
        "eagle", norms=NormConfig(False, False, False, False), mask_position_zero=True
    ),
}


@pytest.mark.parametrize("name", RECYCLED)
def test_whatever_is_fed_and_recycled_both_do_alike(target: Target, name: str):
    """Each setting of the `RecycleSpec`, K = 4, prefill in chunks of 3, float64; it is in force,
    and not dropped by both."""
    config = RECYCLED[name]
    head = away_from_its_start(config, target)
    assert float(worst_difference(target, head, 4, 3, answers_of(target, PROMPTS)).max()) < 1e-9
    plain = replace(config, hidden_first=False, recycle_raw=False, mask_position_zero=False)
    other = type(head)(plain, head.target_config).double()
    other.load_state_dict(head.state_dict())
    rows = torch.randn(2, 6, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fed, apart = [rows[1], rows[1]], []
    for step in range(2):
        outs = [
            one(rows[0], hidden, torch.arange(6) + step, PackedContext([0, 6]), step)
            for one, hidden in zip((head, other), fed, strict=True)
        ]
        fed = [out.recycled for out in outs]
        apart.append(float((outs[0].drafted - outs[1].drafted).detach().abs().max()))
    assert apart[-1] > 1e-3


@pytest.mark.parametrize("chunk", [2, 7, 512])
def test_training_rows_equal_the_engines_rows_in_float32(target: Target, head: Head, chunk: int):
    """The same where rounding is real, and oneDNN's packed weights run."""
    small = Target.load(TargetConfig(source=str(target.folder), dtype="float32", device="cpu"))
    copy = type(head)(head.config, head.target_config)
    copy.load_state_dict({name: value.float() for name, value in head.state_dict().items()})
    worst = worst_difference(small, copy, 4, chunk, answers_of(small, PROMPTS))
    assert float(worst.max()) < 1e-4, worst


@pytest.mark.parametrize("max_batch", [1, 5])
def test_head_keys_after_any_round_are_those_of_true_states(
    target: Target, any_head: Head, max_batch: int
):
    """After each step the head's pages equal pages rebuilt by one prefill over the same text."""
    head = any_head
    script = Script(answers_of(target, PROMPTS), [2, 0, 3, 1], target.vocab_size)
    settings = EngineConfig(max_batch=max_batch, page_size=4, pool_tokens=1024, poison=True)
    drafter = ForcedHeadDrafter(head, None, script)
    engine = Engine(target, settings, drafter)
    sequences = [engine.add(prompt, GREEDY) for prompt in PROMPTS[-max_batch:]]
    for _ in range(6):
        engine.step()
    for sequence in sequences:
        known = sequence.tokens[: sequence.num_computed + 1]
        other = Engine(target, settings, ForcedHeadDrafter(head, None, script))
        # Two tokens wanted, one step run: the request is still alive and so are its pages.
        again = other.add(known[:-1], SamplingParams(max_new_tokens=2, ignore_eos=True))
        other.step()
        assert again.output == known[-1:]
        pairs = zip(
            [*engine.pool.keys, *engine.pool.values],
            [*other.pool.keys, *other.pool.values],
            strict=True,
        )
        for index, (ours, theirs) in enumerate(pairs):
            assert ours is not None and theirs is not None
            layer = index % len(engine.pool.keys) - target.num_layers
            # Module m of several has its row p when x_{p+1+m} is known, so m rows fewer.
            behind = layer if layer > 0 and head.num_modules > 1 else 0
            for position in range(sequence.num_computed - behind):
                mine, rebuilt = ours[:, sequence.slot(position)], theirs[:, again.slot(position)]
                torch.testing.assert_close(mine, rebuilt, rtol=0, atol=1e-9)
