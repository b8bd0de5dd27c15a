"""`draftsmith compare`: what differs, how sure the figures are, the best of a group."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.conf.compose import composed, plain
from draftsmith.models.files import atomic_write_json
from draftsmith.scripts.cli import main
from draftsmith.scripts.compare import _MEASURED
from draftsmith.scripts.run_record import RunRecord
from draftsmith.train.metrics import MetricsFile

Maker = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """A maker of work folders: a training run of two validations with its settings, and a report.

    Args:
        overrides: of the training command. loss: of the second, better validation. calls: target
            calls by prompt in the report, for 24 tokens each; None writes no report. score: of the
            engine at the second validation; None validates without the engine.
    """
    monkeypatch.chdir(tmp_path)

    def build(
        name: str,
        *overrides: str,
        loss: float = 2.0,
        calls: list[int] | None = None,
        score: float | None = None,
    ) -> Path:
        folder = tmp_path / name
        train = folder / "train"
        train.mkdir(parents=True)
        lines = MetricsFile(train / "metrics.jsonl")
        for step, value in ((10, loss + 1), (20, loss)):
            lines.append(
                {
                    "kind": "train",
                    "step": step,
                    "loss": value,
                    "tokens": 1000 * step,
                    "tokens_per_second": 500.0 * step,
                }
            )
            row = {"kind": "validation", "step": step, "loss": value, "agreement": [0.5, 0.25]}
            row["score"] = -value
            if score is not None:
                row["score"] = score - (step == 10)
                row["acceptance"] = {"tokens_per_target_call": row["score"]}
            lines.append(row)
        resolved = plain(composed([f"work={folder}", *overrides]))
        atomic_write_json(train / "provenance.json", {"config": resolved})
        (train / "head").mkdir()
        (train / "head" / "head.safetensors").write_bytes(bytes(4096))
        if calls is not None:
            atomic_write_json(folder / "report.json", {"runs": [plain_run(len(calls)), run(calls)]})
            atomic_write_json(folder / "provenance.json", {"config": resolved})
        return folder

    return build


def run(calls: list[int], **changes: Any) -> dict[str, Any]:
    """A head's entry of a report: 24 tokens an answer."""
    counts = [
        {"id": f"p/{index}", "target_calls": count, "decode_tokens": 24}
        for index, count in enumerate(calls)
    ]
    return {
        "drafter": "mtp",
        "prompts": "humaneval",
        "temperature": 0.0,
        "dtype": "bfloat16",
        "batch": 1,
        "draft_tokens": 3,
        "num_prompts": len(calls),
        "tokens_per_target_call": 24 * len(calls) / sum(calls),
        "tokens_per_second": 40.0,
        "speedup": 1.5,
        "per_prompt": counts,
    } | changes


def plain_run(prompts: int) -> dict[str, Any]:
    """The entry of plain decoding."""
    return run([24] * prompts, drafter="none", draft_tokens=0, speedup=1.0)


def compared(out: str = "work/compare") -> dict[str, Any]:
    """compare.json."""
    return json.loads((Path(out) / "compare.json").read_text())


def test_runs_side_by_side(make: Maker, capsys: pytest.CaptureFixture[str]):
    """Settings that differ and no others, training figures of the best validation, acceptance with
    intervals, and the paired difference from the first run; three files and a provenance."""
    first = make("a", "train.lr=1e-3", calls=[12, 10, 16, 9, 11])
    second = make("b", "train.lr=2e-3", loss=1.5, calls=[8, 7, 12, 6, 8])
    assert main(["compare", str(first), str(second)]) == 0
    found = compared()
    assert found["differing"] == ["train.lr"]
    one, two = found["runs"]
    assert (one["name"], two["name"]) == ("a", "b")
    assert (one["settings"], two["settings"]) == ({"train.lr": 0.001}, {"train.lr": 0.002})
    assert two["training"] == {
        "steps": 20,
        "tokens": 30000,
        "tokens_per_second": 7500.0,
        "best_step": 20,
        "heldout_loss": 1.5,
        "agreement": [0.5, 0.25],
        "score": -1.5,
        "tokens_per_target_call": None,
        "head_bytes": 4096,
    }
    assert [m["role"] for m in one["measurements"]] == ["none", "head"]
    before, after = one["measurements"][1], two["measurements"][1]
    assert before["difference"] is None
    low, high = after["interval"]
    assert after["tokens_per_target_call"] == 120 / 41 and low < 120 / 41 < high
    assert after["difference"]["value"] == pytest.approx(120 / 41 - 120 / 58)
    assert after["difference"]["low"] > 0
    out = Path("work/compare")
    assert {path.name for path in out.iterdir()} == {
        "compare.json",
        "compare.md",
        "compare.html",
        "compare.png",
        "provenance.json",
    }
    assert (out / "compare.png").read_bytes()[:4] == b"\x89PNG"
    text = (out / "compare.md").read_text()
    assert "| train.lr | 0.001 | 0.002 |" in text and " *" in text
    out_loud = " ".join(capsys.readouterr().out.split())
    assert "2.927 [" in text and "2.927" in out_loud
    (told,) = found["verdicts"]
    assert told.startswith(
        "b, head, T=0, K=3, bfloat16, batch 1: more than a, beyond noise: +0.858"
    )
    assert told in out_loud and told in text
    page = (out / "compare.html").read_text()
    assert "beyond noise: +0.858" in page and "train.lr" in page
    assert page.count("<svg ") == 4 and not re.search(r"https?://|<script|src=", page)


