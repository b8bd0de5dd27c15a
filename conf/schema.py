"""The whole configuration of a run as one typed tree.

Sections that configure a class are that class's own dataclass, found beside it. The sections of
this file configure
commands: what `prepare`, `evaluate`, `export`, `import` and `generate` are to do.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.combine import CombineConfig
from ..data.dump import DumpConfig
from ..data.online import OnlineConfig
from ..data.regenerate import RegenerateConfig
from ..data.rows import RowsConfig
from ..inference.config import EngineConfig, SamplingParams
from ..inference.draft_lm import DraftLMConfig
from ..inference.hybrid import NgramConfig
from ..models.heads import HEADS, HeadConfig
from ..models.target import DTYPES, TargetConfig
from ..train.config import TrainConfig
from ..train.forecast import PlanConfig
from ..train.tracker import TrackerConfig


@dataclass(frozen=True)
class DataConfig:
    """From conversations to hidden states."""

    rows: RowsConfig
    dump: DumpConfig
    answers: Literal["found", "regenerated"] = "found"
    """Which answers dump, train and the report take: found (those of the source, as prepared) or
    regenerated (the target's own)."""
    source: Literal["cache", "online"] = "cache"
    """What `train` reads: cache (the states that `dump` wrote) or online (the target makes them
    while training; needs the rows alone)."""
    online: OnlineConfig = field(default_factory=OnlineConfig)

    def __post_init__(self) -> None:
        if self.source == "cache" and self.online.target_ranks:
            raise ValueError(
                f"data.online.target_ranks={self.online.target_ranks} needs data.source=online: a "
                "cache is read by every process, none of which holds the target"
            )
        if self.source == "cache" and self.online != OnlineConfig():
            warnings.warn(
                "data.online.* is ignored: states come from the cache; set data.source=online to "
                "have the target make them",
                stacklevel=2,
            )


@dataclass(frozen=True)
class RayConfig:
    """Where `dump` and `regenerate` run: here, or in shares on the workers of a Ray cluster."""

    workers: int = 0
    """How many shares Ray hands out, one to a worker; 0 does the work in this process."""
    address: str | None = None
    """Of the cluster: auto for the one that this machine belongs to, ray://HOST:10001; null is
    RAY_ADDRESS, or else this machine alone."""
    cpus: float = 1.0
    """Processor cores of a worker."""
    gpus: float | None = None
    """GPUs of a worker; null is one where the cluster has any, else none."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"ray.workers={self.workers}: must be 0 or more")
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"ray.{name}={value}: must be 0 or more")


@dataclass(frozen=True)
class PrepareConfig:
    """What `prepare` prints beside its ledger."""

    show: int = 0
    """Print so many training rows, what the head learns from in green."""
    show_ids: bool = False
    """Print each token's id beside it."""

    def __post_init__(self) -> None:
        if self.show < 0:
            raise ValueError(f"prepare.show={self.show}: must be 0 or more")


@dataclass(frozen=True)
class ValidateConfig:
    """What the engine decodes with the live weights at each validation of a training run."""

    engine: bool = True
    """Measure acceptance in the engine, with the target in memory; false leaves the teacher-forced
    figures, which need the cache alone."""
    prompts: tuple[str, ...] = ("heldout",)
    """humaneval, mt_bench, heldout, or paths of prompt files."""
    limit: int = 8
    """Prompts per set."""
    max_new_tokens: int = 48
    """Tokens per answer, at most."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Each is measured; the lowest gives the score that the best weights are chosen by. 0 is
    greedy."""
    seed: int = 0
    """Of sampled answers: the same random numbers at every validation, so that two of them differ
    by the weights alone."""
    ranks: Literal["first", "all"] = "first"
    """first: one rank holds the target and measures, the others wait; all: each holds it and
    measures every N-th prompt."""

    def __post_init__(self) -> None:
        if self.limit < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"validate.limit={self.limit}, validate.max_new_tokens={self.max_new_tokens}: must "
                "be at least 1"
            )
        if not self.prompts or not self.temperatures:
            raise ValueError(
                "validate.prompts and validate.temperatures need at least one entry each; "
                "validate.engine=false measures nothing in the engine"
            )
        if min(self.temperatures) < 0:
            raise ValueError(
                f"validate.temperatures: {min(self.temperatures)} must be 0 (greedy) or positive"
            )


