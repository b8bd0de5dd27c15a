"""`doctor` finds each fault planted in a cache of the real model, and none in a sound one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.data.alignment import draw, head_rows
from draftsmith.data.cache_writer import CacheWriter
from draftsmith.data.examine import Examination, examine_cache
from draftsmith.data.prefill import shard_states
from draftsmith.data.quantise import quantise
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.data.shards import ShardRows, boundary_name, mask_hash, scale_name
from draftsmith.data.store import Store
from draftsmith.kernels.shift import supervision
from draftsmith.models.target import Target, TargetConfig, load_tokenizer

TALKS = [
    ("What is the capital of France?", "The capital of France is Paris, on the river Seine."),
    ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    ("Name the days of the week.", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday."),
]
Change = Callable[[dict[str, Tensor], ShardRows, int], None]


class Plant:
    """Writes caches of a few real rows with a fault in them, and examines them."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder, self.last = target, folder, target.num_layers
        records = [
            {"id": f"talk-{n}", "messages": [
                {"role": "user", "content": ask}, {"role": "assistant", "content": answer}
            ]}
            for n, (ask, answer) in enumerate(TALKS)
        ]  # fmt: skip
        source = folder / "talks.json"
        source.write_text(json.dumps(records))
        config = RowsConfig(str(source), holdout=0, max_length=256)
        prepare(config, load_tokenizer(target.folder), target.fingerprint, folder / "rows")
        self.rows = Rows.open(folder / "rows")
        boundaries = (self.last - 1, self.last)
        self.shard = list(range(len(self.rows)))
        self.content, self.tensors = shard_states(
            self.shard, self.rows, target, boundaries, "bf16", 4096, lambda done: None
        )

    def borders(self) -> list[int]:
        """Row borders in the shard."""
        return [0, *torch.tensor(self.content.lengths).cumsum(0).tolist()]

    def cache(self, change: Change | None = None, dtype: str = "bf16", **about: object) -> Path:
        """A finished cache of boundary L whose tensors `change` has altered."""
        tensors = {name: value.clone() for name, value in self.tensors.items()}
        if change:
            change(tensors, self.content, self.last)
        mask = tensors["supervised"].bool()
        parts = mask.split(list(self.content.lengths))
        content = dataclasses.replace(
            self.content,
            masks=tuple(mask_hash(part.numpy()) for part in parts),
            supervised=tuple(int(part.sum()) for part in parts),
            runs=tuple(_runs(part) for part in parts),
        )
        codes, scale = quantise(tensors[boundary_name(self.last)], dtype)
        kept = {"tokens": tensors["tokens"], "supervised": tensors["supervised"]}
        kept[boundary_name(self.last)] = codes
        if scale is not None:
            kept[scale_name(self.last)] = scale
        place = self.folder / f"cache-{len(list(self.folder.iterdir()))}"
        described = {
            "engine": "e",
            "target": dict(self.target.fingerprint),
            "target_dtype": "float32",
            "dtype": dtype,
            "rows_key": self.rows.key,
            "split": "train",
            "num_layers": self.last,
            "identity": {},
            "probes": {},
            **about,
        }
        size = self.target.hidden_size
        with CacheWriter(Store(place), ["k"], (self.last,), size, dtype) as writer:
            writer.submit(0, content, kept)
            writer.finish("key", described)
        return place

    def examine(self, place: Path, with_target: bool = True) -> Examination:
        """As the command does, every row sampled."""
        target = self.target if with_target else None
        trunk, marks = self.target.trunk, self.target.fingerprint
        return examine_cache(place, target, trunk, marks, rows=len(TALKS))

    def faults(self, change: Change) -> dict[str, str]:
        """check -> what was told, of the faults found."""
        found = self.examine(self.cache(change))
        return {fault.check: fault.told for fault in found.faults}


def _runs(mask: Tensor) -> list[int]:
    counts = supervision(mask, torch.tensor([0, len(mask)]), 1)[0]
    return [int(counts.sum()) + 1] if counts.any() else []


