"""Chain verification emits the target's joint law, to the last digits: every chain of drafts is
tried, and every uniform is integrated, by bisection of the regions in which `verify` decides alike.

Nothing here is sampled and no formula of acceptance is used: only that draft i is judged by uniform
i, that the last uniform gives the token that follows, and what `verify` answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.batch import Batch
from draftsmith.inference.config import SamplingParams
from draftsmith.inference.drafters import Proposal
from draftsmith.inference.sequence import Sequence
from draftsmith.inference.verifier import verify
from draftsmith.kernels.accept import DraftLaw

PROMPT = [0, 2]
ALMOST = 1 - 2**-50
HALVINGS = 43

Text = tuple[int, ...]


@dataclass(eq=False)
class Forced(Sequence):
    """A request whose next uniforms are given."""

    forced: tuple[float, ...] = ()

    def uniforms(self, count: int) -> list[float]:
        """What was given."""
        assert count == len(self.forced)
        return list(self.forced)


class EvenAfterZero:
    """A grammar: behind token 0, and behind a text of two tokens, only even tokens may come."""

    def __init__(self, size: int) -> None:
        self.even = torch.arange(size) % 2 == 0
        self.asked: set[Text] = set()

    def allowed(self, prompt: list[int], output: list[int]) -> Tensor:
        """See `TokenMask`; a text that breaks the rule is an error here."""
        assert prompt == PROMPT
        self.asked.add(tuple(output))
        for place in range(len(output)):
            assert self._rule(output[:place])[output[place]], "asked behind a forbidden token"
        return self._rule(output)

    def _rule(self, output: list[int]) -> Tensor:
        if (output and output[-1] == 0) or len(output) == 2:
            return self.even
        return torch.ones_like(self.even)


def law_by_hand(logits: Tensor, params: SamplingParams, output: Text) -> Tensor:
    """[V]: what the settings mean, one token at a time, in plain Python."""
    z = [float(value) for value in logits]
    if params.mask is not None:
        allowed = params.mask.allowed(PROMPT, list(output))
        z = [value if allowed[token] else -torch.inf for token, value in enumerate(z)]
    for token, bias in params.logit_bias:
        z[token] += bias
    for token in range(len(z)):
        count = output.count(token)
        if count or token in PROMPT:
            penalty = params.repetition_penalty
            z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
        z[token] -= params.frequency_penalty * count
        z[token] -= params.presence_penalty * (count > 0)
    scaled = torch.tensor(z, dtype=torch.float64) / params.temperature
    law = torch.softmax(scaled, 0)
    law = torch.where(law >= params.min_p * law.max(), law, 0)
    if params.top_k:
        edge = law.sort(descending=True).values[min(params.top_k, len(law)) - 1]
        law = torch.where(law >= edge, law, 0)
    law = law / law.sum()
    kept, mass = torch.zeros_like(law), 0.0
    for token in law.argsort(descending=True).tolist():
        if params.top_p == 1 or mass < params.top_p:
            kept[token] = law[token]
        mass += float(law[token])
    return kept / kept.sum()


@dataclass
class World:
    """Logits of a target and laws of a drafter behind every text; `ids` are what is drafted."""

    size: int
    depth: int
    params: SamplingParams
    drawn: bool
    ids: Tensor | None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        texts = [
            t for n in range(self.depth + 1) for t in itertools.product(range(self.size), repeat=n)
        ]
        rows = torch.randn(len(texts), self.size, generator=generator, dtype=torch.float64) * 1.5
        self.logits = dict(zip(texts, rows, strict=True))
        width = self.size if self.ids is None else len(self.ids)
        own = torch.softmax(torch.randn(len(texts), width, generator=generator).double() * 1.5, -1)
        self.drafts = dict(zip(texts, own, strict=True))
        self._target: dict[Text, Tensor] = {}

    def target(self, text: Text) -> Tensor:
        """[V]: the law behind a text that the target can emit."""
        if text not in self._target:
            self._target[text] = law_by_hand(self.logits[text], self.params, text)
        return self._target[text]

    def chains(self) -> list[tuple[Text, float]]:
        """Every chain of drafts with its probability; a drafter that does not draw has one."""
        if not self.drawn:
            return [(tuple((2 * step + 1) % self.size for step in range(self.depth)), 1.0)]
        found: list[tuple[Text, float]] = []
        ids = list(range(self.size)) if self.ids is None else self.ids.tolist()
        for columns in itertools.product(range(len(ids)), repeat=self.depth):
            text = tuple(ids[column] for column in columns)
            share = 1.0
            for step, column in enumerate(columns):
                share *= float(self.drafts[text[:step]][column])
            found.append((text, share))
        return found

    def proposal(self, chain: Text) -> Proposal:
        """As a drafter gives it."""
        if not self.drawn:
            return Proposal(list(chain))
        laws = torch.stack([self.drafts[chain[:step]] for step in range(len(chain))])
        return Proposal(list(chain), DraftLaw(laws, self.ids))

    def judge(self, asked: list[tuple[Text, tuple[float, ...]]]) -> list[tuple[int, int]]:
        """(kept, following) of chains with their uniforms, all in one batch."""
        generator = torch.Generator()
        sequences, proposals, rows = [], [], []
        for chain, uniforms in asked:
            tokens = list(PROMPT)
            one = Forced(str(len(rows)), tokens, len(PROMPT), self.params, generator, 99)
            one.forced = uniforms
            sequences.append(one)
            proposals.append(self.proposal(chain))
            rows += [self.logits[chain[:step]] for step in range(len(chain) + 1)]
        starts = list(range(0, len(rows) + 1, self.depth + 1))
        empty = torch.empty(0, dtype=torch.int64)
        batch = Batch(sequences, starts, empty, empty, empty, [])
        verdict = verify(batch, sequences, proposals, torch.stack(rows))
        return [(len(k), t) for k, t in zip(verdict.kept, verdict.following, strict=True)]

    def borders(
        self, probes: list[tuple[Text, list[float], int, Callable[[tuple[int, int]], bool]]]
    ) -> list[float]:
        """For each (chain, uniforms, which uniform, test): how much of [0, 1) that uniform passes
        the test on; it passes from 0 up to somewhere."""
        low, high = [0.0] * len(probes), [1.0] * len(probes)
        for halving in range(HALVINGS + 1):
            # First the upper end itself, so that 1 is met exactly.
            middles = [
                ALMOST if halving == 0 else (a + b) / 2 for a, b in zip(low, high, strict=True)
            ]
            asked = []
            for (chain, uniforms, which, _), middle in zip(probes, middles, strict=True):
                asked.append((chain, tuple([*uniforms[:which], middle, *uniforms[which + 1 :]])))
            answers = self.judge(asked)
            for index, answer in enumerate(answers):
                if probes[index][3](answer):
                    low[index] = 1.0 if halving == 0 else middles[index]
                else:
                    high[index] = middles[index]
        return [(a + b) / 2 if a < 1 else 1.0 for a, b in zip(low, high, strict=True)]

    def kept_law(self) -> dict[Text, list[float]]:
        """chain -> the probability that 0, 1, … K drafts are kept."""
        chains, last = [chain for chain, _ in self.chains()], 0.5
        probes = []
        for chain in chains:
            for step in range(self.depth):
                # Drafts before it pass, drafts behind it are refused where any uniform can.
                uniforms = [0.0] * step + [0.0] + [ALMOST] * (self.depth - step - 1) + [last]
                probes.append((chain, uniforms, step, lambda got, need=step + 1: got[0] >= need))
        passes = iter(self.borders(probes))
        laws = {}
        for chain in chains:
            h = [next(passes) for _ in range(self.depth)]
            law = []
            for kept in range(self.depth + 1):
                share = 1.0
                if self.params.verification == "block":
                    share = h[kept - 1] if kept else 1.0
                    for later in h[kept:]:
                        share *= 1 - later
                else:
                    for step in h[:kept]:
                        share *= step
                    share *= 1 - h[kept] if kept < self.depth else 1.0
                law.append(share)
            laws[chain] = law
        return laws

    def emitted(self) -> Tensor:
        """[V] * (K+1): the joint law of the next K+1 tokens, what is not emitted in this step
        following the target's law."""
        kept_law = self.kept_law()
        probes, places = [], []
        for chain, law in kept_law.items():
            for kept, share in enumerate(law):
                if share > 0:
                    uniforms = [0.0] * kept + [ALMOST] * (self.depth - kept) + [0.5]
                    for token in range(self.size - 1):
                        places.append((chain, kept, token))
                        probes.append(
                            (chain, uniforms, self.depth, lambda got, t=token: got[1] <= t)
                        )
        below = dict(zip(places, self.borders(probes), strict=True))
        joint = torch.zeros([self.size] * (self.depth + 1), dtype=torch.float64)
        for chain, share in self.chains():
            for kept, chance in enumerate(kept_law[chain]):
                if chance == 0:
                    continue
                for token in range(self.size):
                    before = below[chain, kept, token - 1] if token else 0.0
                    upto = below.get((chain, kept, token), 1.0)
                    weight = share * chance * (upto - before)
                    self._spread(joint, (*chain[:kept], token), weight)
        return joint

    def truth(self) -> Tensor:
        """[V] * (K+1): the target's own joint law."""
        joint = torch.zeros([self.size] * (self.depth + 1), dtype=torch.float64)
        self._spread(joint, (), 1.0)
        return joint

    def _spread(self, joint: Tensor, text: Text, weight: float) -> None:
        if weight == 0:
            return
        if len(text) == self.depth + 1:
            joint[text] += weight
            return
        for token, share in enumerate(self.target(text).tolist()):
            self._spread(joint, (*text, token), weight * share)


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
}
SETTINGS = {
    "plain": SamplingParams(temperature=1),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.3, top_k=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.5, min_p=0.3),
    "filters": SamplingParams(temperature=1.5, min_p=0.12, top_k=3, top_p=0.85),
    "penalties": SamplingParams(temperature=0.9, **PENALTIES),
    "bias": SamplingParams(temperature=1, logit_bias=((1, 1.5), (3, -2.0))),
    "mask": SamplingParams(temperature=1, mask=EvenAfterZero(4)),
    "all": SamplingParams(
        temperature=1.2,
        top_k=3,
        top_p=0.95,
        min_p=0.02,
        logit_bias=((1, 0.5),),
        mask=EvenAfterZero(4),
        **PENALTIES,
    ),
}


