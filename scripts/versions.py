"""Installed versions beside those that this package was built and tested with."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement


def other_versions(distribution: str = "draftsmith") -> list[str]:
    """What is installed otherwise than the package pins it, a clause each; empty where nothing is,
    or where the package runs without being installed."""
    try:
        asked = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for pin in map(Requirement, asked):
        if pin.marker is not None and not pin.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{pin.name} is missing ({pin.specifier} is asked for)")
            continue
        if not pin.specifier.contains(version, prereleases=True):
            found.append(f"{pin.name} {version} is installed, tested is {pin.specifier}")
    return found
