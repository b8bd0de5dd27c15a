"""What else computes an op on a GPU, called with the arguments of `op_cases`.

PyTorch's own functions, and FlashInfer and Liger where they can be imported. A rival is a function
of the case's arguments that prepares (lays out, plans) and returns the call that is timed; its
output must be the op's first. Attention of PyTorch reads keys that lie in order, without pages,
which is less work than the op's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.paged_rows import PagedRows
from .op_calls import Case

Make = Callable[..., Callable[[], Tensor]]


def rivals(case: Case) -> dict[str, Make]:
    """By name, those of a case that can be tried here."""
    found: dict[str, Make] = {}
    if case.op == "rms_norm":
        found["PyTorch"] = _torch_norm
        if importlib.util.find_spec("liger_kernel"):
            found["Liger"] = _liger_norm
    if case.op.startswith("paged_attention") and "T" not in case.numbers:
        found["SDPA, no pages"] = _sdpa
        if importlib.util.find_spec("flashinfer"):
            found["FlashInfer"] = _flashinfer
    if case.op == "ttt_attention":
        found["SDPA, committed keys of one document"] = _sdpa_causal
    return found


def _torch_norm(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return lambda: F.rms_norm(x, weight.shape, weight, 1e-5)


def _liger_norm(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    from liger_kernel.ops.rms_norm import (  # pyright: ignore[reportMissingImports]
        LigerRMSNormFunction,
    )

    return lambda: LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False)


def _gathered(pool: Tensor, rows: PagedRows) -> Tensor:
    """[B, heads, L, width]: the keys of every sequence in order, up to the longest."""
    paged = pool.unflatten(1, (-1, rows.page_size))[:, rows.pages.long()]
    return paged.flatten(2, 3)[:, :, : rows.longest].transpose(0, 1).contiguous()


def _sdpa(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Callable[[], Tensor]:
    """One call over the batch, with a mask where there are several rows or ragged lengths."""
    if window is not None or softcap is not None:
        raise RuntimeError("it knows no window and no soft cap")
    batch, count = rows.lengths.shape[0], rows.most_rows
    k, v = _gathered(keys, rows), _gathered(values, rows)
    asked = q.transpose(0, 1).unflatten(0, (batch, count)).transpose(1, 2)  # [B, Hq, R, D]
    place = torch.arange(k.shape[2], device=q.device)
    last = rows.lengths[:, None] - count + torch.arange(count, device=q.device)
    mask = (place <= last[..., None])[:, None]
    whole = count == rows.longest

    def call() -> Tensor:
        out = F.scaled_dot_product_attention(
            asked,
            k,
            v,
            None if whole else mask,
            is_causal=whole,
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _sdpa_causal(
    scaling: float,
    window: int | None,
    softcap: float | None,
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    *chain: Tensor,
) -> Callable[[], Tensor]:
    """Less than the op: one document and no chain, so its output differs."""
    return lambda: F.scaled_dot_product_attention(
        q[None], k0[None], v0[None], is_causal=True, scale=scaling, enable_gqa=True
    )[0]


def _flashinfer(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Callable[[], Tensor]:
    """Its prefill wrapper, which serves decoding and chains too, over pages in its own layout;
    planned once, as an engine plans once a step."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    size = rows.page_size
    paged = tuple(
        pool.unflatten(1, (-1, size)).permute(1, 2, 0, 3).contiguous() for pool in (keys, values)
    )
    lengths = rows.lengths.cpu()
    counts = (lengths + size - 1) // size
    table = rows.pages.cpu()
    indices = torch.cat([table[index, : int(n)] for index, n in enumerate(counts)]).to(q.device)
    borders = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    scratch = torch.zeros(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD")
    wrapper.plan(
        rows.starts.cpu().int(),
        borders,
        indices.int(),
        ((lengths - 1) % size + 1).int(),
        q.shape[0],
        keys.shape[0],
        q.shape[2],
        size,
        head_dim_vo=values.shape[2],
        causal=True,
        sm_scale=scaling,
        window_left=-1 if window is None else window - 1,
        logits_soft_cap=softcap,
        q_data_type=q.dtype,
        kv_data_type=keys.dtype,
    )
    asked = q.transpose(0, 1).contiguous()
    return lambda: wrapper.run(asked, paged)
