"""Copies of real work with one fault each, of which scripts/bench/doctor.py asks what doctor says:
target, rows, states and logs. Heads are `_planted_heads`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...conf.compose import composed, to_config
from ...conf.schema import DoctorConfig
from ...data.cache import Cache
from ...data.cache_writer import CacheWriter
from ...data.findings import faults_of
from ...data.prefill import shard_states
from ...data.rowfile import Row, RowWriter, file_facts, token_hash
from ...data.rows import Rows
from ...data.shards import boundary_name
from ...data.store import Store
from ...models.files import atomic_write_json, read_json
from ...models.heads import load_head
from ...models.target import Target, TargetConfig
from ...models.trunk import Trunk
from ...train.examine_run import examine_run
from ...train.material import Material
from ..examination import Doctor, head_findings

HEADS = {
    "mtp": "fam-mtp",
    "eagle restored": "abl-all",
    "eagle3": "data-500k-x4",
    "medusa": "fam-medusa",
}


class Planted(NamedTuple):
    """One fault. `checks`: the names that are right for it."""

    what: str
    checks: tuple[str, ...]
    found: Callable[[Path], list[str]]


class Bench:
    """A loaded target and a slice of real work, from which damaged copies are made.

    Attributes:
        sound: a work folder with rows/ and cache/ of the slice. states: boundary -> [N, H] raw
            bfloat16 of the slice. lengths: of its rows.
    """

    def __init__(self, out: Path, work: Path, folder: Path, tokens: int, root: Path) -> None:
        self.out, self.root = out, root
        self.target = Target.load(TargetConfig(source=str(folder)))
        self.folder = self.target.folder
        self.config = to_config(composed([f"work={root / 'sound'}"]))
        self.sound = root / "sound"
        shutil.copytree(work / "rows", self.sound / "rows")
        self._slice(self.sound / "rows", tokens)
        rows = self.rows = Rows.open(self.sound / "rows")
        every = tuple(range(self.target.num_layers + 1))
        numbers = list(range(len(rows)))
        self.content, self.tensors = shard_states(
            numbers, rows, self.target, every, "bf16", 2048, lambda done: None
        )
        self.lengths = self.content.lengths
        self.heads = {name: load_head(out / at / "head") for name, at in HEADS.items()}
        self.boundaries = tuple(sorted({*self.heads["eagle3"].head.boundaries, every[-1]}))
        cache = Cache.open(self.cache(self.sound / "cache"))
        trunk = Trunk.load(self.folder, torch.float32)
        made = Material.of_cache(trunk, cache)
        self.material = replace(made, more=lambda ids: {k: self.states(k) for k in ids})

    def _slice(self, folder: Path, tokens: int) -> None:
        """Keep held-out rows, on which no head was trained, the shortest first."""
        chosen: list[Row] = []
        for row in sorted(Rows.open(folder, "heldout"), key=lambda row: len(row.tokens)):
            if sum(len(one.tokens) for one in chosen) < tokens:
                chosen.append(row)
        write_rows(folder, chosen)

    def states(self, boundary: int) -> Tensor:
        """[N, H] float32."""
        return self.tensors[boundary_name(boundary)].float()

    def cache(self, place: Path, last: Tensor | None = None, **changes: Any) -> Path:
        """The slice's cache, with other states of boundary L or another manifest."""
        layers = self.target.num_layers
        told = {
            "engine": "bench",
            "target": dict(self.target.fingerprint),
            "target_dtype": "bfloat16",
            "dtype": "bf16",
            "rows_key": self.rows.key,
            "split": "train",
            "num_layers": layers,
            "identity": {},
            "probes": {},
        }
        names = ["tokens", "supervised", *map(boundary_name, self.boundaries)]
        kept = {name: self.tensors[name] for name in names}
        if last is not None:
            kept[boundary_name(layers)] = last.to(torch.bfloat16)
        size = self.target.hidden_size
        with CacheWriter(Store(place), ["slice"], self.boundaries, size, "bf16") as writer:
            writer.submit(0, self.content, kept)
            writer.finish("slice", told | changes)
        return place

    def faults(self, work: Path, folder: Path | None = None) -> list[str]:
        """Subject and check of every fault in a work folder; folder: of another target."""
        source = str(folder or self.folder)
        config = replace(
            self.config,
            work=str(work),
            target=replace(self.config.target, source=source),
            doctor=DoctorConfig(rows=4),
        )
        examined = Doctor(config, self.target if folder is None else None).examine()
        return [
            f"{one.subject} {fault.check}" for one in examined for fault in faults_of(one.findings)
        ]

    def head_faults(self, head: Path) -> list[str]:
        """Of a head's folder, on the slice's states."""
        found = head_findings(head, self.folder, self.target.fingerprint, self.material)
        return [f"head {fault.check}" for fault in faults_of(found)]

    def run_faults(self, run: Path) -> list[str]:
        """Of a run's folder."""
        return [f"run {fault.check}" for fault in faults_of(examine_run(run))]


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Other training rows in a folder, as a careless tool leaves them: all checksums right."""
    writer = RowWriter(folder / "train.parquet")
    for row in rows:
        writer.add(row)
    writer.close()
    manifest = read_json(folder / "manifest.json")
    manifest["files"]["train.parquet"] = file_facts(folder / "train.parquet")
    manifest["counts"]["train"] = writer.count
    atomic_write_json(folder / "manifest.json", manifest)


def of_target(bench: Bench) -> Iterator[Planted]:
    """Tokenizer and template."""

    def with_file(name: str, change: Callable[[Path], object], rows: bool = False) -> Any:
        def found(root: Path) -> list[str]:
            shutil.copytree(
                bench.folder.resolve(),
                root / "target",
                copy_function=lambda held, link: Path(link).symlink_to(held),
            )
            path = root / "target" / name
            text = path.read_bytes() if path.exists() else b"{}"
            path.unlink(missing_ok=True)
            path.write_bytes(text)
            change(path)
            work = root / "work"
            work.mkdir()
            if rows:
                shutil.copytree(bench.sound / "rows", work / "rows")
            return bench.faults(work, root / "target")

        return found

    def text(old: str, new: str) -> Callable[[Path], object]:
        return lambda path: path.write_text(path.read_text().replace(old, new))

    def ends(path: Path) -> None:
        atomic_write_json(path, {**read_json(path), "eos_token_id": 0})

    def added(path: Path) -> None:
        told = read_json(path)
        size = bench.target.trunk.vocab_size
        extra = {**told["added_tokens"][-1], "id": size + 3, "content": "<|extra|>"}
        atomic_write_json(path, {**told, "added_tokens": [*told["added_tokens"], extra]})

    template = "chat_template.jinja"
    yield Planted(
        "no chat template", ("target template",), with_file(template, lambda path: path.unlink())
    )
    yield Planted(
        "the template's end of turn stops nothing", ("target end",), with_file("config.json", ends)
    )
    yield Planted(
        "ids beyond the embedding", ("target vocabulary",), with_file("tokenizer.json", added)
    )
    yield Planted(
        "another template than the rows'",
        ("rows tokenizer",),
        with_file(template, text("helpful", "useful"), rows=True),
    )


def of_rows(bench: Bench) -> Iterator[Planted]:
    """Masks, and ids twice."""
    begin = int(bench.rows[0].tokens[0])

    def with_rows(change: Callable[[Row], Row]) -> Callable[[Path], list[str]]:
        def found(root: Path) -> list[str]:
            shutil.copytree(bench.sound / "rows", root / "rows")
            write_rows(root / "rows", map(change, list(Rows.open(root / "rows"))))
            return bench.faults(root)

        return found

    def mask(change: Callable[[Row], np.ndarray]) -> Callable[[Path], list[str]]:
        return with_rows(lambda row: replace(row, supervised=change(row)))

    def twice(row: Row) -> Row:
        tokens = np.concatenate([[begin], row.tokens]).astype(np.int32)
        marked = np.concatenate([[False], row.supervised])
        return replace(row, tokens=tokens, supervised=marked, sha256=token_hash(tokens))

    end = 2  # SmolLM2's <|im_end|>
    yield Planted("no answer marked", ("rows mask",), mask(lambda row: row.supervised & False))
    yield Planted("prompts marked too", ("rows mask",), mask(lambda row: row.supervised | True))
    yield Planted(
        "ends of answers unmarked",
        ("rows end",),
        mask(lambda row: row.supervised & (row.tokens != end)),
    )
    yield Planted("two bos", ("rows bos",), with_rows(twice))


def of_states(bench: Bench) -> Iterator[Planted]:
    """Shift, norm, boundary, dtype, foreign and damaged caches."""
    layers = bench.target.num_layers
    last = bench.states(layers)

    def with_states(change: Callable[[Tensor], Tensor] | None, **changes: Any) -> Any:
        def found(root: Path) -> list[str]:
            with torch.no_grad():
                altered = None if change is None else change(last)
            shutil.copytree(bench.sound / "rows", root / "rows")
            bench.cache(root / "cache", altered, **changes)
            return bench.faults(root)

        return found

    def by_row(step: int) -> Callable[[Tensor], Tensor]:
        return lambda states: torch.cat([one.roll(step, 0) for one in states.split(bench.lengths)])

    def normed(states: Tensor) -> Tensor:
        trunk = bench.target.trunk
        return trunk.norm(states.to(trunk.dtype)).float()

    def damaged(root: Path) -> list[str]:
        bench.cache(root / "cache")
        path = root / "cache" / "shard-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
        return bench.faults(root)

    def cut(states: Tensor) -> Tensor:
        return (states * 100).clamp(-65504, 65504)

    marks = {**bench.target.fingerprint, "weights": "0" * 16}
    yield Planted("states one place late", ("cache shift",), with_states(by_row(1)))
    yield Planted("states one place early", ("cache shift",), with_states(by_row(-1)))
    yield Planted("states after the final norm", ("cache norm",), with_states(normed))
    yield Planted(
        "states of boundary L-1",
        ("cache states", "cache norm"),
        with_states(lambda _: bench.states(layers - 1)),
    )
    yield Planted(
        "states of another row",
        ("cache states", "cache shift"),
        with_states(lambda states: states.roll(bench.lengths[0], 0)),
    )
    yield Planted("states that float16 cut off", ("cache values",), with_states(cut))
    yield Planted("a cache of other rows", ("cache rows",), with_states(None, rows_key="0" * 64))
    yield Planted("a cache of another target", ("cache target",), with_states(None, target=marks))
    yield Planted("a damaged shard", ("cache files",), damaged)


def of_run(bench: Bench) -> Iterator[Planted]:
    """What a run logged: courses of the loss, and acceptance that stays at 1 token a call."""
    path = bench.out / HEADS["mtp"] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def with_lines(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], list[str]]:
        def found(root: Path) -> list[str]:
            changed = json.loads(json.dumps(lines))
            change(changed)
            (root / "metrics.jsonl").write_text("\n".join(map(json.dumps, changed)))
            return bench.run_faults(root)

        return found

    def course(loss: Callable[[int], float]) -> Callable[[list[dict[str, Any]]], None]:
        def change(told: list[dict[str, Any]]) -> None:
            for number, line in enumerate(line for line in told if line["kind"] == "train"):
                line |= {"loss": loss(number), "agreement": [0.02, 0.02, 0.02]}

        return change

    def accepted(**counts: Any) -> Callable[[list[dict[str, Any]]], None]:
        run = {"target_calls": 900, "num_drafts": 880, "cut_drafts": 20, **counts}
        return lambda told: told[-1].update(acceptance={"runs": {"heldout": {"0": run}}})

    yield Planted("NaN in the loss", ("run loss",), with_lines(course(lambda n: float("nan"))))
    yield Planted("a loss that stays", ("run loss",), with_lines(course(lambda _: 9.0)))
    yield Planted("a loss that goes up", ("run divergence",), with_lines(course(lambda n: 6.0 + n)))
    yield Planted(
        "every draft refused",
        ("run accepted",),
        with_lines(accepted(accepted_per_position=[0, 0, 0])),
    )
    yield Planted(
        "nothing drafted",
        ("run drafted",),
        with_lines(accepted(num_drafts=0, cut_drafts=0, accepted_per_position=[])),
    )
