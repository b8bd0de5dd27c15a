"""Files that are whole or absent: written under a temporary name, flushed to the disk, then
renamed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BLOCK = 1 << 22


def atomic_write_bytes(path: Path | str, data: bytes) -> None:
    """Write `data` so that a kill at any moment leaves either the old file or the new one."""
    atomic_write_blocks(path, [data])


def atomic_write_blocks(path: Path | str, blocks: Iterable[bytes | memoryview]) -> None:
    """`atomic_write_bytes` of data that come in pieces."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        commit(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Rename a finished temporary file into place and flush the folder that lists it."""
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def atomic_write_text(path: Path | str, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: Path | str, value: Any) -> None:
    """`atomic_write_bytes` of indented JSON; refuses NaN and infinities, which JSON has not."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Parse a JSON file.

    Raises:
        ValueError: the file is missing or damaged; the message names it and the byte.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; run the command that writes it first") from None
    return parse_json(data, str(path))


def parse_json(data: bytes, place: str) -> Any:
    """Parse the bytes of a JSON file.

    Args:
        place: the file's name, for messages.
    Raises:
        ValueError: damaged; names the file and the character.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place} is not UTF-8 text at byte {error.start}; delete it and run the command that "
            "writes it again"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place} is not valid JSON at character {error.pos} ({error.msg}); delete it and run "
            "the command that writes it again"
        ) from error


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def content_hash(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """`field old -> new` of every field that differs, nested ones with dotted names."""
    told: list[str] = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            told += changes(before, after, f"{path}{name}.")
        elif before != after:
            told.append(f"{path}{name} {before!r} -> {after!r}")
    return told
