"""Composing a run's configuration, and saying what is wrong with an override before anything runs.

The groups are the folders of YAML beside this file. Every value has a type in `schema.Config`; a
key, a choice or a value that does not fit is a `ValueError` whose message names the nearest thing
that would.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .schema import Config
from .structured import build, describe, leaves, nearest, schema_of

MODULE = "draftsmith.conf"
ROOT = "config"


def register() -> None:
    """Put the typed schema where Hydra's defaults list finds it; may be called again."""
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:
        store.store(name="schema", node=schema_of(Config))


def composed(overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """The composed configuration of one run, typed and resolved.

    Args:
        overrides: Hydra overrides such as `train.steps=10` or `head=mtp`, no sweeps.
        config_dir: a further folder in which groups are looked for.

    Raises:
        ValueError: an override that cannot be parsed, an unknown key, group choice or a value of
        another type.
    """
    check(overrides, config_dir)
    config = _composed(overrides, config_dir)
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ValueError(_explained(error)) from error
    return config


def is_sweep(parsed: Sequence[Override], config_dir: str | None = None) -> bool:
    """Whether the experiment among these overrides is a sweep by itself."""
    single = [str(one.input_line) for one in parsed if not one.is_sweep_override()]
    return _composed(single, config_dir, hydra=True).hydra.mode == RunMode.MULTIRUN


def _composed(overrides: Sequence[str], config_dir: str | None, hydra: bool = False) -> DictConfig:
    register()
    searched = (
        [] if config_dir is None else [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
    )
    try:
        with initialize_config_module(MODULE, version_base="1.3"):
            return compose(ROOT, [*overrides, *searched], return_hydra_config=hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explained(error)) from error


def to_config(node: DictConfig) -> Config:
    """The frozen `Config` of a composed node; ValueError where a dataclass refuses its values."""
    return build(Config, plain(node))


def plain(node: DictConfig) -> dict[str, Any]:
    """A composed node as JSON-ready dicts and lists, as it goes into provenance."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@cache
def groups() -> dict[str, list[str]]:
    """The choices of every configuration group, both sorted."""
    found: dict[str, list[str]] = {}
    for folder in files(MODULE).iterdir():
        if folder.is_dir():
            names = sorted(
                file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml")
            )
            if names:
                found[folder.name] = names
    return dict(sorted(found.items()))


@cache
def options() -> dict[str, str]:
    """The meaning of every key that a run may set, in the order of the schema; empty where none is
    written down."""
    meanings = describe(Config)
    return {key: meanings.get(key, "") for key, _, _ in leaves(Config)}


def check(overrides: Sequence[str], config_dir: str | None = None) -> list[Override]:
    """Refuse overrides whose key or group choice is not known; values are judged when composed.

    Raises:
        ValueError: names the override and the nearest known key or choice.
    """
    choices = groups()
    sections = {key[: key.rindex(".")] for key in options() if "." in key}
    sections |= {section.split(".")[0] for section in sections}
    known = [*options(), *sorted(sections | set(choices))]
    parsed = []
    for text in overrides:
        override = _parsed(text)
        parsed.append(override)
        name = override.key_or_group
        if name.startswith("hydra.") or name.startswith("hydra/"):
            continue
        if name in choices and not override.is_delete():
            value = override.value()
            if isinstance(value, str) and value not in choices[name] and config_dir is None:
                raise ValueError(f"{name}={value}: no such choice; {nearest(value, choices[name])}")
        elif name not in known and not _inside_a_dict(name):
            raise ValueError(f"{name}: no such key; {_nearest_key(name, known)}")
    return parsed


def _parsed(text: str) -> Override:
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except OverrideParseException as error:
        remedy = (
            "write key=value; a value with spaces, commas, = or brackets needs quotes of its own: "
            "'key=\"a, b\"'"
        )
        raise ValueError(f"{text!r} cannot be read as an override; {remedy}") from error
    return override


def _inside_a_dict(name: str) -> bool:
    """Whether `name` lies below a field that is a free mapping."""
    return any(
        isinstance(default, dict) and name.startswith(f"{key}.")
        for key, _, default in leaves(Config)
    )


def _nearest_key(name: str, known: Sequence[str]) -> str:
    last = name.rsplit(".", 1)[-1]
    same = [key for key in known if key.rsplit(".", 1)[-1] == last]
    if same:
        return f"did you mean {' or '.join(same[:3])}?"
    words = nearest(name, known)
    if words.startswith("known"):
        last_words = {key.rsplit(".", 1)[-1]: key for key in known}
        words = nearest(last, last_words)
        if words.startswith("known"):
            return "`--cfg job` prints every key"
        close = words.removeprefix("did you mean ").removesuffix("?").split(" or ")
        return f"did you mean {' or '.join(last_words[key] for key in close)}?"
    return words


def _explained(error: BaseException) -> str:
    """One line that names the key, the value and what is expected there."""
    cause = (
        error.__cause__
        if isinstance(error, ConfigCompositionException) and error.__cause__
        else error
    )
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    keys = [
        line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")
    ]
    message = lines[0] if lines else type(error).__name__
    if not keys:
        return " ".join(str(error).split())
    key = keys[0].split("[")[0]
    if message.endswith("is not in struct"):  # below a free mapping
        return f"{key}: not there yet; a new entry is added with +{key}=…"
    expected = {name: kind for name, kind, _ in leaves(Config)}.get(key)
    if expected is None:
        return f"{key}: {message}"
    if "is not a ListConfig" in message:
        return f"{key}: one value where a list belongs; write {key}=[…]"
    return f"{key}: {message}; expected {_type_name(expected)}"


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
