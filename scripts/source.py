"""The head that a run starts from (`head.init.source`), and the shape that it brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..conf.schema import Config
from ..models.files import read_json
from ..models.formats.source import TARGET_MTP, find_source, own_layout
from ..models.heads import HeadConfig, LoadedHead, take_shape
from .app import Invocation


def with_source(
    config: Config, invocation: Invocation, folder: Path, marks: dict[str, str]
) -> tuple[Config, LoadedHead | None]:
    """The configuration with the shape of the head that the run starts from, and that head.

    Args:
        folder, marks: the target's, and its fingerprint.
    Raises:
        ValueError: no such head, one that does not fit, or settings that contradict its shape.
    """
    named = config.head.init.source
    source = find_source(named, folder, marks)
    if source is None:
        _tell_of_own_weights(config, invocation, folder)
        return config, None
    shape = take_shape(
        config.head, source.head.config, str(named), named_settings(invocation.overrides)
    )
    modules = f"{shape.modules} module{'s' if shape.modules > 1 else ''}"
    invocation.say(f"head: starts from {named} ({shape.kind}, {modules})")
    return dataclasses.replace(config, head=shape), source


def head_shape(config: Config, overrides: Sequence[str]) -> HeadConfig:
    """The head's configuration where its source alone says it; the source's weights are not
    read."""
    named = config.head.init.source
    if named in (None, TARGET_MTP):
        return config.head
    meta = read_json(Path(str(named)).expanduser() / "config.json")
    source = HeadConfig.from_dict(meta.get("head", {}), str(named))
    return take_shape(config.head, source, str(named), named_settings(overrides))


def named_settings(overrides: Sequence[str]) -> set[str]:
    """Settings of the head that a command line names: `head.norms.output=false` is
    `norms.output`."""
    keys = (word.partition("=")[0].lstrip("+") for word in overrides)
    return {key.removeprefix("head.") for key in keys if key.startswith("head.")}


def _tell_of_own_weights(config: Config, invocation: Invocation, folder: Path) -> None:
    if config.head.kind != "mtp" or config.head.init.layer != "target-last":
        return
    layout = own_layout(folder)
    if layout is not None:
        invocation.say(
            f"this target brings its own MTP weights ({layout.title} layout): "
            f"head.init.source={TARGET_MTP} starts from them"
        )
