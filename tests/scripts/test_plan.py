"""`plan` after a run: the forecast beside the measured, and when drafting pays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from draftsmith.conf.compose import composed, to_config
from draftsmith.models.files import atomic_write_json
from draftsmith.models.shape import TargetShape
from draftsmith.scripts.artifacts import Artifacts
from draftsmith.scripts.cli import main
from draftsmith.scripts.plan_measured import Beside, beside
from draftsmith.scripts.plan_payoff import _read, drafting, find_report
from draftsmith.train.metrics import MetricsFile

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=3,
    vocab_size=512,
    tie_word_embeddings=True,
)
LAYERS = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64


def entry(drafter: str, drafts: int, accepted: list[int], step: float) -> dict[str, Any]:
    """A run of 100 steps of one sequence, each of `step` seconds and a tenth of it for a draft."""
    count = 100 if drafts else 0
    median = {"step": step * (1 + drafts / 10), "draft": step * drafts / 10}
    shape = {"sequences": 1, "rows": drafts + 1, "count": 100}
    return {
        "drafter": drafter,
        "temperature": 0.0,
        "dtype": "bfloat16",
        "batch": 1,
        "draft_tokens": drafts,
        "num_drafts": count,
        "drafted_per_position": [count] * drafts,
        "accepted_per_position": accepted,
        "decode_tokens": 100 + sum(accepted),
        "seconds": 100 * median["step"],
        "time": {},
        "passes": [{**shape, "median": median}],
    }


REPORT = {
    "target": {"source": "toy", "device": "cpu"},
    "runs": [
        entry("none", 0, [], 0.1),
        entry("mtp", 1, [50], 0.1),
        entry("mtp", 2, [50, 20], 0.1),
        entry("untrained", 2, [1, 0], 0.1),
    ],
}
"""Rates 0.5 and 0.4; passes that cost the same whatever their rows."""


def told(tmp_path: Path, report: dict[str, Any], *overrides: str) -> Any:
    """`drafting` of a report; the device reads 1 MB and computes 0.1 G operations a second."""
    atomic_write_json(tmp_path / "report.json", report)
    words = ["plan.bandwidth=1e6", "plan.mbu=1", "plan.batches=[1,100]", "plan.context=10"]
    config = to_config(
        composed([f"work={tmp_path}", "train.draft_vocab_size=128", *words, *overrides])
    )
    report_path = find_report(config)
    assert report_path is not None
    shape = TargetShape.counted(CONFIG, "here")
    head: Any = SimpleNamespace(parameters=50_000, own_head=False)
    device = "cpu" if config.plan.device in ("auto", "cpu") else config.plan.device
    return drafting(config, report_path, shape, head, 64, device, 1e8)


def test_a_reports_own_steps(tmp_path: Path) -> None:
    """By hand: 1.5 tokens in 0.11 s, and 1.7 in 0.12 s, against one in 0.1 s; the untrained head
    has no table; the formula from the other K is the measured speed-up where all costs are flat
    but not where a rate changes."""
    found = told(tmp_path, REPORT)
    (payoff,) = found.payoffs
    assert payoff.rates.kept == (100, 20) and payoff.rates.drafted == (200, 50)
    assert payoff.speedups == {1: pytest.approx((1.5 / 1.1, 1.7 / 1.2))}
    assert payoff.best(1) == 2 and "own steps" in found.told
    one, two = found.checks
    assert (one.off, one.left_out) == (pytest.approx(0), True)
    assert two.expected == pytest.approx((1 + 0.5 + 0.25) / 1.2)
    assert two.measured == pytest.approx(1.7 / 1.2)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_modelled_device(tmp_path: Path) -> None:
    """By hand, a toy in bfloat16 on an H100 of 1 MB/s: weights and lm_head are read once, keys by
    sequence, the head's draft vocabulary with its layer; 100 sequences stay within their tiles."""
    found = told(tmp_path, REPORT, "plan.device=h100", "plan.longest=3", "target.dtype=bfloat16")
    (payoff,) = found.payoffs
    weights, keys = 2 * (LAYERS + 512 * 64), 10 * 3 * 64 * 2
    draft = 2 * (50_000 + 128 * 64) / 1e6
    plain = (weights + keys) / 1e6
    expected = [
        tokens * plain / (plain + k * draft) for k, tokens in ((1, 1.5), (2, 1.7), (3, 1.78))
    ]
    assert payoff.speedups[1] == pytest.approx(expected)
    plain = (weights + 100 * keys) / 1e6
    verify = weights * 256 / 1e8  # 200 rows fill four tiles, and two operations a parameter
    draft = 2 * (50_000 + 128 * 64) * 128 / 1e8
    assert verify > plain > weights * 128 / 1e8
    assert payoff.speedups[100][0] == pytest.approx(1.5 * plain / (verify + draft))
    assert found.told.startswith("model: 1 x 100% of")


