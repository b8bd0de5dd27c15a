"""Faults planted in trained heads of every family, see scripts/bench/doctor.py."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...inference.batch import Batch
from ...inference.head_drafter import HeadDrafter
from ...models.files import atomic_write_json, read_json, sha256_file
from ...models.heads import build_head, load_head
from ._planted import HEADS, Bench, Planted


def _meta(head: Path, change: Callable[[dict[str, Any]], object]) -> None:
    told = read_json(head / "config.json")
    change(told)
    atomic_write_json(head / "config.json", told)


def _tensors(head: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = head / "head.safetensors"
    held = load_file(path)
    change(held)
    save_file({name: value.contiguous() for name, value in held.items()}, path)
    _meta(head, lambda told: told.update(sha256=sha256_file(path)))


def _reshaped(**settings: Any) -> Callable[[Path], None]:
    """The same weights under settings that they were not trained with."""

    def plant(head: Path) -> None:
        loaded = load_head(head)
        other = type(loaded.head)(
            replace(loaded.head.config, **settings),
            loaded.head.target_config,
            loaded.head.draft_vocab_size,
        )

        def change(told: dict[str, Any]) -> None:
            told["head"].update(settings)
            told["recycle"] = dataclasses.asdict(other.recycle)

        _meta(head, change)

    return plant


def of_head(bench: Bench, name: str) -> Iterator[Planted]:
    """Whatever can be wrong with a head of this family."""
    source = bench.out / HEADS[name] / "head"
    loaded = bench.heads[name]
    generator = torch.Generator().manual_seed(3)

    def with_head(plant: Callable[[Path], object]) -> Callable[[Path], list[str]]:
        def found(root: Path) -> list[str]:
            shutil.copytree(source, root / "head")
            plant(root / "head")
            return bench.head_faults(root / "head")

        return found

    def planted(what: str, check: str, plant: Callable[[Path], object]) -> Planted:
        return Planted(f"{name}: {what}", (f"head {check}",), with_head(plant))

    def marks(which: str) -> Callable[[Path], None]:
        return lambda head: _meta(
            head, lambda told: told["target_fingerprint"].update({which: "0" * 16})
        )

    def about(**settings: Any) -> Callable[[Path], None]:
        return lambda head: _meta(head, lambda told: told["target_config"].update(settings))

    def vocabulary(ids: Tensor, offsets: Tensor) -> Callable[[Path], None]:
        t2d = torch.zeros(int(loaded.head.target_config.vocab_size), dtype=torch.bool)
        t2d[ids] = True
        return lambda head: _tensors(head, lambda held: held.update(d2t=offsets, t2d=t2d))

    widest = max(
        (
            key
            for key, value in loaded.head.state_dict().items()
            if value.dim() == 2 and not key.startswith("lm_head")
        ),
        key=lambda key: loaded.head.state_dict()[key].numel(),
    )

    def began(head: Path) -> None:
        training = loaded.meta["training"]
        torch.manual_seed(training["seed"])
        start = build_head(
            loaded.head.config, bench.folder, training["state_rms"], draft_ids=loaded.draft_ids
        ).state_dict()
        _tensors(head, lambda held: held.update({widest: start[widest].detach().clone()}))

    yield planted("target weights that moved", "frozen", marks("weights"))
    yield planted("another tokenizer", "tokenizer", marks("tokenizer"))
    yield planted("an untrained tensor", "untrained", began)
    yield planted(
        "a random tensor",
        "random",
        lambda head: _tensors(
            head, lambda held: held[widest].normal_(std=usual(loaded), generator=generator)
        ),
    )
    yield planted(
        "an overflow",
        "agreement",
        lambda head: _tensors(head, lambda held: held[widest][3].fill_(1e38)),
    )
    if loaded.draft_ids is not None:
        ids = loaded.draft_ids.cpu()
        yield planted("absolute ids as offsets", "vocabulary", vocabulary(ids, ids))
        first = torch.arange(len(ids))
        yield planted("the first ids for want of a map", "vocabulary", vocabulary(first, first * 0))
    if name != "medusa":
        rope = {"rope_type": "default", "rope_theta": 1e6}
        yield planted("another rope base", "rope", about(rope_parameters=rope))
        yield planted("fewer positions", "rope", about(max_position_embeddings=64))
    if name in ("mtp", "eagle restored"):
        yield planted("trained before the final norm", "norm", lambda head: raw(bench, head))
        yield planted("parts exchanged", "fusion", _reshaped(hidden_first=True))
        yield planted("recycled before the norm", "recycle", _reshaped(recycle_raw=True))
    if name == "eagle3":
        fused = loaded.head.boundaries
        for by in (-1, 1):
            ids = [k + by for k in fused]
            yield planted(f"boundaries {by:+d}", "boundaries", _reshaped(boundaries=ids))
        yield planted("recycled after the norm", "recycle", _reshaped(norm_output=True))
    if name == "medusa":
        yield planted("its blocks one step late", "shift", late)
    yield Planted(
        f"{name}: an engine one place off", ("head engine",), lambda _: off(bench, source)
    )


def usual(loaded: Any) -> float:
    """The width that transformers draws the target's family with."""
    return float(getattr(loaded.head.target_config, "initializer_range", 0.02))


def raw(bench: Bench, head: Path) -> None:
    """The weights of the same function of the state before the final norm: that norm's weight goes
    into the head's own, so that it now lacks what engines hand over with it."""
    trunk = bench.target.trunk
    weight = next(trunk.final_norm.parameters()).detach().float()
    normed = trunk.norm(bench.states(bench.target.num_layers).to(trunk.dtype)).detach().float()
    size = float(normed.square().mean(-1).sqrt().median())

    def change(held: dict[str, Tensor]) -> None:
        [name] = [key for key in held if key.endswith("hnorm.weight")]
        held[name] = (held[name].float() * weight / size).to(held[name].dtype)

    _tensors(head, change)


def late(head: Path) -> None:
    """Head k holds the weights of head k + 1: trained a place further."""

    def change(held: dict[str, Tensor]) -> None:
        for key in list(held):
            if ".1." in key and (before := key.replace(".1.", ".0.", 1)) in held:
                held[before], held[key] = held[key].clone(), held[before].clone()

    _tensors(head, change)


def off(bench: Bench, head: Path) -> list[str]:
    """A head as it is, in an engine that hands it the states of the place before."""
    right = HeadDrafter.observe

    def wrong(
        self: HeadDrafter, batch: Batch, states: dict[int, Tensor], next_tokens: list[int]
    ) -> None:
        before = {boundary: state.roll(1, 0) for boundary, state in states.items()}
        right(self, batch, before, next_tokens)

    HeadDrafter.observe = wrong
    try:
        return bench.head_faults(head)
    finally:
        HeadDrafter.observe = right
