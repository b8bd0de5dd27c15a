"""FlashInfer's documentation in plain PyTorch: it knows the arrays of a plan and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.config import SamplingParams
from draftsmith.inference.flashinfer_pages import FlashInfer
from draftsmith.inference.sequence import Sequence


class Documented:
    """`BatchPrefillWithPagedKVCacheWrapper` in the layout HND: request b has the rows
    qo_indptr[b:b+2] and the pages paged_kv_indices[paged_kv_indptr[b:b+2]], the last of which holds
    paged_kv_last_page_len[b] keys. Causal rows end where the keys end. A mask is packed into bits,
    the lowest first, each request beginning a byte; bit i * keys + j says whether row i sees key
    j."""

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, *arrays: Any, **settings: Any) -> None:
        """Keeps it, with the mask as the kernels read it."""
        self.plans += 1
        assert all(one.dtype == torch.int32 and one.device.type == "cpu" for one in arrays[:4])
        self.rows, self.borders, self.pages, self.last = (one.tolist() for one in arrays[:4])
        self.heads, self.key_heads, self.width, self.page_size = arrays[4:]
        self.settings = settings
        mask = settings["custom_mask"]
        sizes = [self.keys_of(b) * self.rows_of(b) for b in range(len(self.last))]
        self.bits = []
        if mask is not None:
            assert mask.dtype == torch.bool and mask.shape == (sum(sizes),)
            parts = np.split(mask.numpy(), np.cumsum(sizes)[:-1])
            self.bits = [np.packbits(part, bitorder="little") for part in parts]

    def keys_of(self, b: int) -> int:
        """Keys of request b."""
        return (self.borders[b + 1] - self.borders[b] - 1) * self.page_size + self.last[b]

    def rows_of(self, b: int) -> int:
        """Rows of request b."""
        return self.rows[b + 1] - self.rows[b]

    def sees(self, b: int, row: int, key: int) -> bool:
        """Whether a row of request b sees a key."""
        keys, place = self.keys_of(b), self.keys_of(b) - self.rows_of(b) + row
        left = self.settings["window_left"]
        if left >= 0 and key < place - left:
            return False
        if self.bits:
            at = row * keys + key
            return bool(self.bits[b][at // 8] >> (at % 8) & 1)
        return key <= place or not self.settings["causal"]

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """One row of one request after the other."""
        cap, out = self.settings["logits_soft_cap"], []
        assert q.shape == (self.rows[-1], self.heads, self.width)
        for b in range(len(self.last)):
            assert 1 <= self.last[b] <= self.page_size
            taken = self.pages[self.borders[b] : self.borders[b + 1]]
            keys, values = (torch.cat([pool[i] for i in taken], 1) for pool in paged_kv_cache)
            assert keys.shape[0] == self.key_heads and keys.shape[2] == self.width
            for row in range(self.rows_of(b)):
                seen = [key for key in range(self.keys_of(b)) if self.sees(b, row, key)]
                group = self.heads // self.key_heads
                asked = q[self.rows[b] + row].view(self.key_heads, group, 1, -1)
                scores = (asked * keys[:, None, seen]).sum(-1) * self.settings["sm_scale"]
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                mixed = torch.softmax(scores, -1) @ values[:, seen]
                out.append(mixed.flatten(0, 1))
        return torch.stack(out)


class Plain(FlashInfer):
    """The backend over what is documented, for any dtype and on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Documented] = []

    def wrapper(self, q: Tensor, keys: Tensor, values: Tensor) -> Documented:
        """See `FlashInfer`."""
        self.made.append(Documented())
        return self.made[-1]


def scattered(lengths: list[int], page_size: int) -> list[Sequence]:
    """Requests whose pages lie scattered over a pool of 128 pages."""
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(128, generator=generator).tolist()
    found = []
    for index, length in enumerate(lengths):
        one = Sequence.create(str(index), [1], SamplingParams())
        one.page_size = page_size
        one.pages = [free.pop() for _ in range(-(-length // page_size))]
        found.append(one)
    return found
