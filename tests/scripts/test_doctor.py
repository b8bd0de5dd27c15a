"""`doctor` finds each planted fault under its own name, and none in sound work of any family."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.conf.compose import composed, to_config
from draftsmith.data.batches import BatchPlan, PackedBatch
from draftsmith.data.cache import Cache
from draftsmith.data.cache_writer import CacheWriter
from draftsmith.data.findings import faults_of
from draftsmith.data.prefill import shard_states
from draftsmith.data.rowfile import Row, RowWriter, file_facts, token_hash
from draftsmith.data.rows import Rows
from draftsmith.data.shards import boundary_name
from draftsmith.data.store import Store
from draftsmith.models.files import atomic_write_json, read_json, sha256_file
from draftsmith.models.formats import layout
from draftsmith.models.heads import (
    Head,
    HeadConfig,
    NormConfig,
    build_head,
    load_head,
    mtp,
    save_head,
)
from draftsmith.models.target import Target, load_tokenizer
from draftsmith.models.trunk import Trunk
from draftsmith.scripts.cli import main
from draftsmith.scripts.examination import Doctor
from draftsmith.train.objective import Objective
from draftsmith.train.probe_head import _gain
from draftsmith.train.trial import Nearness, Trial

NO_NORMS = NormConfig(False, False, False, False)
FAMILIES = {
    "mtp of 2 modules": HeadConfig(modules=2),
    "eagle": HeadConfig("eagle", norms=NO_NORMS),
    "eagle restored": HeadConfig("eagle"),
    "eagle3": HeadConfig("eagle3", boundaries=(0, 1)),
    "medusa": HeadConfig("medusa", modules=2, norms=NO_NORMS),
    "medusa of own lm_heads": HeadConfig("medusa", modules=2, own_lm_heads=True, norms=NO_NORMS),
}


@dataclass
class Sound:
    """A finished run over the toy, not to be changed.

    Attributes:
        toy: the module alphabet.py. root: holds target/, chats.json, work/.
    """

    toy: ModuleType
    root: Path

    def words(self, root: Path | None = None) -> list[str]:
        """The settings of the run, or of a copy of it."""
        root = root or self.root
        return self.toy.settings(root / "target", root / "chats.json", root / "work")

    def copy(self, root: Path, *parts: str) -> Path:
        """The target, and parts of the work folder, to be damaged."""
        shutil.copytree(self.root / "target", root / "target")
        for part in parts:
            shutil.copytree(self.root / "work" / part, root / "work" / part)
        return root

    def faults(self, root: Path, *named: str) -> list[tuple[str, str]]:
        """(subject, check) of every fault found in a copy."""
        config = to_config(composed([*self.words(root), *named]))
        found = Doctor(config).examine()
        for one in found:
            for fault in faults_of(one.findings):
                assert fault.told and fault.remedy, fault
        return [(one.subject, fault.check) for one in found for fault in faults_of(one.findings)]

    def head_faults(self, head: Path, *named: str) -> list[str]:
        """Of a head, on the run's held-out states, without loading the target."""
        words = [f"doctor.head={head}", "doctor.target=false", *named]
        found = self.faults(self.root, *words)
        assert {subject for subject, _ in found} <= {"head"}
        return [check for _, check in found]

    @property
    def head(self) -> Path:
        return self.root / "work" / "train" / "head"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    place = Path(__file__).with_name("alphabet.py")
    spec = importlib.util.spec_from_file_location("alphabet", place)
    assert spec is not None and spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    root = tmp_path_factory.mktemp("sound")
    toy.save_target(root / "target")
    toy.save_chats(root / "chats.json")
    made = Sound(toy, root)
    for verb in ("prepare", "dump", "train", "evaluate"):
        assert main([verb, *made.words()]) == 0
    return made


@pytest.fixture(scope="module")
def captured(sound: Sound) -> tuple[Target, _states]:
    """The target, and its states at every boundary."""
    target = Target.load(to_config(composed(sound.words())).target)
    return target, _states(target, Rows.open(sound.root / "work" / "rows"))


