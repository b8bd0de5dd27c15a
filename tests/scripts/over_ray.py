"""Run as a script: `dump` and `regenerate` on two workers of a local Ray cluster, one of which is
killed.

over_ray.py WORK SETTINGS…  Writes WORK/plain, by one process, and WORK/ray.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import ray  # pyright: ignore[reportMissingImports]
from rich.console import Console

from draftsmith.conf.compose import composed, to_config
from draftsmith.conf.schema import Config
from draftsmith.scripts import dump
from draftsmith.scripts.app import Invocation
from draftsmith.scripts.cli import main
from draftsmith.scripts.shares import over_ray


def dying(config: Config, invocation: Invocation, number: int, count: int) -> None:
    """A share of the dump, killed once it has written a shard, the first time."""
    died = Path(config.work) / "died"
    own = Path(config.work) / "cache" / f"shard-{number:05d}.safetensors"

    def kill() -> None:
        while not own.exists():
            time.sleep(0.001)
        died.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)

    if number == 1 and not died.exists():
        threading.Thread(target=kill, daemon=True).start()
    dump._share(config, invocation, number, count, finish=False)
    invocation.say(f"share {number} in process {os.getpid()}")


if __name__ == "__main__":
    work, *settings = sys.argv[1:]
    # Both work in one place, one after the other, since artifacts name what they were made from.
    words = [f"work={work}/run", *settings]
    for verb in ("prepare", "dump", "regenerate"):
        assert main([verb, *words]) == 0
    Path(work, "run").rename(Path(work, "plain"))
    assert main(["prepare", *words]) == 0
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    words.append("ray.workers=2")
    about = Invocation("dump", tuple(words), {}, Console())
    over_ray(to_config(composed(words)), about, dying, dump._share)
    assert main(["regenerate", *words]) == 0
    # what is refused on a worker is told here
    assert main(["dump", *words, "data.dump.max_tokens=1"]) == 2
    Path(work, "run").rename(Path(work, "ray"))
