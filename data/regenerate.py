"""`regenerate`: prepared rows -> the same conversations with answers by the target itself.

A head learns to foresee the target, so it should learn from what the target says; found answers are
another's words. The engine answers each row's prompts ids in, ids out (see chains.py); rows join
the batch as others leave it. The result is a folder of rows as `prepare` writes it, with
answers.parquet beside them (see answers.py). What is held out stays held out.

An answer depends on the row, its turn and the settings alone: each request has a seed of its own,
and neither order nor batch nor drafter changes what it says, up to near ties of a narrow dtype. So
several processes may share the rows; what is on disk is all they share.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..inference.config import EngineConfig, SamplingParams
from ..inference.drafters import Drafter
from ..inference.engine import Engine
from ..inference.sequence import Sequence
from ..models.files import changes, content_hash, read_json
from ..models.target import Target
from .answers import AnswerStore, row_key
from .chains import Chain
from .regenerated import write_rows
from .rowfile import FORMAT, SPLITS, Rows, existing

Progress = Callable[[int, int | None], None]
_log = logging.getLogger(__name__)
_POLL, _TELL_EVERY = 1.0, 30.0  # seconds
RULES = 1  # raised when the rules of chains.py change what a row becomes


@dataclass(frozen=True)
class RegenerateConfig:
    """How the target answers."""

    max_new_tokens: int = 512
    """Tokens of an answer; one that has not ended by then counts as cut."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches p."""
    seed: int = 0
    """Of sampled answers, together with the row's content and the turn."""
    cut_answers: str = "drop"
    """drop leaves an answer without its end out, keep takes it; either way the row ends there."""
    max_rows: int | None = None
    """Only the first so many training rows; held-out rows are all taken."""
    max_tokens: int | None = None
    """Only the first training rows, up to so many tokens as prepared."""
    drafter: str = "none"
    """none, ngram (prompt look-up) or mtp (a head): the same answers, sooner where drafts are
    good."""
    head: str | None = None
    """Native head folder for mtp; null takes the one that this run trained."""
    save_seconds: float = 10.0
    """Finished rows are saved this often; a killed run loses no more than that and the rows under
    way."""
    rank: int | None = None
    """Which of `world_size` processes this one is, each of which answers its share of the rows;
    null takes both from the launcher's environment (torchrun, srun), or is the only one."""
    world_size: int | None = None
    """How many processes answer these rows."""

    def __post_init__(self) -> None:
        SamplingParams(self.max_new_tokens, self.temperature, self.top_k, self.top_p)
        for name, known in (
            ("cut_answers", ("drop", "keep")),
            ("drafter", ("none", "ngram", "mtp")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"regenerate.{name}={getattr(self, name)!r}: choose {', '.join(known)}"
                )
        for name in ("max_rows", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"regenerate.{name}={value}: must be 1 or more, or null for all")
        if self.save_seconds < 0:
            raise ValueError(f"regenerate.save_seconds={self.save_seconds}: must be 0 or more")
        if (self.rank is None) != (self.world_size is None) or not (
            0 <= (self.rank or 0) < (self.world_size or 1)
        ):
            raise ValueError(
                f"regenerate.rank={self.rank} of world_size {self.world_size}: give both, with 0 "
                "<= rank < world_size, or neither"
            )


@dataclass(frozen=True)
class Regenerated:
    """The outcome: `reused` when the rows were there; `resumed` rows whose answers were.

    `generated` tokens are those of this call. Manifest and ledger are empty where the answers were
    left to another process, which writes the rows.
    """

    folder: Path
    manifest: dict[str, Any]
    ledger: dict[str, Any]
    reused: bool
    resumed: int
    generated: int
    messages: tuple[str, ...]


def regenerate(
    config: RegenerateConfig,
    source: Path | str,
    target: Target,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: Path | str,
    drafter: Drafter | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    finish: bool = True,
) -> Regenerated:
    """Write the rows of `source` with the target's own answers into `out`, or find them there.

    Args:
        source: the folder that `prepare` wrote. engine: its max_batch requests run together.
        drafter: the one that the configuration names, or None.
        tokenizer: writes the text of held-out answers for readers; no id comes from it.
        overwrite: replace answers that were made with other settings, of finished rows or not.
        progress: called with (tokens generated, tokens to generate as foreseen so far).
        finish: write the rows on rank 0, which waits for the other ranks' answers; False leaves
            that to a later call.
    Raises:
        ValueError: rows of another tokenizer, answers of other settings in `out`, or no answer that
            can be used; with the reason and the remedy.
        KeyboardInterrupt: with a message; finished answers stay.
    """
    out = Path(out)
    splits = {split: Rows.open(source, split) for split in SPLITS}
    splits["train"].require_tokenizer(target.fingerprint)
    limit = _limit(splits["train"], target)
    settings = _settings(config, target, limit)
    identity = {
        "format": FORMAT,
        "source_key": splits["train"].key,
        "answers": settings,
        **{name: getattr(config, name) for name in ("cut_answers", "max_rows", "max_tokens")},
    }
    key = content_hash(identity)
    old, damaged = existing(out)
    if old is not None:
        _refuse_others(out, old, settings, overwrite)
    if old is not None and old["key"] == key and not damaged:
        return Regenerated(out, old, read_json(out / "ledger.json"), True, 0, 0, ())
    out.mkdir(parents=True, exist_ok=True)
    rank, world_size = config.rank or 0, config.world_size or 1
    store = AnswerStore(out, settings, config.save_seconds, overwrite, rank, world_size)
    counts = {split: len(rows) for split, rows in splits.items()}
    counts["train"] = _first(splits["train"].lengths, config)
    work = Work(splits, counts, target, limit)
    missing, resumed = work.missing(store, rank, world_size)
    finish = finish and rank == 0
    try:
        generated = _answer(missing, work, store, config, Engine(target, engine, drafter), progress)
        if finish and world_size > 1:
            store.flush()  # nothing is lost while the others are waited for
            _wait(work, store)
    except KeyboardInterrupt:
        store.flush()
        raise KeyboardInterrupt(
            f"regenerate stopped: the answers of finished rows are in {out}; the same command goes "
            "on there"
        ) from None
    except ValueError:  # a request that the engine's pool cannot hold, for one
        store.flush()
        raise
    if not finish:
        store.flush()
        return Regenerated(out, {}, {}, False, resumed, generated, tuple(store.messages))
    for stale in out.glob(".*.tmp"):
        stale.unlink()
    store.gather()
    manifest, ledger = write_rows(
        work.answered(store),
        splits["train"],
        config.cut_answers == "drop",
        tokenizer,
        out,
        {
            "key": key,
            "identity": identity,
            "config": {
                **splits["train"].manifest["config"],
                "regenerate": asdict(replace(config, rank=None, world_size=None)),
            },
        },
    )
    return Regenerated(out, manifest, ledger, False, resumed, generated, tuple(store.messages))


@dataclass(frozen=True)
class Work:
    """Which rows are answered: the first `counts[split]` of each split."""

    splits: dict[str, Rows]
    counts: dict[str, int]
    target: Target
    limit: int

    def chain(self, split: str, index: int) -> Chain:
        """A row before its first answer."""
        return Chain(self.splits[split][index], self.target.eos_ids, self.limit)

    def rows(self) -> Iterator[tuple[str, int]]:
        """(split, index) of every row."""
        return ((split, index) for split in SPLITS for index in range(self.counts[split]))

    def answered(self, store: AnswerStore) -> Iterator[tuple[str, Chain]]:
        """(split, row with its answers) of every row."""
        for split, index in self.rows():
            chain = self.chain(split, index)
            chain.answers = [answer.tolist() for answer in store[row_key(chain.row)]]
            yield split, chain

    def missing(
        self, store: AnswerStore, rank: int = 0, world_size: int = 1
    ) -> tuple[dict[str, tuple[str, int, int]], int]:
        """Key -> (split, index, number of answers) of the rows that the store lacks, of a rank's
        share, and how many rows it has.

        Equal rows have one key, one prompt and one seed, hence one answer. The share is every
        `world_size`-th key of all rows, whatever the store has of them.
        """
        missing: dict[str, tuple[str, int, int]] = {}
        places: dict[str, int] = {}
        present = 0
        for split, index in self.rows():
            chain = self.chain(split, index)
            key = row_key(chain.row)
            place = places.setdefault(key, len(places))
            if key in store:
                present += 1
            elif place % world_size == rank:
                missing.setdefault(key, (split, index, len(chain.spans)))
        return missing, present


def _limit(rows: Rows, target: Target) -> int:
    """Tokens that a row may have: prepare's cap and the target's positions."""
    limits = (
        rows.manifest["config"].get("max_length"),
        getattr(target.config, "max_position_embeddings", None),
    )
    return min((int(limit) for limit in limits if limit is not None), default=sys.maxsize)


def _settings(config: RegenerateConfig, target: Target, limit: int) -> dict[str, Any]:
    """Everything that determines an answer, beside the row. A drafter changes none."""
    sampling: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "temperature": 0.0}
    if config.temperature > 0:
        names = ("temperature", "top_k", "top_p", "seed")
        sampling |= {name: getattr(config, name) for name in names}
    elif config.top_k or config.top_p < 1:
        warnings.warn(
            "regenerate.top_k and regenerate.top_p are not used: temperature 0 takes the likeliest",
            stacklevel=3,
        )
    return {
        "rules": RULES,
        "target": dict(target.fingerprint),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "end_ids": sorted(target.eos_ids),
        "max_length": limit,
        **sampling,
    }