def learn(
    captured: tuple[Target, _states],
    config: HeadConfig,
    out: Path,
    ids: Tensor | None = None,
    change: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
    prepare: Callable[[Head], object] = lambda head: None,
) -> Path:
    """A head of any family after a second of training on the target's own states."""
    target, states = captured
    plan = BatchPlan(states, tokens_per_batch=300)
    torch.manual_seed(0)
    head = build_head(config, target.folder, 0.3, draft_ids=ids)
    prepare(head)
    boundaries = tuple(range(target.num_layers + 1))
    objective = Objective(
        target.trunk, [1.0, 0.5], boundaries=boundaries, draft_ids=ids, dtype=torch.float32
    )
    optimiser = torch.optim.Adam(head.parameters(), 5e-3)
    for step in range(30):
        loss, stats = objective(head, change(plan.batch(step)), 2)
        optimiser.zero_grad()
        (loss / stats.weight.sum()).backward()
        optimiser.step()
    training = {"state_rms": 0.3, "seed": 0, "source": None, "step": 30}
    marks = target.fingerprint
    save_head(
        out,
        head,
        target_fingerprint=marks,
        draft_ids=ids,
        trained_length=129,
        config={},
        training=training,
    )
    return out


class _states:
    """The rows with all boundaries, from memory."""

    def __init__(self, target: Target, rows: Rows) -> None:
        numbers = list(range(len(rows)))
        self.boundaries = tuple(range(target.num_layers + 1))
        self.content, self.tensors = shard_states(
            numbers, rows, target, self.boundaries, "bf16", 4096, lambda done: None
        )
        self.lengths, self.ids = np.array(self.content.lengths), list(self.content.ids)
        self.starts = [0, *np.cumsum(self.lengths).tolist()]

    def supervised_counts(self, steps: int) -> np.ndarray:
        return np.ones((len(self.ids), steps), np.int64)

    def gather(self, indices: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        spans = [slice(self.starts[one], self.starts[one + 1]) for one in indices]
        wide = torch.cat([self.tensors[boundary_name(k)] for k in self.boundaries], -1)
        return (
            [self.tensors["tokens"][one].long() for one in spans],
            [self.tensors["supervised"][one].bool() for one in spans],
            torch.cat([wide[one] for one in spans]).float(),
        )


def test_a_sound_run_has_no_fault(sound: Sound, capsys: pytest.CaptureFixture[str]) -> None:
    """Target, rows, cache, run, head and report, each with what was looked at; the record and the
    picture lie in the work folder."""
    assert main(["doctor", *sound.words()]) == 0
    subjects = ["target", "rows", "cache", "run", "head", "report"]
    assert f"{', '.join(subjects)}: no fault found" in " ".join(capsys.readouterr().out.split())
    out = sound.root / "work" / "doctor"
    record = read_json(out / "findings.json")
    assert [one["subject"] for one in record["examined"]] == subjects
    assert all(one["findings"] and not one["waits_for"] for one in record["examined"])
    assert (out / "alignment.png").read_bytes().startswith(b"\x89PNG")
    looked = {
        f"{one['subject']} {each['check']}"
        for one in record["examined"]
        for each in one["findings"]
    }
    assert {"cache states", "run accepted", "head engine", "report text"} <= looked


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sound_head_of_any_family_has_no_fault(
    sound: Sound, captured: tuple[Target, _states], tmp_path: Path, name: str
) -> None:
    """Also over a reduced vocabulary, and eagle3 in an engine's layout, with boundaries that the
    cache lacks and the target makes."""
    ids = torch.arange(20, 200) if name in ("eagle3", "medusa") else None
    head = learn(captured, FAMILIES[name], tmp_path / "head", ids)
    assert sound.faults(sound.root, f"doctor.head={head}") == []
    if name == "eagle3":
        layout("vllm-eagle3")[0](load_head(head), sound.root / "target", tmp_path / "vllm")
        assert sound.faults(sound.root, f"doctor.head={tmp_path / 'vllm'}") == []


# --- target and rows -----------------------------------------------------------------------------


def _json(path: Path, **changes: Any) -> None:
    atomic_write_json(path, {**read_json(path), **changes})


def _no_template(root: Path) -> None:
    (root / "target" / "chat_template.jinja").unlink()


def _two_bos(root: Path) -> None:
    path = root / "target" / "chat_template.jinja"
    path.write_text("<s>" + path.read_text())


def _other_template(root: Path) -> None:
    path = root / "target" / "chat_template.jinja"
    path.write_text(path.read_text().replace("<end>", "<end> "))


def _other_eos(root: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        _json(root / "target" / name, eos_token_id=0)
    _json(root / "target" / "tokenizer_config.json", eos_token="<pad>")


def _one_other_eos(root: Path) -> None:
    _json(root / "target" / "config.json", eos_token_id=0)


def _long_tokenizer(root: Path) -> None:
    tokenizer = load_tokenizer(root / "target")
    tokenizer.add_tokens([f"<{number}>" for number in range(9)])
    tokenizer.save_pretrained(root / "target")


def _no_lm_head(root: Path) -> None:
    path = root / "target" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, {"format": "pt"})


def _nan_lm_head(root: Path) -> None:
    path = root / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][5] = float("nan")
    save_file(tensors, path, {"format": "pt"})