@dataclass(frozen=True)
class EvaluateConfig:
    """What the acceptance report measures: every drafter on every prompt set, temperature and
    dtype."""

    head: str | None = None
    """Head folder, native or of any layout; null takes the one that this run trained."""
    drafters: tuple[str, ...] = ("none", "ngram", "head")
    """none (plain decoding; always measured, and first), ngram (prompt look-up), head (the trained
    head; also by its kind, which reports call it), untrained (the same head before its first
    step), draft-lm (the language model of draft_lm.source), ngram+head and ngram+draft-lm (look-up
    where it finds a long match, the model elsewhere)."""
    prompts: tuple[str, ...] = ("humaneval", "mt_bench", "heldout")
    """humaneval, mt_bench, heldout (first questions of held-out conversations), or paths of prompt
    files."""
    draft_tokens: tuple[int, ...] = ()
    """Chain lengths K that the head and a draft LM draft with, each a run of its own; empty takes
    engine.draft_tokens."""
    limit: int = 16
    """Prompts per set."""
    max_new_tokens: int = 128
    """Tokens per answer, at most."""
    temperatures: tuple[float, ...] = (0.0,)
    """0 is greedy."""
    proof: str | None = "float32"
    """Dtype in which greedy output of the head is compared with plain decoding once more,
    `proof_batch` requests together: in float32 rounding explains no difference. Null leaves it
    out."""
    proof_batch: int = 8
    """Requests that run together in the proof."""
    seed: int = 0
    """Of sampled runs."""
    verification: Literal["rejection", "block", "typical"] = "rejection"
    """How sampled runs judge drafts: token by token, as a block (keeps at least as many), both of
    which leave the target's law; typical is LOSSY and says so in the report."""

    def __post_init__(self) -> None:
        hybrids = ("ngram+head", "ngram+draft-lm")
        known = ("none", "ngram", "head", "untrained", "draft-lm", *hybrids, *HEADS)
        for name in self.drafters:
            if name not in known:
                raise ValueError(
                    f"evaluate.drafters: {name!r} is not known; choose among {', '.join(known)}"
                )
        if self.proof is not None and self.proof not in DTYPES:
            raise ValueError(
                f"evaluate.proof: {self.proof!r} is not known; choose null, {', '.join(DTYPES)}"
            )
        for count in self.draft_tokens:
            if not 1 <= count <= 32:
                raise ValueError(f"evaluate.draft_tokens: {count} must be 1 to 32")
        if not self.prompts or not self.temperatures:
            raise ValueError(
                "evaluate.prompts and evaluate.temperatures need at least one entry each"
            )
        if self.limit < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"evaluate.limit={self.limit}, evaluate.max_new_tokens={self.max_new_tokens}: must "
                "be at least 1"
            )
        for temperature in self.temperatures:
            if temperature < 0:
                raise ValueError(
                    f"evaluate.temperatures: {temperature} must be 0 (greedy) or positive"
                )
        if self.verification != "rejection" and not any(self.temperatures):
            raise ValueError(
                f"evaluate.verification={self.verification} acts on sampled runs alone; give "
                "evaluate.temperatures=[1]"
            )


@dataclass(frozen=True)
class CompareConfig:
    """Which runs stand side by side."""

    runs: tuple[str, ...] = ()
    """Work folders or patterns (`work/sweep-*`), the first of which the others are compared with;
    the words behind the verb for short. Empty takes `work` alone."""
    group: tuple[str, ...] = ()
    """Settings or sections, such as head.norms: of the runs that agree in them, only the best is
    shown. Empty shows every run."""
    by: Literal["score", "loss"] = "score"
    """What is best: the validated score (tokens per target call in the engine, where it was
    measured) or the held-out loss, both of the validation that became the head."""
    out: str = "work/compare"
    """Folder of compare.md, compare.json and compare.png."""


