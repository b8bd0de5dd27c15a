"""What a request may ask of its sampling, through the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting import Script, ScriptedDrafter
from small_heads import HEAD_CONFIGS, PROMPTS, away_from_its_start
from torch import Tensor

from draftsmith.inference.batch import Batch
from draftsmith.inference.capture import capture
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_chains import DraftChains
from draftsmith.inference.drafters import Drafter, NgramDrafter, Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.inference.pages import KVPool
from draftsmith.inference.processors import Row
from draftsmith.inference.sampler import row_laws
from draftsmith.inference.sequence import Sequence
from draftsmith.models.target import Target

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.4,
}


class NoRepeats:
    """A grammar: no token may follow itself, and every fourth is below 100."""

    def __init__(self, size: int) -> None:
        self.size = size

    def allowed(self, prompt: list[int], output: list[int]) -> Tensor:
        """See `TokenMask`."""
        may = torch.ones(self.size, dtype=torch.bool)
        may[(prompt + output)[-1]] = False
        if len(output) % 4 == 3:
            may[100:] = False
        return may


EDITS: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES,
    "mask": {"mask": NoRepeats(512)},
    "all": {"mask": NoRepeats(512), "logit_bias": ((7, 1.0), (400, 0.5)), **PENALTIES},
}


def config(**changes: Any) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings = {"pool_tokens": 1024, "page_size": 4, "poison": True, "max_batch": 3}
    return EngineConfig(**{**settings, **changes})


def true_logits(target: Target, tokens: list[int]) -> Tensor:
    """[n, V]: the target's logits behind every token, in one pass without the engine."""
    last = target.num_layers
    states = capture(target, [torch.tensor(tokens)], (last,))[last]
    return target.logits(target.trunk.norm(states))


