"""The states of one shard's rows, ready to be written, by the engine's own packed prefill; and the
probes of the first rows before the rest is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..inference.capture import capture
from ..models.target import Target
from .probes import ProbeReport, probe_states
from .quantise import dequantise, has_scale, quantise, stored_dtype
from .rowfile import Rows
from .runs import supervised_runs
from .shards import ShardRows, boundary_name, mask_hash, scale_name

_log = logging.getLogger(__name__)
_PROBE_TOKENS = 512
_PROBE_ROWS = 8


def probe_rows(
    rows: Rows, shard: list[int], target: Target, boundaries: tuple[int, ...], dtype: str
) -> ProbeReport:
    """Probe the first rows: packed together as the dump runs them and read back as the cache gives
    them, against each run alone.

    Raises:
        ValueError: no row gives finite states.
    """
    last = target.num_layers
    sample: list[Tensor] = []
    for row in shard:
        sample.append(torch.from_numpy(rows[row].tokens.astype(np.int64)))
        if len(sample) == _PROBE_ROWS or sum(map(len, sample)) >= _PROBE_TOKENS:
            break
    packed = capture(target, sample, tuple(sorted({*boundaries, last})))[last].to(torch.bfloat16)
    alone = torch.cat([capture(target, [row], (last,))[last] for row in sample])
    lengths = [len(row) for row in sample]
    finite = torch.cat(
        [torch.isfinite(part).all().expand(len(part)) for part in packed.split(lengths)]
    )
    if not finite.any():
        raise ValueError(
            f"{rows.folder}: the first {len(sample)} rows give no finite state; the target is "
            f"damaged or its dtype {target.dtype} too narrow (try target.dtype=float32)"
        )
    kept = [place for place, part in enumerate(finite.split(lengths)) if bool(part.all())]
    packed, alone = packed[finite], alone[finite]
    starts = torch.tensor(np.cumsum([0, *(lengths[place] for place in kept)]))

    def engine_logits(begin: int, end: int) -> Tensor:
        return target.logits(target.trunk.norm(alone[begin:end]))

    tokens = torch.cat([sample[place] for place in kept])
    exact = packed if has_scale(dtype) else None
    stored = dequantise(*quantise(packed, dtype))
    return probe_states(target.trunk, stored, tokens, starts, engine_logits, exact)


def shard_states(
    shard: list[int],
    rows: Rows,
    target: Target,
    boundaries: tuple[int, ...],
    dtype: str,
    tokens_per_batch: int,
    tell: Callable[[int], None],
) -> tuple[ShardRows, dict[str, Tensor]]:
    """Run the rows of one shard in its batches; rows with non-finite states are left out.

    Args:
        shard: row numbers. tell: called after each batch with the shard's tokens done.
    Returns:
        what the shard holds, and its tensors by their names in the file, on the CPU.
    """
    tensors = _empty(int(rows.lengths[shard].sum()), target.hidden_size, boundaries, dtype)
    columns: list[tuple[int, str, int, str, str, int, list[int]]] = []
    quarantined: list[tuple[int, str, int]] = []
    end = done = 0
    for batch in batches_of(shard, rows.lengths, tokens_per_batch):
        read = [rows[row] for row in batch]
        lengths = [len(row.tokens) for row in read]
        ids = [torch.from_numpy(row.tokens.astype(np.int64)) for row in read]
        captured = capture(target, ids, boundaries)
        _whole(captured, sum(lengths), rows, batch)
        stored = {k: captured[k].to(torch.bfloat16) for k in boundaries}
        sound = torch.stack([torch.isfinite(state).all(-1) for state in stored.values()]).all(0)
        kept = [bool(part.all()) for part in sound.cpu().split(lengths)]
        for row, place, whole in zip(read, batch, kept, strict=True):
            if not whole:
                quarantined.append((place, row.id, len(row.tokens)))
                _log.warning(
                    "row %d (id %r): its states are not finite; it is left out", place, row.id
                )
                continue
            mask = row.supervised
            marks = (row.sha256, mask_hash(mask), int(mask.sum()), supervised_runs(mask))
            columns.append((place, row.id, len(row.tokens), *marks))
        keep = torch.tensor(kept).repeat_interleave(torch.tensor(lengths))
        begin, end = end, end + int(keep.sum())
        tensors["tokens"][begin:end] = torch.cat(ids)[keep]
        masks = torch.from_numpy(np.concatenate([row.supervised for row in read]))
        tensors["supervised"][begin:end] = masks[keep]
        for k, state in stored.items():
            state = state if all(kept) else state[keep.to(state.device)]
            codes, scale = quantise(state, dtype)
            tensors[boundary_name(k)][begin:end].copy_(codes)
            if scale is not None:
                tensors[scale_name(k)][begin:end].copy_(scale)
        done += sum(lengths)
        tell(done)
    lists = tuple(zip(*columns, strict=True)) or ((),) * 7
    content = ShardRows(*lists, quarantined=tuple(quarantined))
    return content, {name: tensor[:end] for name, tensor in tensors.items()}


def _empty(
    size: int, hidden_size: int, boundaries: tuple[int, ...], dtype: str
) -> dict[str, Tensor]:
    """Room for the tensors of a shard of `size` tokens."""
    tensors = {
        "tokens": torch.empty(size, dtype=torch.int32),
        "supervised": torch.empty(size, dtype=torch.uint8),
    }
    for k in boundaries:
        tensors[boundary_name(k)] = torch.empty(size, hidden_size, dtype=stored_dtype(dtype))
        if has_scale(dtype):
            tensors[scale_name(k)] = torch.empty(size, dtype=torch.float32)
    return tensors


def batches_of(shard: list[int], lengths: np.ndarray, tokens_per_batch: int) -> list[list[int]]:
    """The shard's rows in order, as many a pass as fit tokens_per_batch; one at least."""
    batches: list[list[int]] = []
    filled = 0
    for row in shard:
        length = int(lengths[row])
        if not batches or filled + length > tokens_per_batch:
            batches.append([])
            filled = 0
        batches[-1].append(row)
        filled += length
    return batches


def _whole(captured: dict[int, Tensor], expected: int, rows: Rows, batch: list[int]) -> None:
    """One state for each token, for each boundary; else the rows are named."""
    for boundary, state in captured.items():
        if state.shape[0] != expected:
            raise ValueError(
                f"{rows.folder}: rows {batch[0]} to {batch[-1]} have {expected} tokens, boundary "
                f"{boundary} came back with {state.shape[0]} states; the engine lost or added some"
            )
