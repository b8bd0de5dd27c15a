"""Messages between processes: a JSON header and raw bytes over one socket.

A message is 12 bytes (length of the header as uint32, of the body as uint64, little-endian), the
header in UTF-8, the body. Nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<IQ")
_HEADER_BYTES = 1 << 24
_BODY_BYTES = 1 << 36


def send(link: socket.socket, header: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Send one message; OSError where the other end is gone."""
    text = json.dumps(header).encode()
    link.sendall(_LENGTHS.pack(len(text), len(body)) + text)
    if len(body):
        link.sendall(body)


def receive(link: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """The next message.

    Raises:
        EOFError: the other end closed. OSError: it is gone, or silent beyond the socket's timeout.
        ValueError: what came is no message.
    """
    header_bytes, body_bytes = _LENGTHS.unpack(exactly(link, _LENGTHS.size))
    if header_bytes > _HEADER_BYTES or body_bytes > _BODY_BYTES:
        raise ValueError(
            f"a message of {header_bytes} + {body_bytes} bytes: the other end speaks another "
            "language; start all processes from one version"
        )
    header = json.loads(exactly(link, header_bytes))
    return header, exactly(link, body_bytes)


def exactly(link: socket.socket, count: int) -> bytearray:
    """`count` bytes; EOFError where the other end closes before."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = link.recv_into(view[done:])
        if not got:
            raise EOFError(f"closed after {done} of {count} bytes")
        done += got
    return data
