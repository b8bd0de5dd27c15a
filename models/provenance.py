"""What made an artifact: command, resolved configuration, git state, library versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from .files import atomic_write_json

_LIBRARIES = ("draftsmith", "torch", "transformers", "deepspeed", "safetensors", "datasets")


def provenance(config: dict[str, Any]) -> dict[str, Any]:
    """A JSON-ready record of this run: `command`, `config`, `git`, `versions`, `time` (UTC),
    `machine`."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "config": config,
        "git": _git_state(),
        "versions": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_provenance(folder: Path | str, config: dict[str, Any]) -> None:
    """Write `provenance.json` beside an artifact."""
    atomic_write_json(Path(folder) / "provenance.json", provenance(config))


def _git_state() -> dict[str, Any]:
    """Commit and dirtiness of the checkout this package runs from; empty for an installed wheel."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments],
                cwd=root,
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(git("status", "--porcelain"))}
