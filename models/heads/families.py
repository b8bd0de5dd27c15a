"""The head families by name; the one place that lists them."""

from __future__ import annotations

import difflib

from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .medusa import MedusaHead
from .mtp import MTPHead
from .protocol import Head

HEADS: dict[str, type[Head]] = {
    family.kind: family for family in (MTPHead, EagleHead, Eagle3Head, MedusaHead)
}


def head_class(kind: str) -> type[Head]:
    """The class of a head's name; ValueError lists the known names and the nearest."""
    if kind not in HEADS:
        near = difflib.get_close_matches(kind, HEADS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"head.kind {kind!r} is not known{hint}; known: {', '.join(HEADS)}")
    return HEADS[kind]
