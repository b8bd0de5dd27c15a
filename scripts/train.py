"""`draftsmith train`: hidden states -> head. Alone, or one process per GPU under torchrun or
deepspeed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from ..conf.schema import Config
from ..data.backend import byte_token_ids
from ..data.batches import BatchPlan
from ..data.probes import probe_source, state_rms
from ..data.rows import Rows
from ..data.vocabulary import DraftVocabulary, draft_vocabulary
from ..models.files import atomic_write_json, read_json
from ..models.heads import Head, LoadedHead, build_head, save_head, training_boundaries
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
from ..train.loop import Trainer, TrainResult
from ..train.ranks import adopt_slurm, barrier, largest_over_ranks, rank, set_apart, start
from ..train.tracker import Tracker
from ..train.validation import Validator, summary
from .app import Invocation, Verb
from .artifacts import Artifacts
from .feed import CacheFeed, Feed, OnlineFeed, connect, serve
from .live import LiveAcceptance
from .run_identity import begin, end_of, is_finished, run_identity
from .shares import take_gpu
from .source import with_source
from .watch import draw_curves, watched


def run(config: Config, invocation: Invocation) -> None:
    """Train, resume, or find the finished head."""
    artifacts = Artifacts.of(config)
    if adopt_slurm(os.environ) and os.environ["RANK"] != "0":
        invocation.console.quiet = True
    train(config, invocation)
    if rank() == 0:
        invocation.wrote(
            head=artifacts.head,
            metrics=artifacts.metrics,
            **({"curves": artifacts.curves} if artifacts.curves.exists() else {}),
        )
        invocation.next("evaluate")


def train(config: Config, invocation: Invocation) -> None:
    """The head of a run in WORK/train/head: the best validated weights, or the last where nothing
    was validated. On a target rank: serve states to those that train.

    Raises:
        ValueError: no cache, one that is stale or damaged, or a run of other settings in
        WORK/train.
    """
    artifacts = Artifacts.of(config)
    _require_steps(config)
    online = config.data.source == "online"
    roles = set_apart(config.data.online.target_ranks if online else 0)
    device = torch_device(config.target.device)
    take_gpu(config)
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
    config, source = with_source(config, invocation, folder, marks)
    _require_steps(config)
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
        identity = run_identity(config, feed, source)
        if rank() == 0 and begin(artifacts, identity, config, invocation):
            done = read_json(artifacts.run)["finished"]
            invocation.say(f"reused: train (key matches; step {done})")
        barrier()
        if not is_finished(artifacts, identity, config):
            result = _train(config, invocation, folder, marks, rows, feed, source)
            measured = _measured(artifacts, device)
            if rank() == 0:
                ended = {"identity": identity, "finished": result.step, "measured": measured}
                if result.stopped_early:
                    ended["stopped_early"] = end_of(config)
                atomic_write_json(artifacts.run, ended)
            barrier()


def _train(
    config: Config,
    invocation: Invocation,
    folder: Path,
    marks: dict[str, str],
    rows: Rows,
    feed: Feed,
    start_from: LoadedHead | None,
) -> TrainResult:
    """From the first step, or the newest checkpoint, to the written head."""
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
        vocabulary = _kept_vocabulary(config, start_from, trunk.vocab_size, rows)
        if vocabulary is None:
            size = config.train.draft_vocab_size
            forced = eos_ids(folder, target_config) | byte_token_ids(load_tokenizer(folder))
            vocabulary = draft_vocabulary(rows, size, forced, trunk.vocab_size)
        draft_ids, coverage = vocabulary.ids, vocabulary.coverage
        heldout = vocabulary.coverage_of(Rows.open(artifacts.learned, "heldout"))
        invocation.say(
            f"draft vocabulary: {len(draft_ids):,} ids, {coverage:.2%} of the supervised tokens "
            f"of training rows, {heldout:.2%} of held-out ones"
        )

    head = build_head(config.head, folder, scale, target_config, draft_ids, start_from)
    facts = {
        "state_rms": scale,
        "source": None if start_from is None else start_from.meta["content"],
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
            training={**facts, "step": step, "validation": figures and summary(figures)},
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
        trainer.validate = watched(
            Validator(trainer.objective, held_out, acceptance, trainer.sequence),
            trainer,
            artifacts,
            invocation,
        )
    result = trainer.run()
    if tracker is not None:
        tracker.finish()
    weights = trainer.whole_head()
    if rank() == 0:
        if result.stopped_early:
            invocation.say(
                f"ended at step {result.step}: train.patience={config.train.patience} validations "
                "without a better score"
            )
        if result.best is not None and artifacts.best.exists():
            _copy(artifacts.best, artifacts.head)
            score = result.best.score
            invocation.say(
                f"head: step {result.best.step} of {result.step}, the best validated (score "
                f"{score:.4f})"
            )
        else:
            keep(artifacts.head, weights, result.step, None)
            invocation.say(f"head: step {result.step}, not validated (nothing is held out)")
        draw_curves(artifacts)
        write_provenance(artifacts.train, invocation.resolved)
    return result


def _measured(artifacts: Artifacts, device: torch.device) -> dict[str, float | None]:
    """What `plan` shows beside its forecast: the most memory that any rank has held since it
    started (of its GPU, or of the process on a CPU), and the median of the logged tokens per second
    of all ranks; None where no step was logged. All ranks must call it."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    most = largest_over_ranks(torch.tensor(float(peak), dtype=torch.float64, device=device))
    rates = []
    if rank() == 0:
        lines = [json.loads(line) for line in artifacts.metrics.read_text().splitlines()]
        rates = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    return {
        "peak_memory_bytes": float(most),
        "tokens_per_second": statistics.median(rates) if rates else None,
    }


def _require_steps(config: Config) -> None:
    """ValueError where a separate module would never be trained."""
    if config.head.modules > config.train.steps:
        raise ValueError(
            f"head.modules={config.head.modules} with train.steps={config.train.steps}: a module "
            "that no step trains would draft as it began; raise train.steps or lower head.modules"
        )


def _kept_vocabulary(
    config: Config, source: LoadedHead | None, vocab_size: int, rows: Rows
) -> DraftVocabulary | None:
    """The draft ids of the head that the run starts from, where as many are asked for and it has
    an lm_head row for each; else None."""
    ids = None if source is None or source.head.lm_head is None else source.draft_ids
    if ids is None or len(ids) != config.train.draft_vocab_size:
        return None
    coverage = DraftVocabulary(ids, float("nan"), vocab_size).coverage_of(rows)
    return DraftVocabulary(ids, coverage, vocab_size)


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
        "WORK/train: head/ (the result), best/, checkpoints/, metrics.jsonl, curves.png, "
        "run.json, provenance.json"
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
        "draftsmith train head.init.source=target-mtp",
        "draftsmith train work=work/further inputs=work/default head.init.source=work/x/imported",
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
