"""`draftsmith train`: hidden states -> head. Alone, or one process per GPU under torchrun or
deepspeed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..conf.schema import Config
from ..data.backend import byte_token_ids
from ..data.batches import BatchPlan
from ..data.probes import probe_source, state_rms
from ..data.rows import Rows
from ..data.vocabulary import draft_vocabulary
from ..models.files import atomic_write_json, changes, read_json
from ..models.heads import Head, build_head, save_head, training_boundaries
from ..models.provenance import write_provenance
from ..models.skeleton import text_config
from ..models.target import (
    eos_ids,
    fingerprint,
    load_tokenizer,
    longest_text,
    prepare_folder,
    torch_device,
)
from ..models.trunk import Trunk
from ..train.loop import Trainer
from ..train.ranks import barrier, rank, set_apart, start
from ..train.tracker import Tracker
from ..train.validation import Validator
from .acceptance import LiveAcceptance
from .app import Invocation, Verb
from .artifacts import Artifacts
from .feed import CacheFeed, Feed, OnlineFeed, connect, serve

_FREE = (
    "max_steps",
    "prefetch",
    "log_every",
    "validate_every",
    "checkpoint_every",
    "keep_checkpoints",
)
"""Settings of `train` that may differ when a run goes on."""


def run(config: Config, invocation: Invocation) -> None:
    """Train, resume, or find the finished head."""
    artifacts = Artifacts.of(config)
    train(config, invocation)
    if rank() == 0:
        invocation.wrote(head=artifacts.head, metrics=artifacts.metrics)
        invocation.next("evaluate")


def train(config: Config, invocation: Invocation) -> None:
    """The head of a run in WORK/train/head: the best validated weights, or the last where nothing
    was validated. On a target rank: serve states to those that train.

    Raises:
        ValueError: no cache, one that is stale or damaged, or a run of other settings in
        WORK/train.
    """
    artifacts = Artifacts.of(config)
    if config.head.modules > config.train.steps:
        raise ValueError(
            f"head.modules={config.head.modules} with train.steps={config.train.steps}: a module "
            "that no step trains would draft as it began; raise train.steps or lower head.modules"
        )
    online = config.data.source == "online"
    roles = set_apart(config.data.online.target_ranks if online else 0)
    device = torch_device(config.target.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if roles.server is not None:
        serve(config, roles)
        return
    start(device)
    if rank() == 0:
        prepare_folder(config.target)  # a GGUF file is converted once, by one process
    barrier()
    folder = prepare_folder(config.target)
    client = connect(config, roles)
    target_config = text_config(folder)
    marks = fingerprint(folder)
    rows = Rows.open(artifacts.learned)
    rows.require_tokenizer(marks)
    rows.require_length(longest_text(folder))
    boundaries = training_boundaries(config.head, int(target_config.num_hidden_layers))
    feed: Feed = (
        OnlineFeed(config, rows, marks, boundaries, client)
        if online
        else CacheFeed(config, rows, marks, boundaries)
    )
    with contextlib.closing(feed):
        identity = _identity(config, feed)
        if rank() == 0 and _begin(artifacts, identity, config, invocation):
            done = read_json(artifacts.run)["finished"]
            invocation.say(f"reused: train (key matches; step {done})")
        barrier()
        if not _finished(artifacts, identity, config):
            step = _train(config, invocation, folder, marks, rows, feed)
            if rank() == 0:
                atomic_write_json(artifacts.run, {"identity": identity, "finished": step})
            barrier()


def _train(
    config: Config,
    invocation: Invocation,
    folder: Path,
    marks: dict[str, str],
    rows: Rows,
    feed: Feed,
) -> int:
    """From the first step, or the newest checkpoint, to the written head; the steps of both."""
    artifacts = Artifacts.of(config)
    device = torch_device(config.target.device)
    target_config = text_config(folder)
    source = feed.train()
    torch.manual_seed(config.train.seed)
    scale = state_rms(source)
    trunk = Trunk.load(
        folder, torch.bfloat16 if config.train.precision == "bf16" else torch.float32, device
    )
    probe_source(source, trunk).refuse_faults(f"the states of {rows.folder}, read for training")
    draft_ids, coverage = None, 1.0
    if config.train.draft_vocab_size is not None:
        forced = eos_ids(folder, target_config) | byte_token_ids(load_tokenizer(folder))
        vocabulary = draft_vocabulary(rows, config.train.draft_vocab_size, forced, trunk.vocab_size)
        draft_ids, coverage = vocabulary.ids, vocabulary.coverage
        heldout = vocabulary.coverage_of(Rows.open(artifacts.learned, "heldout"))
        invocation.say(
            f"draft vocabulary: {len(draft_ids):,} ids, {coverage:.2%} of the supervised tokens "
            f"of training rows, {heldout:.2%} of held-out ones"
        )

    head = build_head(config.head, folder, scale, target_config, draft_ids)
    facts = {
        "state_rms": scale,
        "seed": config.train.seed,
        **feed.identity,
        "coverage": coverage,
    }

    def keep(out: Path, weights: Head, step: int, figures: dict[str, Any] | None) -> None:
        save_head(
            out,
            weights,
            target_fingerprint=marks,
            draft_ids=draft_ids,
            trained_length=int(source.lengths.max()),
            config=invocation.resolved,
            training={**facts, "step": step, "validation": figures},
        )

    plan = BatchPlan(source, tokens_per_batch=config.train.tokens_per_batch, seed=config.train.seed)
    invocation.say(
        f"batches: {plan.num_batches():,} an epoch, {plan.fill:.1%} of "
        f"{config.train.tokens_per_batch:,} tokens filled"
    )
    tracker = Tracker(config.tracker, artifacts.train, invocation.resolved) if rank() == 0 else None
    trainer = Trainer(
        head,
        trunk,
        plan,
        config.train,
        artifacts.train,
        boundaries=source.boundaries,
        draft_ids=draft_ids,
        tracker=tracker,
        on_best=lambda weights, step, figures: keep(artifacts.best, weights, step, figures),
        progress=invocation.console.is_terminal,
    )
    held_out = _held_out(config, feed)
    if held_out is not None:
        acceptance = LiveAcceptance(config, draft_ids) if _in_engine(config) else None
        trainer.validate = _told(
            Validator(trainer.objective, held_out, acceptance), trainer, invocation
        )
    elif config.train.zero_stage == 3:
        raise ValueError(
            "train.zero_stage=3 keeps weights in shards, and whole ones are gathered for "
            "validation alone: hold out some "
            "rows (data.rows.holdout) and dump them, or use stage 0 to 2"
        )
    result = trainer.run()
    if tracker is not None:
        tracker.finish()
    if rank() == 0:
        if result.best is not None and artifacts.best.exists():
            _copy(artifacts.best, artifacts.head)
            score = result.best.score
            invocation.say(
                f"head: step {result.best.step} of {result.step}, the best validated (score "
                f"{score:.4f})"
            )
        else:
            keep(artifacts.head, trainer.head, result.step, None)
            invocation.say(f"head: step {result.step}, not validated (nothing is held out)")
        write_provenance(artifacts.train, invocation.resolved)
    return result.step


def _identity(config: Config, feed: Feed) -> dict[str, Any]:
    """Everything that determines the weights, but the settings that may differ when a run goes
    on."""
    settings = dataclasses.asdict(config.train)
    settings["betas"] = list(config.train.betas)
    shape = dataclasses.asdict(config.head) | {"boundaries": list(config.head.boundaries)}
    return {
        **feed.identity,
        **{f"train.{name}": value for name, value in settings.items() if name not in _FREE},
        **{f"head.{name}": value for name, value in shape.items()},
    }


def _begin(
    artifacts: Artifacts, identity: dict[str, Any], config: Config, invocation: Invocation
) -> bool:
    """Whether the run is finished already; else WORK/train is made ready for it."""
    if artifacts.run.exists():
        old = read_json(artifacts.run)["identity"]
        changed = changes(old, identity)
        if changed and not config.overwrite:
            raise ValueError(
                f"{artifacts.train} holds a run of other settings ({'; '.join(changed)}); choose "
                "another work folder, or "
                "overwrite=true to replace it"
            )
        if changed:
            invocation.say(f"made anew: train ({'; '.join(changed)})")
            shutil.rmtree(artifacts.train)
        elif _finished(artifacts, identity, config):
            return True
    artifacts.train.mkdir(parents=True, exist_ok=True)
    atomic_write_json(artifacts.run, {"identity": identity, "finished": None})
    return False


def _finished(artifacts: Artifacts, identity: dict[str, Any], config: Config) -> bool:
    if not artifacts.run.exists() or not (artifacts.head / "config.json").exists():
        return False
    record = read_json(artifacts.run)
    done = record["finished"]
    return record["identity"] == identity and done is not None and done >= config.train.max_steps


def _held_out(config: Config, feed: Feed) -> list[Any] | None:
    """Every held-out batch, or None where nothing is held out."""
    source = feed.heldout()
    if source is None:
        return None
    size = max(config.train.tokens_per_batch, int(source.lengths.max()))
    plan = BatchPlan(source, tokens_per_batch=size)
    device = torch_device(config.target.device)
    return [plan.batch(index).to(device) for index in range(plan.num_batches())]


def _in_engine(config: Config) -> bool:
    return config.validate.engine and config.train.validate_every > 0


def _told(
    validator: Validator, trainer: Trainer, invocation: Invocation
) -> Callable[[Head], dict[str, Any]]:
    """The validator, with a line for the user after each of its runs."""

    def validate(head: Head) -> dict[str, Any]:
        figures = validator(head)
        agreed = " ".join(f"{share:.1%}" for share in figures["agreement"])
        line = f"step {trainer.step}: held-out loss {figures['loss']:.3f}, agreement {agreed}"
        if "acceptance" in figures:
            calls = figures["acceptance"]["tokens_per_target_call"]
            line += f", {calls:.3f} tokens per target call in the engine"
        invocation.say(line)
        return figures

    return validate


def _copy(source: Path, out: Path) -> None:
    """Replace a head folder by another; config.json goes last, so that half a copy is no head."""
    (out / "config.json").unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
        shutil.copy2(path, out / path.name)


VERB = Verb(
    name="train",
    task=run,
    reads=(
        "WORK/rows, WORK/cache, WORK/cache-heldout (*-regenerated* with "
        "data.answers=regenerated) and the target's embedding, final norm and lm_head; with "
        "validate.engine or data.source=online the whole target, and with the latter no cache"
    ),
    writes=(
        "WORK/train: head/ (the result), best/, checkpoints/, metrics.jsonl, run.json, "
        "provenance.json"
    ),
    sections=(
        "work",
        "inputs",
        "overwrite",
        "data.answers",
        "data.source",
        "data.online",
        "head",
        "train",
        "validate",
        "tracker",
    ),
    examples=(
        "draftsmith train",
        "draftsmith train train.max_steps=3000 train.draft_vocab_size=8192 tracker=wandb-offline",
        "draftsmith train --multirun inputs=work/default 'work=work/norms-${head.norms.output}' "
        "head.norms.output=true,false",
        "torchrun --nproc-per-node 8 -m draftsmith.scripts.train train=h100x8 target=llama-3.1-8b",
        "torchrun --nproc-per-node 8 -m draftsmith.scripts.train train=h100x8 target=llama-3.1-8b "
        "data.source=online data.online.target_ranks=2",
    ),
    kept="the newest whole checkpoint is kept, and the same command goes on from it, bit for bit",
)


def main() -> int:
    """`python -m draftsmith.scripts.train`, also under torchrun and deepspeed."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
