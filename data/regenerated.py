"""Answered chains -> a folder of rows, with the files that `prepare` writes.

The folder is of the form that `prepare` writes (see rowfile.py), so `dump` and `train` read either.
`answers` of the ledger: found = generated + all of unanswered; `records` counts source rows.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..models.files import atomic_write_json, commit, read_json
from .chains import Chain
from .conversations import Dropped
from .ledger import DROPPED, UNPROVEN, Ledger, TableWriter
from .rowfile import FILES, FORMAT, SPLITS, Row, Rows, RowWriter, file_facts, token_hash
from .runs import supervised_spans

_COUNTS = (
    "found",
    "generated",
    "kept",
    "cut",
    "other_end",
    "unanswered_after_cut",
    "unanswered_after_other_end",
    "unanswered_no_room",
)


def write_rows(
    chains: Iterable[tuple[str, Chain]],
    source: Rows,
    drop_cut: bool,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    about: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write both splits, then the ledger, then the manifest.

    Args:
        chains: (split, row with its answers) in the order of the source. source: its rows of
            training.
        drop_cut: whether answers that were cut are left out.
        about: `key`, `identity` and `config` of the manifest.
    Returns:
        manifest and ledger.
    Raises:
        ValueError: no training row keeps an answer.
    """
    temporary = {name: out / f".{name}.parquet.{os.getpid()}.tmp" for name in FILES}
    writers = {split: RowWriter(temporary[split], split == "heldout") for split in SPLITS}
    ledger = Ledger(
        str(source.folder),
        TableWriter(temporary["dropped"], DROPPED),
        TableWriter(temporary["unproven"], UNPROVEN),
        read_json(source.folder / "ledger.json")["template"],
    )
    answers: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
    least = int(source.manifest["config"].get("min_supervised", 2))
    try:
        try:
            for split, chain in chains:
                row = _row(chain, drop_cut, least, ledger, answers)
                if row is not None:
                    if split == "heldout":
                        row = replace(row, messages=_messages(chain, row, tokenizer))
                    writers[split].add(row)
                    ledger.count_row(split, len(row.tokens), int(row.supervised.sum()))
        finally:
            for writer in (*writers.values(), ledger):
                writer.close()
        if not ledger.rows["train"]:
            raise ValueError(
                f"{ledger.source}: no training row has an answer that can be used "
                f"({ledger.summary()}); raise regenerate.max_new_tokens or data.rows.max_length, "
                "or take cut answers with regenerate.cut_answers=keep"
            )
        told = ledger.to_json()
        told["answers"] = dict(answers)
        told["tokens"]["on_policy"] = told["tokens"]["supervised"]
        manifest = {
            "kind": "rows",
            "format": FORMAT,
            **about,
            "tokenizer": source.manifest["tokenizer"],
            "counts": {**told["rows"], **told["tokens"]},
            "files": {f"{name}.parquet": file_facts(path) for name, path in temporary.items()},
        }
        (out / "manifest.json").unlink(missing_ok=True)
        for name, path in temporary.items():
            commit(path, out / f"{name}.parquet")
        atomic_write_json(out / "ledger.json", told)
        atomic_write_json(out / "manifest.json", manifest)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return manifest, told


def _row(
    chain: Chain, drop_cut: bool, least: int, ledger: Ledger, answers: Counter[str]
) -> Row | None:
    """The new row, or None where no answer is worth a row; counted either way."""
    reason = "after_cut" if chain.cut else "after_other_end" if chain.other_end else "no_room"
    left_out = chain.cut and drop_cut
    kept = chain.answers[:-1] if left_out else chain.answers
    ledger.read += 1
    answers["found"] += len(chain.spans)
    answers["generated"] += len(chain.answers)
    answers["cut"] += int(chain.cut)
    answers["other_end"] += int(chain.other_end)
    answers[f"unanswered_{reason}"] += chain.unanswered
    if not chain.answers:
        ledger.drop(Dropped("prompt_too_long", chain.row.id), chain.row.index)
    elif not kept:
        ledger.drop(Dropped("cut", chain.row.id), chain.row.index)
    elif max(map(len, kept)) < least:
        ledger.drop(Dropped("too_short", chain.row.id), chain.row.index)
    else:
        ids, supervised = chain.written(left_out)
        tokens, mask = np.array(ids, np.int32), np.array(supervised, np.bool_)
        ledger.kept += 1
        ledger.rows["cut_mid_answer"] += int(chain.cut and not left_out)
        answers["kept"] += len(kept)
        return replace(chain.row, tokens=tokens, supervised=mask, sha256=token_hash(tokens))
    return None


def _messages(chain: Chain, row: Row, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The conversation as text, for readers: each found answer gives way to the target's; what
    follows the last one of the row is left out."""

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()

    spans = supervised_spans(row.supervised)
    pairs = [
        (text(chain.row.tokens[start:end].tolist()), text(answer))
        for (start, end), answer in zip(chain.spans[: len(spans)], chain.answers, strict=False)
    ]
    messages: list[dict[str, Any]] = []
    for message in chain.row.messages or []:
        if not pairs:
            break
        content, (found, answer) = str(message["content"]).strip(), pairs[0]
        # An answer whose tokens could not be proven has no span: it stays as it was found.
        if message["role"] == "assistant" and (content in found or found in content):
            pairs.pop(0)
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.append(dict(message))
    return messages
