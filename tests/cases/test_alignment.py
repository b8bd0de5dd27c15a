"""Field faults of alignment: which token a state belongs to, and which layer it was taken at."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.data import dump as dump_module
from draftsmith.data import prefill as prefill_module
from draftsmith.data.cache import Cache
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.probes import probe_states
from draftsmith.data.rows import Rows
from draftsmith.inference.capture import capture
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.models.files import read_json
from draftsmith.models.target import Target, TargetConfig

SMALL = DumpConfig(shard_tokens=300, tokens_per_batch=128)
TEXT = "The quick brown fox jumps over the lazy dog. The capital of France is Paris."


def load(folder: Path, layers: str = "auto") -> Target:
    return Target.load(TargetConfig(str(folder), dtype="float32", device="cpu", layers=layers))


def random_rows(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(512, (length,), generator=generator) for length in lengths]


def close(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_case_02_states_of_another_request(tiny_llama_folder: Callable[..., Path]) -> None:
    """States that belong to another request because something survives between calls. Eight rows
    of different length give the same states alone, together, and twice in a row."""
    target = load(tiny_llama_folder())
    rows = random_rows([5, 31, 1, 17, 64, 2, 40, 9])
    alone = torch.cat([capture(target, [row], (3,))[3] for row in rows])
    for _ in range(2):
        assert close(capture(target, rows, (3,))[3], alone)


def test_case_02_packed_rows_that_slid_never_reach_the_disk(
    toy_rows: Rows, toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows run together whose states slid against the rows run alone: the dump itself compares a
    sample and refuses before it writes."""

    def sliding(
        target: Target, rows: list[Tensor], boundaries: tuple[int, ...]
    ) -> dict[int, Tensor]:
        states = capture(target, rows, boundaries)
        return {k: v.roll(1, 0) if len(rows) > 1 else v for k, v in states.items()}

    monkeypatch.setattr(prefill_module, "capture", sliding)
    with pytest.raises(
        ValueError, match="argmax: the states choose the engine's own token at only"
    ):
        dump(SMALL, toy_rows, toy_target, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Fine:
    """A probe report without faults."""

    def refuse_faults(self, where: str, remedy: str) -> None:
        """None to refuse."""


def test_case_03_fewer_states_than_tokens(
    tiny_llama_folder: Callable[..., Path],
    toy_rows: Rows,
    toy_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefix that two rows share is computed once and its states are left out. Here every row
    brings as many states as tokens; a capture that does not is refused by the rows' names."""
    target = load(tiny_llama_folder())
    prefix, first, second = random_rows([100, 7, 12])
    rows = [torch.cat([prefix, first]), torch.cat([prefix, second])]
    states = capture(target, rows, (3,))[3]
    assert len(states) == 107 + 112
    assert close(states[:100], states[107:207])

    def short(target: Target, rows: list[Tensor], boundaries: tuple[int, ...]) -> dict[int, Tensor]:
        states = capture(target, rows, boundaries)
        return {k: v[:-1] if len(rows) > 1 else v for k, v in states.items()}

    monkeypatch.setattr(dump_module, "probe_rows", lambda *arguments: Fine())
    monkeypatch.setattr(prefill_module, "capture", short)
    with pytest.raises(ValueError, match=r"rows 0 to [1-9]\d* have \d+ tokens, boundary 2 came"):
        dump(DumpConfig(tokens_per_batch=512), toy_rows, toy_target, tmp_path)


def test_case_04_rows_after_a_shared_prefix(
    tiny_llama_folder: Callable[..., Path], toy_rows: Rows, toy_target: Target, tmp_path: Path
) -> None:
    """Rows behind one that shares a prefix get states of their neighbours. Here the third row's are
    its own, and in the cache each row's tokens lie beside its states under a hash."""
    target = load(tiny_llama_folder())
    prefix, first, second, third = random_rows([100, 7, 12, 33])
    rows = [torch.cat([prefix, first]), torch.cat([prefix, second]), third]
    assert close(capture(target, rows, (3,))[3][-33:], capture(target, [third], (3,))[3])
    dump(SMALL, toy_rows, toy_target, tmp_path)
    cache = Cache.open(tmp_path)
    for row in range(len(cache)):
        assert cache.row(row).tokens.tolist() == toy_rows[row].tokens.tolist()
    cache._sha256[5] = cache._sha256[6]
    with pytest.raises(ValueError, match="row 5 .*: its tokens does not match the index"):
        cache.row(5)


def test_case_06_boundaries_are_counted_one_way(tiny_llama_folder: Callable[..., Path]) -> None:
    """One side counts what leaves layer k, the other what enters it. Layer i adds i + 1 to channel
    i: boundary k has met the layers before k and no other."""
    target = load(tiny_llama_folder(num_hidden_layers=6), "transformers")
    [row] = random_rows([9])
    stack: Any = target.stack
    layers = stack.decoder.layers
    for number, layer in enumerate(layers):
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
        layer.register_forward_hook(adding(number, number + 1.0))
    states = capture(target, [row], (0, 1, 3, 4, 6))
    embedded = target.trunk.embed(row)
    assert torch.equal(states[0], embedded)
    for boundary in (1, 3, 4, 6):
        added = (states[boundary] - embedded)[:, :6]
        wanted = [place + 1.0 if place < boundary else 0.0 for place in range(6)]
        torch.testing.assert_close(added, torch.tensor(wanted).expand(9, 6))


def adding(channel: int, amount: float) -> Callable[..., Any]:
    """A hook that adds to one channel of what a layer gives."""

    def hook(module: Any, arguments: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states = states.clone()
        states[..., channel] += amount
        return (states, *output[1:]) if isinstance(output, tuple) else states

    return hook


def test_case_06_boundaries_in_a_cache(toy_rows: Rows, toy_target: Target, tmp_path: Path) -> None:
    """The manifest states which boundaries lie there, in ascending order: 0 is the embedding's
    output, 1 what enters layer 1, 2 what leaves the last."""
    config = DumpConfig(boundaries=(2, 0, 1), max_tokens=200)
    cache = Cache.open(dump(config, toy_rows, toy_target, tmp_path).folder)
    assert cache.boundaries == (0, 1, 2)
    assert read_json(tmp_path / "manifest.json")["boundaries"] == [0, 1, 2]
    tokens = torch.from_numpy(toy_rows[0].tokens.astype(np.int64))
    read = cache.row(0).states
    assert torch.equal(read[0], toy_target.trunk.embed(tokens).to(torch.bfloat16))
    alone = capture(toy_target, [tokens], (1, 2))
    for boundary in (1, 2):
        torch.testing.assert_close(read[boundary].float(), alone[boundary], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_case_09_and_10_the_last_state_is_raw_and_the_last(
    smollm2_folder: Path, smollm2_tokenizer: Any
) -> None:
    """The state called last is one block too early, or was normed already. On the real target,
    boundary L through the final norm and lm_head chooses transformers' own token everywhere, in
    float32; the state before the last block and the normed one are each named by the probes."""
    target = load(smollm2_folder)
    last = target.num_layers
    tokens = torch.tensor(smollm2_tokenizer(TEXT)["input_ids"])
    states = capture(target, [tokens], (last - 1, last))
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(tokens[None]).logits[0]
    ours = target.logits(target.trunk.norm(states[last]))
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))

    def engine(begin: int, end: int) -> Tensor:
        return theirs[begin:end]

    starts = torch.tensor([0, len(tokens)])

    def verdicts(tensor: Tensor) -> dict[str, str]:
        return probe_states(target.trunk, tensor, tokens, starts, engine).verdicts

    assert set(verdicts(states[last]).values()) == {"ok"}
    assert "another layer" in verdicts(states[last - 1])["argmax"]
    assert "normed before they were stored" in verdicts(target.trunk.norm(states[last]))["norm"]


@pytest.mark.parametrize("layers", [2, 3, 4, 5])
def test_case_12_boundaries_that_a_shallow_target_has_not(
    tiny_llama_folder: Callable[..., Path], toy_rows: Rows, tmp_path: Path, layers: int
) -> None:
    """Layer numbers made for a deep target, asked of a shallow one: refused before the first pass,
    with the numbers that there are; one number twice is refused, too."""
    target = load(tiny_llama_folder(num_hidden_layers=layers))
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"boundaries [29]: this target has the boundaries 0 (embedding) to {layers} "
        ),
    ):
        dump(DumpConfig(boundaries=(2, 29)), toy_rows, target, tmp_path)
    with pytest.raises(ValueError, match=r"boundaries \[1, 1\]: each may be named once"):
        DumpConfig(boundaries=(1, 1))


def test_case_15_capture_and_decoding_run_one_path(
    tiny_llama_folder: Callable[..., Path],
) -> None:
    """Something is added between a block's output and the next block, and one side takes the state
    before it. What is captured for training is what decoding goes on with: with such an addition,
    every greedy token of the engine is the choice of the captured boundary L."""
    plain = load(tiny_llama_folder(), "transformers")
    target = load(tiny_llama_folder(), "transformers")
    stack: Any = target.stack
    layers = stack.decoder.layers
    for layer in layers:
        layer.register_forward_hook(adding(3, 5.0))
    [prompt] = random_rows([12])
    engine = Engine(target, EngineConfig(draft_tokens=0, pool_tokens=256, page_size=4))
    [sequence] = engine.run([prompt.tolist()], SamplingParams(max_new_tokens=16, ignore_eos=True))
    tokens = torch.tensor([*prompt.tolist(), *sequence.output])
    states = capture(target, [tokens], (1, 3))
    chosen = target.logits(target.trunk.norm(states[3])).argmax(-1)
    assert chosen[11:-1].tolist() == sequence.output
    before = capture(plain, [tokens], (1,))[1]
    torch.testing.assert_close((states[1] - before)[:, 3], torch.full((len(tokens),), 5.0))
