"""`prepare`: conversations -> token rows with an exact loss mask, and a ledger of what is missing.

Folder: train.parquet, heldout.parquet (see rowfile.py), ledger.json, dropped.parquet,
unproven.parquet (see ledger.py), manifest.json. The manifest is written last and holds `key`, the
hash of all that determines the rows; a folder without it is unfinished. A folder whose key is the
one asked for is reused, any other is rebuilt, and the fields that changed are named.

A record gives one row for each stable prefix of its conversation (see render.py), mostly one. Which
conversations are held out, holdout.py says. Records that are added at the end of a source leave the
earlier training rows as they are, in their order.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..models.files import atomic_write_json, commit, content_hash, read_json
from .clean import clean
from .cleaning import DEFAULT, CleaningConfig
from .conversations import Conversation, Dropped
from .cut import cut_part
from .holdout import Holdout, Kept
from .ledger import DROPPED, UNPROVEN, Ledger, TableWriter
from .render import Rendered, Renderer
from .rowfile import (
    FILES,
    FORMAT,
    SPLITS,
    Row,
    Rows,
    RowWriter,
    existing,
    file_facts,
    token_hash,
)
from .schemas import SCHEMAS
from .sources import RecordSource, open_source
from .verdict import find_warnings, refuse_useless

__all__ = ["Prepared", "Progress", "Row", "Rows", "RowsConfig", "prepare"]

Progress = Callable[[int, int | None], None]
RULES = 3  # raised when the rules of clean.py or render.py change what a record becomes
_BATCH = 128


@dataclass(frozen=True)
class RowsConfig:
    """What becomes a row."""

    source: str
    """A file or folder, pkg://package/inside, hf://owner/name/file or
    hf://owner/name[@revision][?config=NAME&split=NAME]: JSON, JSONL, Parquet, Arrow or text."""
    torn: str = "refuse"
    """When a file stops inside a record: refuse, or salvage the whole ones."""
    schema: str = "auto"
    """Form of the records: auto sees it from each, a name (sharegpt, openai, preference, alpaca,
    prompt_response, text) leaves out those of another form."""
    cleaning: CleaningConfig = DEFAULT
    max_records: int | None = None
    """Read only the first so many records."""
    max_length: int | None = None
    """Tokens of a row; what lies behind is cut off. null is the target's own limit."""
    cut_mid_answer: str = "keep"
    """A row that max_length cuts within an answer: keep what is left of it, trim the row to its
    last whole answer, or drop the row."""
    duplicates: str = "keep"
    """Records with the content of an earlier one: keep or drop. A repeat of a held-out conversation
    is never trained on."""
    min_supervised: int = 2
    """A row is kept when one of its answers has so many tokens; a head needs two for its first
    target.
    """
    holdout: int = 64
    """Conversations that are kept out of training, chosen by content."""
    seed: int = 0
    """Chooses among contents for the hold-out."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template; must be those of serving."""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError(
                "data.rows.source is empty, which would be the current folder: give a file or "
                "folder (. is the current one), pkg://… or hf://…"
            )
        if self.schema not in ("auto", *SCHEMAS):
            raise ValueError(f"schema {self.schema!r}: choose one of auto, {', '.join(SCHEMAS)}")
        if self.max_length is not None and self.max_length < 3:
            raise ValueError(f"max_length {self.max_length}: a row needs at least 3 tokens")
        for name, choices in (
            ("cut_mid_answer", ("keep", "trim", "drop")),
            ("duplicates", ("keep", "drop")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}"
                )
        if self.min_supervised < 2:
            raise ValueError(
                f"min_supervised {self.min_supervised}: must be at least 2, since a head predicts "
                "the second token "
                "of an answer from the first"
            )
        if self.holdout < 0:
            raise ValueError(f"holdout {self.holdout}: must be 0 or more")
        if self.max_records is not None and self.max_records < 1:
            raise ValueError(f"max_records {self.max_records}: must be 1 or more, or null for all")


@dataclass(frozen=True)
class Prepared:
    """The outcome: `reused` when nothing had to be done, else `changed` names what differed from
    the old rows.
    """

    folder: Path
    manifest: dict[str, Any]
    ledger: dict[str, Any]
    reused: bool
    changed: tuple[str, ...]