ALONE = ("temperature", "top-k", "top-p", "min-p")


@pytest.mark.parametrize(
    ("settings", "drafts", "verification"),
    [
        *itertools.product(ALONE, ["drawn"], ["rejection"]),
        *itertools.product(
            [name for name in SETTINGS if name not in ALONE],
            ["drawn", "chosen"],
            ["rejection", "block"],
        ),
        *itertools.product(["filters", "all"], ["drawn from three ids"], ["rejection", "block"]),
    ],
)
def test_the_joint_law_of_a_chain_is_the_targets(settings: str, drafts: str, verification: str):
    """Four tokens, two drafts, every setting."""
    params = replace(SETTINGS[settings], verification=verification)
    ids = torch.tensor([0, 1, 3]) if "three" in drafts else None
    world = World(4, 2, params, drafts != "chosen", ids)
    torch.testing.assert_close(world.emitted(), world.truth(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_three_drafts(verification: str):
    """Three tokens, three drafts, penalties that count them."""
    params = replace(SETTINGS["penalties"], verification=verification)
    world = World(3, 3, params, True, None)
    torch.testing.assert_close(world.emitted(), world.truth(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", ["plain", "filters", "penalties"])
def test_a_block_keeps_at_least_as_many(settings: str):
    """In the mean over all chains, and strictly more here; three drafts."""
    means = {}
    for verification in ("rejection", "block"):
        world = World(3, 3, replace(SETTINGS[settings], verification=verification), True, None)
        law = world.kept_law()
        means[verification] = sum(
            share * sum(kept * chance for kept, chance in enumerate(law[chain]))
            for chain, share in world.chains()
        )
    assert means["block"] > means["rejection"] + 1e-3


def test_typical_acceptance_is_lossy_and_does_what_it_says():
    """A draft is kept whatever its uniform, where its probability passes the threshold."""
    params = SamplingParams(
        temperature=1, verification="typical", typical_threshold=0.2, typical_scale=0.9
    )
    world = World(4, 2, params, True, None)
    for chain, _ in world.chains():
        expected = 0
        for step in range(2):
            law = world.target(chain[:step])
            entropy = -float((law * law.log()).sum())
            likely = min(0.2, 0.9 * torch.e**-entropy)
            if float(law[chain[step]]) <= likely:
                break
            expected += 1
        for uniform in (0.0, ALMOST):
            assert world.judge([(chain, (uniform, uniform, 0.3))])[0][0] == expected
    assert not params.lossless
    assert (world.emitted() - world.truth()).abs().sum() > 0.01


def test_the_mask_is_asked_about_speculated_texts_and_keeps_nothing():
    """Every text of up to two drafts that the grammar allows is asked for, no other."""
    mask = EvenAfterZero(4)
    world = World(4, 2, SamplingParams(temperature=1, mask=mask), True, None)
    mask.asked.clear()
    world.judge([(chain, (0.5, 0.5, 0.5)) for chain, _ in world.chains()])
    texts = [(), *((a,) for a in range(4)), *itertools.product(range(4), repeat=2)]
    assert mask.asked == {t for t in texts if len(t) < 2 or t[0] != 0 or t[1] % 2 == 0}
