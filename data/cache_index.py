"""index.parquet and manifest.json of a cache: one line a row, one line a shard.

Columns of the index: `row` (its number in the token rows), `id`, `shard` (place in the manifest's
list), `start` (token offset in the shard), `length`, `sha256` of its tokens, `mask_sha256`,
`supervised` (how many tokens), `runs` (lengths of its unbroken supervised runs, one less for a run
that begins the row, since the row's first token has no head row).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..models.files import content_hash
from .quantise import DTYPES
from .shards import FORMAT, ShardRows
from .store import Store

INDEX, MANIFEST = "index.parquet", "manifest.json"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64()),
        pa.field("id", pa.string()),
        pa.field("shard", pa.int32()),
        pa.field("start", pa.int64()),
        pa.field("length", pa.int32()),
        pa.field("sha256", pa.string()),
        pa.field("mask_sha256", pa.string()),
        pa.field("supervised", pa.int32()),
        pa.field("runs", pa.list_(pa.int32())),
    ]
)
_WORDS = {str: "text", int: "a whole number", list: "a list", dict: "an object"}
_TEXTS = {str: str}  # any names
_SHARD = {"name": str, "key": str, "bytes": int, "header_sha256": str, "rows": int, "tokens": int}
_SHAPE: dict[Any, Any] = {
    "key": str,
    "engine": str,
    "target": _TEXTS,
    "target_dtype": str,
    "dtype": str,
    "rows_key": (str, [str]),
    "split": str,
    "num_layers": int,
    "identity": dict,
    "probes": (dict, [dict]),
    "boundaries": [int],
    "hidden_size": int,
    "counts": {"rows": int, "tokens": int, "supervised": int, "quarantined": int},
    "quarantined": [{"row": int, "id": str, "tokens": int}],
    "index": {"bytes": int, "sha256": str},
    "shards": [_SHARD],
    "sha256": str,
}
"""What every manifest has, beside `kind` and `format`: a type; [S], a list of S; (S, T), either; an
object with these fields at least."""


def index_of(contents: list[ShardRows]) -> pa.Table:
    """The index of shards that follow each other in the manifest."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for number, content in enumerate(contents):
        start = 0
        for place, length in enumerate(content.lengths):
            line = (
                content.rows[place],
                content.ids[place],
                number,
                start,
                length,
                content.sha256[place],
                content.masks[place],
                content.supervised[place],
                content.runs[place],
            )
            for name, value in zip(SCHEMA.names, line, strict=True):
                columns[name].append(value)
            start += length
    return pa.table(columns, schema=SCHEMA)


