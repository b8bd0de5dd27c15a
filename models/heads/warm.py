"""A head that starts from another one: the shape it takes over, and all its weights.

Nothing is left to chance: a head is either the other's exact function or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .checkpoint import LoadedHead
from .config import HeadConfig
from .protocol import Head


def take_shape(
    config: HeadConfig, source: HeadConfig, place: str, given: Collection[str] = ()
) -> HeadConfig:
    """The configuration of a head that starts from another: the other's, but for `init`.

    Args:
        config: as composed. source: the other head's. place: where that one lies, for messages.
        given: settings that the user named (`modules`, `norms.output`); the others are taken over
            where they stand at their defaults.
    Raises:
        ValueError: a setting that contradicts; both values are told.
    """
    ours, theirs, plain = (_flat(one) for one in (config, source, HeadConfig()))
    contrary = [
        f"head.{name}={_shown(value)}, where that head has {_shown(theirs[name])}"
        for name, value in ours.items()
        if value != theirs[name] and (name in given or value != plain[name])
    ]
    if contrary:
        raise ValueError(
            f"head.init.source={place} brings its own shape, and the settings contradict it: "
            f"{'; '.join(contrary)}. Leave them out, or start from elsewhere"
        )
    return dataclasses.replace(source, init=config.init)


def take_weights(head: Head, source: LoadedHead, draft_ids: Tensor | None, place: str) -> None:
    """Copy every weight of `source` into `head`, in place.

    Args:
        draft_ids: int64 [Vd] of the new head's draft vocabulary, None for all. Of a head with an
            lm_head of its own the rows are selected anew by target id.
        place: where the source lies, for messages.
    Raises:
        ValueError: tensors or inputs differ (all are named), or the source cannot draft one of the
            ids.
    """
    theirs, ours = source.head.state_dict(), head.state_dict()
    if head.lm_head is not None and "lm_head" in theirs:
        theirs["lm_head"] = _rows(theirs["lm_head"], source.draft_ids, draft_ids, place)
    odd = [f"{name} is missing" for name in sorted(set(ours) - set(theirs))]
    odd += [f"{name} has no place" for name in sorted(set(theirs) - set(ours))]
    odd += [
        f"{name} is {list(theirs[name].shape)}, not {list(ours[name].shape)}"
        for name in sorted(set(ours) & set(theirs))
        if theirs[name].shape != ours[name].shape
    ]
    before, after = (dataclasses.asdict(one.recycle) for one in (source.head, head))
    odd += [
        f"{name} is {before[name]!r}, not {after[name]!r}"
        for name in after
        if before[name] != after[name]
    ]
    if odd:
        more = f" and {len(odd) - 6} more" if len(odd) > 6 else ""
        raise ValueError(
            f"head.init.source={place} does not fit this target's head: {'; '.join(odd[:6])}"
            f"{more}. Name a head that was made for a target of this shape"
        )
    head.load_state_dict(theirs)


def _rows(weight: Tensor, before: Tensor | None, after: Tensor | None, place: str) -> Tensor:
    """Rows of an lm_head [..., V', H] whose row i is target id before[i] (None: i), for the ids
    `after` (None: all of the target's, which `before` must then be, too)."""
    if after is None:
        if before is None:
            return weight
        raise ValueError(
            f"head.init.source={place} drafts {len(before):,} ids with an lm_head of its own, and "
            "train.draft_vocab_size=null asks for all of them; "
            f"train.draft_vocab_size={len(before)} keeps its ids"
        )
    known = torch.arange(weight.shape[-2]) if before is None else before
    places = torch.searchsorted(known, after).clamp(max=len(known) - 1)
    lacking = after[known[places] != after].tolist()
    if lacking:
        raise ValueError(
            f"head.init.source={place} has an lm_head of its own without rows for {len(lacking):,} "
            f"of the {len(after):,} ids that are to be drafted (first: {lacking[:3]}); "
            f"train.draft_vocab_size={len(known)} keeps the {len(known):,} that it has"
        )
    return weight[..., places, :]


def _flat(config: HeadConfig) -> dict[str, Any]:
    """Settings of the shape by dotted name, `init` left out."""
    values = {**vars(config)}
    del values["init"]
    norms = values.pop("norms")
    return {**values, **{f"norms.{name}": on for name, on in vars(norms).items()}}


def _shown(value: Any) -> str:
    """As it would be typed."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
