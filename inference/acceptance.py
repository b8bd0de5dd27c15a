"""One measured run: a drafter on a set of prompts, compared token for token with plain decoding."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..models.target import Target
from .config import EngineConfig, SamplingParams
from .drafters import Drafter
from .engine import Engine
from .metrics import EngineMetrics
from .pass_times import PassTimes
from .schedule import StepOutput
from .sequence import Lead, Sequence
from .tree_drafter import TreeHeadDrafter

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PromptSet:
    """Prompts under one name. `form` says how they were written out (template, first turn, …)."""

    name: str
    form: str
    ids: list[str]
    prompts: list[list[int]]
    first: int = 0
    stride: int = 1
    """Of a part of a set: prompt i is number first + i * stride of the whole, which its random
    stream follows."""

    def part(self, first: int, stride: int) -> PromptSet:
        """Every stride-th prompt of a whole set, from number `first` on; may be empty."""
        return PromptSet(
            self.name,
            self.form,
            self.ids[first::stride],
            self.prompts[first::stride],
            first,
            stride,
        )


@dataclass(frozen=True)
class Difference:
    """Where a greedy answer first leaves the plain one. `gap` is the plain run's lead there, in
    logits."""

    prompt: str
    position: int
    gap: float
    bound: float

    @property
    def near_tie(self) -> bool:
        """Whether the dtype explains it (see `near_tie_bound`)."""
        return self.gap <= self.bound


@dataclass
class RunResult:
    """A run's outputs and counts; `to_json` is one entry of report.json's `runs`."""

    drafter: str
    prompts: PromptSet
    params: SamplingParams
    config: EngineConfig
    dtype: str
    sequences: list[Sequence]
    metrics: EngineMetrics
    seconds: float
    steps: list[list[int]]
    """By sequence: how many tokens each step gave it, from its prefill on. All but the last of a
    step's are accepted drafts; the last is the target's own, or an accepted end token."""
    drafts: list[list[list[int]]] = field(default_factory=list, repr=False)
    """By sequence and step: what was proposed (of a tree, all nodes)."""
    passes: PassTimes = field(default_factory=PassTimes, repr=False)
    """Seconds of its decode-only steps."""
    differences: list[Difference] | None = None
    speedup: float | None = None
    trees: bool = False
    """Whether the drafter drafted trees."""
    plain: RunResult | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(len(sequence.output) for sequence in self.sequences)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / wall seconds, prefill included."""
        return self.tokens / self.seconds

    @property
    def identical_to_plain(self) -> bool | None:
        """True when every difference is a near tie of the plain run; None where nothing was
        compared."""
        if self.differences is None:
            return None
        return all(difference.near_tie for difference in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Raw counts first, so that anyone can recompute the figures."""
        counts = self.metrics
        spent = sum(counts.seconds.values())
        return {
            "drafter": self.drafter,
            "prompts": self.prompts.name,
            "form": self.prompts.form,
            "num_prompts": len(self.sequences),
            "temperature": self.params.temperature,
            "verification": "greedy" if self.params.greedy else self.params.verification,
            "lossless": self.params.lossless,
            "dtype": self.dtype,
            "batch": self.config.max_batch,
            "draft_tokens": self.config.draft_tokens if self.drafter != "none" else 0,
            "tree": dataclasses.asdict(self.config.tree) if self.trees else None,
            "adaptive": self.config.adaptive and self.drafter != "none",
            "max_new_tokens": self.params.max_new_tokens,
            **counts.to_json(),
            "per_prompt": [
                {
                    "id": sequence.id,
                    "target_calls": len(sequence.tokens_per_step),
                    "decode_tokens": sum(sequence.tokens_per_step),
                }
                for sequence in self.sequences
            ],
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "time": {**counts.seconds, "other": max(0.0, self.seconds - spent)},
            "passes": self.passes.to_json(),
            "identical_to_plain": self.identical_to_plain,
            "near_ties": sum(difference.near_tie for difference in self.differences or []),
            "first_differences": [
                {**dataclasses.asdict(difference), "near_tie": difference.near_tie}
                for difference in self.differences or []
            ],
            "finish_reasons": _tally([str(sequence.finish_reason) for sequence in self.sequences]),
        }


def measure(
    target: Target,
    drafter: Drafter | None,
    prompts: PromptSet,
    config: EngineConfig,
    params: SamplingParams,
    plain: RunResult | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Decode a set of prompts and count.

    Args:
        drafter: None measures plain decoding. plain: the plain run on the same prompts, dtype and
            sampling, for the speed-up and, when greedy, the comparison of tokens. progress: called
            with (finished, all) prompts.
    Raises:
        ValueError: an empty set, or a prompt that does not fit the engine.
    """
    if not prompts.prompts:
        raise ValueError(f"prompt set {prompts.name!r} is empty; nothing can be measured on it")
    engine = Engine(target, config, drafter)
    warm = dataclasses.replace(params, max_new_tokens=min(8, params.max_new_tokens))
    engine.run([prompts.prompts[0]], warm)
    engine.reset_metrics()
    start = time.perf_counter()
    # Every prompt has a seed of its own, so that sampled runs do not repeat one random stream.
    sequences = [
        engine.add(
            ids,
            dataclasses.replace(params, seed=params.seed + prompts.first + index * prompts.stride),
            identity,
        )
        for index, (identity, ids) in enumerate(zip(prompts.ids, prompts.prompts, strict=True))
    ]
    given: dict[Sequence, list[StepOutput]] = {sequence: [] for sequence in sequences}
    passes, counts = PassTimes(), engine.metrics
    while not engine.scheduler.idle:
        calls, before, began = counts.target_calls, dict(counts.seconds), time.perf_counter()
        outputs = engine.step()
        for output in outputs:
            given[output.sequence].append(output)
        if counts.target_calls > calls:
            spent = {"step": time.perf_counter() - began}
            for name, total in counts.seconds.items():
                if (more := total - before.get(name, 0.0)) > 0:
                    spent[name] = more
            rows = len(outputs) + sum(len(output.drafts) for output in outputs)
            passes.add(len(outputs), rows, spent)
        if any(output.sequence.finished for output in outputs) and progress:
            progress(sum(sequence.finished for sequence in sequences), len(sequences))
    seconds = time.perf_counter() - start
    dtype = str(target.dtype).removeprefix("torch.")
    name = drafter.name if drafter else "none"
    steps = [[len(output.tokens) for output in told] for told in given.values()]
    drafts = [[output.drafts for output in told] for told in given.values()]
    result = RunResult(
        name, prompts, params, config, dtype, sequences, counts, seconds, steps, drafts, passes
    )
    result.trees = isinstance(drafter, TreeHeadDrafter)
    if plain is not None:
        result.plain = plain
        result.speedup = result.tokens_per_second / plain.tokens_per_second
        if params.greedy:
            result.differences = differences(sequences, plain.sequences, target)
    elif drafter is None:
        result.speedup = 1.0
    return result


def differences(
    sequences: list[Sequence], plain: list[Sequence], target: Target
) -> list[Difference]:
    """The first difference of each greedy answer from the plain one of the same prompt."""
    found = []
    for ours, reference in zip(sequences, plain, strict=True):
        if ours.output == reference.output:
            continue
        shared = min(len(ours.output), len(reference.output))
        position = next((i for i in range(shared) if ours.output[i] != reference.output[i]), shared)
        # Where one answer merely goes on there is no tie to point at: an infinite gap is never
        # excused.
        lead = reference.leads[position] if position < len(reference.leads) else Lead(0.0, math.inf)
        bound = near_tie_bound(target.dtype, target.num_layers, lead.top)
        found.append(Difference(ours.id, position, lead.gap, bound))
    return found


def near_tie_bound(dtype: torch.dtype, num_layers: int, top: float) -> float:
    """The lead below which rounding alone can turn a greedy choice.

    Passes of different shapes sum in different orders. Each of the 2L residual additions rounds the
    state once, by at most u = eps / 2 relative to its size; as independent errors they add up to u
    * sqrt(2L) of the logits' size, and the runner-up's logit moves as well: 2 u sqrt(2L) |top|.
    """
    return torch.finfo(dtype).eps * math.sqrt(2 * num_layers) * abs(top)


def _tally(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
