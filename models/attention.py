"""How transformers' layers reach our attention: one registered function and one keyword.

`model(..., draftsmith=context)` hands the context to every attention layer. transformers then
builds no mask, and the context decides what a query sees: the rows of a packed dump, the pages of
the engine, the unrolled steps of training. Widths of keys and values may differ (MLA).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from ..kernels.causal_attention import packed_attention
from ..kernels.decoder_pass import PagedLayers

IMPLEMENTATION = "draftsmith"


class AttentionContext(Protocol):
    """What a layer's queries may look at."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """q [1,Hq,N,D], k [1,Hk,N,D], v [1,Hk,N,Dv] of this pass's N rows -> [1,N,Hq,Dv]."""
        ...


class OverPages(ABC):
    """A context whose keys lie in pages, which whole layers may read and write by themselves. (No
    protocol: asking whether an object keeps one takes as long as a norm.)"""

    @abstractmethod
    def few_rows(self, layers: range, like: Tensor) -> PagedLayers | None:
        """The pages of these layers, where every sequence has few rows that see all before them;
        else None.

        Args:
            like: [Hk, 1, D], a layer's keys and values in shape and dtype.
        """


class PackedContext:
    """Rows lie end to end and each attends causally to itself alone: a dump, or any pass without a
    past.

    Args:
        starts: row borders, starts[0] = 0, starts[-1] = N.
    """

    def __init__(self, starts: list[int]) -> None:
        self.borders = starts

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `AttentionContext`; keeps nothing."""
        return packed_attention(q[0], k[0], v[0], self.borders, scaling, window, softcap)[None]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    draftsmith: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if draftsmith is None:
        raise ValueError(
            "this model was loaded for draftsmith's engine: pass draftsmith=<attention context>"
        )
    assert attention_mask is None, "a mask was built although the context decides what is seen"
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = draftsmith.attend(
        layer, query, key, value, scaling=scale, window=sliding_window, softcap=softcap
    )
    return out, None


def register() -> None:
    """Make the function known to transformers; calling it twice is harmless."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
