"""The arrows between folders go one way, and the package list names what the tree holds."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("kernels", "models", "inference", "data", "train", "conf", "scripts")
FILES = [path for folder in ORDER for path in sorted((ROOT / folder).rglob("*.py"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _imports(path: Path) -> list[tuple[int, int, str]]:
    """(line, level, dotted name) of every import; level 0 is absolute."""
    found: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, 0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                found.append((node.lineno, node.level, node.module))
            else:  # from .. import x
                found += [(node.lineno, node.level, alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_imports_only_the_folders_below_its_own(path: Path) -> None:
    """A relative import that leaves its folder goes to a folder that stands before it in ORDER."""
    folder, *inside = path.relative_to(ROOT).parts
    below = ORDER[: ORDER.index(folder)]
    for line, level, name in _imports(path):
        assert level <= len(inside) + 1, f"line {line}: leaves the package"
        if level == len(inside) + 1:
            assert name.split(".")[0] in below, (
                f"line {line}: {folder}/ may import {below}, not {name}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_imports_its_own_package_relatively(path: Path) -> None:
    """No `draftsmith.x` and no top-level `kernels`, `models`, … inside the package."""
    for line, level, name in _imports(path):
        if level == 0:
            assert name.split(".")[0] not in ("draftsmith", "tests", *ORDER), (
                f"line {line}: import {name}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_hydra_stays_in_conf_and_scripts(path: Path) -> None:
    """Below conf/ there are frozen dataclasses; nobody else sees Hydra or OmegaConf."""
    if path.relative_to(ROOT).parts[0] not in ("conf", "scripts"):
        names = {name.split(".")[0] for _, level, name in _imports(path) if level == 0}
        assert not names & {"hydra", "omegaconf"}


def test_package_list_is_the_tree() -> None:
    """pyproject.toml lists every folder with Python files, and no other."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in FILES}
    expected = {"draftsmith"} | {f"draftsmith.{folder.replace('/', '.')}" for folder in folders}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected


def test_every_package_has_an_init_and_says_it_is_typed() -> None:
    """An `__init__.py` (conf's lets Hydra find it) and a `py.typed` in each package."""
    for folder in {path.parent for path in FILES} | {ROOT}:
        assert (folder / "__init__.py").exists(), folder
        assert (folder / "py.typed").exists(), folder


def test_direct_requirements_have_one_version() -> None:
    """What pyproject.toml asks for is pinned, and pinned alike in requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {line for line in lines if line and not line.startswith("#")}
    assert set(PYPROJECT["project"]["dependencies"]) <= pinned
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^=\s]+", line) for line in pinned)


def test_direct_requirements_are_those_imported() -> None:
    """Every third-party package that the code imports is asked for by name; what the peers' own
    interpreter imports is no part of this package."""
    modules = {"hydra": "hydra-core"}
    asked = {line.split("==")[0] for line in PYPROJECT["project"]["dependencies"]}
    # Extras, triton among them, which also comes with CUDA builds of torch; and what is tried where
    # it is installed.
    extras = sum(PYPROJECT["project"]["optional-dependencies"].values(), [])
    optional = {re.split(r"[\[=]", line)[0] for line in extras} | {"flashinfer", "liger_kernel"}
    for path in (path for path in FILES if path.name != "_peer_steps.py"):
        for line, level, name in _imports(path):
            top = name.split(".")[0]
            if level == 0 and top not in sys.stdlib_module_names | optional:
                assert modules.get(top, top.replace("_", "-")) in asked, (
                    f"{path.relative_to(ROOT)}:{line}: {name}"
                )


def test_the_checkout_shadows_no_package() -> None:
    """`kernels` at top level would be Hugging Face's package, which transformers looks for."""
    found = importlib.util.find_spec("kernels")
    assert found is None or found.origin is None or not Path(found.origin).is_relative_to(ROOT)
