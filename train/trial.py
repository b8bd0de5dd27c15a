"""A head run on real rows, and how near what it says comes to what the target says there.

Two measures, row by row, so that two runs over the same rows are compared in pairs:

    hits   the head's first choice is the target's. Of a head of minutes' training too few are, and
           a fault moves hardly one of them
    nats   sum over v of p(v) log q(v): p the target's distribution, q the head's at the temperature
           that suits it best, one for each step of a run. A fault moves every row. Without that
           temperature the sum is mostly of how sure a head is, which other inputs change, too
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.heads import Head, LoadedHead
from ..models.trunk import Trunk
from .material import Material
from .unroll import UnrollContext, unroll

STEPS = 4
_SHARPEST = 100.0  # times as sharp, or as flat, as it is, at most
_FITS, _CLOSE = 12, 1e-3  # steps towards the best temperature; of it


class Nearness(NamedTuple):
    """Of one step at rows [n], 0 where a chain has ended.

    Attributes:
        nats: see the module. overlap: sum of min(p, q), what the target would accept at
            temperature 1.
    """

    nats: Tensor
    overlap: Tensor


class Said(NamedTuple):
    """Of one run over rows [n].

    Attributes:
        early, right, late: bool, step 0 chooses as the target does one place before, at, and behind
            its own. next: step 1 chooses as it does at its own.
        near: by step. blocks: of a medusa head, what each of its blocks says at step 0.
    """

    early: Tensor
    right: Tensor
    late: Tensor
    next: Tensor
    near: list[Nearness]
    blocks: list[Nearness]


class Trial:
    """Head rows [n], at most `STEPS` steps each, and what the target says at them.

    Args:
        trained: steps that the head was trained at, None where that is not known; what it says
            beyond them tells nothing.
    Attributes:
        constant: overlap [n] at step 0 of the mean of the target's distributions, drafted from at
            every row alike: what can be had without reading anything.
    """

    @torch.no_grad()
    def __init__(
        self, loaded: LoadedHead, material: Material, rows: Tensor, trained: int | None = None
    ) -> None:
        trunk = self.trunk = material.trunk
        self.batch, self.rows = material.batch, rows
        self.steps = min(STEPS, loaded.head.max_steps or STEPS, trained or STEPS)
        self.ids = None if loaded.draft_ids is None else loaded.draft_ids.to(trunk.device)
        self.states = {
            k: state.to(trunk.device, trunk.dtype) for k, state in material.states.items()
        }
        self.taught = self.batch.chains(max(2, self.steps))[:, rows]
        normed = trunk.norm(self.states[max(self.states)])
        self.choice: list[Tensor] = []
        self.wanted: list[Tensor] = []
        for place in range(max(3, self.steps + 1)):
            said = trunk.logits(normed[(rows + place).clamp_max(len(normed) - 1)]).float()
            self.choice.append(said.argmax(-1))
            if 1 <= place <= self.steps:
                kept = said.softmax(-1)
                self.wanted.append(kept if self.ids is None else kept[:, self.ids])
        mean = self.wanted[0].mean(0)
        self.constant = torch.minimum(self.wanted[0], mean / mean.sum()).sum(-1)

    @torch.no_grad()
    def run(
        self,
        head: Head,
        further: dict[int, Tensor] | None = None,
        raw: bool = False,
        steps: int | None = None,
    ) -> Said | None:
        """What a head says; None where its states or logits are not finite.

        Args:
            steps: how many; None for all.
            further: boundary -> [N, H], states of other boundaries. raw: feed the state before the
                final norm.
        """
        more = {
            k: state.to(self.trunk.device, self.trunk.dtype) for k, state in (further or {}).items()
        }
        given: Any = _Given(self.trunk) if raw else self.trunk
        drafted = unroll(
            head,
            given,
            self.batch,
            steps or self.steps,
            states={**self.states, **more},
            context=UnrollContext(self.batch.starts),
        )[:, self.rows]
        near, blocks, chosen = [], [], []
        for step, wanted in enumerate(self.wanted[: len(drafted)]):
            logits = self._logits(head, drafted[step], step)
            if not bool(logits.isfinite().all()):
                return None
            chosen.append(self._target_ids(logits.argmax(-1)))
            near.append(_nearness(logits, wanted, self.taught[step]))
            if head.kind == "medusa":
                blocks.append(_nearness(logits, self.wanted[0], self.taught[0]))
        early, right, late = (chosen[0] == one for one in self.choice[:3])
        following = chosen[1] == self.choice[2] if len(chosen) > 1 else right
        return Said(early, right, late, following, near, blocks)

    def _logits(self, head: Head, drafted: Tensor, step: int) -> Tensor:
        """[n, Vd] float32 of what a head hands over [n, H]; one lm_head for all steps, or one for
        each."""
        if head.lm_head is None:
            return self.trunk.logits(drafted, self.ids).float()
        rows = head.lm_head if head.lm_head.dim() == 2 else head.lm_head[step]
        return (drafted @ rows.T).float()

    def _target_ids(self, columns: Tensor) -> Tensor:
        return columns if self.ids is None else self.ids[columns]


class _Given:
    """A trunk whose final norm the head is not given."""

    def __init__(self, trunk: Trunk) -> None:
        self.embed = trunk.embed
        self.norm = lambda raw: raw


def _nearness(logits: Tensor, wanted: Tensor, taught: Tensor) -> Nearness:
    """logits: [n, V]. wanted: p, [n, V]; over a draft vocabulary it need not sum to 1. taught: [n]
    bool, the rows that count, by which the temperature is fitted."""
    weight = taught.float()
    mass, meant = wanted.sum(-1), (wanted * logits).sum(-1)
    # The sum over rows of p log softmax(b logits) is concave in b: Newton's steps, halved in the
    # logarithm where they leave the bracket of its slope.
    b, low, high = 1.0, 1 / _SHARPEST, _SHARPEST
    for _ in range(_FITS):
        q = (b * logits).softmax(-1)
        mean = (q * logits).sum(-1)
        slope = float(weight @ (meant - mass * mean))
        bend = float(weight @ (mass * ((q * logits.square()).sum(-1) - mean.square())))
        low, high = (b, high) if slope > 0 else (low, b)
        aim = b + slope / max(bend, 1e-9)
        if not low < aim < high:
            aim = math.sqrt(low * high)
        if abs(aim / b - 1) < _CLOSE:
            break
        b = aim
    nats = b * meant - mass * (b * logits).logsumexp(-1)
    overlap = torch.minimum(logits.softmax(-1), wanted).sum(-1)
    return Nearness(weight * nats, weight * overlap)
