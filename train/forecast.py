"""What a run will need, forecast from its configuration: memory of a rank, bytes on disk, time.

Legend: P parameters of the head, W ranks, N tokens of a micro-batch, K steps, H hidden, B
boundaries, V columns of the draft vocabulary, V' of the target's, c rows of a chunk of logits
(`kernels.logit_chunks`), b bytes of a value in the training precision.

    trunk         b V' H (embedding) + b V' H (an lm_head of its own) + b V H (a part's rows)
    head          4 P                      at stage 3 4 P / W, and what is gathered of it
    optimiser     8 P, 12 P / W at stages 1 and 2 (with float32 masters), 8 P / W at stage 3
    gradients     4 P; from stage 2 on 4 P / W
    bucket        0, from stage 1 on DeepSpeed's: 2 GB on a GPU, min(4 P, 2 GB) on a CPU
    activations   what `trace` saw alive
    loss          c V (b + 8) (8 where b is 4) + b N H (K + 1); an lm_head of the head's own:
                  V H (2 b + 4) more; a loss that is no plain cross-entropy: 16 c V / (K + 1) more
    batches       (prefetch + 1 + accumulation) N (2 B H + 17), and the held-out ones
    heap          on a CPU 0.7 of what a step makes and frees (activations, gradients, loss): the C
                  library keeps freed blocks; fitted to `scripts/bench/plan.py`, nothing derives it

All of it is a forecast: fragments of an allocator and scratch space of libraries are not in it,
which is what `plan.headroom` is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..data.cache_writer import forecast_bytes
from ..inference.config import EngineConfig
from ..kernels.logit_chunks import default_rows
from ..kernels.losses import parse
from ..models.shape import TargetShape
from .config import TrainConfig
from .trace import Step

GB = 10**9
_BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
_LIVE = 1_000_000_000  # elements: DeepSpeed's stage3_max_live_parameters
_GPU_PROCESS = 1.5 * GB  # an assumption: CUDA context, cuBLAS and NCCL workspaces
_HEAP = 0.7
_CPU_PROCESS = 0.6 * GB  # measured, 0.52 GB: torch, transformers, DeepSpeed


@dataclass(frozen=True)
class Card:
    """A device by its data sheet: bytes, dense bfloat16 operations a second, bytes of memory read
    a second."""

    name: str
    memory: float
    flops: float
    mfu: float
    bandwidth: float


CARDS = {
    "h100": Card("H100 SXM 80 GB", 80 * GB, 989e12, 0.3, 3.35e12),
    "h200": Card("H200 141 GB", 141 * GB, 989e12, 0.3, 4.8e12),
    "a100": Card("A100 SXM 80 GB", 80 * GB, 312e12, 0.4, 2.039e12),
}
"""`mfu`, the share of the peak that a run is taken to reach, is an assumption and no measurement;
it is printed with every time, and `plan.mfu` replaces it."""
CPU_MFU = 0.6
_POSITIVE = ("device_memory", "flops", "mfu", "dump_rate", "train_rate", "bandwidth", "mbu")


@dataclass(frozen=True)
class PlanConfig:
    """What a forecast is made for."""

    gpus: int = 1
    """Processes that train, one a device; `dump` shares its work among as many."""
    device: Literal["auto", "cpu", "h100", "h200", "a100"] = "auto"
    """Which device; auto is the GPU of this machine, or its CPU, whose speed is measured."""
    device_memory: float | None = None
    """GB of one device; null takes the card's, or this machine's."""
    headroom: float = 0.1
    """Share of the memory that is left free for what no forecast sees."""
    flops: float | None = None
    """Peak operations a second of one device; null takes the card's."""
    mfu: float | None = None
    """Share of the peak that a run reaches, an assumption; null takes 0.3 (h100, h200), 0.4 (a100)
    or 0.6 (of a measured CPU matrix product)."""
    dump_rate: float | None = None
    """Tokens a second of one device in `dump`, where it was measured; null works it out."""
    train_rate: float | None = None
    """The same of `train`."""
    tokens: int | None = None
    """Tokens of the training rows; null takes those of WORK/rows, else data.dump.max_tokens, else
    25,233,764 (all of ShareGPT with SmolLM2's tokenizer)."""
    row_tokens: int | None = None
    """Tokens of one row, which attention's work grows with; null takes the mean of WORK/rows, else
    the least of data.rows.max_length, train.tokens_per_batch and 2,048."""
    supervised: float = 0.75
    """Share of the tokens that the head learns from; 74.7 % of ShareGPT."""
    report: str | None = None
    """The report.json (or its work folder) whose acceptance says when drafting pays; null takes
    that of `work`."""
    costs: Literal["auto", "measured", "model"] = "auto"
    """What passes and drafts cost there: measured (the report's own steps), model (the device's
    memory and operations), auto (measured where the device is this machine's and the report holds
    steps)."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Sequences that decode together, for the model; a report's steps have their own."""
    longest: int | None = None
    """Drafts of the longest chain that is shown; null takes the longest that the report
    measured."""
    context: int = 1024
    """Tokens of keys and values that each sequence reads."""
    split: int = 1
    """Devices that share the target when it serves; what they tell each other is not counted."""
    bandwidth: float | None = None
    """Bytes of memory that one device reads a second; null takes the card's, or measures this
    CPU's."""
    mbu: float | None = None
    """Share of it that is reached, an assumption; null takes 0.7, of a measured CPU 1."""
    tile: int | None = None
    """Rows that a product computes anyway; null takes 64, on a CPU 1."""
    overhead: float = 0.0
    """Seconds that a pass or a draft costs whatever its rows (launches, the host), where you have
    measured them."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"plan.gpus={self.gpus}: must be at least 1")
        if not 0 <= self.headroom < 1 or not 0 < self.supervised <= 1:
            raise ValueError(
                f"plan.headroom={self.headroom}, plan.supervised={self.supervised}: must be "
                "shares between 0 and 1"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"plan.{name}={value}: must be a positive number, or null")
        if not self.batches or min(self.batches) < 1 or not 0 <= self.overhead < float("inf"):
            raise ValueError(
                f"plan.batches={list(self.batches)}, plan.overhead={self.overhead}: give sizes of "
                "at least 1, and seconds of at least 0"
            )
        if self.longest is not None and not 1 <= self.longest <= 32:
            raise ValueError(f"plan.longest={self.longest}: must be 1 to 32, or null")
        if self.context < 0 or self.split < 1:
            raise ValueError(
                f"plan.context={self.context}, plan.split={self.split}: must be at least 0 and 1"
            )
        for name in ("tokens", "row_tokens", "tile"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"plan.{name}={value}: must be at least 1, or null")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its fullest moment."""

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())


