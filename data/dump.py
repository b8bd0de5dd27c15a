"""`dump`: token rows -> hidden-state cache, by the engine's own prefill.

Everything is fixed before the first pass: which rows (the first of the training set, up to
max_tokens), which shard each goes to, which batch inside its shard. A batch never crosses a shard,
so a run that is killed goes on from its last whole shard and ends with the same bytes as one that
was not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inference.capture import capture
from ..models.files import content_hash, read_json
from ..models.target import Target
from .cache import DTYPES, CacheWriter, check_free_space, engine_version, forecast_bytes
from .probes import ProbeReport, probe_states
from .rowfile import Rows
from .shards import FORMAT, ShardFacts, ShardRows

Progress = Callable[[int, int | None], None]
_log = logging.getLogger(__name__)
_PROBE_TOKENS = 512
_PROBE_ROWS = 8
_QUARANTINE_SHARE = 0.01


@dataclass(frozen=True)
class DumpConfig:
    """What is cached, and in what pieces."""

    boundaries: tuple[int, ...] = ()
    """Which states; empty means L, the last layer's output before the final norm, and what the
    head reads besides."""
    dtype: str = "bf16"
    """bf16: 2·H bytes a token and boundary."""
    shard_tokens: int = 65536
    """Tokens of a shard; one shard is held in memory and is what a killed run loses."""
    tokens_per_batch: int = 2048
    """Tokens of one forward pass (a longer row is a pass of its own)."""
    max_tokens: int | None = None
    """Cache only the first rows, up to so many tokens."""
    overwrite: bool = False
    """Replace a finished cache of other settings in the same folder."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if len(set(self.boundaries)) != len(self.boundaries):
            raise ValueError(f"boundaries {list(self.boundaries)}: each may be named once")
        for name in ("shard_tokens", "tokens_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be 1 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens}: must be 1 or more, or null for all")


@dataclass(frozen=True)
class Dumped:
    """The outcome: `reused` when the finished cache was there, `resumed` whole shards of an earlier
    run.
    """

    folder: Path
    manifest: dict[str, Any]
    reused: bool
    resumed: int


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


def dump(
    config: DumpConfig,
    rows: Rows,
    target: Target,
    out: Path | str,
    progress: Progress | None = None,
) -> Dumped:
    """Write the cache of `rows` into `out`, go on with an unfinished one, or find it there.

    Args:
        progress: called with (tokens done, tokens to do).
    Raises:
        ValueError: rows of another tokenizer, unknown boundary, no room on the disk, a probe that
            found a fault, too many rows with non-finite states, or a finished cache of other
            settings in `out`.
        KeyboardInterrupt: with a message; whole shards stay.
    """
    out = Path(out)
    boundaries = _boundaries(config, target)
    rows.require_tokenizer(target.fingerprint)
    shards = plan_shards(rows.lengths, config.shard_tokens, config.max_tokens)
    if not shards:
        raise ValueError(
            f"{rows.folder}: no row fits max_tokens={config.max_tokens} ({len(rows)} rows, the "
            "first has "
            f"{int(rows.lengths[0]) if len(rows) else 0} tokens); raise data.dump.max_tokens"
        )
    identity = _identity(config, rows, target, boundaries)
    key = content_hash(identity)
    if finished := _finished(out, key, identity, config.overwrite):
        return Dumped(out, finished, True, len(finished["shards"]))
    writer = CacheWriter(out, key, boundaries, target.hidden_size)
    for message in writer.messages:
        _log.warning("%s: %s", out, message)
    total = int(sum(rows.lengths[shard].sum() for shard in shards))
    missing = sum(
        int(rows.lengths[shard].sum()) for n, shard in enumerate(shards) if not writer.existing(n)
    )
    check_free_space(out, forecast_bytes(missing, target.hidden_size, len(boundaries)))
    report = _probe(rows, shards[0], target, boundaries, config)
    report.refuse_faults(str(out))
    facts: list[ShardFacts] = []
    contents: list[ShardRows] = []
    done = resumed = 0

    def tell(before: int, more: int) -> None:
        if progress:
            progress(before + more, total)

    try:
        for number, shard in enumerate(shards):
            if found := writer.existing(number):
                content, fact = found
                resumed += 1
            else:
                content, fact = _write_shard(
                    writer, number, shard, rows, target, config, partial(tell, done)
                )
            facts.append(fact)
            contents.append(content)
            _stop_at_many(contents, sum(map(len, shards)), rows)
            done += int(rows.lengths[shard].sum())
            tell(done, 0)
        manifest = writer.finish(facts, contents, rows, _about(identity, target, report))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"dump stopped: {len(facts)} of {len(shards)} shards are whole in {out}; the same "
            "command goes on there"
        ) from None
    return Dumped(out, manifest, False, resumed)


def _boundaries(config: DumpConfig, target: Target) -> tuple[int, ...]:
    last = target.num_layers
    wanted = config.boundaries or (last,)
    unknown = [k for k in wanted if not 0 <= k <= last]
    if unknown:
        raise ValueError(
            f"boundaries {unknown}: this target has the boundaries 0 (embedding) to {last} (last "
            "layer's output)"
        )
    return tuple(sorted(wanted))


def _identity(
    config: DumpConfig, rows: Rows, target: Target, boundaries: tuple[int, ...]
) -> dict[str, Any]:
    """Everything that determines the bytes of the cache."""
    return {
        "format": FORMAT,
        "engine": engine_version(),
        "target": dict(target.fingerprint),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "boundaries": list(boundaries),
        "dtype": config.dtype,
        "rows_key": rows.key,
        "split": rows.split,
        "shard_tokens": config.shard_tokens,
        "tokens_per_batch": config.tokens_per_batch,
        "max_tokens": config.max_tokens,
    }


