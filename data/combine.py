"""Several caches read as one, or a part of one, without copying a state: a folder that holds an
index and a manifest alone, whose lines name shards in the folders of the caches they came from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..models.files import content_hash
from .cache import folder_of
from .cache_index import SCHEMA, find_manifest, read_index, read_manifest, write_manifest
from .store import Store, expanded

_SAME = ("target", "boundaries", "dtype", "hidden_size", "num_layers", "split")


@dataclass(frozen=True)
class CombineConfig:
    """Which caches become one, and which of their rows."""

    caches: tuple[str, ...] = ()
    """Folders or URLs of finished caches, in the order of their rows."""
    out: str | None = None
    """Folder or URL of the combination; null is cache/ below the work folder."""
    max_tokens: int | None = None
    """The first rows, up to so many tokens."""
    min_length: int = 1
    """Rows of at least so many tokens."""
    max_length: int | None = None
    """Rows of at most so many tokens."""
    ids: str | None = None
    """A text file with the id of a wanted row on each line; null wants all."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_length", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: must be 1 or more")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(
                f"min_length {self.min_length} and max_length {self.max_length}: no row is both"
            )


@dataclass(frozen=True)
class Combined:
    """The outcome. `left_out` counts rows by reason: id, length, heldout, duplicate, max_tokens."""

    folder: str
    manifest: dict[str, Any]
    left_out: dict[str, int]


def combine(config: CombineConfig, out: Path | str, overwrite: bool = False) -> Combined:
    """Write the combination into `out`.

    What one of the caches holds out, to validate with, no other may teach: a training row whose
    tokens stand in a held-out cache beside any of them is left out.

    Args:
        overwrite: replace another combination that lies there; never a cache with shards.
    Raises:
        ValueError: nothing to combine, caches that differ in target, boundaries, dtype, size or
            split, an unfinished held-out cache, an `out` that holds something else, an id that no
            cache has, no row left.
    """
    if not config.caches:
        raise ValueError("combine needs combine.caches=[FOLDER,…], the caches to read")
    place = Store(out)
    sources = [Store(place) for place in config.caches]
    manifests = [read_manifest(source) for source in sources]
    _same(sources, manifests)
    wanted = _wanted(config.ids)
    choice = _Choice(config, wanted, _held_out(config) if manifests[0]["split"] == "train" else ())
    lines: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    for source, manifest in zip(sources, manifests, strict=True):
        table = read_index(source, manifest)
        kept = table.filter(pa.array(choice.of(table), pa.bool_()))
        used = sorted(set(kept["shard"].to_pylist()))
        places = {shard: len(lines) + place for place, shard in enumerate(used)}
        for shard in used:
            line = manifest["shards"][shard]
            lines.append({"folder": place.reference(folder_of(source, line)), **_without(line)})
        moved = pa.array([places[shard] for shard in kept["shard"].to_pylist()], pa.int32())
        tables.append(kept.set_column(SCHEMA.names.index("shard"), SCHEMA.field("shard"), moved))
    choice.refuse_unknown(sources)
    table = pa.concat_tables(tables)
    if not len(table):
        raise ValueError(
            f"no row of {', '.join(config.caches)} is left: {dict(choice.left_out)}; widen the "
            "choice"
        )
    key = content_hash([manifests[0]["target"], [line["key"] for line in lines], _places(table)])
    _refuse(place, key, overwrite)
    manifest = write_manifest(place, key, _about(config, sources, manifests), table, lines, [])
    return Combined(place.place, manifest, dict(choice.left_out))


def heldout_caches(caches: Sequence[str]) -> tuple[str, ...]:
    """The held-out caches that lie beside these, finished or not."""
    places = [f"{cache.rstrip('/')}-heldout" for cache in caches]
    return tuple(place for place in places if Store(place).names())


def _held_out(config: CombineConfig) -> set[str]:
    """Token hashes of all rows that are held out beside the caches."""
    hashes: set[str] = set()
    for place in heldout_caches(config.caches):
        store = Store(place)
        table = read_index(store, read_manifest(store))
        hashes.update(table["sha256"].to_pylist())
    return hashes


