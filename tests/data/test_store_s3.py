"""A cache in an S3-compatible bucket, against a server in this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftsmith.data.cache import Cache
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.rows import Rows
from draftsmith.data.store import Store, blocks_of
from draftsmith.models.target import Target

s3fs = pytest.importorskip("s3fs", reason="the s3 client is installed by requirements-dev.txt")
server = pytest.importorskip("moto.server", reason="the s3 server is, too")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An empty bucket; the client is told of the server by the environment, as a user does it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("caches")
        yield "s3://caches"
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


def test_files(bucket: str) -> None:
    """Write, list, read by ranges, replace, delete."""
    store = Store(f"{bucket}/files")
    assert store.names() == [] and not store.exists("a")
    store.write("a", [b"01", b"2345"])
    assert store.names() == ["a"] and store.size("a") == 6 and store.read("a") == b"012345"
    reader = store.open("a")
    assert [part.tobytes() for part in reader([(0, 2), (4, 6)])] == [b"01", b"45"]
    assert b"".join(part.tobytes() for part in blocks_of(reader, 1, 6)) == b"12345"
    store.write("a", [b"new"])
    assert store.read("a") == b"new"
    store.delete("a")
    assert not store.exists("a")
    with pytest.raises(FileNotFoundError):
        store.size("a")


def test_dump_and_read(bucket: str, toy_rows: Rows, toy_target: Target, tmp_path: Path) -> None:
    """The bytes of a local dump; rows read by ranges; what is there is found again; an injury is
    named."""
    config = DumpConfig(shard_tokens=300, tokens_per_batch=128, dtype="fp8", max_tokens=700)
    dump(config, toy_rows, toy_target, tmp_path)
    place = f"{bucket}/cache"
    dump(config, toy_rows, toy_target, place)
    store = Store(place)
    local = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: store.read(name) for name in store.names()} == local
    cache, here = Cache.open(place), Cache.open(tmp_path)
    assert torch.equal(cache.gather([0, 4])[2], here.gather([0, 4])[2])
    assert dump(config, toy_rows, toy_target, place).reused
    name = "shard-00001.safetensors"
    store.write(name, [local[name][:-20], bytes(20)])
    with pytest.raises(ValueError, match=f"s3://caches/cache/{name}: row"):
        Cache.open(place)
