"""Installed versions beside the tested ones."""

from __future__ import annotations

import importlib.metadata

import pytest

from draftsmith.scripts.versions import other_versions

ASKED = ["torch==2.13.0", "gone==1.0", "rich==15.0.0", "ray==2; extra == 'ray'"]
INSTALLED = {"torch": "2.13.0+cpu", "rich": "14.1"}


def test_case_129_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned version does not match the code. Right: both are told at the start; a build of the
    same version is none, nor is an extra that was not asked for."""

    def version(name: str) -> str:
        if name not in INSTALLED:
            raise importlib.metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ASKED)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert other_versions() == [
        "gone is missing (==1.0 is asked for)",
        "rich 14.1 is installed, tested is ==15.0.0",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert other_versions() == []


def test_this_environment_is_the_tested_one() -> None:
    """What runs the tests is what is pinned; a package that is not installed says nothing."""
    assert other_versions() == []
    assert other_versions("no-such-package-anywhere") == []
