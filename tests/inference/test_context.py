"""What the head is trained on is what the engine gives it: rows of training = rows of the engine,
one by one."""

from __future__ import annotations

import pytest
import torch
from conftest import PROMPTS
from drafting import ForcedHeadDrafter, Script

from draftsmith.data.batches import PackedBatch
from draftsmith.inference.capture import capture
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.models.heads import MTPHead
from draftsmith.models.target import Target, TargetConfig
from draftsmith.train.unroll import unroll

GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


@pytest.fixture(scope="module", params=list(TOLERANCE))
def pair(request: pytest.FixtureRequest, target: Target, head: MTPHead) -> tuple[Target, MTPHead]:
    """Target and head in one dtype."""
    if request.param == "float64":
        return target, head
    small = Target.load(TargetConfig(source=str(target.folder), dtype="float32", device="cpu"))
    copy = MTPHead(head.config, head.target_config)
    copy.load_state_dict({name: value.float() for name, value in head.state_dict().items()})
    return small, copy


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 512])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_training_rows_equal_the_engines_rows(pair: tuple[Target, MTPHead], steps: int, chunk: int):
    """K = 1..4 drafts, prefill in chunks of 1, 2, 3, 7 and whole, every accept count forced in
    turn.

    Step-0 rows are those written last (after each refill from true states); step-k rows those whose
    drafts so far were the text's own.
    """
    target, head = pair
    plain = Engine(target, EngineConfig(draft_tokens=0, pool_tokens=1024)).run(PROMPTS, GREEDY)
    answers = {tuple(s.tokens[: s.num_prompt]): s.output for s in plain}
    script = Script(answers, [*range(steps + 1), steps], target.vocab_size)
    drafter = ForcedHeadDrafter(head, None, script)
    # One request at a time: with chunks of one row, a batch could not even hold one row of each.
    engine = Engine(
        target,
        EngineConfig(
            draft_tokens=steps,
            max_batch=1,
            max_step_tokens=chunk,
            page_size=4,
            pool_tokens=256,
            poison=True,
        ),
        drafter,
    )
    texts = engine.run(PROMPTS, GREEDY)
    worst = torch.zeros(steps, dtype=torch.float64)
    compared = [0] * steps
    for sequence in texts:
        tokens = torch.tensor(sequence.tokens)
        batch = PackedBatch(
            tokens=tokens,
            supervised=torch.ones(len(tokens), dtype=torch.bool),
            hidden=capture(target, [tokens], (target.num_layers,))[target.num_layers],
            starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
            positions=torch.arange(len(tokens)),
            row_ids=(sequence.id,),
        )
        with torch.no_grad():
            states = unroll(head, target.trunk, batch, steps)
        for (identity, position, step), row in drafter.rows.items():
            if identity == sequence.id and position + 1 + step < len(tokens):
                compared[step] += 1
                worst[step] = max(worst[step], (states[step, position] - row).abs().max().double())
    assert compared[0] >= sum(len(p) for p in PROMPTS) and all(compared)
    limit = TOLERANCE[str(target.dtype).removeprefix("torch.")]
    assert float(worst.max()) < limit, worst


@pytest.mark.parametrize("max_batch", [1, 5])
def test_head_keys_after_any_round_are_those_of_true_states(
    target: Target, head: MTPHead, max_batch: int
):
    """After each step the head's pages equal pages rebuilt by one prefill over the same text."""
    plain = Engine(target, EngineConfig(draft_tokens=0, pool_tokens=1024)).run(PROMPTS, GREEDY)
    answers = {tuple(s.tokens[: s.num_prompt]): s.output for s in plain}
    script = Script(answers, [2, 0, 3, 1], target.vocab_size)
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
        for ours, theirs in zip(
            [*engine.pool.keys, *engine.pool.values],
            [*other.pool.keys, *other.pool.values],
            strict=True,
        ):
            assert ours is not None and theirs is not None
            for position in range(sequence.num_computed):
                mine, rebuilt = ours[:, sequence.slot(position)], theirs[:, again.slot(position)]
                torch.testing.assert_close(mine, rebuilt, rtol=0, atol=1e-9)
