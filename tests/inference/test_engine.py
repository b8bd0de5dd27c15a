"""Speculative output is plain output, whoever drafts, however it is batched, whatever is
accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafting import Script, ScriptedDrafter
from small_heads import HEAD_CONFIGS, NO_NORMS, PROMPTS, away_from_its_start
from transformers import AutoModelForCausalLM

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMDrafter
from draftsmith.inference.drafters import NgramDrafter
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.models.heads import Head, HeadConfig, build_head
from draftsmith.models.norm import use_own_norms
from draftsmith.models.target import Target, TargetConfig

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
TINY_HEADS = {
    "mtp": (HeadConfig(), None),
    "reduced mtp": (HeadConfig(), torch.tensor([0, 2, 3])),
    "mtp of 2 modules": (HeadConfig(modules=2), None),
    "reduced eagle3": (HeadConfig("eagle3", boundaries=(0, 1)), torch.tensor([0, 2, 3])),
    "medusa": (HeadConfig("medusa", modules=2, norms=NO_NORMS), None),
}
"""Heads for a target of five tokens and one layer, with their draft ids."""


def config(**changes: int | bool) -> EngineConfig:
    """A small engine whose free pages are NaN."""
    settings = {"pool_tokens": 1024, "page_size": 4, "poison": True, "max_batch": 3} | changes
    return EngineConfig(**settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def answers(target: Target) -> dict[tuple[int, ...], list[int]]:
    """Greedy continuations by transformers itself, without pages, batches or chunks."""
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float64)
    use_own_norms(model)
    found = {}
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(GREEDY.max_new_tokens):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found[tuple(prompt)] = ids[len(prompt) :]
    return found


@pytest.mark.parametrize("max_batch", [1, 3, 5])
@pytest.mark.parametrize("chunk", [5, 7, 512])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_plain_decoding_equals_transformers(
    target, answers, max_batch: int, chunk: int, page_size: int
):
    """Continuous batching, chunked prefill and pages change nothing."""
    engine = Engine(
        target,
        config(max_batch=max_batch, max_step_tokens=chunk, page_size=page_size, draft_tokens=0),
    )
    results = engine.run(PROMPTS, GREEDY)
    assert [sequence.output for sequence in results] == [
        answers[tuple(prompt)] for prompt in PROMPTS
    ]


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("drafter", ["ngram", *HEAD_CONFIGS])
def test_speculative_decoding_equals_plain(
    target, answers, drafter: str, reduced: bool, draft_tokens: int, chunk: int
):
    """Bad heads of every family, over the whole and over a reduced vocabulary, a look-up: the text
    is the target's."""
    ids = torch.arange(0, 512, 3) if reduced else None
    drafting = NgramDrafter()
    if drafter != "ngram":
        drafting = HeadDrafter(away_from_its_start(HEAD_CONFIGS[drafter], target, ids), ids)
    engine = Engine(target, config(draft_tokens=draft_tokens, max_step_tokens=chunk), drafting)
    results = engine.run(PROMPTS, GREEDY)
    assert [sequence.output for sequence in results] == [
        answers[tuple(prompt)] for prompt in PROMPTS
    ]
    assert engine.metrics.num_drafts + engine.metrics.cut_drafts > 0


def test_a_medusa_chain_is_no_longer_than_its_heads(target, answers):
    """Four heads asked for six drafts give four."""
    head = away_from_its_start(HEAD_CONFIGS["medusa"], target)
    engine = Engine(target, config(draft_tokens=6), HeadDrafter(head, None))
    results = engine.run(PROMPTS, GREEDY)
    assert [sequence.output for sequence in results] == [
        answers[tuple(prompt)] for prompt in PROMPTS
    ]
    assert len(engine.metrics.drafted_per_position) == 4


