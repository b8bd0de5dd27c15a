"""One class over local folders and memory:// (s3://: test_store_s3.py): files whole or absent."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.data.store import Store, blocks_of
from draftsmith.models import files as files_module

PLACES = ["local", "memory", "move"]  # move: a protocol that is not known to put files whole


@pytest.fixture(params=PLACES)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """An empty folder of each kind."""
    if request.param == "local":
        yield Store(tmp_path / "folder")
        return
    if request.param == "move":
        monkeypatch.setattr("draftsmith.data.store._ONE_PUT", set())
    store = Store(f"memory://{tmp_path.name}-{request.param}/folder")
    yield store
    for name in store.names():
        store.delete(name)


def test_round_trip(store: Store) -> None:
    """Write in blocks, list, read whole and by ranges, replace, delete."""
    assert store.names() == [] and not store.exists("a")
    store.write("a", [b"01", memoryview(b"2345"), b""])
    store.write(".b", [b"x" * 10])
    assert store.names() == [".b", "a"]
    assert store.exists("a") and store.size("a") == 6 and store.read("a") == b"012345"
    reader = store.open("a")
    assert [part.tobytes() for part in reader([(0, 2), (4, 6), (1, 1)])] == [b"01", b"45", b""]
    assert b"".join(part.tobytes() for part in blocks_of(reader, 1, 6)) == b"12345"
    store.write("a", [b"new"])
    assert store.read("a") == b"new"
    store.delete("a")
    store.delete("a")
    assert store.names() == [".b"] and not store.exists("a")
    with pytest.raises(FileNotFoundError):
        store.size("a")


def test_json(store: Store) -> None:
    """A damaged file is named with the place of the fault."""
    store.write_json("m.json", {"ä": [1, None]})
    assert store.read_json("m.json") == {"ä": [1, None]}
    store.write("m.json", [b'{"a": 1'])
    with pytest.raises(ValueError, match=r"folder/m\.json is not valid JSON at character 7"):
        store.read_json("m.json")
    store.write("m.json", [b"\xff"])
    with pytest.raises(ValueError, match=r"m\.json is not UTF-8 text at byte 0"):
        store.read_json("m.json")


def test_references(tmp_path: Path) -> None:
    """Beside each other by a relative name, else by the whole one."""
    here = Store(tmp_path / "a")
    assert here.reference(Store(tmp_path / "b")) == "../b"
    assert here.resolve("../b").local == tmp_path / "b"
    far = Store(tmp_path / "deep" / "b")
    assert here.reference(far) == str(far.local)
    assert here.resolve(here.reference(far)).place == far.place
    remote = Store("memory://bucket/a")
    assert remote.reference(Store("memory://bucket/b")) == "../b"
    assert remote.resolve("../b").place == "memory://bucket/b"
    assert remote.reference(here) == str(tmp_path / "a")


def test_references_from_a_link(tmp_path: Path) -> None:
    """Both directions take a linked folder for the one it names."""
    (tmp_path / "real" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    linked, beside = Store(tmp_path / "link"), Store(tmp_path / "real" / "b")
    assert linked.reference(beside) == "../b"
    assert linked.resolve("../b").place == beside.place


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is the home folder, never a folder of that name; an unknown user is told."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    store = Store("~/caches/a")
    store.write("x", [b"1"])
    assert store.local == tmp_path / "caches" / "a" and Store(store.place).names() == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["caches"]
    assert Store("~").local == tmp_path
    with pytest.raises(ValueError, match="~nosuchuser/x: .*; write the folder's whole name"):
        Store("~nosuchuser/x")


def test_full_disk_is_a_clean_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 64: nothing half-written stays, and the message says how to go on."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files_module.os, "fsync", full)
    with pytest.raises(
        ValueError, match="disk under .* is full while writing a; .* again, it goes"
    ):
        Store(tmp_path).write("a", [b"1"])
    assert list(tmp_path.iterdir()) == []


def test_unknown_protocol() -> None:
    """The place and fsspec's own words."""
    with pytest.raises(ValueError, match="nowhere://x: .*[Pp]rotocol"):
        Store("nowhere://x")
