"""Datasets of the hub, read through the real clients from a small hub of our own."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.data.hub_records import HubRecords, is_dataset

COMMIT = "a" * 40
CHATS = [
    {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"a{n}"}]}
    for n in range(5)
]
READ = """
import json, sys
from draftsmith.data.sources import open_source
for source in sys.argv[1:]:
    try:
        found = open_source(source)
        records = list(found)
        print(json.dumps([found.form, found.identity, found.total, found.read, records]))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


def parquet(records: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), file)
    return file.getvalue()


FILES = {
    "README.md": b"---\nlicense: mit\n---\n",
    "data/test-00000-of-00001.parquet": parquet(CHATS[:2]),
    "data/train-00000-of-00001.parquet": parquet(CHATS),
}


class Hub(BaseHTTPRequestHandler):
    """Answers what the clients ask about the one dataset owner/chats."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path.startswith("/api/datasets/owner/chats"):
            _, found, folder = parts.path.partition(f"/tree/{COMMIT}")
            if found:
                deep = parse_qs(parts.query).get("recursive") == ["true"]
                return self._json(listed(folder.strip("/"), deep))
            siblings = [{"rfilename": name} for name in FILES]
            return self._json({"id": "owner/chats", "sha": COMMIT, "siblings": siblings})
        _, found, name = parts.path.partition("/datasets/owner/chats/resolve/")
        data = FILES.get(name.partition("/")[2])
        if not found or data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT}
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._send(200, data, headers)
        start, end = (int(place) for place in wanted.removeprefix("bytes=").split("-"))
        part = data[start : end + 1]
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        return self._send(206, part, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def listed(folder: str, deep: bool) -> list[dict[str, Any]]:
    """The entries of a folder as the hub lists them."""
    inside = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for name, data in FILES.items():
        if name.startswith(inside):
            first, deeper, _ = name.removeprefix(inside).partition("/")
            if deeper and not deep:
                entries[first] = {"type": "directory", "path": inside + first, "oid": oid(b"")}
            else:
                entries[name] = {
                    "type": "file",
                    "path": name,
                    "oid": oid(data),
                    "size": len(data),
                }
    return list(entries.values())


@pytest.fixture
def endpoint() -> Iterator[str]:
    """The address of a running hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_datasets_and_files_of_the_hub(endpoint: str, tmp_path: Path) -> None:
    """A split is streamed and named by its commit, a file is fetched, and what is not there is
    refused with what is."""
    sources = [
        "hf://owner/chats",
        "hf://owner/chats@main?split=test",
        "hf://owner/chats?split=valid",
        "hf://owner/nothing",
        "hf://owner/chats/data/test-00000-of-00001.parquet",
    ]
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run(  # the clients read their settings when they are imported
        [sys.executable, "-c", READ, *sources],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    whole, test, no_split, nothing, file = map(json.loads, done.stdout.splitlines())
    form, identity, _, read, records = whole
    assert form == f"dataset of the hub, split train, commit {COMMIT}"
    assert identity == {
        "repository": "owner/chats",
        "commit": COMMIT,
        "config": "",
        "split": "train",
    }
    assert read == 5
    assert records == [[n, chat] for n, chat in enumerate(CHATS)]
    assert test[1]["split"] == "test"
    assert [record for _, record in test[4]] == CHATS[:2]
    assert "the splits are" in no_split and "train" in no_split and "?split=NAME" in no_split
    assert "'hf://owner/nothing': the hub could not give it" in nothing
    assert file[0] == "Parquet"
    assert [record for _, record in file[4]] == CHATS[:2]
    assert file[1] == {
        "sha256": [hashlib.sha256(FILES["data/test-00000-of-00001.parquet"]).hexdigest()]
    }


@pytest.mark.parametrize(
    "source",
    ["hf://owner", "hf://owner/", "hf://owner/chats?splits=x", "hf://owner/chats?split="],
)
def test_a_source_that_is_misspelt(source: str) -> None:
    """The form is shown before anybody is asked."""
    assert is_dataset(source)
    with pytest.raises(ValueError, match=r"write hf://owner/name\[@revision\]\[\?config="):
        HubRecords(source)
