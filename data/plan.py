"""What a dump will write, fixed before its first pass: which rows go to which shard, and the key of
each shard by content.

A shard's key is the hash of all that determines its bytes: the format, the engine's version, the
target's fingerprint and dtype, the boundaries, the cache's dtype, tokens_per_batch (which rows
share a pass), and the numbers, ids, token hashes and mask hashes of its rows. So a change is
noticed whatever caused it, and a shard that nothing touched keeps its key: data appended to the
rows leave all shards but the last as they are.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np

from ..models.files import content_hash
from .rowfile import Rows
from .shards import FORMAT, mask_hash


def engine_version() -> str:
    """The version of this package, whose engine made the states."""
    try:
        return importlib.metadata.version("draftsmith")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def plan_shards(lengths: np.ndarray, shard_tokens: int, max_tokens: int | None) -> list[list[int]]:
    """Row numbers of every shard, from the lengths [R] alone; rows of length 0 are skipped.

    Rows go in order; a shard is closed before the row that would pass `shard_tokens`, and the plan
    before the first row that would pass `max_tokens`.
    """
    shards: list[list[int]] = []
    filled = total = 0
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        if max_tokens is not None and total + length > max_tokens:
            break
        if not shards or filled + length > shard_tokens:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += length
        total += length
    return shards


def states_identity(
    fingerprint: dict[str, str],
    target_dtype: str,
    boundaries: tuple[int, ...],
    dtype: str,
    tokens_per_batch: int,
) -> dict[str, Any]:
    """Everything but the rows that determines a shard's bytes; JSON-ready."""
    return {
        "format": FORMAT,
        "engine": engine_version(),
        "target": dict(fingerprint),
        "target_dtype": target_dtype,
        "boundaries": list(boundaries),
        "dtype": dtype,
        "tokens_per_batch": tokens_per_batch,
    }


def shard_keys(states: dict[str, Any], rows: Rows, shards: list[list[int]]) -> list[str]:
    """The key of each planned shard; reads the rows once, a shard at a time."""
    keys = []
    for shard in shards:
        read = [(number, rows[number]) for number in shard]
        marks = [[number, row.id, row.sha256, mask_hash(row.supervised)] for number, row in read]
        keys.append(content_hash({**states, "rows": marks}))
    return keys


def cache_key(states: dict[str, Any], keys: list[str]) -> str:
    """The key of a cache, from those of its shards."""
    return content_hash({**states, "shards": keys})
