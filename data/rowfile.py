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

from ..models.files import read_json, sha256_file

FORMAT = 2
SPLITS = ("train", "heldout")
FILES = (*SPLITS, "dropped", "unproven")
_GROUP_ROWS = 256
_CACHED_GROUPS = 4


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
            raise ValueError(f"{self._path} cannot be read ({error}); run prepare again") from error
        expected = schema(split == "heldout").names
        if self._file.schema_arrow.names != expected:
            raise ValueError(
                f"{self._path} has the columns {self._file.schema_arrow.names}, expected "
                f"{expected}; "
                "run prepare again"
            )
        sizes = self._file.read(columns=["length", "num_supervised"])
        self.lengths: np.ndarray = sizes["length"].to_numpy()
        self.num_supervised: np.ndarray = sizes["num_supervised"].to_numpy()
        groups = range(self._file.num_row_groups)
        counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()

    @classmethod
    def open(cls, folder: Path | str, split: str = "train", verify: bool = False) -> Rows:
        """Open the rows that `prepare` wrote.

        Args:
            split: "train" or "heldout".
            verify: compare the file's SHA-256 with the manifest's.
        Raises:
            ValueError: unknown split, no manifest (not finished), another format, damaged file.
        """
        folder = Path(folder)
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: choose one of {', '.join(SPLITS)}")
        if not (folder / "manifest.json").exists():
            raise ValueError(
                f"{folder} holds no finished rows (no manifest.json); run prepare into it"
            )
        manifest = read_json(folder / "manifest.json")
        if manifest.get("kind") != "rows" or manifest.get("format") != FORMAT:
            raise ValueError(
                f"{folder}/manifest.json is of kind {manifest.get('kind')!r}, format "
                f"{manifest.get('format')!r}; this version reads kind 'rows', format {FORMAT}: run "
                "prepare again"
            )
        name = f"{split}.parquet"
        if verify and sha256_file(folder / name) != manifest["files"][name]["sha256"]:
            raise ValueError(
                f"{folder / name} differs from its manifest (checksum); run prepare again"
            )
        return cls(folder, split, manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        """Row `index`, 0 <= index < len; its token hash is checked."""
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
                "run prepare again"
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


def existing(out: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The manifest of finished rows in `out` and the names of its damaged files."""
    if not (out / "manifest.json").exists():
        return None, []
    manifest = read_json(out / "manifest.json")
    if manifest.get("kind") != "rows":
        raise ValueError(
            f"{out} holds a {manifest.get('kind')!r}, not rows; choose another folder for the rows"
        )
    files = {**manifest.get("files", {})}
    damaged = [name for name, facts in files.items() if file_facts(out / name) != facts]
    return manifest, damaged if (out / "ledger.json").exists() else [*damaged, "ledger.json"]


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file; nothing of one that is not there."""
    if not path.exists():
        return {}
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
