"""Shares of a command's work: who takes which, and two workers of Ray against one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.scripts.cli import main
from draftsmith.scripts.shares import launched, local_rank

WORDS = "seven wizards boil black quartz while a lazy dog jumps over the quick brown fox".split()


@pytest.mark.parametrize(
    ("environment", "expected", "gpu"),
    [
        ({}, (0, 1), 0),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8), 1),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "2"}, (2, 4), 2),
        # a batch script is one process, whatever it was given
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1), 0),
    ],
)
def test_launchers(environment: dict[str, str], expected: tuple[int, int], gpu: int) -> None:
    """torchrun, srun, neither."""
    found = launched(environment)
    assert (found["rank"], found["world_size"]) == expected
    assert local_rank(environment) == gpu


def test_without_ray_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the command that installs it; nothing is loaded before."""
    monkeypatch.setitem(sys.modules, "ray", None)
    for verb in ("dump", "regenerate"):
        assert main([verb, "ray.workers=2"]) == 2
        assert "pip install 'draftsmith[ray]'" in capsys.readouterr().err


def test_ray_under_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank would begin a cluster's work of its own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["dump", "ray.workers=2"]) == 2
    assert "without torchrun or srun" in capsys.readouterr().err


@pytest.mark.ray
def test_two_workers_of_ray_write_what_one_process_writes(
    talking_folder: Path, tmp_path: Path
) -> None:
    """Caches and regenerated rows are byte for byte the same, although the second worker is killed
    after its first shard; Ray starts it again, and it keeps that shard."""
    chats = [
        {"id": f"{n}", "conversations": [
            {"from": "human", "value": f"{n}: {' '.join(WORDS[: 4 + n % 9])}"},
            {"from": "gpt", "value": " ".join(WORDS[n % 7 :])},
        ]}
        for n in range(16)
    ]  # fmt: skip
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    settings = [
        f"target.source={talking_folder}",
        "target.dtype=float64",
        "target.device=cpu",
        f"data.rows.source={tmp_path}/chats.json",
        "data.rows.max_records=null",
        "data.rows.holdout=3",
        "data.dump.shard_tokens=60",
        "data.dump.tokens_per_batch=60",
        "regenerate.max_new_tokens=6",
        "regenerate.cut_answers=keep",
    ]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("over_ray.py")), str(tmp_path), *settings],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "share 2 of 2: train" in done.stdout or "1 of them kept" in done.stdout, done.stdout
    for name in ("cache", "cache-heldout", "rows-regenerated"):
        plain, shared = (
            {path.name: path for path in (tmp_path / side / name).iterdir()}
            for side in ("plain", "ray")
        )
        assert plain.keys() == shared.keys()
        for file in plain.keys() - {"provenance.json"}:
            assert plain[file].read_bytes() == shared[file].read_bytes(), f"{name}/{file}"
    died = int((tmp_path / "ray" / "died").read_text())
    assert f"process {died}" not in done.stdout and "share 1 in process" in done.stdout
    assert "holds a finished cache" in done.stderr or "max_tokens" in done.stderr, done.stderr
