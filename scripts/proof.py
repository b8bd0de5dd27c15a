"""What an export or an import is proven with: the head that came back, beside the one that went in,
in the trainer's own unroll, over seeded prompts and over the rows of the run's cache; and what each
tensor of the folder is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..conf.schema import Config
from ..data.batches import PackedBatch
from ..data.cache import Cache
from ..data.cache_index import MANIFEST
from ..data.store import Store
from ..models.formats.eagle_files import EMBEDDING, LM_HEAD, targets_own
from ..models.heads import LoadedHead
from ..models.trunk import Trunk, tensor_files
from ..train.unroll import split_states, unroll
from .artifacts import Artifacts

TOLERANCE = 1e-6
"""Largest difference of float32 logits, relative to the largest logit where that is above 1, that
a head may show when read back: its weights are stored as they are, or rounded before."""
_SEEDED = (4, 7, 10, 12, 15)
_CACHED, _LONGEST = 5, 48
COPIED = "copied from the target"


@dataclass(frozen=True)
class Prompts:
    """Rows end to end with the target's raw states [N, H] by boundary; `name` says of what kind."""

    name: str
    batch: PackedBatch
    states: dict[int, Tensor]


def boundaries_of(*heads: LoadedHead) -> tuple[int, ...]:
    """The states that any of these heads reads, and L."""
    last = int(heads[0].head.target_config.num_hidden_layers)
    return tuple(sorted({last, *(k for one in heads for k in one.head.boundaries)}))


def seeded(trunk: Trunk, boundaries: tuple[int, ...]) -> Prompts:
    """Five prompts of drawn tokens, and states of unit RMS at every boundary."""
    generator, rows = torch.Generator().manual_seed(0), sum(_SEEDED)
    tokens = torch.randint(trunk.vocab_size, (rows,), generator=generator)
    hidden = torch.randn(rows, len(boundaries) * trunk.hidden_size, generator=generator)
    drawn = list(tokens.split(_SEEDED))
    return _packed("seeded prompts", drawn, hidden, boundaries, trunk.hidden_size)


def cached(
    config: Config, marks: dict[str, str], boundaries: tuple[int, ...]
) -> tuple[Prompts | None, str]:
    """The beginnings of the first five rows of the run's cache and the states that the target left
    there; None and the reason where the cache is not of this target or lacks a boundary."""
    place = Artifacts.of(config).cache
    if not Store(place).exists(MANIFEST):
        return None, f"{place} holds no cache"
    try:
        cache = Cache.open(place, dict(marks), verify=False)
    except ValueError as error:
        return None, str(error)
    needed = [k for k in boundaries if k not in cache.boundaries]
    # Boundary L is the trunk's alone; a head of fused states does not read it.
    if needed not in ([], [max(boundaries)]) or (needed and len(boundaries) == 1):
        return None, f"{place} holds the boundaries {list(cache.boundaries)}, not {needed}"
    tokens, states = list[Tensor](), list[Tensor]()
    for index in range(min(_CACHED, len(cache))):
        row, _, raw = cache.gather([index])
        tokens.append(row[0][:_LONGEST])
        states.append(raw[:_LONGEST].float())
    hidden = torch.cat(states)
    return _packed("rows of the cache", tokens, hidden, cache.boundaries, cache.hidden_size), ""


def _packed(
    name: str, rows: list[Tensor], hidden: Tensor, boundaries: tuple[int, ...], size: int
) -> Prompts:
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    tokens = torch.cat(rows)
    batch = PackedBatch(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        hidden,
        lengths.cumsum(0).to(torch.int32),
        torch.cat([torch.arange(len(row)) for row in rows]),
        tuple(map(str, range(len(rows)))),
    )
    return Prompts(name, batch, split_states(hidden, boundaries, size))


def steps_of(head: LoadedHead, wanted: int = 3) -> int:
    """The steps to compare: those asked for, each module and two more, at most what it has."""
    steps = max(wanted, head.head.num_modules + 2)
    return steps if head.head.max_steps is None else min(steps, head.head.max_steps)


