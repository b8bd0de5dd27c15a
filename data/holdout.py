"""Which conversations are kept out of training: those with the smallest seeded content hash.

The choice does not depend on the file's order, and what a whole file holds out is held out of every
part of it too. Repeats of a conversation share its fate: they wait with it, are trained on when it
is, and are left out when it is held out.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from dataclasses import dataclass, replace

from .rowfile import Row


@dataclass(frozen=True, eq=False)
class Kept:
    """A record that became rows.

    Attributes:
        digest: of the conversation's content. notes: what the ledger counts once the record is
            written.
    """

    id: str
    index: int
    digest: bytes
    rows: tuple[Row, ...]
    notes: Counter[str]

    def repeated(self, id: str, index: int) -> Kept:
        """The same content as another record."""
        rows = tuple(replace(row, id=id, index=index) for row in self.rows)
        return replace(self, id=id, index=index, rows=rows)


class Holdout:
    """Takes records in file order and gives back, in an order that more records at the end do not
    change, those that are certain to be trained on.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._heap: list[tuple[int, int, Kept]] = []  # the largest hash on top, ties by order
        self._repeats: dict[bytes, list[tuple[str, int]]] = {}
        self._taken = 0

    def give(self, record: Kept) -> list[Kept]:
        """Take a record; returns those that leave for training."""
        if record.digest in self._repeats:
            self._repeats[record.digest].append((record.id, record.index))
            return []
        seeded = f"{self._seed}:{record.digest.hex()}".encode()
        rank = int.from_bytes(hashlib.sha256(seeded).digest()[:8], "big")
        heapq.heappush(self._heap, (-rank, self._taken, record))
        self._repeats[record.digest] = []
        self._taken += 1
        if len(self._heap) <= self._count:
            return []
        leaving = heapq.heappop(self._heap)[2]
        others = self._repeats.pop(leaving.digest)
        return [leaving, *(leaving.repeated(id, index) for id, index in others)]

    def rest(self) -> list[tuple[Kept, list[tuple[str, int]]]]:
        """What is held out, the smallest hash first, each with its repeats' (id, index)."""
        ordered = sorted(self._heap, key=lambda item: (-item[0], item[1]))
        return [(record, self._repeats[record.digest]) for _, _, record in ordered]