def _about(identity: dict[str, Any], target: Target, report: ProbeReport) -> dict[str, Any]:
    """The manifest's part that describes where the states come from."""
    names = ("engine", "target", "target_dtype", "dtype", "rows_key", "split")
    return {
        **{name: identity[name] for name in names},
        "num_layers": target.num_layers,
        "identity": identity,
        "probes": report.to_json(),
    }


def _finished(
    out: Path, key: str, identity: dict[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """The manifest of a finished cache with this key; a finished one with another key is never
    removed unasked.
    """
    if not (out / "manifest.json").exists():
        return None
    manifest = read_json(out / "manifest.json")
    if manifest.get("kind") != "cache":
        raise ValueError(
            f"{out} holds {manifest.get('kind')!r}, not a cache; choose another folder"
        )
    if manifest.get("key") == key and all(
        (out / fact["name"]).exists() and (out / fact["name"]).stat().st_size == fact["bytes"]
        for fact in manifest["shards"]
    ):
        return manifest
    old = manifest.get("identity", {})
    changed = [
        f"{name} {old.get(name)!r} -> {identity[name]!r}"
        for name in identity
        if old.get(name) != identity[name]
    ]
    if changed and not overwrite:
        raise ValueError(
            f"{out} holds a finished cache of other settings ({'; '.join(changed)}); choose "
            "another folder, or "
            "overwrite=true to replace it"
        )
    return None


def _probe(
    rows: Rows, shard: list[int], target: Target, boundaries: tuple[int, ...], config: DumpConfig
) -> ProbeReport:
    """Probe a sample of the first shard: packed states as they are cached, against each row run
    alone.
    """
    last = target.num_layers
    sample: list[Tensor] = []
    for row in shard:
        sample.append(torch.from_numpy(rows[row].tokens.astype(np.int64))[:_PROBE_TOKENS])
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
            "damaged or its "
            f"dtype {target.dtype} too narrow (try target.dtype=float32)"
        )
    kept = [place for place, part in enumerate(finite.split(lengths)) if bool(part.all())]
    packed, alone = packed[finite], alone[finite]
    starts = torch.tensor(np.cumsum([0, *(lengths[place] for place in kept)]))

    def engine_logits(begin: int, end: int) -> Tensor:
        return target.logits(target.trunk.norm(alone[begin:end]))

    tokens = torch.cat([sample[place] for place in kept])
    return probe_states(target.trunk, packed, tokens, starts, engine_logits)


def _write_shard(
    writer: CacheWriter,
    number: int,
    shard: list[int],
    rows: Rows,
    target: Target,
    config: DumpConfig,
    tell: Callable[[int], None],
) -> tuple[ShardRows, ShardFacts]:
    """Run the rows of one shard in its batches; rows with non-finite states are left out."""
    size = int(rows.lengths[shard].sum())
    tokens = torch.empty(size, dtype=torch.int32)
    supervised = torch.empty(size, dtype=torch.bool)
    states = {
        k: torch.empty(size, target.hidden_size, dtype=torch.bfloat16) for k in writer.boundaries
    }
    kept: list[tuple[int, int, str]] = []
    quarantined: list[int] = []
    end = done = 0
    for batch in _batches(shard, rows.lengths, config.tokens_per_batch):
        read = [rows[row] for row in batch]
        ids = [torch.from_numpy(row.tokens.astype(np.int64)) for row in read]
        captured = capture(target, ids, writer.boundaries)
        _whole(captured, sum(map(len, ids)), rows, batch)
        offset = 0
        for row, place in zip(read, batch, strict=True):
            length = len(row.tokens)
            parts = {
                k: captured[k][offset : offset + length].to("cpu", torch.bfloat16) for k in states
            }
            offset += length
            if not all(bool(torch.isfinite(part).all()) for part in parts.values()):
                quarantined.append(place)
                _log.warning(
                    "row %d (id %r): its states are not finite; it is left out", place, row.id
                )
                continue
            tokens[end : end + length] = torch.from_numpy(row.tokens.copy())
            supervised[end : end + length] = torch.from_numpy(row.supervised.copy())
            for k, part in parts.items():
                states[k][end : end + length] = part
            kept.append((place, length, row.sha256))
            end += length
        done += offset
        tell(done)
    content = ShardRows(
        tuple(place for place, _, _ in kept),
        tuple(length for _, length, _ in kept),
        tuple(digest for _, _, digest in kept),
        tuple(quarantined),
    )
    states = {k: state[:end] for k, state in states.items()}
    return content, writer.write(number, content, tokens[:end], supervised[:end], states)


def _batches(shard: list[int], lengths: np.ndarray, tokens_per_batch: int) -> list[list[int]]:
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
                f"{boundary} "
                f"came back with {state.shape[0]} states; the engine lost or added some"
            )


def _stop_at_many(contents: list[ShardRows], planned: int, rows: Rows) -> None:
    bad = [row for content in contents for row in content.quarantined]
    if len(bad) > max(1, int(_QUARANTINE_SHARE * planned)):
        raise ValueError(
            f"{len(bad)} of {planned} rows have non-finite states (first: "
            f"{[rows[row].id for row in bad[:5]]}), more "
            f"than {_QUARANTINE_SHARE:.0%}; try target.dtype=float32, or look at the target's "
            "weights"
        )