def prepare(
    config: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_fingerprint: dict[str, str],
    out: Path | str,
    progress: Progress | None = None,
    limit: int | None = None,
) -> Prepared:
    """Write token rows into `out`, or find them there already.

    Args:
        limit: tokens that the target can read, which max_length may not exceed; the length of
            rows where that is null.
        tokenizer_fingerprint: of the target's tokenizer and chat template; other fields are not
            looked at.
        progress: called with (records done, records to do or None).
    Raises:
        ValueError: no known length or one beyond the limit, unreadable source, no chat template,
            no supervised token anywhere, a mask that is true everywhere, or nothing left to train
            on; with the reason and the remedy.
    """
    out = Path(out)
    if config.max_length is None:
        if limit is None:
            raise ValueError(
                "max_length is null and the target names no limit of its own "
                "(max_position_embeddings in config.json); give data.rows.max_length"
            )
        config = replace(config, max_length=limit)
    elif limit is not None and config.max_length > limit:
        raise ValueError(
            f"data.rows.max_length={config.max_length}: the target reads {limit} tokens "
            f"(max_position_embeddings in its config.json); give {limit} or less, or null for its "
            "own limit"
        )
    source = open_source(config.source, config.torn)
    identity = _identity(config, tokenizer_fingerprint, source.identity)
    old, damage = existing(out)
    changed = _changed(old, identity) or damage
    if old is not None and not changed:
        return Prepared(out, old, read_json(out / "ledger.json"), True, ())
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob(".*.tmp"):
        stale.unlink()
    temporary = {name: out / f".{name}.parquet.{os.getpid()}.tmp" for name in FILES}
    try:
        ledger = _build(config, tokenizer, source, temporary, progress).to_json()
        manifest = {
            "kind": "rows",
            "format": FORMAT,
            "key": content_hash(identity),
            "identity": identity,
            "config": asdict(config),
            "tokenizer": dict(tokenizer_fingerprint),
            "counts": {**ledger["rows"], **ledger["tokens"]},
            "files": {f"{name}.parquet": file_facts(path) for name, path in temporary.items()},
        }
        (out / "manifest.json").unlink(missing_ok=True)
        for name, path in temporary.items():
            commit(path, out / f"{name}.parquet")
        atomic_write_json(out / "ledger.json", ledger)
        atomic_write_json(out / "manifest.json", manifest)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"the disk under {out} is full; free some space and run prepare again"
            ) from error
        raise
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return Prepared(out, manifest, ledger, False, tuple(changed))


def _identity(
    config: RowsConfig, tokenizer: dict[str, str], content: dict[str, Any]
) -> dict[str, Any]:
    """Everything that determines the rows; where the source lies does not."""
    settings = asdict(config) | {"source": content}
    named = {name: tokenizer.get(name, "") for name in ("tokenizer", "chat_template")}
    return {"format": FORMAT, "rules": RULES, **settings, **named}


def _changed(old: dict[str, Any] | None, identity: dict[str, Any]) -> list[str]:
    if old is None:
        return []
    before = old.get("identity", {})
    return [name for name in identity if before.get(name) != identity[name]]


def _build(
    config: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: RecordSource,
    files: dict[str, Path],
    progress: Progress | None,
) -> Ledger:
    """Stream the source into the files."""
    ledger = Ledger(
        config.source,
        TableWriter(files["dropped"], DROPPED),
        TableWriter(files["unproven"], UNPROVEN),
        form=source.form,
    )
    writers = {split: RowWriter(files[split], split == "heldout") for split in SPLITS}
    holdout = Holdout(config.holdout, config.seed)
    try:
        for record in _records(config, tokenizer, source, ledger, progress):
            for leaving in holdout.give(record):
                _write(writers["train"], leaving, "train", ledger)
        for record, repeats in holdout.rest():
            _write(writers["heldout"], record, "heldout", ledger)
            for name, index in repeats:
                detail = f"record {record.index} ({record.id}) with this content is held out"
                ledger.drop(Dropped("repeats_heldout", name, detail), index)
    finally:
        for writer in (*writers.values(), ledger):
            writer.close()
    refuse_useless(ledger, config.holdout)
    ledger.warnings = find_warnings(ledger, _length(config))
    return ledger


