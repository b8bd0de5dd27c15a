"""One chunk of logits: which rows it holds, its buffers, how they are filled and searched.

Legend: N rows, H hidden, V columns of the head, K students of a teacher row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of one chunk of logits. On a CPU three such buffers should stay near the last-level cache
# (measured 2**21..2**25 at V = 49,152 and 8,192); on a GPU larger matrix products are worth more
# than cache.
_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
_TOP_BLOCK = 256


def default_rows(device: torch.device, columns: int) -> int:
    """Rows of logits alive at a time where the caller does not say."""
    return max(64, min(1024, _CHUNK_ELEMENTS.get(device.type, 1 << 23) // columns))


class Chunk(NamedTuple):
    """Row numbers of one chunk, teacher rows first ordered by their number of students, most
    first."""

    teacher: Tensor  # [c] row numbers
    students: list[Tensor]  # per step [c_k] indices into `teacher`
    prefix: list[bool]  # per step: whether those indices are 0 .. c_k - 1, so that a slice will do


def row_chunks(weight: Tensor, rows: int) -> Iterator[Chunk]:
    """Split the rows that have a weight [K, N] into chunks of about `rows` rows of logits; one
    transfer of [K, N] to the host decides everything.

    Raises ValueError for a negative or non-finite weight, with its place.
    """
    host = weight.detach().cpu()
    if not bool((host >= 0).all()) or not bool(host.isfinite().all()):
        step, row = (~((host >= 0) & host.isfinite())).nonzero()[0].tolist()
        raise ValueError(
            f"weight[{step}, {row}] is {float(host[step, row])}; weights must be finite and >= 0"
        )
    active = host > 0
    per_row = active.sum(0)
    order = per_row.argsort(descending=True, stable=True)[: int((per_row > 0).sum())]
    size, begin = max(1, rows // (weight.shape[0] + 1)), 0
    while begin < order.numel():
        most = int(per_row[order[begin]])  # of the fullest row left: later rows have no more
        size = max(1, rows // (most + 1))
        teacher = order[begin : begin + size]
        students = [active[k, teacher].nonzero().squeeze(1) for k in range(weight.shape[0])]
        prefix = [s.numel() == 0 or int(s[-1]) + 1 == s.numel() for s in students]
        device = weight.device
        yield Chunk(teacher.to(device), [s.to(device) for s in students], prefix)
        begin += size


class Workspace:
    """Buffers of [rows, V], made once a call: fresh ones a chunk would cost a page fault every 4
    KiB.

    Args:
        compute: dtype of the matrix products. accurate: dtype of softmax and sums. fused: raw
            logits are all that is needed; the other buffers are empty.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        compute: torch.dtype,
        accurate: torch.dtype,
        device: torch.device,
        fused: bool = False,
    ) -> None:
        self.raw = torch.empty(rows, columns, dtype=compute, device=device)
        rows = 0 if fused else rows
        self.logits = self.raw[:rows]
        if compute != accurate:
            self.logits = torch.empty(rows, columns, dtype=accurate, device=device)
        self.probs = torch.empty(rows, columns, dtype=accurate, device=device)


class Readout(NamedTuple):
    """From states to finished logits."""

    head: Tensor  # [V, H] in the dtype of the matrix products
    scale: float
    softcap: float | None

    def __call__(self, states: Tensor, raw: Tensor, logits: Tensor) -> None:
        """states [m, H] -> raw and logits [m, V], which may be one buffer."""
        torch.mm(states, self.head.T, out=raw)
        if logits.dtype != raw.dtype:
            logits.copy_(raw)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)


def top_columns(values: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and first argmax of each row [m, V]: blocks by amax, which is vectorised, then one
    block by argmax."""
    num_columns = values.shape[1]
    if num_columns < 2 * _TOP_BLOCK:
        best = values.max(-1)
        return best.values, best.indices
    whole = num_columns - num_columns % _TOP_BLOCK
    peaks = values[:, :whole].unflatten(1, (-1, _TOP_BLOCK)).amax(-1)
    if whole < num_columns:
        peaks = torch.cat([peaks, values[:, whole:].amax(-1, keepdim=True)], 1)
    begin = (peaks.argmax(-1, keepdim=True) * _TOP_BLOCK).clamp_(max=num_columns - _TOP_BLOCK)
    columns = begin + torch.arange(_TOP_BLOCK, device=values.device)
    best = values.gather(1, columns).max(-1)
    return best.values, best.indices + begin.squeeze(1)
