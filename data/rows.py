"""`prepare`: conversations -> token rows with an exact loss mask, and a ledger of what is missing.

Folder: train.parquet, heldout.parquet (see rowfile.py), ledger.json, manifest.json. The manifest is
written last and holds `key`, the hash of all that determines the rows; a folder without it is
unfinished. A folder whose key is the one asked for is reused, any other is rebuilt, and the fields
that changed are named.

Held out are the `holdout` conversations with the smallest seeded content hash: the choice does not
depend on the file's order, and what the whole file holds out is held out of every part of it too.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..models.files import atomic_write_json, commit, content_hash, read_json, sha256_file
from .cleaning import DEFAULT, CleaningConfig
from .conversations import Conversation, Dropped, clean
from .ledger import Ledger
from .render import Rendered, Renderer
from .rowfile import FORMAT, SPLITS, Row, Rows, RowWriter, show, token_hash
from .schemas import SCHEMAS
from .sources import RecordSource, open_source

__all__ = ["Prepared", "Progress", "Row", "Rows", "RowsConfig", "prepare", "show"]

Progress = Callable[[int, int | None], None]
RULES = 2  # raised when the rules of conversations.py or render.py change what a record becomes
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
    max_length: int = 2048
    """Tokens of a row; what lies behind is cut off."""
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
        if self.schema not in ("auto", *SCHEMAS):
            raise ValueError(f"schema {self.schema!r}: choose one of auto, {', '.join(SCHEMAS)}")
        if self.max_length < 3:
            raise ValueError(f"max_length {self.max_length}: a row needs at least 3 tokens")
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
) -> Prepared:
    """Write token rows into `out`, or find them there already.

    Args:
        tokenizer_fingerprint: of the target's tokenizer and chat template; other fields are not
            looked at.
        progress: called with (records done, records to do or None).
    Raises:
        ValueError: unreadable source, no chat template, no supervised token anywhere, a mask that
            is true everywhere, or nothing left to train on; with the reason and the remedy.
    """
    out = Path(out)
    source = open_source(config.source, config.torn)
    identity = _identity(config, tokenizer_fingerprint, source.identity)
    old, damage = _existing(out)
    changed = _changed(old, identity) or damage
    if old is not None and not changed:
        return Prepared(out, old, read_json(out / "ledger.json"), True, ())
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob(".*.tmp"):
        stale.unlink()
    temporary = {split: out / f".{split}.parquet.{os.getpid()}.tmp" for split in SPLITS}
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
            "files": {f"{split}.parquet": _facts(path) for split, path in temporary.items()},
        }
        (out / "manifest.json").unlink(missing_ok=True)
        for split, path in temporary.items():
            commit(path, out / f"{split}.parquet")
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


def _existing(out: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The manifest of finished rows in `out` and the names of its damaged files."""
    if not (out / "manifest.json").exists():
        return None, []
    manifest = read_json(out / "manifest.json")
    if manifest.get("kind") != "rows":
        raise ValueError(
            f"{out} holds a {manifest.get('kind')!r}, not rows; choose another folder for the rows"
        )
    files = {**manifest.get("files", {})}
    damaged = [name for name, facts in files.items() if _facts(out / name) != facts]
    return manifest, damaged if (out / "ledger.json").exists() else [*damaged, "ledger.json"]


def _changed(old: dict[str, Any] | None, identity: dict[str, Any]) -> list[str]:
    if old is None:
        return []
    before = old.get("identity", {})
    return [name for name in identity if before.get(name) != identity[name]]


