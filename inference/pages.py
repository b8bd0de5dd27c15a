"""Pages of keys and values: one allocator, and one pool that target and head share.

A page id addresses the same rows in every layer of the target *and* of the head: allocated once,
freed once. A page may have several users (requests with one prefix) and, with none, still hold a
prefix that the next request may want; such pages are taken last, the oldest first. The allocator
prefers runs of neighbouring pages, so that a sequence's keys can be read as a slice without a copy;
when there is no run it hands out scattered pages, and they are gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set

import torch
from torch import Tensor

from ..kernels.kv_append import is_prefix
from ..kernels.kv_move import PoolTable, compact_paths, copy_pages
from .prefix import PrefixCache
from .upload import upload


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1 and counts their users.

    Args:
        cache: what the pages hold; None keeps nothing of a page without users.
    Attributes:
        num_free: pages without users, those that still hold a prefix among them.
    """

    def __init__(self, num_pages: int, cache: PrefixCache | None = None) -> None:
        self.num_pages = num_pages
        self.cache = PrefixCache(1, 0, enabled=False) if cache is None else cache
        self.num_free = num_pages
        self.users = [0] * num_pages
        # When a page with a prefix lost its last user, in releases; 0 for a page that holds none.
        self._left = [0] * num_pages
        self._releases = 0

    def allocate(
        self,
        count: int,
        *,
        after: int | None = None,
        room: int = 0,
        avoid: Callable[[], Set[int]] = frozenset,
    ) -> list[int] | None:
        """`count` pages for one user, neighbouring where possible; None when fewer are free.

        Args:
            after: a page whose neighbours are wanted first, whatever prefix they hold. room: how
                many pages in a row the user may come to need; the run is looked for where so many
                are free. avoid: gives the pages that others hope to grow into, taken only where
                nothing else is left; asked where the neighbours are not free.
        """
        if count > self.num_free:
            return None
        pages = self._behind(after, count) or self._elsewhere(count, room, avoid())
        for page in pages:
            self.cache.drop(page)
            self.users[page] = 1
            self._left[page] = 0
        self.num_free -= count
        return pages

    def share(self, pages: list[int]) -> None:
        """One user more for each page, whether it has users or only holds a prefix."""
        for page in pages:
            assert self.users[page] or page in self.cache, f"page {page} holds nothing to share"
            self.num_free -= not self.users[page]
            self.users[page] += 1

    def release(self, pages: list[int]) -> list[int]:
        """One user less for each page; those that hold nothing any more. One release too many is a
        programming error."""
        emptied = []
        # The end of a prefix is found through its beginning, so the end is older: it goes first.
        for page in reversed(pages):
            assert self.users[page], f"page {page} is already free"
            self.users[page] -= 1
            if not self.users[page]:
                self.num_free += 1
                self._releases += 1
                self._left[page] = self._releases if page in self.cache else 0
                if page not in self.cache:
                    emptied.append(page)
        return emptied

    def forget_prefixes(self) -> list[int]:
        """Keep no prefix any more; the pages that are empty by it."""
        known = [page for page in range(self.num_pages) if page in self.cache]
        for page in known:
            self.cache.drop(page)
            self._left[page] = 0
        return [page for page in known if not self.users[page]]

    def _behind(self, page: int | None, count: int) -> list[int]:
        """The next `count` neighbours of a page where all are free, else none."""
        if page is None or page + count >= self.num_pages:
            return []
        pages = list(range(page + 1, page + 1 + count))
        return [] if any(self.users[each] for each in pages) else pages

    def _elsewhere(self, count: int, room: int, avoid: Set[int]) -> list[int]:
        """The first of a long run, else of a short one, else what is left."""
        for length in (max(room, count), count):
            pages = self._run(length, avoid)[:count]
            if pages:
                return pages
        free = (page for page in range(self.num_pages) if not self.users[page])
        return sorted(free, key=lambda page: (page in avoid, self._left[page]))[:count]

    def _run(self, length: int, avoid: Set[int]) -> list[int]:
        """Of the runs of free pages the one whose newest prefix is oldest (none at all is best);
        empty where there is no run. One pass: `newest` holds the last `length` pages of the present
        run, without those that a later and newer one outlives."""
        best, start = None, 0
        newest: deque[int] = deque()
        for page in range(self.num_pages):
            if self.users[page] or page in avoid:
                newest.clear()
                start = page + 1
                continue
            while newest and self._left[newest[-1]] <= self._left[page]:
                newest.pop()
            newest.append(page)
            if newest[0] <= page - length:
                newest.popleft()
            if page - start + 1 >= length:
                age = self._left[newest[0]]
                if best is None or age < best[0]:
                    best = age, page - length + 1
                if age == 0:
                    break
        return [] if best is None else list(range(best[1], best[1] + length))