class _Choice:
    """Which rows are taken, cache after cache; counts the others by reason."""

    def __init__(
        self, config: CombineConfig, wanted: set[str] | None, held_out: Collection[str]
    ) -> None:
        self._config = config
        self._wanted = wanted
        self._held_out = held_out
        self._met: set[tuple[str, str]] = set()
        self._found: set[str] = set()
        self._tokens = 0
        self._full = False
        self.left_out: Counter[str] = Counter()

    def of(self, table: pa.Table) -> list[bool]:
        """One verdict a row of an index. Rows repeat those of earlier caches, not of their own:
        what stands twice in one cache was wanted twice."""
        names = ("id", "length", "sha256", "mask_sha256")
        columns = [table[name].to_pylist() for name in names]
        reasons = [self._reason(*row) for row in zip(*columns, strict=True)]
        marks = zip(*columns[2:], strict=True)
        self._met.update(mark for mark, reason in zip(marks, reasons, strict=True) if not reason)
        self.left_out.update(reason for reason in reasons if reason)
        return [not reason for reason in reasons]

    def _reason(self, name: str, length: int, digest: str, mask: str) -> str:
        config = self._config
        if self._wanted is not None and name not in self._wanted:
            return "id"
        self._found.add(name)
        if length < config.min_length or length > (config.max_length or length):
            return "length"
        if digest in self._held_out:
            return "heldout"
        if (digest, mask) in self._met:
            return "duplicate"
        # nothing is taken after the first row that does not fit, as in a dump
        self._full |= self._tokens + length > (config.max_tokens or self._tokens + length)
        if self._full:
            return "max_tokens"
        self._tokens += length
        return ""

    def refuse_unknown(self, sources: Sequence[Store]) -> None:
        """Every wanted id must have been met."""
        unknown = sorted((self._wanted or set()) - self._found)
        if unknown:
            raise ValueError(
                f"{self._config.ids}: {len(unknown)} ids are in none of "
                f"{', '.join(source.place for source in sources)} (first: {unknown[:5]}); correct "
                "the file"
            )


def _same(sources: list[Store], manifests: list[dict[str, Any]]) -> None:
    first = manifests[0]
    for source, manifest in zip(sources[1:], manifests[1:], strict=True):
        for name in _SAME:
            if manifest[name] != first[name]:
                raise ValueError(
                    f"{source.place}: its {name} is {manifest[name]!r}, that of {sources[0].place} "
                    f"is {first[name]!r}; only caches of one kind become one"
                )


def _wanted(path: str | None) -> set[str] | None:
    if path is None:
        return None
    try:
        lines = Path(expanded(path)).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"combine.ids={path}: no such file; give one id a line") from None
    return {line for line in lines if line}


def _without(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "folder"}


def _places(table: pa.Table) -> list[list[int]]:
    return [table[name].to_pylist() for name in ("shard", "start", "length")]


def _refuse(out: Store, key: str, overwrite: bool) -> None:
    there = find_manifest(out)
    if there is None:
        if any(name.startswith("shard-") for name in out.names()):
            raise ValueError(f"{out.place} holds shards of an unfinished dump; choose another out")
        return
    if "parts" not in there:
        raise ValueError(f"{out.place} holds something else than a combination; choose another out")
    if there.get("key") != key and not overwrite:
        raise ValueError(
            f"{out.place} holds another combination, of {', '.join(map(str, there['parts']))}; "
            "choose another out, or overwrite=true to replace it"
        )


def _about(
    config: CombineConfig, sources: list[Store], manifests: list[dict[str, Any]]
) -> dict[str, Any]:
    """The manifest's part that describes where the rows come from."""
    rows_keys = [key for manifest in manifests for key in _list(manifest["rows_key"])]
    both = {
        name: ", ".join(sorted({str(manifest[name]) for manifest in manifests}))
        for name in ("engine", "target_dtype")
    }
    return {
        **{name: manifests[0][name] for name in _SAME},
        **both,
        "rows_key": list(dict.fromkeys(rows_keys)),
        "parts": [source.place for source in sources],
        "choice": {
            name: getattr(config, name)
            for name in ("max_tokens", "min_length", "max_length", "ids")
        },
        "probes": [probes for manifest in manifests for probes in _list(manifest["probes"])],
        "identity": {},
    }


def _list(value: Any) -> list[Any]:
    """What a combination holds of each of its parts, a cache once."""
    return value if isinstance(value, list) else [value]