def test_experts_are_told_from_what_every_row_meets() -> None:
    """8 experts of 100, 2 chosen: 600 idle parameters are 800 of experts in all."""
    shape: Any = SimpleNamespace(
        parameters=2 * 50 + 40 + 800,
        embedding=50,
        tied=False,
        active=40 + 200,
        config=SimpleNamespace(num_local_experts=8, num_experts_per_tok=2),
    )
    assert _read(shape) == (40 + 50, 800, 0.25)


def test_what_a_report_lacks(tmp_path: Path) -> None:
    """No chains: nothing is said of a run's own report, the one asked for is refused; so are
    missing steps, where they are asked for, and a report that is not there."""
    bare = {"runs": [entry("none", 0, [], 0.1)]}
    assert told(tmp_path, bare) is None
    with pytest.raises(ValueError, match="no run drafted chains of one length"):
        told(tmp_path, bare, f"plan.report={tmp_path}")
    old = {"runs": [{**run, "passes": []} for run in REPORT["runs"]]}
    with pytest.raises(ValueError, match="holds no times of steps"):
        told(tmp_path, old, "plan.costs=measured")
    config = to_config(composed([f"work={tmp_path}/none"]))
    assert find_report(config) is None
    with pytest.raises(ValueError, match="no report.json is there"):
        find_report(to_config(composed(["plan.report=nowhere"])))


def test_the_forecast_beside_the_measured(tmp_path: Path) -> None:
    """Bytes of the files, seconds of the training lines; nothing of a run that is not finished."""
    artifacts = Artifacts.of(to_config(composed([f"work={tmp_path}"])))
    found: Any = SimpleNamespace(
        memory={"train": SimpleNamespace(total=30), "validate": SimpleNamespace(total=40)},
        facts={"train_tokens_per_second": 100.0, "gpus": 2},
        seconds={"train": 9.0},
        disk={"cache": 700, "checkpoints": 500, "head": 60},
    )
    for place, size in (("cache/a", 600), ("cache-heldout/a", 50), ("train/head/a", 64)):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_bytes(bytes(size))
    lines = MetricsFile(artifacts.metrics)
    for step, rate in ((1, 500.0), (2, 250.0)):
        told = {"tokens": 1000, "tokens_per_second": rate}
        lines.append({"kind": "train", "step": step, **told})
    record: dict[str, Any] = {"identity": {}, "finished": None}
    atomic_write_json(artifacts.run, record)
    assert beside(found, artifacts) == []
    measured = {"peak_memory_bytes": 50.0, "tokens_per_second": 375.0}
    atomic_write_json(artifacts.run, record | {"finished": 2, "measured": measured})
    assert beside(found, artifacts) == [
        Beside("most memory of a rank", "bytes", 50.0, 40),
        Beside("training, all ranks", "tokens/s", 375.0, 200.0),
        Beside("training", "seconds", 6.0, 9.0),
        Beside("cache", "bytes", 650, 700),
        Beside("head", "bytes", 64, 60),
    ]


def test_the_command(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, what they rest on, plan.json and the picture."""
    atomic_write_json(tmp_path / "report.json", REPORT)
    words = [f"work={tmp_path}", f"target.source={tiny_llama_folder()}", "plan.device=h100"]
    assert main(["plan", *words, "plan.tokens=1000", "train.tokens_per_batch=64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "drafting pays? mtp, temperature 0" in out and "kept there 50.0% 40.0%" in out
    assert "on target toy; costs: model" in out
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert stored["drafting"]["payoffs"][0]["kept"] == [100, 20] and stored["measured"] == []
    assert (tmp_path / "payoff.png").read_bytes()[:4] == b"\x89PNG"
