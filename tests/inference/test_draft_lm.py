"""A second language model drafts: the text stays the target's, its pages hold the true text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafting import Script
from small_heads import PROMPTS
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMDrafter
from draftsmith.inference.drafters import Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.sequence import Sequence
from draftsmith.models.target import Target, TargetConfig

GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)


def config(**changes: int | bool) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings = {"pool_tokens": 1024, "page_size": 4, "poison": True, "max_batch": 3} | changes
    return EngineConfig(**settings)  # type: ignore[arg-type]


def load(folder: Path, dtype: str = "float64") -> Target:
    """A model of a test folder."""
    return Target.load(TargetConfig(source=str(folder), dtype=dtype, device="cpu"))


@pytest.fixture(scope="module")
def other(tiny_llama_folder: Callable[..., Path]) -> Target:
    """A smaller random model: other widths, fewer layers, one key-value head."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    return load(tiny_llama_folder(seed=3, num_key_value_heads=1, **shape))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Another family, run by transformers' own layers, in float32 beside a float64 target."""
    folder = tmp_path_factory.mktemp("qwen")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        shape = Qwen3Config(
            vocab_size=512,
            num_hidden_layers=1,
            hidden_size=32,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
        model = Qwen3ForCausalLM(shape)
    model.save_pretrained(folder)
    return load(folder, "float32")


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """What the target says alone."""
    return [s.output for s in Engine(target, config(draft_tokens=0)).run(PROMPTS, GREEDY)]


class ForcedDraftLM(DraftLMDrafter):
    """Computes everything, but drafts the script's tokens in place of its own."""

    def __init__(self, lm: DraftLM, script: Script) -> None:
        super().__init__(lm)
        self.script = script

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """Rows of the script's drafts are really computed and left in the pages."""
        chains = []
        for sequence, count in zip(sequences, counts, strict=True):
            chain = [self.script.token(sequence, step) for step in range(count)]
            for step, token in enumerate(chain[:-1], 1):
                place = len(sequence.tokens) - 1 + step
                self._run([(sequence, place, [token])])
                self._carried[sequence].rows = place + 1
            self.script.next_round(sequence)
            chains.append(Proposal(chain))
        return chains


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
@pytest.mark.parametrize("model", ["target", "other", "qwen"])
def test_greedy_text_is_the_targets(
    request: pytest.FixtureRequest,
    target: Target,
    plain: list[list[int]],
    model: str,
    draft_tokens: int,
    chunk: int,
):
    """Whoever drafts, in batches, chunks and chains of any length."""
    lm = DraftLM.paired(request.getfixturevalue(model), target)
    engine = Engine(
        target, config(draft_tokens=draft_tokens, max_step_tokens=chunk), DraftLMDrafter(lm)
    )
    results = engine.run(PROMPTS, GREEDY)
    assert [sequence.output for sequence in results] == plain
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages
    metrics = engine.metrics
    assert metrics.num_drafts > 0
    if model == "target":  # in float64 it foresees itself without a miss
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens
        assert metrics.mean_acceptance_length == draft_tokens + 1


@pytest.mark.parametrize("max_batch", [1, 5])
@pytest.mark.parametrize("pattern", [[0], [3], [2, 0, 3, 1], [1, 3, 3, 0]], ids=str)
def test_pages_after_any_round_are_those_of_the_true_text(
    target: Target, other: Target, plain: list[list[int]], pattern: list[int], max_batch: int
):
    """After every step the draft LM's keys and values equal those of one prefill over the same
    text, whatever was kept, the newest token's row among them; and so does what it carries."""
    answers = {tuple(p): text for p, text in zip(PROMPTS, plain, strict=True)}
    lm = DraftLM.paired(other, target)
    settings = config(max_batch=max_batch, max_step_tokens=7)
    drafter = ForcedDraftLM(lm, Script(answers, pattern, target.vocab_size))
    engine = Engine(target, settings, drafter)
    prompts = PROMPTS[-max_batch:]
    sequences = [engine.add(prompt, GREEDY) for prompt in prompts]
    compared = 0
    while not engine.scheduler.idle:
        engine.step()
        for sequence in sequences:
            if sequence.finished or not sequence.decoding:
                continue
            alone = DraftLMDrafter(lm)
            rebuilt = Engine(target, config(max_batch=1, draft_tokens=3), alone)
            # Two tokens wanted, one step run: the request is alive and so are its pages.
            again = rebuilt.add(sequence.tokens[:-1], SamplingParams(2, ignore_eos=True))
            rebuilt.step()
            assert again.tokens == sequence.tokens
            ours = [sequence.slot(p) for p in range(len(sequence.tokens))]
            theirs = [again.slot(p) for p in range(len(sequence.tokens))]
            for layer in range(target.num_layers, target.num_layers + other.num_layers):
                for kind in ("keys", "values"):
                    mine = getattr(engine.pool, kind)[layer][:, ours]
                    right = getattr(rebuilt.pool, kind)[layer][:, theirs]
                    torch.testing.assert_close(mine, right, rtol=0, atol=1e-9)
            torch.testing.assert_close(
                drafter._carried[sequence].normed,
                alone._carried[again].normed,
                rtol=0,
                atol=1e-9,
            )
            compared += 1
    assert [sequence.output for sequence in sequences] == plain[-max_batch:]
    assert compared >= 5
    assert not drafter._carried  # everybody was forgotten


def test_rows_are_not_computed_twice(target: Target, plain: list[list[int]]):
    """A round costs K passes: after full acceptance one of two rows, else of one."""
    rows: list[int] = []

    class Counting(DraftLMDrafter):
        def _run(
            self, parts: list[tuple[Sequence, int, list[int]]], drafts: torch.Tensor | None = None
        ) -> torch.Tensor:
            rows.append(sum(len(tokens) for _, _, tokens in parts))
            return super()._run(parts, drafts)

    drafter = Counting(DraftLM.paired(target, target))
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    Engine(target, config(), drafter).run([PROMPTS[2]], params)
    # The prompt and the token after it; two whole rounds of three drafts kept. The end of the
    # answer is not filled in.
    assert rows == [len(PROMPTS[2]) + 1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("model", ["target", "other"])
def test_a_coupled_request_says_what_plain_decoding_draws(
    request: pytest.FixtureRequest, target: Target, model: str
):
    """One seed, one text."""
    params = SamplingParams(16, temperature=0.8, top_k=40, seed=3, ignore_eos=True, coupled=True)
    alone = [
        Engine(target, config(draft_tokens=0)).run([prompt], params)[0].output for prompt in PROMPTS
    ]
    lm = DraftLM.paired(request.getfixturevalue(model), target)
    drafted = Engine(target, config(max_step_tokens=7), DraftLMDrafter(lm)).run(PROMPTS, params)
    assert [sequence.output for sequence in drafted] == alone


def test_a_draft_lm_of_few_positions_ends_where_they_end(
    target: Target, tiny_llama_folder: Callable[..., Path], plain: list[list[int]]
):
    """Beyond its positions a text goes on undrafted, and stays the target's."""
    short = load(tiny_llama_folder(max_position_embeddings=24))
    places: list[int] = []

    class Watched(DraftLMDrafter):
        def _run(
            self, parts: list[tuple[Sequence, int, list[int]]], drafts: torch.Tensor | None = None
        ) -> torch.Tensor:
            places.extend(first + len(tokens) - 1 for _, first, tokens in parts)
            return super()._run(parts, drafts)

    engine = Engine(target, config(), Watched(DraftLM.paired(short, target)))
    assert [sequence.output for sequence in engine.run(PROMPTS, GREEDY)] == plain
    assert max(places) == 23
    assert engine.metrics.num_accepted_tokens > 0