def _short_target(root: Path) -> None:
    _json(root / "target" / "config.json", max_position_embeddings=32)


def _rewritten(change: Callable[[Row], Row]) -> Callable[[Path], None]:
    """Training rows changed, the manifest with them: as a careless tool would leave them."""

    def plant(root: Path) -> None:
        folder = root / "work" / "rows"
        rows = [change(row) for row in Rows.open(folder)]
        writer = RowWriter(folder / "train.parquet")
        for row in rows:
            writer.add(row)
        writer.close()
        manifest = read_json(folder / "manifest.json")
        manifest["files"]["train.parquet"] = file_facts(folder / "train.parquet")
        atomic_write_json(folder / "manifest.json", manifest)

    return plant


def _with_tokens(row: Row, tokens: np.ndarray, mask: np.ndarray) -> Row:
    return replace(row, tokens=tokens, supervised=mask, sha256=token_hash(tokens))


def _cut_rows(root: Path) -> None:
    path = root / "work" / "rows" / "train.parquet"
    path.write_bytes(path.read_bytes()[:-20])


UPSTREAM: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "no chat template": ("target", "template", _no_template),
    "a template that writes two bos": ("target", "template", _two_bos),
    "an end of turn that stops nothing": ("target", "end", _other_eos),
    "an end that config.json alone lacks": ("target", "end", _one_other_eos),
    "ids beyond the embedding": ("target", "vocabulary", _long_tokenizer),
    "no lm_head": ("target", "trunk", _no_lm_head),
    "NaN in lm_head": ("target", "trunk", _nan_lm_head),
    "rows cut short": ("rows", "files", _cut_rows),
    "another template since": ("rows", "tokenizer", _other_template),
    "rows longer than the target reads": ("rows", "length", _short_target),
    "an empty mask": (
        "rows",
        "mask",
        _rewritten(lambda row: replace(row, supervised=np.zeros_like(row.supervised))),
    ),
    "a mask of prompts too": (
        "rows",
        "mask",
        _rewritten(lambda row: replace(row, supervised=np.ones_like(row.supervised))),
    ),
    "ends that are not supervised": (
        "rows",
        "end",
        _rewritten(lambda row: replace(row, supervised=row.supervised & (row.tokens != 2))),
    ),
    "two bos in the rows": (
        "rows",
        "bos",
        _rewritten(
            lambda row: _with_tokens(
                row,
                np.concatenate([[1], row.tokens]).astype(np.int32),
                np.concatenate([[False], row.supervised]),
            )
        ),
    ),
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_a_fault_of_target_or_rows(sound: Sound, tmp_path: Path, name: str) -> None:
    """It is the only one told: what was made from it is not looked at."""
    subject, check, plant = UPSTREAM[name]
    root = sound.copy(tmp_path, "rows", "cache")
    plant(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Doctor, "_load", lambda self: pytest.fail("it went on"))
        assert sound.faults(root) == [(subject, check)]


def test_ends_that_files_list_in_part_are_no_fault(sound: Sound, tmp_path: Path) -> None:
    """The end of a text in one, that of a turn beside it in another, as published chat models have
    it; and a config.json that lists none."""
    root = sound.copy(tmp_path)
    _json(root / "target" / "config.json", eos_token_id=0)
    _json(root / "target" / "generation_config.json", eos_token_id=[0, 2])
    assert sound.faults(root) == []
    _json(root / "target" / "config.json", eos_token_id=None)
    assert sound.faults(root) == []


def test_rows_of_other_template_arguments(sound: Sound, tmp_path: Path) -> None:
    """Held-out conversations rendered with the arguments of serving give other ids."""
    root = sound.copy(tmp_path, "rows")
    assert sound.faults(root) == []
    told = sound.faults(root, "+data.rows.template_kwargs.loud=true")
    assert told == [("rows", "rendering")]


