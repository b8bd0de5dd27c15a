"""The whole way on the real small model and real conversations, in miniature, through the command
line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.e2e

SMALL = [
    "data.rows.max_records=40",
    "data.rows.max_length=192",
    "data.rows.holdout=6",
    "train.max_steps=10",
    "train.tokens_per_batch=512",
    "train.draft_vocab_size=2048",
    "train.validate_every=5",
    "train.checkpoint_every=5",
    "evaluate.limit=1",
    "evaluate.drafters=[none,ngram,head]",
    "evaluate.draft_tokens=[3]",
    "evaluate.max_new_tokens=14",
    "evaluate.proof=null",
    "target.dtype=float32",
    "validate.limit=1",
    "tracker=none",
    "validate.max_new_tokens=8",
]


def draftsmith(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command from another folder, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "draftsmith.scripts.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def settings(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of the miniature run, and the folder it works in."""
    work = tmp_path_factory.mktemp("run")
    return [f"work={work}", f"target.folder={smollm2_folder}", *SMALL]


@pytest.fixture(scope="module")
def work(settings: list[str]) -> Path:
    """The artifacts of one `draftsmith demo`."""
    folder = Path(settings[0].removeprefix("work="))
    done = draftsmith("demo", *settings, folder=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def report(work: Path) -> dict[str, Any]:
    """report.json."""
    return json.loads((work / "report.json").read_text())


def test_every_record_is_accounted_for(work: Path):
    """kept + dropped = read."""
    records = json.loads((work / "rows" / "ledger.json").read_text())["records"]
    assert records["read"] == 40 == records["kept"] + sum(records["dropped"].values())


def test_the_probes_of_the_dump_hold_by_a_wide_margin(work: Path):
    """Real states: the right shift and the norm win by nats, and argmax equals the engine's own."""
    probes = json.loads((work / "cache" / "manifest.json").read_text())["probes"]
    right = probes["shift_nll"]["0"]
    assert right + 2 < min(probes["shift_nll"]["-1"], probes["shift_nll"]["+1"], probes["raw_nll"])
    assert probes["argmax_agreement"] > 0.99


def test_greedy_speculative_text_is_plain_text_in_float32(work: Path):
    """Every prompt set and drafter, token for token."""
    runs = report(work)["runs"]
    assert {run["prompts"] for run in runs} == {"humaneval", "mt_bench", "heldout"}
    assert {"none", "ngram", "mtp"} <= {run["drafter"] for run in runs}
    for run in runs:
        if run["drafter"] != "none":
            assert run["identical_to_plain"] is True, (run["drafter"], run["first_differences"])


def test_the_report_keeps_its_contract(work: Path):
    """The fields that others read, and the figures recomputed from the raw counts."""
    found = report(work)
    assert {"target", "head", "data", "settings", "runs"} <= set(found)
    for run in found["runs"]:
        drafts, accepted = run["num_drafts"], run["num_accepted_tokens"]
        length = 1 + (accepted / drafts if drafts else 0)
        assert run["mean_acceptance_length"] == pytest.approx(length)
        assert sum(run["accepted_per_position"]) == accepted
        assert run["tokens_per_second"] == pytest.approx(run["tokens"] / run["seconds"])
        histogram = run["tokens_per_step_histogram"]
        assert sum(histogram) == run["target_calls"]
        assert sum(i * n for i, n in enumerate(histogram)) == run["decode_tokens"]
        assert run["tokens"] == run["decode_tokens"] + run["num_prompts"]
        assert run["near_ties"] == sum(d["near_tie"] for d in run["first_differences"])
    for name in ("report.md", "report.html"):
        assert (work / name).stat().st_size > 1000
    assert list(work.glob("*.png"))


def test_training_lowers_the_loss_and_drafts_in_the_engine_meanwhile(work: Path):
    """Real learning within ten steps; each validation carries an acceptance measured by the
    engine."""
    lines = [
        json.loads(line) for line in (work / "train" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in lines if line["kind"] == "validation"]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert all(
        "tokens_per_target_call" in line["acceptance"] for line in lines if "acceptance" in line
    )
    assert sum("acceptance" in line for line in lines) == 2


def test_the_export_holds_the_trained_weights(work: Path):
    """The DeepSeek-style layout: trained tensors bit for bit, the rest copied from the target."""
    exported = load_file(work / "export" / "deepseek-mtp" / "mtp.safetensors")
    native = load_file(work / "train" / "head" / "head.safetensors")
    layer, ours = "model.layers.30", "blocks.0"
    assert torch.equal(exported[f"{layer}.eh_proj.weight"], native[f"{ours}.eh_proj.weight"])
    assert torch.equal(exported[f"{layer}.shared_head.norm.weight"], native[f"{ours}.norm.weight"])
    assert exported["model.layers.30.embed_tokens.weight"].shape == (49152, 576)


def test_a_second_call_reuses_everything(work: Path, settings: list[str]):
    """Valid artifacts are recognised and named, and nothing is written again."""
    before = {path: path.stat().st_mtime_ns for path in (work / "cache").iterdir()}
    done = draftsmith("demo", *settings, folder=work)
    assert done.returncode == 0, done.stderr[-2000:]
    for stage in ("cache", "train", "report"):
        assert f"reused: {stage}" in done.stdout, done.stdout[-3000:]
    after = {path: path.stat().st_mtime_ns for path in (work / "cache").iterdir()}
    assert before == after


def test_an_answer_in_the_terminal(work: Path, settings: list[str]):
    """`generate` with the head says what the target says without it."""
    texts = []
    for drafter in ("mtp", "none"):
        done = draftsmith(
            "generate",
            *settings,
            f"generate.drafter={drafter}",
            "generate.prompt=Name three colors.",
            "generate.max_new_tokens=24",
            folder=work,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        texts.append(done.stdout)
    answers = [text.split("tokens")[0] for text in texts]
    assert "red" in texts[0].lower() or "blue" in texts[0].lower()
    assert answers[0][:40] == answers[1][:40]


def test_damage_to_a_shard_is_refused_by_name(work: Path, settings: list[str]):
    """A zeroed tail in a cached shard stops training with exit code 2; the shard is put back
    afterwards."""
    shard = work / "cache" / "shard-00000.safetensors"
    whole = shard.read_bytes()
    try:
        shard.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
        done = draftsmith("train", *settings, "train.max_steps=11", "overwrite=true", folder=work)
        assert done.returncode == 2 and "shard-00000.safetensors" in done.stdout + done.stderr
    finally:
        shard.write_bytes(whole)
