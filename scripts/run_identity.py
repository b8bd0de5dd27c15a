"""Which run WORK/train holds: what determines its weights, and whether it has reached its end."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

from ..conf.schema import Config
from ..models.files import atomic_write_json, changes, read_json
from ..models.heads import LoadedHead
from .app import Invocation
from .artifacts import Artifacts
from .feed import Feed

_FREE = (
    "max_steps",
    "prefetch",
    "checkpoint_activations",
    "chunk_tokens",
    "sequence_parallel",
    "log_every",
    "validate_every",
    "checkpoint_every",
    "keep_checkpoints",
    "patience",
    "accumulation",
    "zero_stage",
    "offload",
)
"""Settings of `train` that may differ when a run goes on."""


def run_identity(config: Config, feed: Feed, source: LoadedHead | None) -> dict[str, Any]:
    """Everything that determines the weights, but the settings that may differ when a run goes
    on. A head to start from counts by its content, wherever it lies."""
    settings = dataclasses.asdict(config.train)
    shape = dataclasses.asdict(config.head)
    shape["init"] = {
        **vars(config.head.init),
        "source": None if source is None else source.meta["content"],
    }
    identity = {
        **feed.identity,
        **{f"train.{name}": value for name, value in settings.items() if name not in _FREE},
        **{f"head.{name}": value for name, value in shape.items()},
    }
    return json.loads(json.dumps(identity))  # as it is read again: a tuple is a list


def begin(
    artifacts: Artifacts, identity: dict[str, Any], config: Config, invocation: Invocation
) -> bool:
    """Whether the run is finished already; else WORK/train is made ready for it."""
    if artifacts.run.exists():
        old = read_json(artifacts.run)["identity"]
        changed = changes(old, identity)
        if changed and not config.overwrite:
            raise ValueError(
                f"{artifacts.train} holds a run of other settings ({'; '.join(changed)}); choose "
                "another work folder, or "
                "overwrite=true to replace it"
            )
        if changed:
            invocation.say(f"made anew: train ({'; '.join(changed)})")
            shutil.rmtree(artifacts.train)
        elif is_finished(artifacts, identity, config):
            return True
    artifacts.train.mkdir(parents=True, exist_ok=True)
    atomic_write_json(artifacts.run, {"identity": identity, "finished": None})
    return False


def is_finished(artifacts: Artifacts, identity: dict[str, Any], config: Config) -> bool:
    """Whether WORK/train holds the head of a run of this identity that has reached its end."""
    if not artifacts.run.exists() or not (artifacts.head / "config.json").exists():
        return False
    record = read_json(artifacts.run)
    done = record["finished"]
    if record["identity"] != identity or done is None:
        return False
    return done >= config.train.max_steps or record.get("stopped_early") == end_of(config)


def end_of(config: Config) -> dict[str, int]:
    """What decides where a run ends; one that ended early goes on when it changes."""
    return {"max_steps": config.train.max_steps, "patience": config.train.patience}