# --- cache ---------------------------------------------------------------------------------------

States = dict[int, Tensor]


def _by_row(change: Callable[[Tensor], Tensor]) -> Callable[[States, list[int], Trunk], Tensor]:
    return lambda states, lengths, _: torch.cat([change(one) for one in states[2].split(lengths)])


def _cut_off(states: States, lengths: list[int], trunk: Trunk) -> Tensor:
    return (states[2] * 1e6).clamp(-65504, 65504)


CACHES: dict[str, tuple[str, Callable[[States, list[int], Trunk], Tensor]]] = {
    "states one place late": ("shift", _by_row(lambda one: one.roll(1, 0))),
    "states one place early": ("shift", _by_row(lambda one: one.roll(-1, 0))),
    "normed states": ("norm", lambda states, _, trunk: trunk.norm(states[2])),
    "another boundary": ("states", lambda states, *_: states[1]),
    "states of another row": ("states", lambda states, lengths, _: states[2].roll(lengths[0], 0)),
    "states that float16 cut off": ("values", _cut_off),
}


def _write_cache(
    place: Path, captured: tuple[Target, _states], state: Tensor, rows_key: str
) -> Path:
    target, held = captured
    described = {
        "engine": "e",
        "target": dict(target.fingerprint),
        "target_dtype": "float32",
        "dtype": "bf16",
        "rows_key": rows_key,
        "split": "train",
        "num_layers": 2,
        "identity": {},
        "probes": {},
    }
    kept = {name: held.tensors[name] for name in ("tokens", "supervised")}
    kept[boundary_name(2)] = state.to(torch.bfloat16)
    with CacheWriter(Store(place), ["k"], (2,), target.hidden_size, "bf16") as writer:
        writer.submit(0, held.content, kept)
        writer.finish("key", described)
    return place


@pytest.mark.parametrize("name", CACHES)
def test_a_fault_of_states(
    sound: Sound, captured: tuple[Target, _states], tmp_path: Path, name: str
) -> None:
    """Named first; what the extraction says beside it is the same fault seen again."""
    check, change = CACHES[name]
    target, held = captured
    states = {k: held.tensors[boundary_name(k)].float() for k in held.boundaries}
    with torch.no_grad():
        altered = change(states, held.lengths.tolist(), target.trunk)
    key = Rows.open(sound.root / "work" / "rows").key
    place = _write_cache(tmp_path / "cache", captured, altered, key)
    faults = sound.faults(sound.root, f"doctor.cache={place}")
    assert faults[0] == ("cache", check)
    assert {one for _, one in faults} <= {check, "states"}


def test_a_cache_of_other_rows_and_a_damaged_one(
    sound: Sound, captured: tuple[Target, _states], tmp_path: Path
) -> None:
    """In a work folder whose rows were prepared anew, or copied badly; the head is not judged on
    it."""
    root = sound.copy(tmp_path, "rows", "train")
    state = captured[1].tensors[boundary_name(2)]
    _write_cache(root / "work" / "cache", captured, state, "of other rows")
    assert sound.faults(root) == [("cache", "rows")]
    path = root / "work" / "cache" / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    assert sound.faults(root) == [("cache", "files")]


# --- head ----------------------------------------------------------------------------------------


def _meta(head: Path, **changes: Any) -> None:
    _json(head / "config.json", **changes)


