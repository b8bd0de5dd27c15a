"""Each classic fault of hidden states is found and named on a real target; a sound cache passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.probes import LEAST, probe_states
from draftsmith.data.render import render
from draftsmith.inference.capture import capture
from draftsmith.models.target import Target, TargetConfig, load_tokenizer
from draftsmith.models.trunk import Trunk


class Captured:
    """States of two real rows at the last two boundaries."""

    def __init__(self, target: Target) -> None:
        tokenizer = load_tokenizer(target.folder)
        texts = [
            (
                "What is the capital of France?",
                "The capital of France is Paris, on the river Seine.",
            ),
            ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
        ]
        rows = []
        for question, answer in texts:
            turns = (Turn("user", question), Turn("assistant", answer))
            rows.append(torch.tensor(render(Conversation("x", turns), tokenizer).parts[0].tokens))
        self.target = target
        self.last = target.num_layers
        self.tokens = torch.cat(rows)
        self.starts = torch.tensor([0, len(rows[0]), len(self.tokens)])
        self.states = capture(target, rows, (self.last - 1, self.last))

    def engine_logits(self, begin: int, end: int) -> Tensor:
        return self.target.logits(self.target.trunk.norm(self.states[self.last][begin:end]))

    def probe(self, states: Tensor) -> dict[str, str]:
        trunk = self.target.trunk
        return probe_states(trunk, states, self.tokens, self.starts, self.engine_logits).verdicts


@pytest.fixture(scope="module")
def captured(smollm2_folder: Path) -> Captured:
    target = Target.load(TargetConfig(str(smollm2_folder), dtype="float32", device="cpu"))
    return Captured(target)


def test_sound_states_pass(captured: Captured) -> None:
    """Case 9: raw boundary L, stored in bf16, agrees with the engine everywhere."""
    trunk = captured.target.trunk
    stored = captured.states[captured.last].to(torch.bfloat16)
    report = probe_states(trunk, stored, captured.tokens, captured.starts, captured.engine_logits)
    assert report.verdicts == {"shift": "ok", "norm": "ok", "argmax": "ok"}
    assert report.argmax_agreement == 1.0
    assert report.faults == []
    report.refuse_faults("cache")
    logits = captured.engine_logits(0, len(captured.tokens)).log_softmax(-1)
    places = [p for p in range(len(captured.tokens)) if p + 2 < len(captured.tokens)]
    border = int(captured.starts[1])
    places = [p for p in places if not border - 2 <= p < border]
    places = [p for p in places if len(set(captured.tokens[p : p + 3].tolist())) == 3]
    assert report.positions == len(places) > 40
    direct = -logits[places, captured.tokens[[p + 1 for p in places]]].mean()
    assert report.shift_nll["0"] == pytest.approx(float(direct), rel=0.02)


@pytest.mark.parametrize(("shift", "told"), [(1, "one position late"), (-1, "one position early")])
def test_shifted_states_are_named(captured: Captured, shift: int, told: str) -> None:
    """Case 1: the direction of the shift is part of the message."""
    verdicts = captured.probe(captured.states[captured.last].roll(shift, 0))
    assert told in verdicts["shift"]
    assert "another layer, another row" in verdicts["argmax"]


def test_states_of_another_row_are_named(captured: Captured) -> None:
    """Cases 2, 4: rows that slid against their tokens."""
    border = int(captured.starts[1])
    swapped = torch.cat(
        [captured.states[captured.last][border:], captured.states[captured.last][:border]]
    )
    assert "another row" in captured.probe(swapped)["argmax"]


def test_faults_are_refused_with_numbers(captured: Captured) -> None:
    """The message holds the place, every fault and its figures."""
    report = probe_states(
        captured.target.trunk,
        captured.states[captured.last].roll(1, 0),
        captured.tokens,
        captured.starts,
        captured.engine_logits,
    )
    with pytest.raises(ValueError, match=r"work/cache: shift: .* by shift -1: .*; argmax: .*%"):
        report.refuse_faults("work/cache")
    assert set(report.to_json()["shift_nll"]) == {"-1", "0", "+1"}


def test_a_target_that_knows_nothing_is_inconclusive(toy_target: Target) -> None:
    """Random weights favour no shift: said, and not refused."""
    tokens = torch.arange(100, 160)
    last = toy_target.num_layers
    states = capture(toy_target, [tokens], (last,))[last]
    report = probe_states(toy_target.trunk, states, tokens, torch.tensor([0, 60]))
    assert report.verdicts == {"shift": "inconclusive", "norm": "inconclusive"}
    assert report.argmax_agreement is None


def test_states_that_are_not_finite_are_no_success(captured: Captured) -> None:
    """A NaN likelihood is a fault, never a win."""
    states = captured.states[captured.last].clone()
    states[3, 5] = float("nan")
    assert "not finite" in captured.probe(states)["shift"]


def zeros(target: Target) -> tuple[Tensor, Tensor]:
    """A run of one token, and its states."""
    name = int(load_tokenizer(target.folder).encode("0", add_special_tokens=False)[0])
    tokens = torch.full((60,), name)
    return tokens, capture(target, [tokens], (target.num_layers,))[target.num_layers]


def test_repeated_tokens_tell_no_shift(captured: Captured) -> None:
    """Where x_p, x_{p+1} and x_{p+2} are one token the three shifts are one number: alone they are
    inconclusive, beside a text they are left out."""
    tokens, states = zeros(captured.target)
    trunk = captured.target.trunk
    report = probe_states(trunk, states, tokens, torch.tensor([0, 60]))
    assert report.verdicts["shift"] == "inconclusive" and report.faults == []
    border = int(captured.starts[1])
    both = torch.cat([states, captured.states[captured.last][:border]])
    tokens = torch.cat([tokens, captured.tokens[:border]])
    report = probe_states(trunk, both, tokens, torch.tensor([0, 60, 60 + border]))
    assert report.verdicts["shift"] == "ok"
    assert LEAST <= report.positions < border


def test_a_tied_target_that_knows_nothing_is_inconclusive(
    tiny_llama_folder: Callable[..., Path],
) -> None:
    """Its embedding is its lm_head, so that h_p tells x_p a little; that is no shift of a target
    whose states choose the engine's own tokens, and one where they do not."""
    size = {"vocab_size": 49152, "num_hidden_layers": 2, "hidden_size": 576}
    folder = tiny_llama_folder(**size, tie_word_embeddings=True, initializer_range=0.02)
    target = Target.load(TargetConfig(str(folder), dtype="float32", device="cpu"))
    tokens, starts = torch.arange(100, 160), torch.tensor([0, 60])
    states = capture(target, [tokens], (2,))[2]

    def engine(begin: int, end: int) -> Tensor:
        return target.logits(target.trunk.norm(states[begin:end]))

    report = probe_states(target.trunk, states, tokens, starts, engine)
    assert report.shift_nll["-1"] + 0.5 < report.shift_nll["0"]
    assert report.verdicts == {"shift": "inconclusive", "norm": "inconclusive", "argmax": "ok"}
    assert probe_states(target.trunk, states, tokens, starts).faults == []

    def other(begin: int, end: int) -> Tensor:
        return -engine(begin, end)

    late = probe_states(target.trunk, states, tokens, starts, other)
    assert "one position late" in late.verdicts["shift"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_raw_likelihood_that_is_none(captured: Captured, value: float) -> None:
    """Logits without the norm may overflow where those with it do not: nothing is concluded, and
    the manifest holds null."""

    class Narrow:
        """The trunk, whose lm_head gives nothing finite of a state that was not normed."""

        def __init__(self, trunk: Trunk) -> None:
            self.trunk = trunk

        def __getattr__(self, name: str) -> Any:
            return getattr(self.trunk, name)

        def norm(self, raw: Tensor) -> Tensor:
            self.normed = self.trunk.norm(raw)
            return self.normed

        def logits(self, normed: Tensor) -> Tensor:
            logits = self.trunk.logits(normed)
            return logits if normed is self.normed else torch.full_like(logits, value)

    trunk: Any = Narrow(captured.target.trunk)
    states = captured.states[captured.last]
    report = probe_states(trunk, states, captured.tokens, captured.starts)
    assert report.verdicts == {"shift": "ok", "norm": "inconclusive"}
    assert report.to_json()["raw_nll"] is None
    json.dumps(report.to_json(), allow_nan=False)


def test_too_short_rows_are_refused(toy_target: Target) -> None:
    """A shift needs a neighbour on either side."""
    with pytest.raises(ValueError, match="a row of at least 3 tokens; the 2 rows are shorter"):
        probe_states(toy_target.trunk, torch.zeros(4, 32), torch.arange(4), torch.tensor([0, 2, 4]))