def edited(logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """Mask, bias and penalties of one row [V], token by token."""
    z = logits.clone()
    if params.mask is not None:
        z[~params.mask.allowed(prompt, output)] = -math.inf
    for token, bias in params.logit_bias:
        z[token] += bias
    for token in set(prompt + output):
        factor = params.repetition_penalty
        z[token] = z[token] / factor if z[token] > 0 else z[token] * factor
    for token in set(output):
        z[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return z


@pytest.fixture(scope="module", params=list(EDITS))
def edits(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each kind of edit in turn."""
    return EDITS[request.param]


def test_greedy_takes_the_likeliest_of_the_edited_logits(target: Target, edits: dict[str, Any]):
    """Plain decoding against a direct computation, with the lead of every choice; and every
    drafter says the same, whether its drafts are kept or not."""
    params = SamplingParams(14, ignore_eos=True, **edits)
    plain = Engine(target, config(draft_tokens=0)).run(PROMPTS, params)
    for sequence in plain:
        prompt, output = sequence.tokens[: sequence.num_prompt], sequence.output
        rows = true_logits(target, sequence.tokens)[sequence.num_prompt - 1 : -1]
        for place, row in enumerate(rows):
            z = edited(row, params, prompt, output[:place])
            first, second = z.topk(2).values.tolist()
            assert int(z.argmax()) == output[place]
            assert sequence.leads[place].top == pytest.approx(first, abs=1e-9)
            assert sequence.leads[place].gap == pytest.approx(first - second, abs=1e-9)
    said = {tuple(one.tokens[: one.num_prompt]): one.output for one in plain}
    unedited = Engine(target, config(draft_tokens=0)).run(
        PROMPTS, SamplingParams(14, ignore_eos=True)
    )
    assert [one.output for one in unedited] != list(said.values())
    script = Script(said, [3, 0, 1, 2], target.vocab_size)
    heads = [
        HeadDrafter(away_from_its_start(HEAD_CONFIGS["mtp"], target), None),
        HeadDrafter(
            away_from_its_start(HEAD_CONFIGS["eagle3"], target, torch.arange(0, 512, 3)),
            torch.arange(0, 512, 3),
        ),
    ]
    for drafter in (ScriptedDrafter(script), NgramDrafter(), *heads):
        engine = Engine(target, config(max_step_tokens=9), drafter)
        results = engine.run(PROMPTS, params)
        assert [one.output for one in results] == list(said.values()), drafter.name
    right = Engine(target, config(), ScriptedDrafter(Script(said, [3], target.vocab_size)))
    right.run(PROMPTS, params)
    assert right.metrics.mean_acceptance_length == 4


def test_a_greedy_head_drafts_behind_the_same_edits(target: Target):
    """A bias that decides every token decides the head's drafts too, so all are kept."""
    params = SamplingParams(13, ignore_eos=True, logit_bias=((7, 1e4), (9, 1e4 - 40)))
    params = replace(params, frequency_penalty=30.0)
    head = away_from_its_start(HEAD_CONFIGS["mtp"], target)
    engine = Engine(target, config(), HeadDrafter(head, None))
    results = engine.run(PROMPTS[1:], params)
    assert all(set(one.output) == {7, 9} for one in results)
    assert engine.metrics.mean_acceptance_length == 4


@pytest.mark.parametrize("drafts", ["none", "right", "wrong"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_are_the_targets_own(target: Target, drafts: str, temperature: float):
    """Whatever acts on the draw: log-softmax of the raw logits, of the token and of the likeliest,
    for accepted drafts as for the target's own tokens, and none for tokens that were cut."""
    params = SamplingParams(
        11, temperature, top_k=20, seed=3, ignore_eos=True, coupled=True, logprobs=4, **PENALTIES
    )
    plain = Engine(target, config(draft_tokens=0)).run(PROMPTS, replace(params, logprobs=None))
    assert not any(sequence.logprobs for sequence in plain)
    said = {tuple(one.tokens[: one.num_prompt]): one.output for one in plain}
    script = Script(said, [3] if drafts == "right" else [0], target.vocab_size)
    engine = Engine(target, config(), None if drafts == "none" else ScriptedDrafter(script))
    sequences = [
        engine.add(prompt, replace(params, logprobs=index)) for index, prompt in enumerate(PROMPTS)
    ]
    while not engine.scheduler.idle:
        engine.step()
    for index, sequence in enumerate(sequences):
        assert sequence.output == said[tuple(PROMPTS[index])]
        rows = true_logits(target, sequence.tokens)[sequence.num_prompt - 1 : -1]
        law = torch.log_softmax(rows, -1)
        assert len(sequence.logprobs) == len(sequence.output)
        for row, token, given in zip(law, sequence.output, sequence.logprobs, strict=True):
            assert given.token == pytest.approx(float(row[token]), abs=1e-9)
            values, ids = row.topk(index)
            assert [one for one, _ in given.top] == ids.tolist()
            assert [value for _, value in given.top] == pytest.approx(values.tolist(), abs=1e-9)


def test_an_end_token_cuts_the_log_probabilities_too(target: Target):
    """Drafts that were kept behind it leave nothing."""
    params = SamplingParams(12, logprobs=1)
    (plain,) = Engine(target, config(draft_tokens=0)).run([PROMPTS[2]], params)
    ended = Target(
        target.folder, target.config, target.stack, target.trunk, frozenset({plain.output[2]})
    )
    script = Script({tuple(PROMPTS[2]): plain.output}, [3], target.vocab_size)
    (cut,) = Engine(ended, config(), ScriptedDrafter(script)).run([PROMPTS[2]], params)
    assert cut.finish_reason == "stop" and len(cut.logprobs) == len(cut.output) <= 3


MIXED = [
    SamplingParams(9, ignore_eos=True),
    SamplingParams(9, ignore_eos=True, **PENALTIES),
    SamplingParams(9, 0.8, seed=1, ignore_eos=True),
    SamplingParams(9, 1.2, top_k=30, top_p=0.9, seed=2, ignore_eos=True, verification="block"),
    SamplingParams(9, 1.0, min_p=0.05, seed=3, ignore_eos=True, mask=NoRepeats(512)),
    SamplingParams(9, 0.9, top_p=0.7, seed=4, ignore_eos=True, coupled=True, **PENALTIES),
    SamplingParams(9, 0.7, seed=5, ignore_eos=True, verification="typical", logit_bias=((3, 1.0),)),
    SamplingParams(9, 1.0, top_p=0.8, seed=6, ignore_eos=True, logprobs=2),
]
"""One request of every kind."""


@pytest.mark.parametrize("drafting", ["none", "head", "ngram"])
def test_requests_of_every_kind_run_beside_each_other(target: Target, drafting: str):
    """Each text is that of the request alone; prompts of one length, so that the same steps
    speculate."""
    head = away_from_its_start(HEAD_CONFIGS["mtp"], target)
    prompt = [*PROMPTS[1], *PROMPTS[1]]
    drafters: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "head": lambda: HeadDrafter(head, None),
        "ngram": NgramDrafter,
    }

    def texts(params: list[SamplingParams]) -> list[list[int]]:
        engine = Engine(target, config(max_batch=8), drafters[drafting]())
        sequences = [engine.add(prompt, one) for one in params]
        while not engine.scheduler.idle:
            engine.step()
        return [sequence.output for sequence in sequences]

    together = texts(MIXED)
    assert together == [texts([one])[0] for one in MIXED]
    assert len(set(map(tuple, together))) >= len(MIXED) - 1


def test_rows_of_any_speculated_texts_in_any_order(target: Target):
    """`row_laws` as a tree asks: several texts of one request, shuffled, among another's rows."""
    generator = torch.Generator().manual_seed(0)
    one = Sequence.create("one", [1, 2, 3], SamplingParams(temperature=0.9, **PENALTIES))
    one.tokens += [5, 5, 2]
    two = Sequence.create("two", [4, 5], SamplingParams(temperature=1.1, top_k=3, min_p=0.1))
    three = Sequence.create("three", [4], SamplingParams(**PENALTIES))
    rows = [
        Row(one, [5, 6]),
        Row(two, [1, 1]),
        Row(one, []),
        Row(three, [4, 4]),
        Row(one, [6, 6, 6]),
        Row(one, [5, 7]),
        Row(two, []),
    ]
    logits = torch.randn(len(rows), 9, generator=generator, dtype=torch.float64)
    laws = row_laws(logits, rows)
    for z, (sequence, drafts), law in zip(logits, rows, laws, strict=True):
        output = [*sequence.output, *drafts]
        z = edited(z, sequence.params, sequence.tokens[: sequence.num_prompt], output)
        if sequence.params.greedy:
            expected = torch.zeros(9).double()
            expected[z.argmax()] = 1
        else:
            expected = torch.softmax(z / sequence.params.temperature, -1)
            floor = sequence.params.min_p * expected.max()
            edge = expected.sort(descending=True).values[(sequence.params.top_k or 9) - 1]
            expected = expected * (expected >= torch.maximum(floor, edge))
            expected /= expected.sum()
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-14)
    for index in range(len(rows)):
        alone = row_laws(logits[index : index + 1], rows[index : index + 1])
        assert torch.equal(alone[0], laws[index])


class TableTarget:
    """A target whose next token depends on the last one alone, by a table of logits [V, V]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.num_layers, self.vocab_size = 1, len(table)
        self.device, self.dtype = table.device, table.dtype
        self.eos_ids: frozenset[int] = frozenset()
        self.spread = False
        self.config = SimpleNamespace()
        self.trunk = SimpleNamespace(norm=lambda states: states)

    def forward(
        self, tokens: Tensor, positions: Tensor, context: Any, boundaries: tuple[int, ...] = ()
    ) -> dict[int, Tensor]:
        """The last token, one-hot."""
        return {1: torch.nn.functional.one_hot(tokens, self.vocab_size).to(self.dtype)}

    def logits(self, normed: Tensor) -> Tensor:
        """[N, V]."""
        return self.table[normed.argmax(-1)]


class TableDrafter:
    """A worse table drafts, over some of the ids."""

    name = "table"
    num_layers = 0
    boundaries = ()
    lookahead = 0

    def __init__(self, table: Tensor, ids: Tensor) -> None:
        self.table, self.ids = table, ids

    def attach(self, target: Target, pool: KVPool, first_layer: int) -> None:
        """Nothing to prepare."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`."""
        chains = DraftChains(sequences, self.ids)
        for step in range(max(counts)):
            active = [index for index, count in enumerate(counts) if count > step]
            last = [(sequences[i].tokens + chains.tokens[i])[-1] for i in active]
            chains.extend(active, self.table[last][:, self.ids])
        return chains.proposals()

    def observe(self, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]) -> None:
        """Nothing to refill."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize(
    ("asked", "verification"),
    [
        ({"temperature": 0.7}, "rejection"),
        ({"temperature": 1.0}, "block"),
        ({"temperature": 1.5}, "rejection"),
        ({"temperature": 1.0, "top_k": 3}, "block"),
        ({"temperature": 1.0, "top_p": 0.8}, "rejection"),
        ({"temperature": 1.3, "top_k": 4, "top_p": 0.7}, "block"),
    ],
    ids=str,
)
def test_sampled_frequencies_are_the_targets(asked: dict[str, Any], verification: Any):
    """40,000 tokens of 200 requests: the frequencies of pairs of neighbours, within a total
    variation of 0.02 of what the target's law makes of the first of each pair."""
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(6, 6, generator=generator, dtype=torch.float64) * 1.5
    worse = table + torch.randn(6, 6, generator=generator, dtype=torch.float64)
    drafter = TableDrafter(worse, torch.tensor([0, 1, 2, 4, 5]))
    settings = EngineConfig(max_batch=200, pool_tokens=1 << 16, max_step_tokens=400)
    engine = Engine(TableTarget(table), settings, drafter)  # type: ignore[arg-type]
    sequences = [
        engine.add([seed % 6], SamplingParams(200, seed=seed, verification=verification, **asked))
        for seed in range(200)
    ]
    while not engine.scheduler.idle:
        engine.step()
    law = torch.softmax(table / asked["temperature"], -1)
    for row in law:
        ordered = row.sort(descending=True)
        kept = ordered.values[: asked.get("top_k") or 6]
        kept = kept / kept.sum()
        before = kept.cumsum(0) - kept
        kept = torch.where(before < asked.get("top_p", 1.0), kept, 0)
        row.zero_()[ordered.indices[: len(kept)]] = kept / kept.sum()
    texts = torch.tensor([sequence.tokens for sequence in sequences])
    pairs = (texts[:, :-1] * 6 + texts[:, 1:]).flatten()
    seen = torch.bincount(pairs, minlength=36).view(6, 6).double()
    assert seen.sum() == 40_000 and engine.metrics.num_accepted_tokens > 10_000
    expected = seen.sum(1, keepdim=True) * law
    assert float((seen - expected).abs().sum()) / 2 / 40_000 <= 0.02
    assert not seen[law == 0].any()


class Stuck:
    """A grammar that ends in a dead end."""

    def allowed(self, prompt: list[int], output: list[int]) -> Tensor:
        """See `TokenMask`."""
        return torch.full((512,), not output)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(mask=Stuck()), "request 'request-1': its mask lets nothing follow"),
        (SamplingParams(mask=NoRepeats(100)), "its mask has 100 tokens, the target 512"),
        (SamplingParams(logit_bias=((512, 1.0),)), "token 512 is outside"),
        (SamplingParams(logprobs=513), "logprobs 513"),
    ],
)
def test_requests_that_do_not_fit_the_target_are_refused(
    target: Target, params: SamplingParams, message: str
):
    """The value, the place and the remedy."""
    with pytest.raises(ValueError, match=message):
        Engine(target, config()).run([PROMPTS[1]], params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"repetition_penalty": 0}, "repetition_penalty 0"),
        ({"presence_penalty": math.inf}, "presence_penalty inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty nan"),
        ({"logit_bias": ((3, math.inf),)}, "logit_bias: inf for token 3"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "token 3 is given twice"),
        ({"logprobs": -1}, "logprobs -1"),
        ({"verification": "typcal"}, "verification 'typcal': choose rejection, block, typical"),
        ({"verification": "block", "coupled": True}, "with coupled"),
        ({"typical_scale": 0.0}, "typical_scale 0.0"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str):
    """Before anything runs."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


def test_a_bias_may_be_a_mapping_and_params_stay_hashable():
    """As written in an API call."""
    given: Any = {5: 1.0, 7: -2.0}
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((5, 1.0), (7, -2.0)) and hash(params) == hash(replace(params))


def test_typical_at_temperature_zero_warns():
    """It would change nothing."""
    with pytest.warns(UserWarning, match="temperature 0"):
        SamplingParams(verification="typical")
