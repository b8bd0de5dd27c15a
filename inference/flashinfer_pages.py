"""Attention over pages by FlashInfer (`engine.attention=flashinfer`): decode rows, chains, trees
and chunks of prompts through its prefill wrapper, planned once a pass and run in every layer.

What it calls a page is ours: a layer of the pool is seen as [pages, key heads, page size, width],
its layout HND, without a copy. Rows are causal at the end of their keys; those of trees get a mask
over all keys, which is the only form it has.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .batch import Batch

_SCRATCH = 128 << 20  # bytes, FlashInfer's own advice
_WIDTHS = (64, 128, 192, 256)  # its tiles are 64 wide; wider ones are for attention on latents


class Wrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, as far as it is used."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int,
        custom_mask: Tensor | None,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """What the calls of `run` until the next plan have in common."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """q [N, Hq, D], keys and values [P, Hk, page size, D or Dv] -> [N, Hq, Dv]."""
        ...


@dataclass(frozen=True)
class PageArrays:
    """A batch as `plan` takes it.

    Attributes:
        rows: [B+1] int32 borders of the sequences' rows. borders: [B+1] int32 borders of their
            pages in `pages`, int32. last: [B] int32 slots that hold keys in the last page of each,
            1 to page size. All four on the host, where the plan is made.
        mask: of trees, which keys each row sees: bool, sequence after sequence, row after row, all
            keys of the sequence, on the batch's device. None where rows are causal.
    """

    rows: Tensor
    borders: Tensor
    pages: Tensor
    last: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, batch: Batch, window: int | None) -> PageArrays:
        """From a batch. window: keys that a row of a tree sees at most; a causal row's is told
        apart."""
        size = batch.sequences[0].page_size
        tables = [
            sequence.pages[: -(-length // size)]
            for sequence, length in zip(batch.sequences, batch.lengths, strict=True)
        ]
        numbers = (
            batch.starts,
            [0, *itertools.accumulate(map(len, tables))],
            [page for table in tables for page in table],
            [(length - 1) % size + 1 for length in batch.lengths],
        )
        pinned = batch.tokens.is_cuda  # else the copy to the device would be waited for
        host = [torch.tensor(each, dtype=torch.int32, pin_memory=pinned) for each in numbers]
        return cls(*host, mask=None if batch.trees is None else _tree_mask(batch, window))


def _tree_mask(batch: Batch, window: int | None) -> Tensor:
    """A row sees the text before its tree and its own ancestors, of either the last `window`."""
    assert batch.trees is not None
    parts = []
    for index, length in enumerate(batch.lengths):
        first, end = batch.starts[index], batch.starts[index + 1]
        ancestry = batch.trees.ancestry(index, end - first)
        text = length - ancestry.shape[1]
        mask = ancestry.new_ones(end - first, length, dtype=torch.bool)
        mask[:, text:] = ancestry > 0
        if window is not None:
            place = torch.arange(text, device=mask.device)
            mask[:, :text] = place > batch.positions[first:end, None] - window
            mask[:, text:] &= ancestry <= window
        parts.append(mask.flatten())
    return torch.cat(parts)


class FlashInfer:
    """A `KVPool.attention`. One plan serves all layers of like heads, widths and windows."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._scratch: dict[torch.device, Tensor] = {}

    @classmethod
    def open(cls, device: torch.device) -> FlashInfer:
        """For a target on this device.

        Raises:
            ValueError: it is no GPU, or the package cannot be imported.
        """
        if device.type != "cuda":
            raise ValueError(
                f"engine.attention=flashinfer: the target is on {device}, and FlashInfer runs on "
                "NVIDIA GPUs alone; set target.device=cuda, or engine.attention=auto"
            )
        _library()
        return cls()

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of a batch whose keys are stored, see `kernels.paged_attention`.

        Args:
            q: [Hq, N, D]. keys: [Hk, S, D], values: [Hk, S, Dv]: a layer of the pool.
        Returns:
            [N, Hq, Dv].
        """
        settings = (scaling, window, softcap)
        key = (q.device, q.dtype, len(q), len(keys), keys.shape[2], values.shape[2], *settings)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(self.wrapper(q, keys, values))
        if plan.batch is not batch:
            plan.make(batch, q, keys, values, *settings)
        size = batch.sequences[0].page_size
        asked = q.transpose(0, 1)
        asked = asked if asked.stride(-1) == 1 else asked.contiguous()
        return plan.wrapper.run(asked, (as_pages(keys, size), as_pages(values, size)))

    def wrapper(self, q: Tensor, keys: Tensor, values: Tensor) -> Wrapper:
        """A new one for tensors like these. Its kernels are named, for one form then serves causal
        rows, masks, windows and soft caps, on every card.

        Raises:
            ValueError: a dtype or widths that FlashInfer's kernels do not take.
        """
        widths = keys.shape[2], values.shape[2]
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"engine.attention=flashinfer: keys are {q.dtype}, its kernels take bfloat16 and "
                "float16; set target.dtype=bfloat16 (of a draft LM draft_lm.dtype), or "
                "engine.attention=auto"
            )
        if not all(width in _WIDTHS for width in widths):
            raise ValueError(
                f"engine.attention=flashinfer: keys and values are {widths[0]} and {widths[1]} "
                f"wide, it takes {', '.join(map(str, _WIDTHS))}; set engine.attention=auto"
            )
        scratch = self._scratch.get(q.device)
        if scratch is None:
            scratch = torch.zeros(_SCRATCH, dtype=torch.uint8, device=q.device)
            self._scratch[q.device] = scratch
        return _library().BatchPrefillWithPagedKVCacheWrapper(scratch, "HND", backend="fa2")


class _Plan:
    """A wrapper and the batch that it is planned for."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.batch: Batch | None = None
        self._sent: torch.cuda.Event | None = None

    def make(
        self,
        batch: Batch,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        if self._sent is not None:
            # A plan goes to the device from memory that the next one is written to.
            self._sent.synchronize()
        arrays = PageArrays.of(batch, window)
        self.wrapper.plan(
            arrays.rows,
            arrays.borders,
            arrays.pages,
            arrays.last,
            q.shape[0],
            keys.shape[0],
            keys.shape[2],
            batch.sequences[0].page_size,
            head_dim_vo=values.shape[2],
            custom_mask=arrays.mask,
            causal=arrays.mask is None,
            sm_scale=scaling,
            # It counts the keys before a row's own; a tree's window is in its mask.
            window_left=-1 if window is None or arrays.mask is not None else window - 1,
            logits_soft_cap=softcap,
            q_data_type=q.dtype,
            kv_data_type=keys.dtype,
        )
        self.batch = batch
        if q.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record()


def as_pages(pool: Tensor, page_size: int) -> Tensor:
    """A layer's keys or values [Hk, S, D] as a view [S / page size, Hk, page size, D]."""
    return pool.unflatten(1, (-1, page_size)).transpose(0, 1)


def _library() -> Any:
    """The package, imported where it is chosen.

    Raises:
        ValueError: it is missing, or misses something.
    """
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]
    except ImportError as fault:
        raise ValueError(
            f"engine.attention=flashinfer: the package cannot be imported ({fault}); "
            "pip install draftsmith[flashinfer], or set engine.attention=auto"
        ) from fault
    return flashinfer