def _refuse_others(
    out: Path, old: dict[str, Any], settings: dict[str, Any], overwrite: bool
) -> None:
    """Finished rows of other settings are not replaced unasked."""
    before = old["identity"].get("answers")
    if not isinstance(before, dict):
        raise ValueError(f"{out} holds no regenerated rows; choose another folder for them")
    changed = changes(before, settings)
    if changed and not overwrite:
        raise ValueError(
            f"{out} holds finished answers of other settings ({'; '.join(changed)}); choose "
            "another work folder, or overwrite=true to replace them"
        )


def _first(lengths: np.ndarray, config: RegenerateConfig) -> int:
    """How many training rows are taken."""
    count = len(lengths) if config.max_rows is None else min(config.max_rows, len(lengths))
    if config.max_tokens is not None:
        count = min(count, int((lengths.cumsum() <= config.max_tokens).sum()))
    if not count:
        raise ValueError(
            f"regenerate.max_tokens={config.max_tokens}: the first row has more tokens; raise it"
        )
    return count


def _answer(
    missing: dict[str, tuple[str, int, int]],
    work: Work,
    store: AnswerStore,
    config: RegenerateConfig,
    engine: Engine,
    progress: Progress | None,
) -> int:
    """Give every missing answer; the number of tokens generated.

    Twice as many conversations as fit the batch are under way, so that it stays full while the next
    turn of another waits.
    """
    flying: dict[Sequence, tuple[str, Chain]] = {}
    waiting = iter(missing.items())
    expected, answered, tokens = sum(number for _, _, number in missing.values()), 0, 0

    def go_on(key: str, chain: Chain) -> None:
        nonlocal expected
        prompt = chain.prompt
        if prompt is None:
            expected -= chain.unanswered
            store.add(key, chain.answers)
        else:
            turn = len(chain.answers)
            params = SamplingParams(
                min(config.max_new_tokens, chain.limit - len(prompt)),
                config.temperature,
                config.top_k,
                config.top_p,
                _seed(config.seed, key, turn),
                coupled=True,
            )
            name = f"row {chain.row.id}, answer {turn + 1} ({key[:16]})"
            flying[engine.add(prompt, params, name)] = key, chain

    while True:
        while len(flying) < 2 * engine.config.max_batch:
            if (entry := next(waiting, None)) is None:
                break
            key, (split, index, _) = entry
            go_on(key, work.chain(split, index))
        if not flying:
            break
        for output in engine.step():
            tokens += len(output.tokens)
            if output.sequence.finished:
                key, chain = flying.pop(output.sequence)
                chain.answers.append(output.sequence.output)
                answered += 1
                go_on(key, chain)
        if progress and answered:
            progress(tokens, max(tokens, round(expected * tokens / answered)))
    return tokens


def _wait(work: Work, store: AnswerStore) -> None:
    """Until the answers of all ranks are there; tells how many rows lack theirs every 30
    seconds."""
    told, left = time.monotonic(), list(work.missing(store)[0])
    while left:
        if time.monotonic() - told >= _TELL_EVERY:
            told = time.monotonic()
            _log.warning("%s: waiting for %d rows of other ranks", store.folder, len(left))
        time.sleep(_POLL)
        store.refresh()
        left = [key for key in left if key not in store]


def _seed(seed: int, key: str, turn: int) -> int:
    """A request's own, from what it is and not from when it runs."""
    digest = hashlib.sha256(f"{seed}:{key}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
