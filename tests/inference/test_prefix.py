"""Rows that are found again give what rows computed anew give: tokens, drafts and what the drafts
come from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafting import Answers, ForcedHeadDrafter, Script, answers_of
from small_heads import HEAD_CONFIGS, away_from_its_start
from torch import Tensor

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMDrafter
from draftsmith.inference.drafters import Drafter
from draftsmith.inference.engine import Engine
from draftsmith.inference.sequence import Sequence
from draftsmith.models.target import Target

PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True)
BASE = torch.randint(3, 512, (40,), generator=torch.Generator().manual_seed(3)).tolist()
TAIL = [5, 8, 9, 5]
NAMES = ["none", "mtp", "mtp of 3 modules", "eagle3", "draft-lm"]
LOOKAHEAD = {"none": 0, "mtp": 1, "mtp of 3 modules": 3, "eagle3": 1, "draft-lm": 0}
Rows = dict[tuple[str, int, int], Tensor]


class WatchedDraftLM(DraftLMDrafter):
    """Remembers the state behind each row: (sequence, position, 0) -> [H]."""

    def __init__(self, lm: DraftLM) -> None:
        super().__init__(lm)
        self.rows: Rows = {}
        self.first: dict[str, int] = {}

    def _run(
        self, parts: list[tuple[Sequence, int, list[int]]], drafts: Tensor | None = None
    ) -> Tensor:
        out = super()._run(parts, drafts)
        for (sequence, first, tokens), row in zip(parts, out, strict=True):
            self.first.setdefault(sequence.id, first)
            self.rows[sequence.id, first + len(tokens) - 1, 0] = row
        return out


def watched(
    name: str, target: Target, answers: Answers, pattern: list[int]
) -> ForcedHeadDrafter | WatchedDraftLM | None:
    """A drafter that notes what it drafts from."""
    if name == "none":
        return None
    if name == "draft-lm":
        return WatchedDraftLM(DraftLM.paired(target, target))
    head = away_from_its_start(HEAD_CONFIGS[name], target)
    return ForcedHeadDrafter(head, None, Script(answers, pattern, target.vocab_size))


def engine_of(target: Target, drafter: Drafter | None, size: int, **changes: int | bool) -> Engine:
    """A small engine whose free pages are NaN."""
    settings = {"page_size": size, "pool_tokens": 1024, "poison": True, "max_batch": 2} | changes
    return Engine(target, EngineConfig(**settings), drafter)  # type: ignore[arg-type]


def require_same_rows(ours: Rows, right: Rows, least: int) -> None:
    """Every row that both computed, to rounding; at least so many."""
    both = [key for key in ours if key in right]
    assert len(both) >= least, len(both)
    for key in both:
        torch.testing.assert_close(ours[key], right[key], rtol=0, atol=1e-9, msg=str(key))


def prompts_of(size: int) -> dict[str, list[int]]:
    """Prompts that part from BASE just before, at and behind borders of pages, that are a beginning
    of it, or that go on."""
    border = size * (33 // size)
    found = {f"parts at {border + by:+d}": BASE[: border + by] + TAIL for by in (-1, 0, 1, 2, 3)}
    found |= {f"first {border + by}": BASE[: border + by] for by in (-1, 0, 1)}
    return found | {"again": BASE, "goes on": BASE + TAIL, "elsewhere": TAIL + BASE}


@pytest.fixture(scope="module")
def answers(target: Target) -> Answers:
    """What the target says to all of the prompts."""
    prompts = {tuple(p) for size in (1, 4, 16) for p in prompts_of(size).values()}
    return answers_of(target, [list(prompt) for prompt in sorted(prompts)], PARAMS)


@pytest.mark.parametrize(
    ("name", "size", "chunk"),
    [
        *((name, *shape) for name in NAMES for shape in ((4, 3), (16, 512))),
        ("mtp of 3 modules", 1, 512),
    ],
)
def test_a_hit_changes_nothing(target: Target, answers: Answers, name: str, size: int, chunk: int):
    """Tokens, step by step, and every row the drafter drafts from, whatever was kept."""
    rows: list[Rows] = []
    texts: list[list[tuple[list[int], list[int]]]] = []
    ahead = LOOKAHEAD[name]
    for reuse in (True, False):
        drafter = watched(name, target, answers, [3, 0, 2, 1])
        engine = engine_of(target, drafter, size, max_step_tokens=chunk, prefix_reuse=reuse)
        engine.run([BASE], PARAMS)
        said = []
        for what, prompt in prompts_of(size).items():
            before = engine.scheduler.counts.reused_tokens
            sequence = engine.add(prompt, PARAMS, what)
            while not sequence.finished:
                engine.step()
            said.append((sequence.output, sequence.tokens_per_step))
            assert sequence.output == answers[tuple(prompt)]
            gained = engine.scheduler.counts.reused_tokens - before
            if isinstance(drafter, WatchedDraftLM):
                assert drafter.first[what] == gained
            if not reuse:
                assert gained == 0
            elif what.startswith("parts"):
                # Whole pages whose rows saw no token that differs, less the modules' rows.
                parted = len(prompt) - len(TAIL)
                whole = size * ((parted - ahead) // size)
                assert gained == min(whole, len(prompt) - 1) - max(ahead - 1, 0)
            elif what == "elsewhere":
                assert gained == 0
            else:
                assert gained > 0
        texts.append(said)
        rows.append(drafter.rows if drafter else {})
        assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages
    assert texts[0] == texts[1]
    if name != "none":
        require_same_rows(*rows, least=60)


@pytest.mark.parametrize("name", NAMES)
def test_forks_share_the_prompt(target: Target, answers: Answers, name: str):
    """Also its partly filled page, whether the first is reading, writing or gone; each goes its own
    way, and no page is lost."""
    drafter = watched(name, target, answers, [2, 0, 3])
    engine = engine_of(target, drafter, 4, max_batch=5, max_step_tokens=9, prefix_reuse=False)
    prompt = BASE[:30]
    right = answers_of(target, [prompt], PARAMS)[tuple(prompt)]
    if isinstance(drafter, ForcedHeadDrafter):
        drafter.script.answers = {tuple(prompt): right}
    first = engine.add(prompt, PARAMS, "a")
    early = [engine.fork(first, PARAMS), engine.fork(first, replace(PARAMS, max_new_tokens=4))]
    while len(first.output) < 2:
        engine.step()
    late = [engine.fork(first, PARAMS)]
    while not engine.scheduler.idle:
        engine.step()
        held = {page for one in engine.scheduler.running for page in one.pages}
        users = engine.scheduler.allocator.users
        assert {page for page, count in enumerate(users) if count} == held
    late.append(engine.fork(first, PARAMS))
    while not engine.scheduler.idle:
        engine.step()
    counts = engine.scheduler.counts
    assert (counts.hits, counts.reused_tokens) == (3, 3 * (29 - max(LOOKAHEAD[name] - 1, 0)))
    assert early[1].output == right[:4]
    assert all(one.output == right for one in (first, early[0], *late))
    assert not any(engine.scheduler.allocator.users)
    if drafter:
        alone = watched(name, target, {tuple(prompt): right}, [2, 0, 3])
        assert alone is not None
        other = engine_of(target, alone, 4, prefix_reuse=False)
        other.add(prompt, PARAMS, early[0].id)
        while not other.scheduler.idle:
            other.step()
        require_same_rows(drafter.rows, alone.rows, least=4)


def test_forks_of_one_prompt_draw_texts_of_their_own(target: Target):
    """The texts that their seeds give without sharing."""
    params = [SamplingParams(12, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    engine = engine_of(target, None, 4, max_batch=4, draft_tokens=0)
    first = engine.add(BASE, params[0])
    forks = [engine.fork(first, each) for each in params[1:]]
    while not engine.scheduler.idle:
        engine.step()
    assert engine.scheduler.counts.hits == 3
    for one, each in zip((first, *forks), params, strict=True):
        alone = engine_of(target, None, 4, draft_tokens=0, prefix_reuse=False)
        assert one.output == alone.run([BASE], each)[0].output
    assert len({tuple(one.output) for one in (first, *forks)}) == 4


def test_a_pool_without_a_page_for_the_copy_computes_that_page(target: Target):
    """A prompt that is known whole, in a pool that holds it once and nothing more."""
    prompt, params = BASE[:32], SamplingParams(max_new_tokens=1, ignore_eos=True)
    plain = engine_of(target, None, 16, draft_tokens=0).run([prompt], params)[0].output
    for pool, gained in ((48, 16), (64, 31)):
        engine = engine_of(target, None, 16, draft_tokens=0, pool_tokens=pool)
        # Two answers' worth, so that the prompt's pages are offered.
        first = engine.add(prompt, SamplingParams(max_new_tokens=2, ignore_eos=True))
        while not first.finished:
            engine.step()
        assert engine.run([prompt], params)[0].output == plain
        assert engine.scheduler.counts.reused_tokens == gained


def test_resetting_the_counts_forgets_the_prefixes(target: Target):
    """A measured run starts from nothing."""
    engine = engine_of(target, None, 4)
    engine.run([BASE], PARAMS)
    assert len(engine.scheduler.cache)
    engine.reset_metrics()
    assert not len(engine.scheduler.cache)
    for tensor in (*engine.pool.keys, *engine.pool.values):
        assert tensor is not None and bool(tensor.isnan().all())