def test_each_medusa_head_drafts_with_its_own_lm_head(target, monkeypatch):
    """Blocks that add nothing, lm_heads with the target's rows moved by k + 1: drafts are the last
    token plus 1, 2, 3."""
    shape = HeadConfig("medusa", modules=3, own_lm_heads=True, norms=NO_NORMS)
    head = build_head(shape, target.folder, 1.0)
    assert head.lm_head is not None
    with torch.no_grad():
        for k, rows in enumerate(head.lm_head):
            rows.copy_(target.trunk.lm_head.float().roll(k + 1, 0))
    drafter, seen = HeadDrafter(head.double(), None), []
    propose = drafter.propose

    def watched(sequences, counts):
        found = propose(sequences, counts)
        for one, proposal in zip(sequences, found, strict=True):
            right = [(one.tokens[-1] + 1 + k) % 512 for k in range(len(proposal.tokens))]
            seen.append(proposal.tokens == right)
        return found

    monkeypatch.setattr(drafter, "propose", watched)
    Engine(target, config(draft_tokens=3), drafter).run(PROMPTS, GREEDY)
    assert len(seen) > 20 and all(seen)


@pytest.mark.parametrize("pattern", list(itertools.product(range(4), repeat=2)), ids=str)
def test_every_accept_pattern(target, answers, pattern: tuple[int, int]):
    """Rounds that keep 0, 1, 2 or 3 of 3 drafts, in every order, mixed in one batch."""
    script = Script(answers, list(pattern), target.vocab_size)
    engine = Engine(target, config(), ScriptedDrafter(script))
    results = engine.run(PROMPTS, GREEDY)
    assert [sequence.output for sequence in results] == [
        answers[tuple(prompt)] for prompt in PROMPTS
    ]
    for sequence in results:
        whole_rounds = sequence.tokens_per_step[:-2]
        expected = [pattern[i % 2] + 1 for i in range(len(whole_rounds))]
        assert whole_rounds == expected


def test_an_oracle_scores_k_plus_one_and_a_wrong_draft_one(target, answers):
    """The ends of the scale; cut rounds are left out of the rate and counted in tokens per call."""
    for keep, length in ((3, 4.0), (0, 1.0)):
        engine = Engine(
            target, config(), ScriptedDrafter(Script(answers, [keep], target.vocab_size))
        )
        engine.run(PROMPTS, GREEDY)
        metrics = engine.metrics
        assert metrics.mean_acceptance_length == length
        assert metrics.accepted_per_position == [
            metrics.num_drafts if i < keep else 0 for i in range(3)
        ]
        assert metrics.decode_tokens == len(PROMPTS) * (GREEDY.max_new_tokens - 1)


@pytest.mark.parametrize("limit", range(1, 10))
def test_a_limit_gives_the_prefix_of_the_long_answer(target, answers, limit: int):
    """max_new_tokens cuts inside an accepted run exactly where it should, and the pages are free
    again."""
    engine = Engine(target, config(), ScriptedDrafter(Script(answers, [3], target.vocab_size)))
    results = engine.run(PROMPTS, SamplingParams(max_new_tokens=limit, ignore_eos=True))
    assert [sequence.output for sequence in results] == [answers[tuple(p)][:limit] for p in PROMPTS]
    assert all(sequence.finish_reason == "length" for sequence in results)
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages


@pytest.mark.parametrize("place", range(5))
def test_an_end_token_inside_an_accepted_run_ends_the_answer(target, answers, place: int):
    """Nothing behind it is emitted or counted, and the round does not enter the rate."""
    prompt = PROMPTS[2]
    answer = answers[tuple(prompt)]
    end = answer[place]
    ended = Target(target.folder, target.config, target.stack, target.trunk, frozenset({end}))
    first = answer.index(end)
    engine = Engine(ended, config(), ScriptedDrafter(Script(answers, [3], target.vocab_size)))
    (result,) = engine.run([prompt], SamplingParams(max_new_tokens=24))
    assert result.output == answer[: first + 1] and result.finish_reason == "stop"
    assert engine.metrics.decode_tokens == len(result.output) - 1


def test_a_tiny_pool_only_makes_requests_wait(target, head: Head, answers):
    """With room for one request at a time the answers are the same, and no page is lost."""
    need = max(map(len, PROMPTS)) + GREEDY.max_new_tokens + 3
    engine = Engine(target, config(pool_tokens=need), HeadDrafter(head, None))
    results = engine.run(PROMPTS, GREEDY)
    assert [sequence.output for sequence in results] == [
        answers[tuple(prompt)] for prompt in PROMPTS
    ]
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages


def test_scattered_pages_are_read_like_neighbours(target, head: Head, answers):
    """A pool whose free pages are every other one forces the gathered path."""
    engine = Engine(target, config(pool_tokens=2048, max_batch=2), HeadDrafter(head, None))
    allocator = engine.scheduler.allocator
    pages = allocator.allocate(allocator.num_pages)
    assert pages is not None
    allocator.release(pages[::2])
    results = engine.run(PROMPTS, GREEDY)
    assert [sequence.output for sequence in results] == [
        answers[tuple(prompt)] for prompt in PROMPTS
    ]


def test_requests_join_and_leave_while_others_run(target, head: Head, answers):
    """A request added in the middle, and one cancelled, disturb nobody."""
    engine = Engine(target, config(), HeadDrafter(head, None))
    first = engine.add(PROMPTS[4], GREEDY)
    for _ in range(4):
        engine.step()
    gone, late = engine.add(PROMPTS[3], GREEDY), engine.add(PROMPTS[1], GREEDY)
    engine.step()
    engine.scheduler.cancel(gone)
    while not engine.scheduler.idle:
        engine.step()
    assert first.output == answers[tuple(PROMPTS[4])] and late.output == answers[tuple(PROMPTS[1])]
    assert gone.finish_reason == "cancelled"
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_seed_fixes_a_sampled_text_whatever_runs_beside_it(target, head: Head, draft_tokens: int):
    """Each request draws from its own stream: alone or in a batch the text is the same, another
    seed differs."""
    drafter = HeadDrafter(head, None) if draft_tokens else None

    def texts(prompts: list[list[int]], seed: int) -> list[list[int]]:
        engine = Engine(target, config(draft_tokens=draft_tokens, max_batch=5), drafter)
        params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
        return [sequence.output for sequence in engine.run(prompts, params)]

    together = texts(PROMPTS, 7)
    assert together == [texts([prompt], 7)[0] for prompt in PROMPTS]
    assert together != texts(PROMPTS, 8)