@dataclass(frozen=True)
class ExportConfig:
    """Which head leaves in which layouts."""

    head: str | None = None
    """Head folder, native or of any layout; null takes the one that this run trained."""
    dtype: str = "float32"
    """How weights are stored: float32, as the trainer holds them, or bfloat16, rounded; copies of
    the target's tensors and maps stay as they are."""
    layout: Any = "deepseek-mtp"
    """The layout to write, or a list of them: deepseek-mtp, glm-mtp, ernie-mtp, mimo-mtp, qwen-mtp;
    eagle, vllm-eagle, sglang-eagle; eagle3, vllm-eagle3, sglang-eagle3, trtllm-eagle3, speculators;
    medusa, vllm-medusa. vllm, sglang, trtllm and authors stand for the one that is read there."""
    folder: str | None = None
    """Where to (of several layouts, each below it); null is export/LAYOUT below the work folder."""

    def __post_init__(self) -> None:
        if not self.layouts or not all(isinstance(name, str) for name in self.layouts):
            raise ValueError(f"export.layout={self.layout}: name a layout, or a list of them")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"export.dtype={self.dtype}: must be float32 or bfloat16")

    @property
    def layouts(self) -> tuple[str, ...]:
        """Those named, one or several."""
        if isinstance(self.layout, list | tuple):
            return tuple(self.layout)
        return (self.layout,)


@dataclass(frozen=True)
class ImportConfig:
    """Which foreign head comes in."""

    folder: str | None = None
    """The folder that holds it; null is what `export` of this run wrote."""
    layout: str | None = None
    """The layout it has: deepseek-mtp, glm-mtp, ernie-mtp, mimo-mtp, qwen-mtp; eagle, vllm-eagle,
    sglang-eagle; eagle3, vllm-eagle3, sglang-eagle3, trtllm-eagle3, speculators; medusa,
    vllm-medusa. Null finds it from the files, where they say it."""
    out: str | None = None
    """Native head folder to write; null is imported/ below the work folder."""


@dataclass(frozen=True)
class GenerateConfig:
    """A conversation in the terminal."""

    head: str | None = None
    """Head folder, native or of any layout; null takes the one that this run trained, and decodes
    plainly where there is none."""
    drafter: str = "head"
    """head (also by its kind), ngram, draft-lm (the language model of draft_lm.source), ngram+head,
    ngram+draft-lm or none."""
    prompt: str | None = None
    """Answer this and end; null reads questions until an empty line."""
    system: str | None = None
    """System message; null leaves the chat template's own."""
    max_new_tokens: int = 256
    """Tokens per answer, at most."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches p."""
    seed: int = 0
    """Of sampled answers."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, before them."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that prompt or answer hold; 1 is off."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken off them once for every time."""
    verification: Literal["rejection", "block", "typical"] = "rejection"
    """How sampled drafts are judged; typical is LOSSY."""

    def sampling(self) -> SamplingParams:
        """What the engine takes."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            verification=self.verification,
        )

    def __post_init__(self) -> None:
        self.sampling()
        known = ("head", "ngram", "draft-lm", "ngram+head", "ngram+draft-lm", "none")
        if self.drafter not in (*known, *HEADS):
            raise ValueError(f"generate.drafter={self.drafter!r}: choose one of {', '.join(known)}")


@dataclass(frozen=True)
class DoctorConfig:
    """What is examined, and how closely."""

    cache: str | None = None
    """A cache (`cache=…` for short). Where any of cache, head, run and report is named, only what
    is named is examined; else whatever the work folder holds."""
    head: str | None = None
    """A head's folder: ours, or one in a layout that `import` reads."""
    run: str | None = None
    """A training run's folder, as WORK/train: metrics.jsonl, checkpoints/."""
    report: str | None = None
    """An acceptance report, report.json."""
    rows: int = 16
    """Rows that are sampled: the first, the last, the longest, and others by chance."""
    target: bool = True
    """Load the whole target where a check needs it (sampled rows are extracted again, a head is
    given other boundaries); false reads its embedding, final norm and lm_head alone."""
    seed: int = 0
    """Of the sample."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"doctor.rows={self.rows}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: everything below `work`, and the settings that made it."""

    work: str = "work/default"
    """Folder of the run's artifacts: rows*/, cache*/, train/, export/, report.*"""
    inputs: str | None = None
    """Another run's work folder, whose rows and caches are used instead of this one's (sweeps,
    ablations)."""
    overwrite: bool = False
    """Replace answers, a finished cache or a training run of other settings below `work`, instead
    of refusing."""
    target: TargetConfig
    head: HeadConfig
    data: DataConfig
    train: TrainConfig
    engine: EngineConfig
    ngram: NgramConfig = field(default_factory=NgramConfig)
    draft_lm: DraftLMConfig = field(default_factory=DraftLMConfig)
    tracker: TrackerConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    combine: CombineConfig = field(default_factory=CombineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    import_head: ImportConfig = field(default_factory=ImportConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        if not self.work:
            raise ValueError("work is empty: name the folder of the run's artifacts, work=…")