def draft_columns(train: TrainConfig, shape: TargetShape) -> int:
    """V."""
    return int(train.draft_vocab_size or shape.vocab_size)


def loss_bytes(train: TrainConfig, shape: TargetShape, step: Step, gpu: bool) -> int:
    """See the module's `loss`."""
    columns, size, itemsize = draft_columns(train, shape), shape.hidden_size, _itemsize(train)
    rows = default_rows(torch.device("cuda" if gpu else "cpu"), columns)
    held = rows * columns * (itemsize + 8 if itemsize < 4 else 8)
    held += itemsize * train.tokens_per_batch * size * (train.steps + 1)
    if parse(train.loss.kind) != {"kl": 1.0}:
        held += 16 * columns * (rows // (train.steps + 1))
    return held + (columns * size * (2 * itemsize + 4) if step.own_head else 0)


def loss_flops(train: TrainConfig, shape: TargetShape, step: Step, supervised: float) -> int:
    """Of one micro-batch: the teacher's logits, every student's, and the way back through them."""
    products = 1 + train.steps * (3 if step.own_head else 2)
    one = 2 * draft_columns(train, shape) * shape.hidden_size
    return int(supervised * train.tokens_per_batch) * products * one


def training_memory(
    train: TrainConfig,
    shape: TargetShape,
    step: Step,
    *,
    ranks: int,
    gpu: bool,
    boundaries: int,
    heldout: int,
) -> Memory:
    """Of a rank that trains, `validation` left out. heldout: tokens that validation keeps."""
    weights, stage = 4 * step.parameters, train.zero_stage
    share = weights // ranks
    rows, columns = shape.embedding * _itemsize(train), draft_columns(train, shape)
    trunk = rows * (1 if shape.tied else 2)
    if train.draft_vocab_size is not None:
        trunk += columns * shape.hidden_size * _itemsize(train)
    batch = 2 * boundaries * shape.hidden_size + 17
    read = (train.prefetch + 1 + train.accumulation) * train.tokens_per_batch
    fixed = {
        "process": int(_GPU_PROCESS if gpu else _CPU_PROCESS),
        "trunk": trunk,
        "head": weights if stage < 3 else share,
        "optimiser": {0: 2 * weights, 3: 2 * share}.get(stage, 3 * share),
        "batches": (read + heldout) * batch,
    }
    kept = weights if stage < 2 else share
    bucket = 4 * (_BUCKET if gpu else min(_BUCKET, step.parameters)) if stage else 0
    gathered = min(weights, 4 * (_LIVE + step.largest)) if stage == 3 else 0
    unreduced = min(weights, 4 * (_BUCKET + step.largest)) if stage == 3 else 0
    between = kept if train.accumulation > 1 or stage == 3 else 0
    loss = loss_bytes(train, shape, step, gpu)
    forward = {"gradients": between, "bucket": bucket, "gathered": gathered}
    moments = {
        "the unroll": forward | {"activations": step.unroll},
        "the loss": forward | {"activations": step.saved, "loss": loss},
        "the backward pass": {
            "gradients": kept + unreduced,
            "bucket": bucket,
            "gathered": gathered,
            "activations": step.backward - weights,
        },
        "the optimiser's step": {
            "gradients": kept + (share if 0 < stage < 3 else 0),
            "bucket": bucket,
            "scratch": share if stage else weights,
        },
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = fixed | moments[moment]
    if not gpu:
        parts["heap"] = int(_HEAP * sum(moments[moment].values()))
    return Memory(moment, {name: size for name, size in parts.items() if size})


def target_memory(shape: TargetShape, itemsize: int, *, gpu: bool) -> dict[str, int]:
    """A whole target: its weights, and the trunk, which is read once more. On a CPU the products'
    weights are laid out anew, and both forms are there for a moment."""
    weights = shape.parameters * itemsize
    trunk = shape.embedding * itemsize * (1 if shape.tied else 2)
    parts = {"target": weights, "trunk of the target": trunk}
    return parts if gpu else parts | {"laid-out weights": weights - shape.embedding * itemsize}


def validation_memory(
    shape: TargetShape,
    engine: EngineConfig,
    step: Step,
    training: Memory,
    itemsize: int,
    *,
    layers: int,
    key_width: int,
    gpu: bool,
) -> Memory:
    """Of rank 0 while the engine runs the live weights: what training keeps, the whole target and
    the pages. layers: of the head, that have keys; key_width: that of `trace.Step`, of the
    target's layers."""
    kept = ("process", "trunk", "head", "optimiser", "batches")
    rows = engine.max_batch * (engine.step_slots + 1)
    pages = engine.pool_tokens * (shape.num_layers + layers) * key_width * itemsize
    parts = {
        **{name: size for name, size in training.parts.items() if name in kept},
        **target_memory(shape, itemsize, gpu=gpu),
        "pages": pages,
        "logits": 3 * rows * shape.vocab_size * 4,
        "head to draft with": step.parameters * itemsize,
    }
    return Memory("the engine's run", parts)


def dump_memory(
    shape: TargetShape,
    layer: Step,
    itemsize: int,
    *,
    boundaries: int,
    tokens_per_batch: int,
    layer_tokens: int,
    shard_bytes: int,
    gpu: bool,
) -> Memory:
    """Of a rank that dumps: the target and one pass. layer: a trace of one of its layers in
    float32 over `layer_tokens` tokens. On a CPU two shards lie beside them."""
    values = layer.unroll * itemsize // 4 * tokens_per_batch // layer_tokens
    states = tokens_per_batch * boundaries * shape.hidden_size * (itemsize + 2)
    parts = {
        "process": int(_GPU_PROCESS if gpu else _CPU_PROCESS),
        **target_memory(shape, itemsize, gpu=gpu),
        "one pass": values + states,
    }
    return Memory("a pass", parts if gpu else parts | {"shards": 2 * shard_bytes})


def cache_bytes(shape: TargetShape, boundaries: int, tokens: int) -> dict[str, int]:
    """Of all rows, by dtype."""
    return {
        dtype: forecast_bytes(tokens, shape.hidden_size, boundaries, dtype)
        for dtype in ("bf16", "fp8", "int8")
    }


def dump_flops(shape: TargetShape, query_width: int, row_tokens: int) -> int:
    """Of one token: the products of its layers' weights, and its scores and values."""
    return 2 * shape.active + shape.num_layers * query_width * row_tokens


def train_flops(train: TrainConfig, shape: TargetShape, step: Step, supervised: float) -> int:
    """Of all micro-batches of one rank. Steps of the warm-up unroll once, which is taken to cost
    the K-th part of the unroll."""
    loss = loss_flops(train, shape, step, supervised)
    unrolled = step.forward_flops + step.backward_flops
    way = 3 if step.own_head else 2  # there and back; the teacher goes once
    short = unrolled // train.steps + loss * (1 + way) // (1 + way * train.steps)
    warm = min(train.unroll_warmup, train.max_steps)
    return train.accumulation * (warm * short + (train.max_steps - warm) * (unrolled + loss))


def _itemsize(train: TrainConfig) -> int:
    return 2 if train.precision == "bf16" else 4