@pytest.mark.parametrize("drafter", ["head", "reduced head", "ngram", "right", "wrong"])
def test_coupled_requests_say_what_plain_decoding_draws(target, head: Head, drafter: str):
    """One seed, one text, whoever drafts, whatever runs beside it, however many drafts are kept."""
    params = [
        SamplingParams(16, temperature=0.8, top_k=40, seed=n, ignore_eos=True, coupled=True)
        for n in range(len(PROMPTS))
    ]
    plain = []
    for prompt, each in zip(PROMPTS, params, strict=True):
        plain.append(Engine(target, config(draft_tokens=0)).run([prompt], each)[0].output)
    said = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=True)}
    drafting = {
        "head": HeadDrafter(head, None),
        "reduced head": HeadDrafter(head, torch.arange(0, 512, 3)),
        "ngram": NgramDrafter(),
        "right": ScriptedDrafter(Script(said, [3, 1, 2], target.vocab_size)),
        "wrong": ScriptedDrafter(Script(said, [0], target.vocab_size)),
    }[drafter]
    engine = Engine(target, config(max_step_tokens=7), drafting)
    sequences = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    while not engine.scheduler.idle:
        engine.step()
    assert [sequence.output for sequence in sequences] == plain
    kept = engine.metrics.num_accepted_tokens
    assert {"right": kept > 10, "wrong": kept == 0}.get(drafter, True)


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [
        ("ngram", 1.0),
        *((name, 1.0) for name in TINY_HEADS),
        ("reduced mtp", 0.6),
        ("draft-lm", 0.7),
        ("narrow draft-lm", 1.0),
    ],
)
def test_sampled_output_has_the_targets_law(
    tiny_llama_folder: Callable[..., Path], drafter: str, temperature: float
):
    """Chi-square of the first three tokens of four, jointly, over 3,500 answers: vocabulary 5, all
    125 texts."""
    target = tiny_target(tiny_llama_folder)
    drafting = NgramDrafter()
    if "draft-lm" in drafter:
        model = tiny_target(tiny_llama_folder, seed=6)
        drafting = DraftLMDrafter(DraftLM(model, 3 if "narrow" in drafter else 5))
    elif drafter != "ngram":
        chosen, ids = TINY_HEADS[drafter]
        head = build_head(chosen, target.folder, 1.0, draft_ids=ids)
        drafting = HeadDrafter(head.double(), ids)
    count, prompt = 3500, [3, 1, 4, 1, 3, 1]
    engine = Engine(
        target,
        EngineConfig(draft_tokens=2, max_batch=250, pool_tokens=1 << 13, max_step_tokens=2000),
        drafting,
    )
    for index in range(count):
        engine.add(prompt, SamplingParams(4, temperature=temperature, seed=index, ignore_eos=True))
    waiting = list(engine.scheduler.waiting)
    while not engine.scheduler.idle:
        engine.step()
    seen = torch.zeros(5, 5, 5, dtype=torch.float64)
    for sequence in waiting:
        a, b, c, _ = sequence.output
        seen[a, b, c] += 1
    expected = joint_law(target, prompt, temperature) * count
    likely = expected > 5
    chi2 = float(((seen - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    # Mean `freedom`, deviation sqrt(2 freedom): five deviations happen once in a million runs.
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5, (chi2, freedom)
    assert engine.metrics.num_accepted_tokens > 0


def tiny_target(make: Callable[..., Path], seed: int = 0) -> Target:
    """A target with five tokens and one layer."""
    tiny = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    folder = make(vocab_size=5, bos_token_id=None, eos_token_id=None, seed=seed, **tiny)
    return Target.load(TargetConfig(source=str(folder), dtype="float64", device="cpu"))


def joint_law(target: Target, prompt: list[int], temperature: float) -> torch.Tensor:
    """[5, 5, 5]: the exact probability of every text of three tokens."""
    from draftsmith.inference.capture import capture

    texts = list(itertools.product(range(5), repeat=2))
    rows = [torch.tensor([*prompt, a, b]) for a, b in texts]
    states = capture(target, rows, (1,))[1]
    logits = target.logits(target.trunk.norm(states)).view(25, len(prompt) + 2, 5)[:, -3:]
    laws = torch.softmax(logits / temperature, -1)
    joint = torch.zeros(5, 5, 5, dtype=torch.float64)
    for index, (a, b) in enumerate(texts):
        joint[a, b] = laws[index, 0, a] * laws[index, 1, b] * laws[index, 2]
    return joint


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([5, 512], GREEDY, "token 512 at position 1"),
        ([5] * 1024, GREEDY, "leaves none of the target's 1024 positions"),
        ([5], SamplingParams(stop_ids=(512,)), r"stop_ids \[512\] are outside"),
        ([5] * 900, SamplingParams(max_new_tokens=124), "raise engine.pool_tokens"),
    ],
)
def test_requests_that_cannot_run_are_refused(target, prompt, params, message: str):
    """The value, the place and the remedy; the engine stays usable."""
    engine = Engine(target, config())
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, params)
    assert engine.run([PROMPTS[0]], SamplingParams(max_new_tokens=2))[0].finished


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineConfig(max_batch=0), "max_batch 0"),
        (lambda: EngineConfig(draft_tokens=99), "draft_tokens 99"),
        (lambda: EngineConfig(max_batch=9, max_step_tokens=8), "max_step_tokens 8"),
        (lambda: SamplingParams(max_new_tokens=0), "max_new_tokens 0"),
        (lambda: SamplingParams(temperature=-1), "temperature -1"),
        (lambda: SamplingParams(top_p=0), "top_p 0"),
        (lambda: SamplingParams(top_k=-2), "top_k -2"),
        (lambda: NgramDrafter(2, 3), "ngram lengths"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], object], message: str):
    """Before anything runs."""
    with pytest.raises(ValueError, match=message):
        make()


def test_a_head_of_another_target_is_refused(
    tiny_llama_folder: Callable[..., Path], target: Target
):
    """By its width, before it drafts nonsense."""
    other = build_head(HeadConfig(), tiny_target(tiny_llama_folder).folder, 1.0)
    with pytest.raises(ValueError, match="trained for another target"):
        Engine(target, config(), HeadDrafter(other, None))


def test_nan_logits_stop_the_engine(tiny_llama_folder: Callable[..., Path]):
    """An id is never taken from NaN."""
    target = Target.load(
        TargetConfig(source=str(tiny_llama_folder()), dtype="float32", device="cpu")
    )
    target.trunk.final_norm.get_parameter("weight").data[3] = float("nan")
    with pytest.raises(ValueError, match="logits are not finite"):
        Engine(target, config()).run([PROMPTS[1]], GREEDY)
