"""Prefix reuse: whole pages of computed rows, found again by what they hold.

Row p of a head was made from the tokens up to p + a, where a is how far its drafter looks ahead (1
for a head of one module, D for one of D modules, 0 without keys or for a draft LM). So page i is
named by a chain of hashes over the tokens before it, its own, and the a tokens behind them:

    name_i = hash(name_{i-1}, x_{iS} … x_{(i+1)S-1+a})         S slots a page

Two texts that part at token t share the pages whose names end before t. Module m of a head has its
rows up to m behind the target's, which is why the last a - 1 computed rows are not offered.
"""

from __future__ import annotations

import hashlib
from array import array

from .sequence import Sequence


class PrefixCache:
    """Which page holds which prefix. Host bookkeeping only.

    Args:
        page_size: S. lookahead: a, see the module. enabled: off finds and keeps nothing.
    """

    def __init__(self, page_size: int, lookahead: int, enabled: bool = True) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._names

    def __len__(self) -> int:
        return len(self._names)

    def find(self, sequence: Sequence) -> list[int]:
        """The pages of the longest prefix that is known, in order; possibly none."""
        if not self.enabled:
            return []
        found = []
        for index in range((len(sequence.tokens) - self.lookahead) // self.page_size):
            page = self._pages.get(self._name(sequence, index))
            if page is None:
                break
            found.append(page)
        return found

    def offer(self, sequence: Sequence) -> None:
        """Keep the names of the pages that the sequence has filled since it was last asked. A page
        whose content another page holds already stays nameless."""
        if not self.enabled:
            return
        whole = (sequence.num_computed - max(self.lookahead - 1, 0)) // self.page_size
        for index in range(sequence.num_offered, whole):
            name, page = self._name(sequence, index), sequence.pages[index]
            if name not in self._pages:
                assert page not in self._names
                self._pages[name], self._names[page] = page, name
        sequence.num_offered = max(sequence.num_offered, whole)

    def drop(self, page: int) -> None:
        """The page's content goes; nothing happens where it had no name."""
        name = self._names.pop(page, None)
        if name is not None:
            del self._pages[name]

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """Tokens are only ever added to a sequence, so a name once made stays."""
        names = sequence.page_names
        while len(names) <= index:
            first = len(names) * self.page_size
            held = sequence.tokens[first : first + self.page_size + self.lookahead]
            assert len(held) == self.page_size + self.lookahead
            before = names[-1] if names else b""
            names.append(
                hashlib.blake2b(before + array("q", held).tobytes(), digest_size=16).digest()
            )
        return names[index]