def _facts(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _build(
    config: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: RecordSource,
    files: dict[str, Path],
    progress: Progress | None,
) -> Ledger:
    """Stream the source into the two files."""
    ledger = Ledger(config.source)
    writers = {split: RowWriter(files[split], split == "heldout") for split in SPLITS}
    held: list[
        tuple[int, int, Row]
    ] = []  # a heap whose top has the largest hash; the second field breaks ties
    try:
        for order, (rank, row) in enumerate(_rows(config, tokenizer, source, ledger, progress)):
            heapq.heappush(held, (-rank, order, row))
            if len(held) > config.holdout:
                _write(writers["train"], heapq.heappop(held)[2], "train", ledger)
        for _, _, row in sorted(held, key=lambda item: -item[0]):
            _write(writers["heldout"], row, "heldout", ledger)
    finally:
        for writer in writers.values():
            writer.close()
    _refuse_useless(config, ledger)
    return ledger


def _write(writer: RowWriter, row: Row, split: str, ledger: Ledger) -> None:
    writer.add(row)
    ledger.count_row(split, len(row.tokens), int(row.supervised.sum()))


def _rows(
    config: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: RecordSource,
    ledger: Ledger,
    progress: Progress | None,
) -> Iterator[tuple[int, Row]]:
    """(hold-out rank, row) of every record that is kept, in file order."""
    renderer = Renderer(tokenizer, config.template_kwargs)
    batch: list[tuple[int, Conversation]] = []
    for index, conversation in _unique(source, config, ledger):
        batch.append((index, conversation))
        if len(batch) == _BATCH:
            yield from _finish(batch, renderer, config, ledger)
            batch = []
            if progress:
                progress(ledger.read, config.max_records)
    yield from _finish(batch, renderer, config, ledger)
    ledger.torn = source.torn
    if progress:
        progress(ledger.read, ledger.read)


def _unique(
    source: RecordSource, config: RowsConfig, ledger: Ledger
) -> Iterator[tuple[int, Conversation]]:
    """Cleaned conversations, exact repeats left out."""
    seen: set[bytes] = set()
    for index, record in source:
        ledger.read += 1
        found = clean(record, index, ledger.turns, config.cleaning, config.schema)
        if isinstance(found, Dropped):
            ledger.drop(found, index)
        else:
            digest = bytes.fromhex(found.content_hash)[:16]
            if digest in seen:
                ledger.drop(Dropped("duplicate", found.id), index)
            else:
                seen.add(digest)
                yield index, found
        if ledger.read == config.max_records:
            return


def _finish(
    batch: list[tuple[int, Conversation]], renderer: Renderer, config: RowsConfig, ledger: Ledger
) -> Iterator[tuple[int, Row]]:
    """Render, cut to length and judge one batch."""
    conversations = [conversation for _, conversation in batch]
    for (index, conversation), rendered in zip(
        batch, renderer.render(conversations, ledger.turns), strict=True
    ):
        made = (
            rendered
            if isinstance(rendered, Dropped)
            else _cut(rendered, conversation, config, ledger)
        )
        if isinstance(made, Dropped):
            ledger.drop(made, index)
            continue
        tokens, supervised = made
        ledger.kept += 1
        seeded = f"{config.seed}:{conversation.content_hash}".encode()
        rank = int.from_bytes(hashlib.sha256(seeded).digest()[:8], "big")
        yield (
            rank,
            Row(
                conversation.id,
                index,
                tokens,
                supervised,
                token_hash(tokens),
                conversation.messages(),
            ),
        )


def _cut(
    rendered: Rendered, conversation: Conversation, config: RowsConfig, ledger: Ledger
) -> tuple[np.ndarray, np.ndarray] | Dropped:
    """Cut at max_length, then behind the last supervised token: what follows it teaches nothing."""
    limit = config.max_length
    tokens = np.array(rendered.tokens[:limit], np.int32)
    supervised = np.array(rendered.supervised[:limit], np.bool_)
    if not any(rendered.supervised):
        return Dropped("template_rewrites", conversation.id, "no answer's tokens could be proven")
    (places,) = np.nonzero(supervised)
    if not len(places):
        return Dropped("no_supervised_tokens", conversation.id)
    if longest_run(supervised) < config.min_supervised:
        return Dropped("too_short", conversation.id)
    if len(rendered.tokens) > limit:
        ledger.rows["truncated"] += 1
        ledger.rows["cut_mid_answer"] += int(supervised[-1] and rendered.supervised[limit])
    end = int(places[-1]) + 1
    return tokens[:end], supervised[:end]


def longest_run(supervised: np.ndarray) -> int:
    """Length of the longest unbroken run of true in [n] bool."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], supervised.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _refuse_useless(config: RowsConfig, ledger: Ledger) -> None:
    """A data set that would train nothing, or everything, is refused."""
    if not ledger.tokens["supervised"]:
        raise ValueError(
            f"{config.source}: no row keeps a supervised token, so there is nothing to learn from "
            f"({ledger.summary()}); look at the reasons, raise max_length or give other "
            "conversations"
        )
    if ledger.tokens["supervised"] == ledger.tokens["total"]:
        raise ValueError(
            f"{config.source}: every token of every row is supervised, so prompts would be trained "
            "on; the chat "
            "template writes nothing around the answers: give the target's own template"
        )
    if not ledger.rows["train"]:
        raise ValueError(
            f"{config.source}: holdout={config.holdout} takes all {ledger.kept} usable "
            "conversations and leaves none "
            f"to train on ({ledger.summary()}); lower data.rows.holdout or give more conversations"
        )