def _write(writer: RowWriter, record: Kept, split: str, ledger: Ledger) -> None:
    ledger.kept += 1
    ledger.rows.update(record.notes)
    for row in record.rows:
        writer.add(row)
        ledger.count_row(split, len(row.tokens), int(row.supervised.sum()))


def _records(
    config: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: RecordSource,
    ledger: Ledger,
    progress: Progress | None,
) -> Iterator[Kept]:
    """Every record that becomes rows, in file order."""
    renderer = Renderer(tokenizer, config.template_kwargs, config.cleaning.control_tokens)
    ledger.template = renderer.describe()
    batch: list[tuple[int, Conversation]] = []
    seen: set[bytes] = set()
    for index, conversation in _cleaned(source, config, ledger):
        batch.append((index, conversation))
        if len(batch) == _BATCH:
            yield from _finish(batch, renderer, config, ledger, seen)
            batch = []
            if progress:
                progress(ledger.read, config.max_records)
    yield from _finish(batch, renderer, config, ledger, seen)
    ledger.torn = source.torn
    if progress:
        progress(ledger.read, ledger.read)


def _cleaned(
    source: RecordSource, config: RowsConfig, ledger: Ledger
) -> Iterator[tuple[int, Conversation]]:
    for index, record in source:
        ledger.read += 1
        found = clean(record, index, ledger.turns, config.cleaning, config.schema)
        if isinstance(found, Dropped):
            ledger.drop(found, index)
        else:
            yield index, found
        if ledger.read == config.max_records:
            return


def _finish(
    batch: list[tuple[int, Conversation]],
    renderer: Renderer,
    config: RowsConfig,
    ledger: Ledger,
    seen: set[bytes],
) -> Iterator[Kept]:
    """Render, cut to length and judge one batch; `seen` holds the contents of earlier records."""
    conversations = [conversation for _, conversation in batch]
    for (index, _), rendered in zip(
        batch, renderer.render(conversations, ledger.turns), strict=True
    ):
        if isinstance(rendered, Dropped):
            ledger.drop(rendered, index)
            continue
        ledger.name_unproven(index, rendered.conversation.id, rendered.unproven)
        digest = bytes.fromhex(rendered.conversation.content_hash)
        repeats = digest[:16] in seen
        seen.add(digest[:16])
        ledger.repeats += repeats
        if repeats and config.duplicates == "drop":
            ledger.drop(Dropped("duplicate", rendered.conversation.id), index)
            continue
        record = _judge(rendered, index, digest, config)
        if isinstance(record, Dropped):
            ledger.drop(record, index)
        else:
            yield record


def _judge(rendered: Rendered, index: int, digest: bytes, config: RowsConfig) -> Kept | Dropped:
    """The rows of a record, or why none of its parts is of use (the reason of the first)."""
    talk = rendered.conversation
    if not rendered.parts:
        reasons = ", ".join(f"turn {turn + 1}: {why}" for turn, why in rendered.unproven[:4])
        return Dropped("unproven", talk.id, f"no answer's place could be proven ({reasons})")
    notes: Counter[str] = Counter()
    rows: list[Row] = []
    lost: list[str] = []
    for number, part in enumerate(rendered.parts):
        cut = cut_part(part, _length(config), config.cut_mid_answer, config.min_supervised, notes)
        if isinstance(cut, str):
            lost.append(cut)
        else:
            tokens, supervised = cut
            messages = talk.messages()
            digits = token_hash(tokens)
            rows.append(Row(talk.id, index, tokens, supervised, digits, messages, number))
    if not rows:
        length = len(rendered.parts[0].tokens)
        return Dropped(lost[0], talk.id, f"{length} tokens, max_length {config.max_length}")
    notes.update(f"lost_parts:{reason}" for reason in lost)
    notes["further_parts"] += len(rows) - 1
    return Kept(talk.id, index, digest, tuple(rows), +notes)


def _length(config: RowsConfig) -> int:
    """Tokens of a row."""
    assert config.max_length is not None  # `prepare` has put the target's own limit there
    return config.max_length
