"""What `doctor` asks of a head's folder, ours or one in a foreign layout, before it is run.

    files       every tensor is there, of the shape that the configuration asks for, undamaged
    tokenizer   made for the tokenizer of the target at hand
    frozen      the target's weights are those that it was trained beside
    rope        frequencies, scaling and positions are the target's
    vocabulary  the map holds ascending offsets inside the vocabulary, and reaches what is answered
    untrained   no tensor is bit for bit what training began with
    random      no tensor looks freshly drawn, or filled with a constant, where none was

How it runs is asked by `probe_head`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..data.findings import Finding, faults_of
from ..models.files import read_json
from ..models.formats import layout
from ..models.formats.source import find_source, layout_of
from ..models.heads import HeadConfig, LoadedHead, build_head, load_head
from ..models.heads.checkpoint import read_vocabulary
from ..models.skeleton import text_config

_ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim")
_LEAST_COVERAGE, _ALMOST_ALL = 0.7, 0.99
_SMALL = 256  # elements: of fewer nothing is said about their distribution
_KEPT = 0.2  # of a tensor's beginning: the cosine below which nothing of it is left


class HeadExamined(NamedTuple):
    """Findings, the head (None where it cannot be run), and what its folder says of itself."""

    findings: list[Finding]
    loaded: LoadedHead | None
    meta: dict[str, Any]


def examine_head(
    folder: Path, target_folder: Path, marks: dict[str, str], answers: Tensor | None = None
) -> HeadExamined:
    """Examine a head's folder against its target's.

    Args:
        marks: fingerprint of the target in `target_folder`. answers: [m] int64, supervised tokens
            that the head should be able to draft; None leaves the coverage out.
    """
    try:
        meta: dict[str, Any] = read_json(folder / "config.json")
        native = "format" in meta and "sha256" in meta
        found = _vocabulary_map(folder, meta) if native else []
        if native and not found:
            found += _target(meta["target_fingerprint"], marks)
            found += _rope(meta["target_config"], target_folder, meta.get("trained_length", 0))
        if faults_of(found):
            return HeadExamined(found, None, meta)
        loaded, told = _read(folder, target_folder, native)
    except (ValueError, SafetensorError, OSError, KeyError) as error:
        remedy = "copy the whole folder again, or train anew"
        return HeadExamined([Finding("files", "fault", _words(error), remedy)], None, {})
    meta = loaded.meta
    found = [Finding("files", "ok", told), *found]
    if not native:
        found += _target(meta.get("target_fingerprint", {}), marks)
        found += _rope(loaded.head.target_config.to_dict(), target_folder, 0)
    found.append(_vocabulary(loaded, answers))
    found += _weights(loaded, target_folder, marks)
    return HeadExamined(found, loaded, meta)


def _read(folder: Path, target_folder: Path, native: bool) -> tuple[LoadedHead, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it would warn of are findings here
        if native:
            loaded, name = load_head(folder), "native folder"
        else:
            name = layout_of(folder)
            loaded = layout(name)[1](folder, target_folder)
    parameters = sum(value.numel() for value in loaded.head.parameters())
    return loaded, (
        f"{loaded.head.kind} head, {name}: {len(loaded.head.state_dict())} tensors, "
        f"{parameters:,} parameters, none missing"
    )


def _vocabulary_map(folder: Path, meta: dict[str, Any]) -> list[Finding]:
    """The map of a native folder, before `load_head` refuses it together with all else."""
    tensors = load_file(folder / "head.safetensors")
    maps = {name: tensors[name] for name in ("d2t", "t2d") if name in tensors}
    size, d2t = int(meta["target_config"]["vocab_size"]), maps.get("d2t")
    try:
        read_vocabulary(maps, size, str(folder / "head.safetensors"))
    except ValueError as error:
        told = str(error)
        if d2t is not None and bool((d2t.diff() > 0).all()) and int(d2t[-1]) < size:
            told += f"; d2t itself ascends from {int(d2t[0])} to {int(d2t[-1])}: absolute ids"
        remedy = "write d2t[i] = id - i, int64 (engines add the index)"
        return [Finding("vocabulary", "fault", told, remedy)]
    return []


def _target(trained: dict[str, str], marks: dict[str, str]) -> list[Finding]:
    """The fingerprint of the target that it was trained beside."""
    if not trained:
        return [Finding("frozen", "note", "the folder does not say which target it was made for")]
    told = {name: f"{was[:12]}, now {marks.get(name, '')[:12]}" for name, was in trained.items()}
    differing = [name for name in trained if trained[name] != marks.get(name)]
    if "tokenizer" in differing:
        remedy = "use the target it was trained for: its ids mean other tokens here"
        return [Finding("tokenizer", "fault", f"trained with {told['tokenizer']}", remedy)]
    found = [Finding("tokenizer", "ok", "made for the tokenizer of this target")]
    if "weights" in differing:
        remedy = (
            "use the weights it was trained beside, which must stay frozen, or train it further"
        )
        was = f"the target's weights were {told['weights']}"
        return [*found, Finding("frozen", "fault", was, remedy)]
    rest = [f"{name} {told[name]}" for name in differing]
    if rest:
        remedy = "the text stays right; acceptance may fall"
        noted = f"the same weights, but {'; '.join(rest)}"
        return [*found, Finding("frozen", "note", noted, remedy)]
    return [*found, Finding("frozen", "ok", "the target is bit for bit that of its training")]


def _rope(trained: dict[str, Any], target_folder: Path, length: int) -> list[Finding]:
    present = text_config(target_folder).to_dict()
    differing = [
        f"{name} {trained.get(name)}, the target {present.get(name)}"
        for name in _ROPE
        if trained.get(name) != present.get(name)
    ]
    remedy = "put the target's own values into the head's config.json; positions are the target's"
    if differing:
        return [Finding("rope", "fault", f"the head has {'; '.join(differing)}", remedy)]
    held, reads = (one.get("max_position_embeddings") for one in (trained, present))
    if held is not None and reads is not None and held < reads:
        told = f"the head has {held:,} positions, the target {reads:,}: its tables end too early"
        return [Finding("rope", "fault", told, remedy)]
    told = f"the target's: {present.get('rope_parameters')}"
    if length:
        told += f"; trained on rows of up to {length:,} tokens of {reads or 0:,}"
    return [Finding("rope", "ok", told)]


def _vocabulary(loaded: LoadedHead, answers: Tensor | None) -> Finding:
    ids, size = loaded.draft_ids, int(loaded.head.target_config.vocab_size)
    if ids is None:
        return Finding("vocabulary", "ok", f"drafts from all {size:,} ids")
    told = f"drafts {len(ids):,} of {size:,} ids"
    first = bool((ids == torch.arange(len(ids))).all())
    if first:
        told += ", which are simply the first ones"
    if answers is None or not len(answers):
        return Finding("vocabulary", "note" if first else "ok", told)
    share = float(torch.isin(answers.cpu(), ids).float().mean())
    told += f", {share:.1%} of {len(answers):,} answered tokens among them"
    promised = (loaded.meta.get("training") or {}).get("coverage")
    least = _LEAST_COVERAGE if promised is None else min(_LEAST_COVERAGE, promised - 0.2)
    # Nobody chooses the first ids by frequency: that is what readers make of a map that is lost.
    if share < least or (first and share < _ALMOST_ALL):
        remedy = (
            "the map is missing or of other data: keep it with the head, or train over these rows"
        )
        return Finding("vocabulary", "fault", told, remedy)
    return Finding("vocabulary", "ok", told)


def _weights(loaded: LoadedHead, target_folder: Path, marks: dict[str, str]) -> list[Finding]:
    """`untrained` and `random`."""
    state = {name: value.detach().float() for name, value in loaded.head.state_dict().items()}
    start = _start(loaded, target_folder, marks)
    if start is None:
        found = [Finding("untrained", "note", "the folder does not say how its training began")]
    else:
        same = [name for name, value in state.items() if torch.equal(value, start[name])]
        told = f"{len(same)} of {len(state)} tensors are bit for bit what training began with"
        if same:
            remedy = "no step reached them: look at train.max_steps, train.lr, and what is frozen"
            found = [Finding("untrained", "fault", f"{told}: {_few(same)}", remedy)]
        else:
            found = [Finding("untrained", "ok", told)]
    fresh = {
        name: why
        for name, value in state.items()
        if (why := _fresh(value, None if start is None else start[name], loaded)) is not None
    }
    told = f"{len(fresh)} of {len(state)} tensors look freshly drawn"
    if fresh and not faults_of(found):
        whys = _few([f"{name} ({why})" for name, why in fresh.items()])
        remedy = "a loader that found no such tensor drew it: copy the folder again, or train anew"
        return [*found, Finding("random", "fault", f"{told}: {whys}", remedy)]
    return [*found, Finding("random", "ok", told)]


def _start(
    loaded: LoadedHead, target_folder: Path, marks: dict[str, str]
) -> dict[str, Tensor] | None:
    """The head's tensors before its first step, rebuilt; None where its folder does not say how."""
    training = loaded.meta.get("training") or {}
    if "state_rms" not in training or "seed" not in training or "head" not in loaded.meta:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = HeadConfig.from_dict(loaded.meta["head"], "head")
    try:
        source = find_source(config.init.source, target_folder, marks)
        if source is not None and source.meta["content"] != training.get("source"):
            return None
        if source is not None:
            config = replace(source.head.config, init=config.init)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training["seed"])
            head = build_head(
                config,
                target_folder,
                training["state_rms"],
                draft_ids=loaded.draft_ids,
                source=source,
            )
    except ValueError:
        return None
    return {name: value.detach().float() for name, value in head.state_dict().items()}