def _tensors(head: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = head / "head.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    _meta(head, sha256=sha256_file(path))


def _fingerprint(name: str) -> Callable[[Path], None]:
    def plant(head: Path) -> None:
        marks = read_json(head / "config.json")["target_fingerprint"]
        _meta(head, target_fingerprint={**marks, name: "0" * 16})

    return plant


def _other_rope(head: Path) -> None:
    about = read_json(head / "config.json")["target_config"]
    about["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    _meta(head, target_config=about)


def _short_rope(head: Path) -> None:
    about = read_json(head / "config.json")["target_config"]
    _meta(head, target_config={**about, "max_position_embeddings": 64})


def _exchanged(head: Path) -> None:
    meta = read_json(head / "config.json")
    meta["head"]["hidden_first"] = True
    meta["recycle"]["fusion_order"] = ["hidden", "embedding"]
    atomic_write_json(head / "config.json", meta)


def _flipped(head: Path) -> None:
    _tensors(
        head, lambda held: held.update({"blocks.0.norm.weight": -held["blocks.0.norm.weight"]})
    )


def _infinite(head: Path) -> None:
    _tensors(head, lambda held: held["blocks.0.eh_proj.weight"][3].fill_(float("inf")))


def _random(head: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def change(held: dict[str, Tensor]) -> None:
        held["blocks.0.layer.mlp.down_proj.weight"].normal_(std=0.05, generator=generator)

    _tensors(head, change)


def _ones(head: Path) -> None:
    _tensors(head, lambda held: held["blocks.0.enorm.weight"].fill_(2.5))


def _map(ids: Tensor, d2t: Tensor | None = None) -> Callable[[Path], None]:
    def plant(head: Path) -> None:
        t2d = torch.zeros(264, dtype=torch.bool)
        t2d[ids] = True
        offsets = ids - torch.arange(len(ids)) if d2t is None else d2t
        _tensors(head, lambda held: held.update({"d2t": offsets, "t2d": t2d}))

    return plant


def _lacking(head: Path) -> None:
    _tensors(head, lambda held: held.pop("blocks.0.hnorm.weight"))


IDS = torch.arange(20, 200)
HEADS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a tensor is missing": ("files", _lacking),
    "half a file": ("files", lambda head: _meta(head, sha256="0")),
    "another tokenizer": ("tokenizer", _fingerprint("tokenizer")),
    "target weights that moved": ("frozen", _fingerprint("weights")),
    "another rope base": ("rope", _other_rope),
    "fewer positions than the target": ("rope", _short_rope),
    "absolute ids as offsets": ("vocabulary", _map(IDS, IDS)),
    "maps of two vocabularies": ("vocabulary", _map(IDS, IDS.flip(0) * 0 + 3)),
    "the first ids for want of a map": ("vocabulary", _map(torch.arange(40))),
    "a random tensor": ("random", _random),
    "a norm filled with a constant": ("random", _ones),
    "state and embedding exchanged": ("fusion", _exchanged),
    "weights of another moment": ("validated", _flipped),
    "an overflow": ("agreement", _infinite),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_fault_of_a_head(sound: Sound, tmp_path: Path, name: str) -> None:
    """The only one told."""
    check, plant = HEADS[name]
    head = tmp_path / "head"
    shutil.copytree(sound.head, head)
    plant(head)
    assert sound.head_faults(head) == [check]


def test_an_untrained_tensor(sound: Sound, tmp_path: Path) -> None:
    """One that is what training began with, and a head that is so as a whole."""
    head, began = tmp_path / "head", tmp_path / "began"
    shutil.copytree(sound.head, head)
    loaded = load_head(head)
    training = loaded.meta["training"]
    torch.manual_seed(training["seed"])
    start = build_head(loaded.head.config, sound.root / "target", training["state_rms"])
    name = "blocks.0.eh_proj.weight"
    _tensors(head, lambda held: held.update({name: start.state_dict()[name].detach().clone()}))
    assert sound.head_faults(head)[0] == "untrained"
    shutil.copytree(head, began)
    _tensors(began, lambda held: held.update(start.state_dict()))
    assert sound.head_faults(began)[0] == "untrained"


def _one_further(batch: PackedBatch) -> PackedBatch:
    return replace(batch, hidden=batch.hidden.roll(-1, 0))


def test_a_head_that_was_trained_on_something_else(
    sound: Sound, captured: tuple[Target, _states], tmp_path: Path
) -> None:
    """A teacher one place further: what its weights agree with names the fault."""
    late = learn(captured, HeadConfig(), tmp_path / "late", change=_one_further)
    assert sound.head_faults(late) == ["shift"]


@torch.no_grad()
def _blind(head: Head) -> None:
    head.get_parameter("blocks.0.enorm.weight").requires_grad_(False).uniform_(0, 1e-3)
    head.get_parameter("blocks.0.norm.weight")[::2] *= 4


def _given_raw(self: Head, states: dict[int, Tensor], trunk: Trunk) -> Tensor:
    return states[max(states)]


def test_what_counts_as_a_gain() -> None:
    """Of two steps: the same mean on every row, by a few rows, too small to matter, at the second
    step alone, in nats against the overlap, and by a head that is no nearer than a constant."""

    def wins(first: Tensor, second: Tensor, overlap: float = 0.41, constant: float = 0.1) -> bool:
        trial = SimpleNamespace(constant=torch.full((200,), constant))
        base = [Nearness(torch.full((200,), -3.0), torch.full((200,), 0.4))] * 2
        other = [Nearness(gain - 3.0, torch.full((200,), overlap)) for gain in (first, second)]
        return _gain(base, other, cast("Trial", trial)).wins

    steady, none, lucky = torch.full((200,), 0.1), torch.zeros(200), torch.zeros(200)
    lucky[:5] += 4
    assert wins(steady, steady)
    assert not wins(lucky, lucky)
    assert not wins(steady / 5, steady / 5)
    assert not wins(none, 5 * steady)
    assert not wins(steady, steady, overlap=0.39)
    assert not wins(steady, steady, constant=0.41)


def test_a_head_that_was_trained_before_the_final_norm(
    sound: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target with a final norm far from even, whose lm_head takes that back."""
    root = sound.copy(tmp_path, "rows")
    path = root / "target" / "model.safetensors"
    tensors = load_file(path)
    scale = torch.linspace(-2.5, 2.5, 64).exp()
    tensors["model.norm.weight"] *= scale
    tensors["lm_head.weight"] /= scale
    save_file(tensors, path, {"format": "pt"})
    target = Target.load(to_config(composed(sound.words(root))).target)
    captured = target, _states(target, Rows.open(root / "work" / "rows"))
    right = learn(captured, HeadConfig(), tmp_path / "right", prepare=_blind)
    assert sound.faults(root, f"doctor.head={right}") == []
    monkeypatch.setattr(Head, "feed", _given_raw)
    wrong = learn(captured, HeadConfig(), tmp_path / "wrong", prepare=_blind)
    monkeypatch.undo()
    assert sound.faults(root, f"doctor.head={wrong}") == [("head", "norm")]


def test_medusa_blocks_of_another_step(
    sound: Sound, captured: tuple[Target, _states], tmp_path: Path
) -> None:
    """The first two in each other's place."""
    head = learn(captured, FAMILIES["medusa"], tmp_path / "head")
    assert sound.head_faults(head) == []

    def change(held: dict[str, Tensor]) -> None:
        for name in ("weight", "bias"):
            one, two = (f"heads.{number}.0.linear.{name}" for number in (0, 1))
            held[one], held[two] = held[two].clone(), held[one].clone()

    _tensors(head, change)
    assert sound.head_faults(head) == ["shift"]


def test_a_head_that_was_trained_on_what_it_recycles_no_more(
    sound: Sound, captured: tuple[Target, _states], tmp_path: Path
) -> None:
    """The side of the output norm, changed in its config.json after a training at two steps. The
    head is all but blind to tokens, which tell everything here, and its norm is far from even."""

    head = learn(captured, HeadConfig(), tmp_path / "head", prepare=_blind)
    assert sound.head_faults(head) == []
    meta = read_json(head / "config.json")
    meta["head"]["recycle_raw"] = True
    meta["recycle"]["recycled"] = "pre-output-norm"
    atomic_write_json(head / "config.json", meta)
    assert sound.head_faults(head) == ["recycle"]


def test_an_engine_that_runs_something_else(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions one off in the engine's own form of the head."""
    call = mtp._LeanModule.__call__

    def wrong(self: Any, embeds: Tensor, hidden: Tensor, positions: Tensor, context: Any) -> Any:
        return call(
            self, embeds, hidden.roll(1, 0) if len(hidden) > 1 else hidden, positions, context
        )

    assert sound.head_faults(sound.head) == []
    monkeypatch.setattr(mtp._LeanModule, "__call__", wrong)
    assert sound.head_faults(sound.head) == ["engine"]


# --- run and report ------------------------------------------------------------------------------

Lines = list[dict[str, Any]]


def _course(losses: Callable[[int], float]) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        trained = [line for line in lines if line["kind"] == "train"]
        for number, line in enumerate(trained):
            line["loss"], line["agreement"] = losses(number), [0.02, 0.02, 0.02]

    return change


def _nan(lines: Lines) -> None:
    lines[3]["loss"] = float("nan")


def _untaught(lines: Lines) -> None:
    for line in lines:
        if line["kind"] == "train":
            line["supervised"] = 0


def _never_drafted(lines: Lines) -> None:
    for run in lines[-1]["acceptance"]["runs"]["heldout"].values():
        run |= {"num_drafts": 0, "cut_drafts": 0, "accepted_per_position": []}


def _never_accepted(lines: Lines) -> None:
    for run in lines[-1]["acceptance"]["runs"]["heldout"].values():
        run["accepted_per_position"] = [0] * len(run["accepted_per_position"])


RUNS: dict[str, tuple[str, Callable[[Lines], None]]] = {
    "NaN in the loss": ("loss", _nan),
    "a loss that stays": ("loss", _course(lambda number: 4.0)),
    "a loss that goes up at once": ("divergence", _course(lambda number: 4.0 + number)),
    "nothing supervised": ("teaching", _untaught),
    "nothing drafted": ("drafted", _never_drafted),
    "nothing accepted": ("accepted", _never_accepted),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_fault_of_a_run(sound: Sound, tmp_path: Path, name: str) -> None:
    """From what it logged, whether it came to its end or not."""
    check, change = RUNS[name]
    path = sound.root / "work" / "train" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert sound.faults(sound.root, f"doctor.run={tmp_path}") == [("run", check)]


def test_a_run_with_a_damaged_checkpoint_or_of_another_cache(sound: Sound, tmp_path: Path) -> None:
    """The newest checkpoint is compared with its marker, the cache's key with the run's."""
    root = sound.copy(tmp_path, "train")
    run = root / "work" / "train"
    cache = sound.root / "work" / "cache"
    named = [f"doctor.run={run}", f"doctor.cache={cache}", "doctor.target=false"]
    assert sound.faults(root, *named) == []
    weights = next(run.glob("checkpoints/step-*/weights.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"0000")
    record = read_json(run / "run.json")
    record["identity"]["cache"] = "0" * 64
    atomic_write_json(run / "run.json", record)
    assert sound.faults(root, *named) == [("run", "inputs"), ("run", "checkpoints")]


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("drafted", {"num_drafts": 0, "cut_drafts": 0}),
        ("accepted", {"accepted_per_position": [0, 0, 0]}),
        ("text", {"identical_to_plain": False}),
    ],
)
def test_a_fault_of_a_report(
    sound: Sound, tmp_path: Path, check: str, changes: dict[str, Any]
) -> None:
    """Tokens per target call of exactly 1 have two causes, told apart by the counts; text that
    drafting changed is a fault whatever the speed."""
    report = read_json(sound.root / "work" / "report.json")
    head = next(run for run in report["runs"] if run["drafter"] == "mtp")
    head |= changes
    path = tmp_path / "report.json"
    atomic_write_json(path, report)
    assert sound.faults(sound.root, f"doctor.report={path}") == [("report", check)]


def test_a_draft_lm_does_not_hide_a_head_that_accepts_nothing(sound: Sound, tmp_path: Path) -> None:
    """Each drafter is judged alone: only the head agrees with the text and is never taken."""
    report = read_json(sound.root / "work" / "report.json")
    head = next(run for run in report["runs"] if run["drafter"] == "mtp")
    good = head | {"drafter": "draft-lm", "accepted_per_position": [head["num_drafts"]] * 3}
    head["accepted_per_position"] = [0, 0, 0]
    report["runs"].append(good)
    path = tmp_path / "report.json"
    atomic_write_json(path, report)
    assert sound.faults(sound.root, f"doctor.report={path}") == [("report", "accepted")]


def test_faults_end_the_command_with_two(
    sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named with place and remedy on stderr; what waits for them is said; a place that is not there
    is refused."""
    root = sound.copy(tmp_path, "rows", "cache")
    _no_template(root)
    assert main(["doctor", *sound.words(root)]) == 2
    told = capsys.readouterr()
    assert "template: the tokenizer of" in told.err and "chat_template.jinja" in told.err
    assert "not looked at: mend target first" in told.out
    record = read_json(root / "work" / "doctor" / "findings.json")
    waits = {one["subject"]: one["waits_for"] for one in record["examined"]}
    assert waits == {"target": [], "rows": ["target"], "cache": ["target"]}
    assert main(["doctor", *sound.words(root), f"doctor.head={tmp_path}/none"]) == 2
    assert "nothing is there to examine" in capsys.readouterr().err


def test_the_cache_of_the_run_is_open_to_all(sound: Sound) -> None:
    """The plants above damaged copies only."""
    Cache.open(sound.root / "work" / "cache")