def write_manifest(
    store: Store,
    key: str,
    about: dict[str, Any],
    table: pa.Table,
    shards: list[dict[str, Any]],
    quarantined: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write the index, then the manifest, which makes the cache whole.

    Args:
        about: what the manifest says besides the files. table: the index. shards: their lines.
    """
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    data = buffer.getvalue()
    store.write(INDEX, [data])
    manifest = {
        "kind": "cache",
        "format": FORMAT,
        "key": key,
        **about,
        "counts": {**_counts(table), "quarantined": len(quarantined)},
        "quarantined": quarantined,
        "index": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "shards": shards,
        "complete": True,
    }
    manifest = sealed(manifest)
    store.write_json(MANIFEST, manifest)
    return manifest


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with `sha256`, that of all else in it (JSON with sorted keys, no spaces)."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return {**body, "sha256": content_hash(body)}


def read_manifest(store: Store) -> dict[str, Any]:
    """The manifest of a finished cache.

    Raises:
        ValueError: there is none (no cache, or an unfinished dump), it is damaged or was altered,
            or is of another kind or format.
    """
    manifest = find_manifest(store)
    if manifest is None:
        raise ValueError(_no_cache(store))
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{store.path(MANIFEST)} is of kind 'cache', format {manifest.get('format')!r}; this "
            f"version reads kind 'cache', format {FORMAT}: dump again"
        )
    return manifest


def find_manifest(store: Store) -> dict[str, Any] | None:
    """The manifest of a finished cache, None where there is none; one of another format is not
    looked into.

    Raises:
        ValueError: it is damaged or was altered, or is not that of a cache.
    """
    try:
        manifest = store.read_json(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):  # another process may just have removed it
        return None
    place = store.path(MANIFEST)
    if not isinstance(manifest, dict):
        raise ValueError(f"{place} holds no JSON object; delete it and run the same command again")
    if manifest.get("kind") != "cache":
        raise ValueError(
            f"{place} describes {manifest.get('kind')!r}, not a cache; name another folder"
        )
    if manifest.get("format") == FORMAT:
        _validate(manifest, place)
    return manifest


def _validate(manifest: dict[str, Any], place: str) -> None:
    """Refuse what the rest of the package could stumble over.

    Raises:
        ValueError: names the field.
    """
    verb = "combine" if "parts" in manifest else "dump"
    remedy = f"delete it and run {verb} again"
    if fault := _misfit(manifest, _SHAPE, ""):
        raise ValueError(f"{place} {fault}; {remedy}")
    if manifest["sha256"] != sealed(manifest)["sha256"]:
        raise ValueError(
            f"{place} differs from the checksum that it holds of itself; it is damaged or was "
            f"changed: {remedy}"
        )
    if manifest["dtype"] not in DTYPES:
        raise ValueError(
            f"{place}: dtype {manifest['dtype']!r} is not known; dump again with one of "
            f"{', '.join(DTYPES)}"
        )
    lines, boundaries = manifest["shards"], manifest["boundaries"]
    for wrong, what in (
        (not lines, "names no shard"),
        (
            not boundaries
            or sorted(set(boundaries) & set(range(manifest["num_layers"] + 1))) != boundaries,
            f"has the boundaries {boundaries} of {manifest['num_layers']} layers",
        ),
        (
            manifest["counts"]["quarantined"] != len(manifest["quarantined"]),
            f"counts {manifest['counts']['quarantined']} rows left out and names "
            f"{len(manifest['quarantined'])}",
        ),
        (
            any(not isinstance(line.get("folder", ""), str) for line in lines),
            "names a shard's folder by something else than text",
        ),
    ):
        if wrong:
            raise ValueError(f"{place} {what}; {remedy}")


def _misfit(value: Any, shape: Any, name: str) -> str:
    """Where `value` is not of the shape, in words; "" where it is."""
    if isinstance(shape, tuple):
        faults = [_misfit(value, each, name) for each in shape]
        return "" if "" in faults else faults[0]
    kind = shape if isinstance(shape, type) else type(shape)
    if type(value) is not kind:
        return f"has {value!r:.40} as {name}, expected {_WORDS[kind]}"
    inside: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(shape, list):
        inside = ((each, shape[0], f"{name}[{place}]") for place, each in enumerate(value))
    elif shape is _TEXTS:
        inside = ((each, str, f"{name}.{key}") for key, each in value.items())
    elif isinstance(shape, dict):
        if absent := [key for key in shape if key not in value]:
            return f"lacks {', '.join(f'{name}.{key}'.strip('.') for key in absent)}"
        inside = ((value[key], each, f"{name}.{key}".strip(".")) for key, each in shape.items())
    return next((fault for each in inside if (fault := _misfit(*each))), "")


def _no_cache(store: Store) -> str:
    """Why a folder without a manifest is none."""
    names = store.names()
    if any(name.startswith(("shard-", ".shard-")) for name in names):
        return (
            f"{store.place}: the dump is not finished (no manifest.json); run it again, it goes on"
        )
    if store.is_file():
        return f"{store.place} is a file; name the folder of a cache"
    if names or (store.local is not None and store.local.is_dir()):
        what = "holds no cache (neither manifest.json nor shards)"
    else:
        what = "does not exist"
    return f"{store.place} {what}; correct the name, or run `draftsmith dump`"


def read_index(store: Store, manifest: dict[str, Any]) -> pa.Table:
    """The index, its checksum verified, and what the manifest says of it.

    Raises:
        ValueError: missing, or it differs from the manifest.
    """
    place, fact = store.path(INDEX), manifest["index"]
    try:
        data = store.read(INDEX)
    except FileNotFoundError:
        raise ValueError(
            f"{place} is missing although the manifest names it; run dump again"
        ) from None
    if len(data) != fact["bytes"] or hashlib.sha256(data).hexdigest() != fact["sha256"]:
        raise ValueError(
            f"{place}: its {len(data)} bytes differ from what the manifest promises "
            f"({fact['bytes']} bytes, sha256 {fact['sha256'][:16]}); it is damaged: delete it and "
            "run dump again"
        )
    table = pq.read_table(io.BytesIO(data))
    if table.schema.names != SCHEMA.names:
        raise ValueError(
            f"{place} has the columns {table.schema.names}, expected {SCHEMA.names}; delete it and "
            "run dump again"
        )
    _match(table, manifest, store.path(MANIFEST))
    return table


def _match(table: pa.Table, manifest: dict[str, Any], place: str) -> None:
    """Every row lies inside a shard that the manifest names, and the counts are those of the rows.

    Raises:
        ValueError: names the row, or the count.
    """
    found, held = _counts(table), manifest["counts"]
    wrong = [name for name in found if found[name] != held[name]]
    if wrong:
        told = ", ".join(f"{name} {held[name]} ({found[name]})" for name in wrong)
        raise ValueError(
            f"{place}: its counts are not those of {INDEX}, which stand in brackets: {told}; "
            "delete it and run dump again"
        )
    shard, start, length = (table[name].to_numpy() for name in ("shard", "start", "length"))
    lines = manifest["shards"]
    known = (shard >= 0) & (shard < len(lines))
    tokens = np.array([line["tokens"] for line in lines], np.int64)
    inside = (start >= 0) & (length > 0) & (start + length <= tokens[np.where(known, shard, 0)])
    (lost,) = np.nonzero(~(known & inside))
    if len(lost):
        row = int(lost[0])
        raise ValueError(
            f"{place}: row {row} (id {table['id'][row].as_py()!r}) lies at {start[row]} in shard "
            f"{shard[row]}, outside the {len(lines)} shards it names; delete it and run dump again"
        )


def _counts(table: pa.Table) -> dict[str, int]:
    return {
        "rows": len(table),
        "tokens": int(table["length"].to_numpy().sum()),
        "supervised": int(table["supervised"].to_numpy().sum()),
    }