class KVPool:
    """Keys and values of every layer. Layer l: keys [heads, slots, D], values [heads, slots, Dv].

    The shape of a layer is learnt from the first keys it stores, so any family fits (GQA, MLA).
    Values that are the first columns of the keys they come with are not stored again: `values` of
    such a layer stays None, so that `keys` and `values` list every memory once.

    Args:
        num_layers: layers of the target and of the head together.
        num_slots: pages times page size.
        poison: start from NaN and refill freed slots with NaN.
        spare: slots behind those, which belong to nobody: padding rows are written there.
    """

    def __init__(
        self, num_layers: int, num_slots: int, poison: bool = False, spare: int = 0
    ) -> None:
        self.num_slots = num_slots
        self.spare = spare
        self.poison = poison
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self._closed: dict[int, PoolTable] = {}  # by how many layers are moved
        self.mirror: Callable[..., None] | None = None
        """Called with the name and arguments of whatever changes pages beside a forward call, where
        other ranks hold further heads of these layers (`parallel`)."""
        self.attention: Callable[..., Tensor] | None = None
        """What reads the pages, where it is not one of our own forms (`flashinfer_pages`)."""

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The pool of one layer; allocated on first use in the shape and dtype of k and v [heads,
        N, width]. Of values inside the keys it gives a view."""
        keys, values = self.keys[index], self.values[index]
        if keys is not None and values is None:
            return keys, keys[..., : v.shape[2]]
        if keys is None or values is None:
            make = torch.full if self.poison else _zeros
            keys = make(
                (k.shape[0], self.num_slots + self.spare, k.shape[2]),
                float("nan"),
                dtype=k.dtype,
                device=k.device,
            )
            self.keys[index] = keys
            if is_prefix(v, k):
                return keys, keys[..., : v.shape[2]]
            values = make(
                (v.shape[0], self.num_slots + self.spare, v.shape[2]),
                float("nan"),
                dtype=v.dtype,
                device=v.device,
            )
            self.values[index] = values
        return keys, values

    @torch.inference_mode()
    def copy(self, source: int, target: int, page_size: int) -> None:
        """Copy one page, in every layer that has been written."""
        if self.mirror:
            self.mirror("copy", source, target, page_size)
        held = self._held()
        if held:
            pages = upload([[source], [target]], held[0].device)
            for tensor in held:
                copy_pages(tensor, pages[0], pages[1], page_size)

    @torch.inference_mode()
    def close_up(
        self,
        tables: list[list[int]],
        page_size: int,
        first: list[int],
        paths: list[list[int]],
        num_layers: int,
    ) -> None:
        """Move the kept rows of several trees, in the first `num_layers` layers, to where they
        belong as text (`kernels.compact_paths`).

        Args:
            tables: the pages of each sequence. first: the position of each tree's first row. paths:
                ascending offsets of the kept rows from it.
        """
        if self.mirror:
            self.mirror("close_up", tables, page_size, first, paths, num_layers)
        held = self._closed.get(num_layers)
        if held is None:
            held = PoolTable(self._held(num_layers))
            if all(keys is not None for keys in self.keys[:num_layers]):
                self._closed[num_layers] = held
        if held:
            device = held[0].device
            pages = upload(_even(tables, 0), device, torch.int32)
            moves = upload(_even(paths, -1), device)
            compact_paths(held, pages, page_size, upload(first, device), moves)

    @torch.inference_mode()
    def forget(self, pages: list[int], page_size: int) -> None:
        """Poison the slots of freed pages, where poisoning is on."""
        if not self.poison or not pages:
            return
        if self.mirror:
            self.mirror("forget", pages, page_size)
        slots = [page * page_size + i for page in pages for i in range(page_size)]
        for tensor in self._held():
            tensor[:, upload(slots, tensor.device)] = float("nan")

    def _held(self, num_layers: int | None = None) -> list[Tensor]:
        """Keys and values of the first layers (all of them), each memory once."""
        pairs = zip(self.keys[:num_layers], self.values[:num_layers], strict=True)
        return [tensor for pair in pairs for tensor in pair if tensor is not None]


def _even(rows: list[list[int]], fill: int) -> list[list[int]]:
    longest = max(map(len, rows))
    return [row + [fill] * (longest - len(row)) for row in rows]


def _zeros(shape: tuple[int, ...], fill: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
