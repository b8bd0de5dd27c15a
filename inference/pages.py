"""Pages of keys and values: one allocator, and one pool that target and head share.

A page id addresses the same rows in every layer of the target *and* of the head: allocated once,
freed once. The allocator prefers runs of neighbouring pages, so that a sequence's keys can be read
as a slice without a copy; when there is no run it hands out scattered pages, and they are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = [True] * num_pages
        self.num_free = num_pages

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, neighbouring where possible; None when fewer are free."""
        if count > self.num_free:
            return None
        pages = self._run(count) or [page for page, free in enumerate(self._free) if free][:count]
        for page in pages:
            self._free[page] = False
        self.num_free -= count
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back; giving one back twice is a programming error."""
        for page in pages:
            assert not self._free[page], f"page {page} is already free"
            self._free[page] = True
        self.num_free += len(pages)

    def _run(self, count: int) -> list[int] | None:
        length = 0
        for page, free in enumerate(self._free):
            length = length + 1 if free else 0
            if length == count:
                return list(range(page - count + 1, page + 1))
        return None


@dataclass(frozen=True)
class KVShape:
    """Heads and widths of one layer's keys and values."""

    heads: int
    key_width: int
    value_width: int


class KVPool:
    """Keys and values of every layer. Layer l: keys [heads, slots, D], values [heads, slots, Dv].

    The shape of a layer is learnt from the first keys it stores, so any family fits (GQA, MLA).

    Args:
        num_layers: layers of the target and of the head together.
        num_slots: pages times page size.
        poison: start from NaN and refill freed slots with NaN.
    """

    def __init__(self, num_layers: int, num_slots: int, poison: bool = False) -> None:
        self.num_slots = num_slots
        self.poison = poison
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.mirror: Callable[..., None] | None = None
        """Called with the name and arguments of whatever changes pages beside a forward call, where
        other ranks hold further heads of these layers (`parallel`)."""

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The pool of one layer; allocated on first use in the shape and dtype of k and v [heads,
        N, width]."""
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            make = torch.full if self.poison else _zeros
            keys = make(
                (k.shape[0], self.num_slots, k.shape[2]),
                float("nan"),
                dtype=k.dtype,
                device=k.device,
            )
            values = make(
                (v.shape[0], self.num_slots, v.shape[2]),
                float("nan"),
                dtype=v.dtype,
                device=v.device,
            )
            self.keys[index], self.values[index] = keys, values
        return keys, values

    @torch.inference_mode()
    def forget(self, pages: list[int], page_size: int) -> None:
        """Poison the slots of freed pages, where poisoning is on."""
        if not self.poison:
            return
        if self.mirror:
            self.mirror("forget", pages, page_size)
        slots = torch.tensor([page * page_size + i for page in pages for i in range(page_size)])
        for tensor in [*self.keys, *self.values]:
            if tensor is not None:
                tensor[:, slots.to(tensor.device)] = float("nan")


def _zeros(shape: tuple[int, ...], fill: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
