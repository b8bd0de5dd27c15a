"""The rows of a batch whose keys lie in pages: what attention over them is told (`paged_attention`,
`few_rows`).

Legend: B sequences, N rows in all, C columns of the largest tree, P pages of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftedRows:
    """The trees in the last slots of every sequence, a chain being one too.

    Attributes:
        ancestry: [N, C] int32, how far up its path a row finds each column of its tree, counted
            from 1 for itself; 0 off the path (`tree_build`). columns: [B] int64, how many there
            are. positions: [N] int64 of the rows in the text, by depth.
    """

    ancestry: Tensor
    columns: Tensor
    positions: Tensor


@dataclass(frozen=True)
class PagedRows:
    """Which rows belong to whom and where their keys lie.

    Attributes:
        starts: [B+1] int64 borders of the sequences' rows. lengths: [B] int64, keys that the last
            row of each sees, its own included. pages: [B, P] int, page ids in order; entries behind
            a sequence's last page are not read.
        page_size: slots per page.
        most_rows: at least the rows of every sequence. longest: at least every length. Both are
            host numbers that set the launch's size and nothing else.
        tree: None where a row sees all keys up to its own.
    """

    starts: Tensor
    lengths: Tensor
    pages: Tensor
    page_size: int
    most_rows: int
    longest: int
    tree: DraftedRows | None = None
