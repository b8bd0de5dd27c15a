"""Token rows on disk: one Parquet file for each split, read lazily by row group.

Columns: `id` text, `index` int64 (place in the source), `part` int32 (which stable prefix of the
record), `tokens` list<int32>, `supervised` list<bool>, `length` and `num_supervised` int32,
`sha256` of the row's tokens (little-endian int32), and in heldout.parquet `messages` (JSON).
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..models.files import content_hash, read_json, sha256_file

FORMAT = 2
SPLITS = ("train", "heldout")
FILES = (*SPLITS, "dropped", "unproven")
REGENERATED = "rows-regenerated"
"""Name of the folder that `regenerate` writes; `prepare` writes the others."""
_GROUP_ROWS = 256
_CACHED_GROUPS = 4
_SHAPE: dict[str, type] = {
    "key": str,
    "identity": dict,
    "config": dict,
    "tokenizer": dict,
    "counts": dict,
    "files": dict,
}


def schema(with_messages: bool) -> pa.Schema:
    """The columns of a split's file."""
    fields = [
        pa.field("id", pa.string()),
        pa.field("index", pa.int64()),
        pa.field("part", pa.int32()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("supervised", pa.list_(pa.bool_())),
        pa.field("length", pa.int32()),
        pa.field("num_supervised", pa.int32()),
        pa.field("sha256", pa.string()),
    ]
    return pa.schema([*fields, pa.field("messages", pa.string())] if with_messages else fields)


def token_hash(tokens: np.ndarray) -> str:
    """Hex SHA-256 of ids [n] as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Row:
    """One row: tokens [n] int32, supervised [n] bool, the hash of the tokens, the record it came
    from and which of the record's stable prefixes it is.
    """

    id: str
    index: int
    tokens: np.ndarray
    supervised: np.ndarray
    sha256: str
    messages: list[dict[str, Any]] | None = None
    part: int = 0


class RowWriter:
    """Writes rows in flat memory, a row group at a time. `close` makes the file whole."""

    def __init__(self, path: Path, with_messages: bool = False) -> None:
        self._schema = schema(with_messages)
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self.count = 0

    def add(self, row: Row) -> None:
        """Append one row."""
        self._rows.append(row)
        self.count += 1
        if len(self._rows) == _GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is buffered and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        borders = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        tokens = pa.array(np.concatenate([row.tokens for row in rows]), pa.int32())
        supervised = pa.array(np.concatenate([row.supervised for row in rows]), pa.bool_())
        columns: list[Any] = [
            pa.array([row.id for row in rows], pa.string()),
            pa.array([row.index for row in rows], pa.int64()),
            pa.array([row.part for row in rows], pa.int32()),
            pa.ListArray.from_arrays(borders, tokens),
            pa.ListArray.from_arrays(borders, supervised),
            pa.array(lengths),
            pa.array(np.array([row.supervised.sum() for row in rows], np.int32)),
            pa.array([row.sha256 for row in rows], pa.string()),
        ]
        if "messages" in self._schema.names:
            texts = [json.dumps(row.messages, ensure_ascii=False) for row in rows]
            columns.append(pa.array(texts, pa.string()))
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


class Rows:
    """The rows of one split, in file order; `rows[i]` reads one row group at most.

    Attributes:
        folder, split: where they lie. manifest: the folder's manifest.json. key: the hash of all
            that made them.
        lengths, num_supervised: [R] int32.
    """

    def __init__(self, folder: Path, split: str, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        self.key: str = manifest["key"]
        self._path = folder / f"{split}.parquet"
        try:
            self._file = pq.ParquetFile(self._path, memory_map=True)
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{self._path} cannot be read ({error}); {_again(folder)}") from error
        expected = schema(split == "heldout").names
        if self._file.schema_arrow.names != expected:
            raise ValueError(
                f"{self._path} has the columns {self._file.schema_arrow.names}, expected "
                f"{expected}; {_again(folder)}"
            )
        sizes = self._file.read(columns=["length", "num_supervised"])
        self.lengths: np.ndarray = sizes["length"].to_numpy()
        self.num_supervised: np.ndarray = sizes["num_supervised"].to_numpy()
        if manifest["counts"].get(split) != len(self.lengths):
            raise ValueError(
                f"{self._path} holds {len(self.lengths)} rows, its manifest counts "
                f"{manifest['counts'].get(split)!r}; {_again(folder)}"
            )
        groups = range(self._file.num_row_groups)
        counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()

    @classmethod
    def open(cls, folder: Path | str, split: str = "train", verify: bool = True) -> Rows:
        """Open the rows that `prepare` or `regenerate` wrote.

        Args:
            split: "train" or "heldout".
            verify: compare the file's SHA-256 with the manifest's. Nothing else would show a loss
                mask that was changed.
        Raises:
            ValueError: unknown split, no manifest (not finished), another format, damaged file.
        """
        folder = Path(folder)
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: choose one of {', '.join(SPLITS)}")
        manifest = read_manifest(folder)
        if manifest is None:
            raise ValueError(
                f"{folder} holds no finished rows (no manifest.json); run "
                f"`draftsmith {_maker(folder)}` with this work folder first"
            )
        if manifest["format"] != FORMAT:
            raise ValueError(
                f"{folder}/manifest.json is of format {manifest['format']!r}; this version reads "
                f"format {FORMAT}: {_again(folder)}"
            )
        name = f"{split}.parquet"
        if verify and file_facts(folder / name) != manifest["files"].get(name):
            raise ValueError(
                f"{folder / name} differs from its manifest (checksum); {_again(folder)}"
            )
        return cls(folder, split, manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        """Row `index`, 0 <= index < len; its token hash and the sum of its mask are checked."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self._path}")
        group = int(np.searchsorted(self._first, index, "right")) - 1
        table, place = self._group(group), index - int(self._first[group])
        tokens = table["tokens"][place].values.to_numpy()
        row = Row(
            id=table["id"][place].as_py(),
            index=table["index"][place].as_py(),
            tokens=tokens,
            supervised=table["supervised"][place].values.to_numpy(zero_copy_only=False),
            sha256=table["sha256"][place].as_py(),
            messages=json.loads(table["messages"][place].as_py())
            if "messages" in table.column_names
            else None,
            part=table["part"][place].as_py(),
        )
        if token_hash(tokens) != row.sha256:
            raise ValueError(
                f"{self._path}: row {index} (id {row.id!r}): its tokens do not match their hash; "
                f"{_again(self.folder)}"
            )
        count = int(self.num_supervised[index])
        if len(row.supervised) != len(tokens) or int(row.supervised.sum()) != count:
            raise ValueError(
                f"{self._path}: row {index} (id {row.id!r}): its mask marks "
                f"{int(row.supervised.sum())} of {len(row.supervised)} tokens, the file counts "
                f"{count} of {len(tokens)}; {_again(self.folder)}"
            )
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def require_tokenizer(self, fingerprint: dict[str, str]) -> None:
        """The rows must have been made with the tokenizer and chat template of this target's
        fingerprint.

        Raises:
            ValueError: names the field and both values.
        """
        made = self.manifest.get("tokenizer", {})
        for name in ("tokenizer", "chat_template"):
            if made.get(name) != fingerprint.get(name):
                raise ValueError(
                    f"{self.folder}: {name} of the rows is {made.get(name)!r}, the target's is "
                    f"{fingerprint.get(name)!r}; run prepare with this target"
                )

    def require_length(self, limit: int | None) -> None:
        """No row may be longer than the target can read.

        Args:
            limit: its positions (see models.target.longest_text); None where it names none.
        Raises:
            ValueError: names the longest row and both lengths.
        """
        if limit is None or not len(self) or int(self.lengths.max()) <= limit:
            return
        longest = int(self.lengths.argmax())
        raise ValueError(
            f"{self._path}: row {longest} has {int(self.lengths[longest])} tokens, the target "
            f"reads {limit} (max_position_embeddings in its config.json); prepare with "
            f"data.rows.max_length={limit} or less"
        )

    def supervised_tokens(self) -> Iterator[np.ndarray]:
        """The supervised ids of one row group after another, [m] int32."""
        for group in range(self._file.num_row_groups):
            table = self._file.read_row_group(
                group, columns=["tokens", "supervised"]
            ).combine_chunks()
            tokens = table["tokens"].combine_chunks().flatten().to_numpy()
            mask = table["supervised"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            yield tokens[mask]

    def _group(self, group: int) -> pa.Table:
        if group not in self._groups:
            self._groups[group] = self._file.read_row_group(group).combine_chunks()
            if len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of rows; None where the folder has none, so that its rows are not finished.

    Raises:
        ValueError: a manifest of something else, or one that was altered; names the field.
    """
    place = folder / "manifest.json"
    if not place.exists():
        return None
    manifest = read_json(place)
    if not isinstance(manifest, dict) or "kind" not in manifest:
        raise ValueError(f"{place} is no manifest; delete it, and {_again(folder)}")
    if manifest["kind"] != "rows":
        raise ValueError(
            f"{folder} holds a {manifest['kind']!r}, not rows; name another folder for the rows"
        )
    if manifest.get("format") != FORMAT:  # of another version, whose fields are not known
        return {"identity": {}, "files": {}, "format": None, **manifest}
    for name, kind in _SHAPE.items():
        if not isinstance(manifest.get(name), kind):
            raise ValueError(
                f"{place}: {name} is {manifest.get(name)!r:.80}, not a {kind.__name__}; delete the "
                f"file, and {_again(folder)}"
            )
    if manifest["key"] != content_hash(manifest["identity"]):
        raise ValueError(
            f"{place}: key is not the hash of identity, so one of them was changed; delete the "
            f"file, and {_again(folder)}"
        )
    return manifest


def existing(out: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The manifest of finished rows in `out` and the names of its damaged files."""
    manifest = read_manifest(out)
    if manifest is None:
        return None, []
    if manifest["format"] != FORMAT:
        return manifest, ["manifest.json"]
    damaged = [name for name, facts in manifest["files"].items() if file_facts(out / name) != facts]
    damaged += [f"{name}.parquet" for name in FILES if f"{name}.parquet" not in manifest["files"]]
    return manifest, damaged if (out / "ledger.json").exists() else [*damaged, "ledger.json"]


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file; nothing of one that is not there."""
    if not path.exists():
        return {}
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _maker(folder: Path) -> str:
    """The command that writes the rows of a folder."""
    return "regenerate" if folder.name == REGENERATED else "prepare"


def _again(folder: Path) -> str:
    """The remedy for rows that cannot be used."""
    return f"run {_maker(folder)} again"
