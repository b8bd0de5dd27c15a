"""`dump`: token rows -> hidden-state cache, by the engine's own prefill.

Everything is fixed before the first pass: which rows (the first of the training set, up to
max_tokens), which shard each goes to, which batch inside its shard (plan.py). A batch never crosses
a shard, so a run that is killed goes on from its whole shards and ends with the same bytes as one
that was not, and as one that several ranks shared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..models.files import changes
from ..models.target import Target, longest_text
from .cache import intact
from .cache_index import find_manifest
from .cache_writer import CacheWriter, check_free_space, forecast_bytes, refuse_many
from .plan import cache_key, plan_shards, shard_keys, states_identity
from .prefill import probe_rows, shard_states
from .probes import ProbeReport
from .quantise import DTYPES
from .rowfile import Rows
from .shards import FORMAT
from .store import Store

Progress = Callable[[int, int | None], None]
_log = logging.getLogger(__name__)
_TARGET_REMEDY = (
    "the target's weights do not fit its config.json, or its dtype is too narrow (try "
    "target.dtype=float32)"
)
_TOLD = 5  # messages of one kind; the rest are counted


@dataclass(frozen=True)
class DumpConfig:
    """What is cached, and in what pieces."""

    boundaries: tuple[int, ...] = ()
    """Which states; empty means L, the last layer's output before the final norm, and what the
    head reads besides."""
    dtype: str = "bf16"
    """bf16 (2·H bytes a token and boundary), fp8 or int8 (H + 4 bytes, a scale for each token)."""
    folder: str | None = None
    """Where to: a path or an fsspec URL (s3://…); null is cache/ below the work folder. Held-out
    rows go to FOLDER-heldout."""
    shard_tokens: int = 65536
    """Tokens of a shard; two shards are held in memory, and what a killed run loses is at most
    these two."""
    tokens_per_batch: int = 2048
    """Tokens of one forward pass (a longer row is a pass of its own)."""
    max_tokens: int | None = None
    """Cache only the first rows, up to so many tokens."""
    rank: int | None = None
    """Which of `world_size` processes this one is, each of which computes its share of the shards;
    null takes both from the launcher's environment (torchrun, srun), or is the only one."""
    world_size: int | None = None
    """How many processes write this cache."""
    overwrite: bool = False
    """Throw away whole shards of a finished cache that were made of other rows or settings."""

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
        if self.folder == "":
            raise ValueError("folder is empty: give a path or a URL, or null for WORK/cache")
        if (self.rank is None) != (self.world_size is None) or not (
            0 <= (self.rank or 0) < (self.world_size or 1)
        ):
            raise ValueError(
                f"rank {self.rank} of world_size {self.world_size}: give both, with 0 <= rank < "
                "world_size, or neither"
            )


@dataclass(frozen=True)
class Dumped:
    """The outcome.

    Attributes:
        folder: path or URL. manifest: as on disk; empty where another process finishes the cache:
            on every rank but the first.
        reused: the finished cache was there, and nothing was done. resumed: whole shards that were
            there. shards: of this rank. changed: fields that differ from the finished cache that
            was there before.
    """

    folder: str
    manifest: dict[str, Any]
    reused: bool
    resumed: int
    shards: int
    changed: tuple[str, ...] = ()


def dump(
    config: DumpConfig,
    rows: Rows,
    target: Target,
    out: Path | str,
    progress: Progress | None = None,
    finish: bool = True,
) -> Dumped:
    """Write the cache of `rows` into `out`, go on with an unfinished one, renew the shards that a
    change touched, or find it there.

    Args:
        out: a folder or an fsspec URL.
        progress: called with (tokens done, tokens to do) of this rank.
        finish: write index and manifest on rank 0, which waits for the other ranks' shards; False
            leaves that to a later call.
    Raises:
        ValueError: rows of another tokenizer or too long for the target, unknown boundary, no room
            on the disk, a probe that found a fault, too many rows with non-finite states, or a
            finished cache in `out` of which whole shards would be lost.
        KeyboardInterrupt: with a message; whole shards stay.
    """
    store = Store(out)
    rank, world_size = config.rank or 0, config.world_size or 1
    boundaries = _boundaries(config, target)
    rows.require_tokenizer(target.fingerprint)
    rows.require_length(longest_text(target.folder))
    shards = plan_shards(rows.lengths, config.shard_tokens, config.max_tokens)
    if not shards:
        raise ValueError(
            f"{rows.folder}: no row fits max_tokens={config.max_tokens} ({len(rows)} rows, the "
            f"first has {int(rows.lengths[0]) if len(rows) else 0} tokens); raise "
            "data.dump.max_tokens"
        )
    dtype_name = str(target.dtype).removeprefix("torch.")
    states = states_identity(
        target.fingerprint, dtype_name, boundaries, config.dtype, config.tokens_per_batch
    )
    keys = shard_keys(states, rows, shards)
    identity = {
        **states,
        "rows_key": rows.key,
        "rows": rows.manifest.get("config", {}),
        "split": rows.split,
        "shard_tokens": config.shard_tokens,
        "max_tokens": config.max_tokens,
    }
    old = find_manifest(store)
    changed = _changed(old, identity)
    if old and not changed and intact(store, old):
        return Dumped(store.place, old, True, len(keys), len(keys))
    if old and not config.overwrite:
        _refuse_loss(store, old, states, rows.split, keys, changed)
    sizes = [int(rows.lengths[shard].sum()) for shard in shards]
    with CacheWriter(
        store, keys, boundaries, target.hidden_size, config.dtype, rank, world_size
    ) as writer:
        _tell_messages(store, writer.messages)
        needed = sum(sizes[number] for number in writer.missing())
        check_free_space(
            store, forecast_bytes(needed, target.hidden_size, len(boundaries), config.dtype)
        )
        report = probe_rows(rows, shards[0], target, boundaries, config.dtype)
        report.refuse_faults(store.place, _TARGET_REMEDY)
        try:
            _fill(writer, config, rows, target, shards, progress)
            manifest: dict[str, Any] = {}
            if rank == 0 and finish:
                writer.wait()
                about = _about(identity, target, report)
                manifest = writer.finish(cache_key(states, keys), about)
        except KeyboardInterrupt:
            writer.flush()
            raise KeyboardInterrupt(
                f"dump stopped: {len(keys) - len(writer.missing())} of {len(keys)} shards are "
                f"whole in {store.place}; the same command goes on there"
            ) from None
    kept = len(writer.kept)
    return Dumped(store.place, manifest, False, kept, len(writer.own), changed)


def _fill(
    writer: CacheWriter,
    config: DumpConfig,
    rows: Rows,
    target: Target,
    shards: list[list[int]],
    progress: Progress | None,
) -> None:
    """Compute and write this rank's shards that are not there."""
    own = {number: int(rows.lengths[shards[number]].sum()) for number in writer.own}
    total, done = sum(own.values()), 0
    left_out: list[tuple[int, str, int]] = []

    def tell(before: int, more: int) -> None:
        writer.check()
        if progress:
            progress(before + more, total)

    for number, size in own.items():
        if number in writer.kept:
            left_out += writer.kept[number]
        else:
            content, tensors = shard_states(
                shards[number],
                rows,
                target,
                writer.boundaries,
                config.dtype,
                config.tokens_per_batch,
                partial(tell, done),
            )
            writer.submit(number, content, tensors)
            left_out += content.quarantined
        refuse_many([name for _, name, _ in left_out], sum(map(len, shards)))
        done += size
        tell(done, 0)
    writer.flush()


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


def _about(identity: dict[str, Any], target: Target, report: ProbeReport) -> dict[str, Any]:
    """The manifest's part that describes where the states come from."""
    names = ("engine", "target", "target_dtype", "dtype", "rows_key", "split")
    return {
        **{name: identity[name] for name in names},
        "num_layers": target.num_layers,
        "identity": identity,
        "probes": report.to_json(),
    }


def _changed(old: dict[str, Any] | None, identity: dict[str, Any]) -> tuple[str, ...]:
    """What differs from a finished cache."""
    if old is None:
        return ()
    if old.get("format") != FORMAT:
        return (f"format {old.get('format')!r} -> {FORMAT}",)
    return tuple(changes(old["identity"], identity))


def _refuse_loss(
    store: Store,
    old: dict[str, Any],
    states: dict[str, Any],
    split: str,
    keys: list[str],
    changed: tuple[str, ...],
) -> None:
    """Growth may renew the last shard of a finished cache; anything that would throw away more is
    refused.

    Raises:
        ValueError: how many shards would be lost, and which fields differ.
    """
    if "parts" in old:
        raise ValueError(
            f"{store.place} holds a combination of other caches; choose another folder, or "
            "overwrite=true to replace it"
        )
    if old.get("format") != FORMAT:
        there = sum(name.startswith("shard-") for name in store.names())
        lost, grown = there, False
    else:
        lines, identity = old["shards"], old["identity"]
        kept = dict(enumerate(keys))
        places = [n for n, line in enumerate(lines) if line["key"] != kept.get(n)]
        there, lost = len(lines), len(places)
        same = all(identity.get(name) == value for name, value in states.items())
        grown = same and old["split"] == split and places == [there - 1]
    if lost and not grown:
        raise ValueError(
            f"{store.place} holds a finished cache, of which {lost} of {there} shards "
            f"would be thrown away ({'; '.join(changed) or 'rows of other content'}); choose "
            "another folder, or overwrite=true to replace them"
        )


def _tell_messages(store: Store, messages: list[str]) -> None:
    for message in messages[:_TOLD]:
        _log.warning("%s: %s", store.place, message)
    if len(messages) > _TOLD:
        _log.warning("%s: and %d more files removed", store.place, len(messages) - _TOLD)