def _fresh(value: Tensor, start: Tensor | None, loaded: LoadedHead) -> str | None:
    """Why a tensor looks like a fresh one: a constant, or a normal or uniform law of the width that
    such tensors are drawn with, and nothing of its own beginning in it."""
    if value.numel() < _SMALL and value.dim() != 1:
        return None
    if value.dim() == 1:
        constant = bool((value == value[0]).all()) and len(value) > 1
        return f"all {float(value[0]):g}" if constant else None
    if not bool(value.any()):
        return "all zeros"
    if start is not None and _cosine(value, start) > _KEPT:
        return None
    usual = float(getattr(loaded.head.target_config, "initializer_range", 0.02))
    spread, count = float(value.std()), value.numel()
    shape = float(((value - value.mean()) / spread).pow(4).mean())
    error = 5 / math.sqrt(2 * count)
    # the widths that torch and transformers draw with; kurtosis of the law; its sampling error
    laws = {
        f"normal of width {usual:g}": (usual, 3.0, 5 * math.sqrt(24 / count)),
        "uniform of width 1/sqrt(inputs)": (
            1 / math.sqrt(3 * value.shape[-1]),
            1.8,
            5 * math.sqrt(24 / count),
        ),
    }
    for name, (width, kurtosis, slack) in laws.items():
        centred = abs(float(value.mean())) < 5 * spread / math.sqrt(count)
        if centred and abs(spread / width - 1) < error and abs(shape - kurtosis) < slack:
            return name
    return None


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0))


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"


def _words(error: Exception) -> str:
    """An error of a library may be a bare key or type."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
