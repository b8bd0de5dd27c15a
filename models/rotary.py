"""The rotary embedding of a head's layer: the family's own module, for the layer's own type.

Its tables stay float32 whatever the head is cast to (in bfloat16 a position beyond 256 is not even
a number), they follow the head to its device, and no checkpoint holds them. Of a rope whose
frequencies change with the longest position of a batch (dynamic, longrope), a head keeps those of
the original length: else what a row gives would depend on what runs beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Rotary(nn.Module):
    """Tables of a decoder, seen from one layer.

    Args:
        tables: the decoder's `rotary_emb`, with real buffers. layer_type: the layer's entry in the
            configuration's `layer_types`, read where the family turns its layer types differently
            (Gemma-3).
    """

    def __init__(self, tables: nn.Module, layer_type: str | None) -> None:
        super().__init__()
        self.tables = tables
        by_type = "layer_type" in inspect.signature(tables.forward).parameters
        self._extra = (layer_type,) if by_type else ()
        # Without the decorator that rewrites the frequencies in place.
        self._turn = inspect.unwrap(type(tables).forward)

    def forward(self, like: Tensor, positions: Tensor) -> Any:
        """What the family's layers take as `position_embeddings` (cos and sin, or complex).

        Args:
            like: [1, N, H], for its dtype and device. positions: [1, N] int64.
        """
        return self._turn(self.tables, like, positions, *self._extra)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """A change of device reaches the tables, a change of dtype does not."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)
