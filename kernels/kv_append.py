"""New keys and values into their slots of the pool.

keys[:, slots[n]] = k[:, n]        values[:, slots[n]] = v[:, n]        rows with slot -1 nowhere
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .jit import Kernel, power_of_two, use_triton
from .native import INTEGER, POINTER, Native

if TYPE_CHECKING:
    import triton.language as tl


_NATIVE = Native(
    "kv_append",
    {
        "kv_append": [POINTER, INTEGER, INTEGER, POINTER]
        + [INTEGER, INTEGER, POINTER]
        + [INTEGER] * 3
    },
)


def is_prefix(values: Tensor, keys: Tensor) -> bool:
    """Whether values [H, N, Dv] are the first columns of keys [H, N, D] in the same memory, as they
    are in attention on latents (`models.latent`)."""
    if keys.is_meta:
        return values._base is keys
    return values.is_set_to(keys[..., : values.shape[-1]])


def kv_append_reference(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """The plain definition, see `kv_append`."""
    kept = slots >= 0
    keys[:, slots[kept]] = k[:, kept]
    if not is_prefix(values, keys):
        values[:, slots[kept]] = v[:, kept]


def kv_append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store one layer's rows, in place.

    Args:
        keys: [Hk, S, D], values: [Hk, S, Dv]: a layer of the pool, S slots, unit stride in the last
            dimension. Values that are a view of the keys (`is_prefix`) are written with them, and v
            is not read.
        k: [Hk, N, D], v: [Hk, N, Dv]: the rows, any strides. slots: [N] int, no slot twice, -1 for
            a row that is not stored (its k and v are not read).
    """
    assert k.shape[:2] == v.shape[:2] and slots.shape[0] == k.shape[1]
    if not use_triton(keys):
        if _NATIVE.serves(keys):
            for pool, new in ((keys, k), (values, v)):
                _store(pool, new, slots)
            return
        kv_append_reference(keys, values, k, v, slots)
        return
    heads, rows, width = k.shape
    v = v[..., :0] if is_prefix(values, keys) else v
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    if rows:
        kv_append_kernel[(rows, heads)](
            keys,
            values,
            k,
            v,
            slots,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            width,
            v.shape[2],
            BLOCK_D=power_of_two(width),
            BLOCK_V=power_of_two(max(1, v.shape[2])),
            num_warps=1,
        )


def _store(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    slots = slots.long().contiguous()
    size = pool.element_size()
    assert pool.stride(2) == 1 and rows.dtype == pool.dtype
    _NATIVE.functions.kv_append(
        pool.data_ptr(),
        pool.stride(0) * size,
        pool.stride(1) * size,
        rows.data_ptr(),
        rows.stride(0) * size,
        rows.stride(1) * size,
        slots.data_ptr(),
        rows.shape[1],
        rows.shape[0],
        rows.shape[2] * size,
    )


@Kernel
def kv_append_kernel(
    keys,
    values,
    k,
    v,
    slots,
    keys_head,
    keys_slot,
    values_head,
    values_slot,
    k_head,
    k_row,
    v_head,
    v_row,
    width,
    value_width,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One row of one head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = (column < width) & (slot >= 0)
    key = tl.load(k + head * k_head + row * k_row + column, inside)
    tl.store(keys + head * keys_head + slot * keys_slot + column, key, inside)
    column = tl.arange(0, BLOCK_V)
    inside = (column < value_width) & (slot >= 0)
    value = tl.load(v + head * v_head + row * v_row + column, inside)
    tl.store(values + head * values_head + slot * values_slot + column, value, inside)
