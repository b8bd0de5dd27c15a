"""Where the next rows of every sequence go, without asking the host.

    positions[b, j] = first[b] + j
    slots[b, j]     = pages[b, positions // page_size] * page_size + positions % page_size

`first` moves by the number of tokens a verification kept, which only the device knows yet. Rows at
or behind a sequence's limit get slot -1: they are computed with the rest, so that shapes stay
fixed, and stored nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import Kernel, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl


def place_rows_reference(
    first: Tensor, limits: Tensor, pages: Tensor, page_size: int, width: int
) -> tuple[Tensor, Tensor]:
    """The plain definition, see `place_rows`."""
    positions = first[:, None] + torch.arange(width, device=first.device)
    inside = positions < limits[:, None]
    page = (positions // page_size).clamp(max=max(pages.shape[1] - 1, 0))
    slots = pages.to(torch.int64).gather(1, page) * page_size + positions % page_size
    return positions, torch.where(inside, slots, -1)


def place_rows(
    first: Tensor, limits: Tensor, pages: Tensor, page_size: int, width: int
) -> tuple[Tensor, Tensor]:
    """Positions and pool slots of `width` rows of each sequence.

    Args:
        first: [B] int64, position of each sequence's first row. limits: [B] int64, positions that
            the sequence's pages and token limit allow; at most P * page_size.
        pages: [B, P] int, page ids in order; entries behind a sequence's last page are not read.
        page_size: slots per page. width: rows of each sequence, >= 1.
    Returns:
        (positions [B, width], slots [B, width]), int64; slot -1 where a row has no place.
    """
    if not use_triton(first):
        return place_rows_reference(first, limits, pages, page_size, width)
    pages = pages.contiguous()
    positions = torch.empty(first.shape[0], width, dtype=torch.int64, device=first.device)
    slots = torch.empty_like(positions)
    if first.shape[0]:
        place_rows_kernel[(first.shape[0],)](
            first,
            limits,
            pages,
            positions,
            slots,
            pages.shape[1],
            page_size,
            width,
            BLOCK=power_of_two(width),
            num_warps=1,
        )
    return positions, slots


@Kernel
def place_rows_kernel(
    first, limits, pages, positions, slots, num_pages, page_size, width, BLOCK: tl.constexpr
):
    """One sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    written = column < width
    position = tl.load(first + sequence) + column
    inside = written & (position < tl.load(limits + sequence))
    page = tl.load(pages + sequence * num_pages + position // page_size, inside, 0).to(tl.int64)
    slot = tl.where(inside, page * page_size + position % page_size, -1)
    tl.store(positions + sequence * width + column, position, written)
    tl.store(slots + sequence * width + column, slot, written)
