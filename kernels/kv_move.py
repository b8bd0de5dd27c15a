"""Keys and values that change their place in the pool: whole pages, and the kept path of a tree.

    copy_pages      page target[m] = page source[m]               a shared page that is written
    compact_paths   position first[b] + j = position first[b] + path[b, j]    after verification

A path ascends, path[b, j] >= j, so a row is read before anything is written over it when rows move
in order; one program moves one sequence's rows of one head in that order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import Kernel, power_of_two, use_triton
from .native import INTEGER, POINTER, Native

if TYPE_CHECKING:
    import triton.language as tl

_NATIVE = Native(
    "kv_move",
    {"compact_paths": [POINTER, INTEGER, POINTER, *[INTEGER] * 2, *[POINTER] * 2, *[INTEGER] * 2]},
)


class _Pool(ctypes.Structure):
    """`Pool` in kv_move.cpp."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "head_stride", "slot_stride", "bytes")),
    ]


def copy_pages_reference(pool: Tensor, source: Tensor, target: Tensor, page_size: int) -> None:
    """The plain definition, see `copy_pages`."""
    paged = pool.unflatten(1, (-1, page_size))
    paged[:, target.long()] = paged[:, source.long()]


def copy_pages(pool: Tensor, source: Tensor, target: Tensor, page_size: int) -> None:
    """Copy pages of one layer's keys or values, in place.

    Args:
        pool: [Hk, S, D], unit stride in the last dimension, S a multiple of page_size.
        source, target: [M] int page ids; no target is a source or comes twice.
    """
    if not use_triton(pool):
        copy_pages_reference(pool, source, target, page_size)
        return
    heads, _, width = pool.shape
    if source.shape[0]:
        copy_pages_kernel[(source.shape[0], heads)](
            pool,
            source,
            target,
            pool.stride(0),
            pool.stride(1),
            page_size,
            width,
            BLOCK_S=16,
            BLOCK_D=power_of_two(width),
        )


@Kernel
def copy_pages_kernel(
    pool,
    source,
    target,
    head_stride,
    slot_stride,
    page_size,
    width,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One page of one head, BLOCK_S slots at a time."""
    move = tl.program_id(0).to(tl.int64)
    base = pool + tl.program_id(1).to(tl.int64) * head_stride
    origin = tl.load(source + move).to(tl.int64) * page_size
    place = tl.load(target + move).to(tl.int64) * page_size
    column = tl.arange(0, BLOCK_D)[None, :]
    for begin in range(0, page_size, BLOCK_S):
        slot = begin + tl.arange(0, BLOCK_S)[:, None]
        inside = (slot < page_size) & (column < width)
        rows = tl.load(base + (origin + slot) * slot_stride + column, inside)
        tl.store(base + (place + slot) * slot_stride + column, rows, inside)


def compact_paths_reference(
    pool: Tensor, pages: Tensor, page_size: int, first: Tensor, path: Tensor
) -> None:
    """The plain definition, see `compact_paths`."""
    order = torch.arange(path.shape[1], device=pool.device)
    sequence, step = (path >= 0).nonzero(as_tuple=True)
    slots = []
    for offset in (path[sequence, step], order[step]):
        position = first[sequence] + offset
        page = pages[sequence, position // page_size].long()
        slots.append(page * page_size + position % page_size)
    pool[:, slots[1]] = pool[:, slots[0]]


class PoolTable(list[Tensor]):
    """Pools that are moved in again and again: where they lie is written down for C++ once.

    Args:
        pools: see `compact_paths`.
    """

    @cached_property
    def written(self) -> ctypes.Array[_Pool]:
        """What C++ reads."""
        return (_Pool * len(self))(*map(_described, self))


def _described(pool: Tensor) -> tuple[int, ...]:
    size, (head, slot, _) = pool.element_size(), pool.stride()
    return pool.data_ptr(), pool.shape[0], head * size, slot * size, pool.shape[2] * size


def compact_paths(
    pools: Sequence[Tensor], pages: Tensor, page_size: int, first: Tensor, path: Tensor
) -> None:
    """Close up the kept rows of keys and values, in place.

    Args:
        pools: of every layer the keys, the values: [Hk, S, D], unit stride in the last dimension.
            pages: [B, P] int page ids in order. first: [B] int64, the position of each sequence's
            first drafted row. path: [B, K] int64, ascending offsets of the kept rows from `first`,
            path[b, j] >= j, -1 behind the last.
    """
    if not pools or not path.numel():
        return
    if use_triton(pools[0]):
        for pool in pools:
            _launch(pool, pages.contiguous(), page_size, first, path.contiguous())
    elif _NATIVE.serves(pools[0]):
        _call(pools, pages.int().contiguous(), page_size, first.contiguous(), path.contiguous())
    else:
        for pool in pools:
            compact_paths_reference(pool, pages, page_size, first, path)


def _call(
    pools: Sequence[Tensor], pages: Tensor, page_size: int, first: Tensor, path: Tensor
) -> None:
    assert first.dtype == path.dtype == torch.int64
    table = pools.written if isinstance(pools, PoolTable) else PoolTable(pools).written
    _NATIVE.functions.compact_paths(
        table,
        len(pools),
        pages.data_ptr(),
        pages.shape[1],
        page_size,
        first.data_ptr(),
        path.data_ptr(),
        *path.shape,
    )


def _launch(pool: Tensor, pages: Tensor, page_size: int, first: Tensor, path: Tensor) -> None:
    heads, _, width = pool.shape
    compact_paths_kernel[(path.shape[0], heads)](
        pool,
        pages,
        first,
        path,
        pool.stride(0),
        pool.stride(1),
        pages.shape[1],
        page_size,
        path.shape[1],
        width,
        BLOCK_D=power_of_two(width),
        num_warps=1,
    )


@Kernel
def compact_paths_kernel(
    pool,
    pages,
    first,
    path,
    head_stride,
    slot_stride,
    num_pages,
    page_size,
    steps,
    width,
    BLOCK_D: tl.constexpr,
):
    """One sequence's rows of one head, in order."""
    sequence = tl.program_id(0).to(tl.int64)
    base = pool + tl.program_id(1).to(tl.int64) * head_stride
    table = pages + sequence * num_pages
    begin = tl.load(first + sequence)
    column = tl.arange(0, BLOCK_D)
    for step in range(0, steps):
        offset = tl.load(path + (sequence * steps + step))
        moves = offset > step  # -1 ends the path, and a row already in place stays
        inside = (column < width) & moves
        old, new = begin + offset, begin + step
        origin = tl.load(table + old // page_size, moves, 0).to(tl.int64)
        place = tl.load(table + new // page_size, moves, 0).to(tl.int64)
        origin = origin * page_size + old % page_size
        place = place * page_size + new % page_size
        row = tl.load(base + origin * slot_stride + column, inside)
        tl.store(base + place * slot_stride + column, row, inside)