def test_within_noise_is_said(make: Maker):
    """Over all prompt sets together, of the prompts that both have; an unequal pair is held against
    its own prompts."""
    calls = {"a": [12, 10, 16, 9], "b": [10, 12, 14, 11], "c": [12, 10, 16], "d": [12]}
    for name, told in calls.items():
        folder = make(name, calls=told)
        report = json.loads((folder / "report.json").read_text())
        report["runs"] += [run([8, 8, 8][: len(told)], prompts="mt_bench"), run([5], prompts=name)]
        atomic_write_json(folder / "report.json", report)
    assert main(["compare", *calls]) == 0
    within, part, few = compared()["verdicts"]
    ours = 24 * 7 / (10 + 12 + 14 + 11 + 24) - 24 * 7 / (12 + 10 + 16 + 9 + 24)
    assert f"within noise of a: {ours:+.3f} tokens" in within
    assert within.endswith("over 7 prompts that both have (of 8 and 8).")
    assert "+0.000" in part and "over 6 prompts that both have (of 7 and 8)." in part
    assert "over 2 prompts that both have (of 3 and 8)" in few
    text = Path("work/compare/compare.md").read_text()
    assert " within noise |" in text


def test_reports_are_taken_like_runs(make: Maker, capsys: pytest.CaptureFixture[str]):
    """A run's report.json stands for its folder; one kept elsewhere for itself; another file is
    refused."""
    make("a", calls=[12, 10, 16])
    kept = Path("kept.json")
    told = {"runs": [run([8, 9, 7])], "settings": {"engine": {"draft_tokens": 5}}, "head": {}}
    atomic_write_json(kept, told)
    assert main(["compare", "a/report.json", "a", "kept.json"]) == 0
    one, two = compared()["runs"]
    assert (one["name"], two["name"]) == ("a", "kept.json")
    assert one["training"]["steps"] == 20 and two["training"] == {}
    assert two["settings"]["engine.draft_tokens"] == 5
    assert "more than a" in compared()["verdicts"][0]
    Path("other.json").write_text("[]")
    assert main(["compare", "a", "other.json"]) == 2
    assert "other.json is no report" in " ".join(capsys.readouterr().err.split())


def test_many_runs_of_long_names_have_numbers(make: Maker):
    """Settings stand as columns, no table has a column for each run, and a line tells whose number
    it is; JSON keeps the names."""
    for index in range(9):
        make(f"sweep/norms-true-{index}/target-last", f"train.seed={index}", calls=[9, 8 + index])
    assert main(["compare", "runs=sweep/*/*"]) == 0
    assert compared()["runs"][8]["name"] == "norms-true-8/target-last"
    text = Path("work/compare/compare.md").read_text()
    assert "| 9 | norms-true-8/target-last |" in text
    assert "| run | train.seed |" in text and "| 9 | 8 |" in text
    widest = max(len(line.split("|")) for line in text.splitlines())
    assert widest == len(_MEASURED) + 2


@pytest.mark.parametrize(
    "words", [["runs=sweep-*"], ["runs=[sweep-1,sweep-2]"], ["sweep-1", "sweep-2"], ["sweep-*"]]
)
def test_runs_are_named_in_every_way(make: Maker, words: list[str]):
    """A pattern, a list, words as the shell gives them; a folder that holds no run is left out of a
    pattern, and the same folder twice is one run."""
    make("sweep-2", "train.seed=2")
    make("sweep-1", "train.seed=1")
    Path("sweep-empty").mkdir()
    assert main(["compare", *words, "compare.out=out"]) == 0
    assert [one["name"] for one in compared("out")["runs"]] == ["sweep-1", "sweep-2"]


def test_a_run_that_is_named_twice_is_one(make: Maker, capsys: pytest.CaptureFixture[str]):
    """As a word and by a pattern, in the order of the words; words beside a list are refused."""
    make("sweep-1", "train.seed=1")
    make("sweep-2", "train.seed=2")
    assert main(["compare", "sweep-2", "runs=sweep-*", "compare.out=out"]) == 0
    assert [one["name"] for one in compared("out")["runs"]] == ["sweep-2", "sweep-1"]
    assert main(["compare", "sweep-2", "runs=[sweep-1]"]) == 2
    assert "give either words (sweep-2) or compare.runs=[…]" in capsys.readouterr().err


