"""index.parquet and manifest.json of a cache: one line a row, one line a shard.

Columns of the index: `row` (its number in the token rows), `id`, `shard` (place in the manifest's
list), `start` (token offset in the shard), `length`, `sha256` of its tokens, `mask_sha256`,
`supervised` (how many tokens), `runs` (lengths of its unbroken supervised runs, one less for a run
that begins the row, since the row's first token has no head row).
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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
FIELDS = (
    "key",
    "engine",
    "target",
    "target_dtype",
    "dtype",
    "rows_key",
    "split",
    "num_layers",
    "probes",
    "boundaries",
    "hidden_size",
    "counts",
    "quarantined",
    "index",
    "shards",
)
"""What every manifest has, beside `kind` and `format`."""


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
        "counts": {
            "rows": len(table),
            "tokens": int(table["length"].to_numpy().sum()),
            "supervised": int(table["supervised"].to_numpy().sum()),
            "quarantined": len(quarantined),
        },
        "quarantined": quarantined,
        "index": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "shards": shards,
        "complete": True,
    }
    store.write_json(MANIFEST, manifest)
    return manifest


def read_manifest(store: Store) -> dict[str, Any]:
    """The manifest of a finished cache.

    Raises:
        ValueError: there is none (the dump is not finished), it is damaged, of another kind or
            format, or a field is missing.
    """
    if not store.exists(MANIFEST):
        raise ValueError(
            f"{store.place}: the dump is not finished (no manifest.json); run it again, it goes on"
        )
    manifest = store.read_json(MANIFEST)
    place = store.path(MANIFEST)
    if not isinstance(manifest, dict):
        raise ValueError(f"{place} holds no JSON object; delete it and run dump again")
    if manifest.get("kind") != "cache" or manifest.get("format") != FORMAT:
        raise ValueError(
            f"{place} is of kind {manifest.get('kind')!r}, format {manifest.get('format')!r}; this "
            f"version reads kind 'cache', format {FORMAT}: dump again"
        )
    absent = [name for name in FIELDS if name not in manifest]
    if absent:
        raise ValueError(f"{place} lacks {', '.join(absent)}; delete it and run dump again")
    return manifest


def read_index(store: Store, fact: dict[str, Any]) -> pa.Table:
    """The index, its checksum verified.

    Raises:
        ValueError: missing, or it differs from the manifest's line `fact`.
    """
    place = store.path(INDEX)
    if not store.exists(INDEX):
        raise ValueError(f"{place} is missing although the manifest names it; run dump again")
    data = store.read(INDEX)
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
    return table
