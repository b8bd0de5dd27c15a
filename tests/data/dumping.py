"""Run as a script: dumps in child processes that are killed or share the work. Prints JSON.

dumping.py kill  TARGET ROWS OUT SEED KILLS
dumping.py ranks TARGET ROWS OUT
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.rows import Rows
from draftsmith.models.target import Target, TargetConfig


class Dumps:
    """Forks children that write the same rows into folders below `out`."""

    def __init__(self, target: str, rows: str, out: str) -> None:
        self.target = Target.load(TargetConfig(target, dtype="float32", device="cpu"))
        self.rows = Rows.open(rows)
        self.out = Path(out)
        assert self.target.fingerprint
        begin = time.perf_counter()
        self.wait(self.start("whole"))
        self.lasted = time.perf_counter() - begin

    def start(self, name: str, rank: int = 0, world_size: int = 1) -> int:
        """Fork one process of a dump into the folder `name`."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                config = DumpConfig(
                    shard_tokens=90, tokens_per_batch=90, rank=rank, world_size=world_size
                )
                dump(config, self.rows, self.target, self.out / name)
                status = 0
            finally:
                os._exit(status)
        return pid

    def wait(self, pid: int) -> None:
        """It must end well."""
        status = os.waitpid(pid, 0)[1]
        if status:
            raise SystemExit(f"a child ended with {status}")

    def shards(self, name: str) -> int:
        """Whole shards in a folder."""
        return len(list((self.out / name).glob("shard-*")))


def kill(dumps: Dumps, seed: int, wanted: int) -> dict[str, object]:
    """SIGKILL at random moments, `wanted` times; a folder that gets finished is followed by a fresh
    one."""
    rng = random.Random(seed)
    kills, folders, shards = 0, 0, []
    while kills < wanted:
        name = f"killed-{folders}"
        pid = dumps.start(name)
        goal = time.perf_counter() + dumps.lasted * rng.uniform(0.1, 0.8)
        ended = 0
        while not ended and time.perf_counter() < goal:
            ended = os.waitpid(pid, os.WNOHANG)[0]
            time.sleep(0.001)
        if ended:
            folders += 1
            continue
        os.kill(pid, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        shards.append(dumps.shards(name))
    dumps.wait(dumps.start(f"killed-{folders}"))
    return {"kills": kills, "shards": shards, "planned": dumps.shards("whole")}


def ranks(dumps: Dumps) -> dict[str, object]:
    """Two ranks; the second is killed after its first shard, and started again."""
    first = dumps.start("shared", 0, 2)
    second = dumps.start("shared", 1, 2)
    while not (dumps.out / "shared" / "shard-00001.safetensors").exists():
        time.sleep(0.001)
    os.kill(second, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(second, 0)[1])
    time.sleep(dumps.lasted)  # the first waits for the shards that now nobody makes
    waited = not os.waitpid(first, os.WNOHANG)[0]
    lacking = dumps.shards("whole") - dumps.shards("shared")
    dumps.wait(dumps.start("shared", 1, 2))
    dumps.wait(first)
    return {"killed": killed, "waited": waited, "lacking": lacking}


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, target, rows, out, *rest = sys.argv[1:]
    dumps = Dumps(target, rows, out)
    print(json.dumps(kill(dumps, *map(int, rest)) if mode == "kill" else ranks(dumps)))