def test_the_best_of_each_group(make: Maker, capsys: pytest.CaptureFixture[str]):
    """An ablation: every variant with its best of several rates and starts, how many it had, and
    which settings won. A run that was not validated is counted and never chosen."""
    for norm in ("true", "false"):
        for index, (lr, start) in enumerate((("1e-3", "target"), ("2e-3", "random"))):
            loss = 2.0 + (norm == "false") + (0.5 if index == (norm == "true") else 0)
            words = (f"head.norms.output={norm}", f"train.lr={lr}", f"head.init.layer={start}")
            make(f"n-{norm}-{index}", *words, loss=loss)
    dead = make("n-true-2", "head.norms.output=true") / "train" / "metrics.jsonl"
    dead.write_text(dead.read_text().splitlines()[0] + "\n")
    assert main(["compare", "n-*", "compare.group=[head.norms]", "compare.by=loss"]) == 0
    found = compared()
    assert [one["name"] for one in found["runs"]] == ["n-false-1", "n-true-0"]
    off, on = found["groups"]
    assert off["settings"]["head.norms.output"] is False and len(off["runs"]) == 2
    assert on["settings"]["head.norms.output"] is True and len(on["runs"]) == 3
    assert off["won"] == {"head.init.layer": "random", "train.lr": 0.002}
    out = " ".join(capsys.readouterr().out.split())
    assert "2 runs; best loss 3.0000: n-false-1 with head.init.layer=random, train.lr=0.002" in out
    assert "3 runs, 1 of them not validated; best loss 2.0000: n-true-0" in out


def test_the_score_is_the_engines_where_there_is_one(make: Maker):
    """Higher is better, and it need not have the lowest loss."""
    make("a", "train.seed=1", loss=1.0, score=1.5)
    make("b", "train.seed=2", loss=2.0, score=1.7)
    assert main(["compare", "a", "b", "compare.group=[head.norms]"]) == 0
    assert compared()["runs"][0]["name"] == "b"
    assert compared()["groups"][0]["won"] == {"train.seed": 2}


def test_what_does_not_compare_is_refused(make: Maker, capsys: pytest.CaptureFixture[str]):
    """The value, and what to give instead."""
    make("a", score=1.5)
    make("b")
    for words, message in (
        (["a", "nowhere"], "nowhere holds neither train/metrics.jsonl nor report.json"),
        (["c*"], "c*: no folder of that pattern holds"),
        (["a", "b", "compare.group=[head.nrms]"], "no run has a setting 'head.nrms'; did you mean"),
        (["a", "b", "compare.group=[head.norms]"], "choose compare.by=loss"),
        (["a", "compare.by=speed"], "compare.by=speed is not known"),
    ):
        assert main(["compare", *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("work/compare").exists()


def test_reports_without_counts_or_other_prompts(make: Maker, capsys: pytest.CaptureFixture[str]):
    """An older report has no interval, other prompts no difference, and a run without a report is
    compared on its training alone; each is said."""
    first, old = make("a", calls=[12, 10, 16]), make("b", calls=[9, 9, 9])
    report = json.loads((old / "report.json").read_text())
    for entry in report["runs"]:
        del entry["per_prompt"]
    atomic_write_json(old / "report.json", report)
    other, bare = make("c", calls=[9, 9]), make("d")
    assert main(["compare", *map(str, (first, old, other, bare))]) == 0
    heads = [one["measurements"][1] for one in compared()["runs"][:3]]
    assert [bool(head["interval"]) for head in heads] == [True, False, True]
    assert [head["difference"] for head in heads] == [None, None, None]
    assert compared()["runs"][3]["measurements"] == []
    out = capsys.readouterr().out
    assert "b: no interval" in out and "d: no report" in out


def test_a_run_that_is_not_finished_is_read(make: Maker):
    """What identifies it stands in for its configuration, and a torn last line is left out."""
    folder = make("a")
    (folder / "train" / "provenance.json").unlink()
    identity = {"train.lr": 0.5, "head.norms": {"output": True}}
    atomic_write_json(folder / "train" / "run.json", {"identity": identity, "finished": None})
    with (folder / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    record = RunRecord.read(folder)
    assert record.settings == {"train.lr": 0.5, "head.norms.output": True}
    assert record.training()["steps"] == 20


def test_a_validation_without_training_lines_has_no_figures(make: Maker):
    """Nothing is divided by zero."""
    lines = make("a") / "train" / "metrics.jsonl"
    kept = [row for row in lines.read_text().splitlines() if '"validation"' in row]
    lines.write_text("\n".join(kept) + "\n")
    assert RunRecord.read(lines.parents[1]).training() == {}
    assert main(["compare", "work=a"]) == 0
    assert compared()["runs"][0]["training"] == {}