@pytest.fixture(scope="module")
def plant(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Plant:
    target = Target.load(TargetConfig(str(smollm2_folder), dtype="float32", device="cpu"))
    return Plant(target, tmp_path_factory.mktemp("plant"))


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8"])
def test_a_sound_cache_has_no_fault(plant: Plant, dtype: str) -> None:
    """Whatever it is stored in, with the target at hand or without."""
    place = plant.cache(dtype=dtype)
    found = plant.examine(place)
    assert [finding.verdict for finding in found.findings[:7]] == ["ok"] * 7
    assert [finding.check for finding in found.findings] == [
        "files", "target", "mask", "values", "shift", "norm", "states", "policy",
    ]  # fmt: skip
    blind = plant.examine(place, with_target=False)
    assert not blind.faults and "not looked at" in blind.findings[6].told


@pytest.mark.parametrize(("shift", "told"), [(1, "that of token p-1"), (-1, "that of token p+1")])
def test_shifted_states(plant: Plant, shift: int, told: str) -> None:
    """The probes say it, and the extraction says by which shift."""

    def change(tensors: dict[str, Tensor], content: ShardRows, last: int) -> None:
        parts = tensors[boundary_name(last)].split(list(content.lengths))
        tensors[boundary_name(last)] = torch.cat([part.roll(shift, 0) for part in parts])

    faults = plant.faults(change)
    assert "shift" in faults and told in faults["states"] and "'talk-" in faults["states"]


def test_another_boundary(plant: Plant) -> None:
    """One layer early is hard to see in the probes; the extraction names the boundary."""

    def change(tensors: dict[str, Tensor], content: ShardRows, last: int) -> None:
        tensors[boundary_name(last)] = tensors[boundary_name(last - 1)]

    assert f"the states of boundary {plant.last - 1}" in plant.faults(change)["states"]


def test_normed_states(plant: Plant) -> None:
    """Named by both."""

    def change(tensors: dict[str, Tensor], content: ShardRows, last: int) -> None:
        name = boundary_name(last)
        tensors[name] = plant.target.trunk.norm(tensors[name].float()).to(torch.bfloat16)

    faults = plant.faults(change)
    assert "normed before" in faults["norm"] and "after the final norm" in faults["states"]


def test_states_of_another_row(plant: Plant) -> None:
    """From the token on where they begin; the other rows are right."""
    begin, middle, end = plant.borders()[2], plant.borders()[2] + 20, plant.borders()[3]

    def change(tensors: dict[str, Tensor], content: ShardRows, last: int) -> None:
        states = tensors[boundary_name(last)]
        states[middle:end] = states[: end - middle].clone()

    told = plant.faults(change)["states"]
    assert f"row 2 (id 'talk-2'), boundary {plant.last}, from token {middle - begin}" in told
    assert "nothing of this row's" in told


def test_masks_that_teach_nothing_or_all(plant: Plant) -> None:
    """An empty mask, and one that holds the prompts."""

    def empty(tensors: dict[str, Tensor], content: ShardRows, last: int) -> None:
        tensors["supervised"].zero_()

    def full(tensors: dict[str, Tensor], content: ShardRows, last: int) -> None:
        tensors["supervised"].fill_(1)

    assert f"{len(TALKS)} rows teach nothing" in plant.faults(empty)["mask"]
    assert "100.0% of" in plant.faults(full)["mask"]


def test_a_cut_file_ends_the_examination(plant: Plant) -> None:
    """The file is named, and nothing is concluded from the rest."""
    place = plant.cache()
    path = place / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    found = plant.examine(place)
    assert [finding.check for finding in found.faults] == ["files"] and len(found.findings) == 1
    assert "shard-00000.safetensors" in found.faults[0].told


def test_another_target(plant: Plant) -> None:
    """Each field of the fingerprint that differs."""
    other = dict(plant.target.fingerprint) | {"tokenizer": "x", "weights": "y"}
    found = plant.examine(plant.cache(target=other))
    told = {fault.check: fault.told for fault in found.faults}
    assert "tokenizer, weights differ" in told["target"]


def test_a_target_of_other_sizes(plant: Plant, tiny_llama_folder: Callable[..., Path]) -> None:
    """What needs the target is left out, and said; files and mask are looked at."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 1}
    target = Target.load(
        TargetConfig(str(tiny_llama_folder(**sizes)), dtype="float32", device="cpu")
    )
    place = plant.cache()
    for given in (target, None):
        found = examine_cache(place, given, target.trunk, target.fingerprint, rows=len(TALKS))
        checks = {finding.check: finding for finding in found.findings}
        assert list(checks) == ["files", "target", "mask", "values"] and found.probes is None
        told = checks["target"].told
        assert "the states come from another target: " in told
        assert f"hidden size ({plant.target.hidden_size}, the target's" in told
        assert "vocabulary (token " in told and "the target's ends at 63)" in told
        assert ("layers (30, the target's 1)" in told) == (given is not None)
        assert checks["mask"].verdict == "ok"


def test_a_target_of_fewer_layers(plant: Plant, smollm2_folder: Path, tmp_path: Path) -> None:
    """The depth alone differs."""
    folder = tmp_path / "shallow"
    shutil.copytree(smollm2_folder, folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "num_hidden_layers": 2}))
    target = Target.load(TargetConfig(str(folder), dtype="float32", device="cpu"))
    found = examine_cache(plant.cache(), target, target.trunk, target.fingerprint)
    told = {fault.check: fault.told for fault in found.faults}
    assert list(told) == ["target"] and "layers (30, the target's 2)" in told["target"]


def test_alignment_of_a_row(plant: Plant) -> None:
    """Head row p: fed x_{p+1}, predicts x_{p+2}, trained where both are the assistant's; and the
    target's own word for x_{p+2} comes from h_{p+1}."""
    found = plant.examine(plant.cache())
    assert found.cache is not None and found.probes is not None
    row, tokenizer = found.cache.row(0), load_tokenizer(plant.target.folder)
    rows = head_rows(row, plant.target.trunk, tokenizer, plant.last)
    ids, marked = row.tokens.tolist(), row.supervised.tolist()
    for line in rows:
        p = line.position
        assert line.fed == repr(tokenizer.decode([ids[p + 1]]))[1:-1]
        assert line.trained == (marked[p + 1] and marked[p + 2])
        law = plant.target.logits(
            plant.target.trunk.norm(row.states[plant.last][p + 1 : p + 2].float())
        )[0].softmax(-1)
        assert line.chosen == repr(tokenizer.decode([int(law.argmax())]))[1:-1]
        assert line.probability == pytest.approx(float(law.max()), rel=1e-4)
    assert any(line.trained for line in rows) and not rows[0].trained
    assert len(draw(rows, found.probes.shift_nll).axes) == 2