@torch.inference_mode()
def difference(
    one: LoadedHead, other: LoadedHead, trunk: Trunk, prompts: Prompts, steps: int
) -> float:
    """Largest difference of two heads' float32 logits over the trainer's unroll of K steps (each
    row with the keys of its prefix and of its own chain), relative to the largest logit where that
    is above 1; infinite where they draft other ids."""
    if not _same_ids(one, other):
        return float("inf")
    drafted = [
        unroll(loaded.head.eval(), trunk, prompts.batch, steps, states=prompts.states)
        for loaded in (one, other)
    ]
    worst = scale = 0.0
    heads = zip((one, other), drafted, strict=True)
    for ours, theirs in zip(*(_logits(head, states, trunk) for head, states in heads), strict=True):
        worst = max(worst, float((ours - theirs).abs().max()))
        scale = max(scale, float(ours.abs().max()))
    return worst / max(scale, 1.0)


def largest_difference(one: LoadedHead, other: LoadedHead, trunk: Trunk) -> float:
    """`difference` over the seeded prompts, at every module and two steps beyond."""
    return difference(one, other, trunk, seeded(trunk, boundaries_of(one, other)), steps_of(one))


def _logits(loaded: LoadedHead, drafted: Tensor, trunk: Trunk) -> Iterator[Tensor]:
    """[N, Vd] of each step; an lm_head may be one for all steps or one for each."""
    rows = loaded.head.lm_head
    for step, state in enumerate(drafted):
        if rows is None:
            yield trunk.logits(state)
        else:
            yield state @ (rows if rows.dim() == 2 else rows[step]).T


def _same_ids(one: LoadedHead, other: LoadedHead) -> bool:
    ids = [loaded.draft_ids for loaded in (one, other)]
    if any(value is None for value in ids):
        return ids[0] is ids[1]
    return torch.equal(*(value for value in ids if value is not None))


def rounded(loaded: LoadedHead, dtype: torch.dtype) -> LoadedHead:
    """The head with its weights in `dtype`, as an export in it stores them."""
    if dtype == torch.float32:
        return loaded
    return replace(loaded, head=copy.deepcopy(loaded.head).to(dtype))


def changed(loaded: LoadedHead, back: LoadedHead) -> list[str]:
    """Names of the weights that did not come back bit for bit; those that one head lacks, too."""
    ours, theirs = loaded.head.state_dict(), back.head.state_dict()
    return [
        name
        for name in {**ours, **theirs}
        if name not in ours
        or name not in theirs
        or not torch.equal(ours[name].float(), theirs[name].float())
    ]


@dataclass(frozen=True)
class Row:
    """A tensor of a folder: name, shape, dtype, origin as checked."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    origin: str


def table(out: Path, origins: dict[str, str], target: Path, draft_ids: Tensor | None) -> list[Row]:
    """What each tensor of an export is, its copies of the target's compared bit for bit.

    Args:
        draft_ids: of the head; a copy of the target's lm_head may have their rows alone.
    Raises:
        ValueError: a tensor without an origin, an origin without a tensor, or a copy that is none.
    """
    rows: list[Row] = []
    tensors = _stored(out, set(origins))
    lacking = sorted(set(origins) - set(tensors))
    if lacking:
        raise ValueError(f"{out}: {', '.join(lacking)} were said to be written and are not there")
    for name, origin in origins.items():
        value = tensors[name]
        if origin == COPIED:
            own = targets_own(target, EMBEDDING if name.endswith(EMBEDDING) else LM_HEAD)
            if len(value) < len(own) and draft_ids is not None:
                own = own[draft_ids]
            if own.dtype != value.dtype or not torch.equal(own, value):
                raise ValueError(f"{out}: {name} is no copy of the target's, bit for bit")
            origin += ", bit-equal"
        rows.append(Row(name, tuple(value.shape), str(value.dtype)[6:], origin))
    return rows


def _stored(out: Path, names: set[str]) -> dict[str, Tensor]:
    """These tensors of a folder: safetensors, else pickles, of which only tensors are read."""
    found: dict[str, Tensor] = {}
    if not list(out.glob("*.safetensors")):
        for path in sorted([*out.glob("*.pt"), *out.glob("*.bin")]):
            found |= torch.load(path, map_location="cpu", weights_only=True)
        return {name: value for name, value in found.items() if name in names}
    for name, path in tensor_files(out).items():
        if name in names:
            with safe_open(path, framework="pt") as file:
                found[name] = file.get_tensor(name)
    return found
