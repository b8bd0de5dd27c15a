"""What `doctor` asks of token rows: are they this target's, and would they teach?

files      both splits' checksums, columns and counts
tokenizer  made with the tokenizer and chat template of the target at hand
length     no row longer than the target can read
mask       how much is supervised, and whether anything is
bos        no sampled row begins with two of the tokens that begin a text
end        supervised answers end with a token that the target stops at
rendering  held-out conversations, rendered now, give the very ids and masks that are stored
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..models.skeleton import text_config
from ..models.target import eos_ids, longest_text
from .conversations import Conversation, Dropped, Turn
from .examine_target import run_ends
from .findings import Finding, faults_of, mask_finding
from .marks import Part
from .render import Renderer
from .rowfile import REGENERATED, Row, Rows

_RENDERED = 32  # held-out rows


def examine_rows(
    folder: Path,
    target_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: dict[str, str],
    template_kwargs: dict[str, Any],
    *,
    rows: int = 16,
    seed: int = 0,
) -> tuple[list[Finding], Rows | None]:
    """Findings, and the training rows (None where they cannot be read).

    Args:
        tokenizer, fingerprint: of the target in `target_folder`. template_kwargs: of serving.
        rows: how many are sampled. seed: of the sample.
    """
    try:
        train, heldout = Rows.open(folder), Rows.open(folder, "heldout")
        drawn = np.random.default_rng(seed).permutation(len(train))[:rows].tolist()
        sample = [train[index] for index in sorted(drawn)]
    except ValueError as error:
        return [Finding("files", "fault", str(error), "make these rows again")], None
    told = f"{len(train):,} training rows and {len(heldout):,} held out: every checksum holds"
    found = [Finding("files", "ok", told)]
    try:
        train.require_tokenizer(fingerprint)
    except ValueError as error:
        return [*found, Finding("tokenizer", "fault", str(error), "run prepare again")], train
    found.append(Finding("tokenizer", "ok", "tokenizer and chat template are the target's"))
    try:
        limit = longest_text(target_folder)
        train.require_length(limit)
        longest = int(train.lengths.max(initial=0))
        reads = f"the target reads {limit:,}" if limit else "the target names no limit"
        found.append(Finding("length", "ok", f"the longest row has {longest:,} tokens, {reads}"))
    except ValueError as error:
        remedy = "data.rows.max_length=null takes the target's own limit"
        found.append(Finding("length", "fault", str(error), remedy))
    (idle,) = np.nonzero(train.num_supervised < 2)
    names = [train[index].id for index in idle[:3].tolist()] + [""] * max(0, len(idle) - 3)
    counts = int(train.num_supervised.sum()), int(train.lengths.sum())
    found.append(mask_finding(*counts, names, len(train)))
    found += [_bos(sample, tokenizer), _end(sample, target_folder)]
    with_tools = (train.manifest["config"].get("cleaning") or {}).get("tools") == "render"
    # Of regenerated rows the ids came first; the tools of a conversation are not kept.
    if not faults_of(found) and folder.name != REGENERATED and len(heldout) and not with_tools:
        found.append(_rendering(heldout, tokenizer, template_kwargs))
    return found, train


def _bos(sample: list[Row], tokenizer: PreTrainedTokenizerBase) -> Finding:
    begin = tokenizer.bos_token_id
    twice = [row for row in sample if begin is not None and list(row.tokens[:2]) == [begin] * 2]
    told = f"{len(twice)} of {len(sample)} sampled rows begin with two of {tokenizer.bos_token!r}"
    if twice:
        remedy = "let template or tokenizer write it, not both, and prepare again"
        return Finding("bos", "fault", f"{told} (first: {twice[0].id})", remedy)
    return Finding("bos", "ok", told)


def _end(sample: list[Row], target_folder: Path) -> Finding:
    """Runs of supervised tokens that the row's own end does not cut."""
    ends = eos_ids(target_folder, text_config(target_folder))
    whole = right = 0
    for row in sample:
        for place in run_ends(row.supervised.tolist()):
            if int(row.tokens[place]) in ends or place + 1 < len(row.tokens):
                whole += 1
                right += int(row.tokens[place]) in ends
    told = f"{right:,} of {whole:,} whole answers in {len(sample)} rows end with one of "
    told += f"{sorted(ends)}, supervised"
    if whole and not right:
        remedy = "the head would never learn where an answer ends: mask by length, not by token id"
        return Finding("end", "fault", told, f"{remedy}, and prepare again")
    if right < whole / 2:
        return Finding("end", "note", told, "look at `draftsmith prepare --show 3`")
    return Finding("end", "ok", told)


def _rendering(
    heldout: Rows, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> Finding:
    """Render the kept messages anew; a row may be cut, so it is compared as far as it goes."""
    renderer = Renderer(tokenizer, template_kwargs)
    compared = 0
    for index in range(min(len(heldout), _RENDERED)):
        row = heldout[index]
        turns = [_turn(message) for message in row.messages or []]
        if not turns:
            continue
        [rendered] = renderer.render([Conversation(row.id, tuple(turns))], Counter())
        parts = [] if isinstance(rendered, Dropped) else rendered.parts
        part = parts[row.part] if row.part < len(parts) else Part([], [])
        place, tokens = _first_difference(part, row), part.tokens
        if place is not None:
            told = (
                f"held-out row {index} (id {row.id!r}), rendered with the arguments of "
                f"now, differs from token {place} of {len(row.tokens)} on (ids or marks): stored "
                f"{tokenizer.decode(row.tokens[place : place + 8].tolist())!r}, now "
                f"{tokenizer.decode(tokens[place : place + 8])!r}"
            )
            remedy = "give data.rows.template_kwargs of serving, and prepare again"
            return Finding("rendering", "fault", told, remedy)
        compared += 1
    told = f"{compared} held-out conversations rendered anew: the same ids and marks"
    return Finding("rendering", "ok" if compared else "note", told)


def _turn(message: dict[str, Any]) -> Turn:
    return Turn(
        message["role"],
        message["content"],
        message.get("reasoning_content", ""),
        tuple(message.get("tool_calls", ())),
        message.get("name", ""),
    )


def _first_difference(part: Part, row: Row) -> int | None:
    """Where rendered ids or marks leave the stored ones; None where they hold them all."""
    now = list(zip(part.tokens, part.supervised, strict=True))
    stored = list(zip(row.tokens.tolist(), row.supervised.tolist(), strict=True))
    for place, one in enumerate(stored):
        if place >= len(now) or now[place] != one:
            return place
    return None
