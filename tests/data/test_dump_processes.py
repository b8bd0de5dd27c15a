"""Dumps in processes of their own, killed at random or sharing one cache, end with the same bytes.

DRAFTSMITH_KILLS sets how many kills are tried (5).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.cache import Cache
from draftsmith.data.rows import Rows

KILLS = int(os.environ.get("DRAFTSMITH_KILLS", "5"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def dumping(mode: str, target: Path, rows: Rows, out: Path, *more: int) -> dict[str, Any]:
    """Run dumping.py; gives what it printed last."""
    script = Path(__file__).with_name("dumping.py")
    words = [mode, str(target), str(rows.folder), str(out), *map(str, more)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(script), *words],
        capture_output=True,
        text=True,
        timeout=60 + 20 * KILLS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        cwd=out,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_at_random_points(toy_rows: Rows, toy_folder: Path, tmp_path: Path) -> None:
    """kill -9 at random moments, while the writer's thread is at work, too; run once more, and the
    cache is byte for byte the undisturbed one."""
    told = dumping("kill", toy_folder, toy_rows, tmp_path, 7, KILLS)
    assert told["kills"] == KILLS
    assert any(0 < count < told["planned"] for count in told["shards"]), told
    whole = contents(tmp_path / "whole")
    assert len(whole) > 10
    killed = sorted(tmp_path.glob("killed-*"))
    assert killed
    for folder in killed:
        assert contents(folder) == whole


@pytest.mark.slow
def test_two_ranks_write_the_cache_of_one(toy_rows: Rows, toy_folder: Path, tmp_path: Path) -> None:
    """Each process computes every other shard; the first waits for the other, which is killed and
    started again, and finishes byte for byte the cache of one process."""
    told = dumping("ranks", toy_folder, toy_rows, tmp_path)
    assert told["killed"] and told["waited"] and told["lacking"] > 0, told
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")
    assert len(Cache.open(tmp_path / "shared")) == len(toy_rows)
