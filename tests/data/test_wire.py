"""Messages over a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from draftsmith.data.wire import exactly, receive, send


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one connection."""
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_messages_arrive_whole_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    """Header and body, an empty body, and one after another."""
    left, right = ends
    send(left, {"lengths": [1, 2]}, b"\x00\xffabc")
    send(left, {"text": "ü"})
    assert receive(right) == ({"lengths": [1, 2]}, bytearray(b"\x00\xffabc"))
    assert receive(right) == ({"text": "ü"}, bytearray())


def test_a_cut_message_is_an_end(ends: tuple[socket.socket, socket.socket]) -> None:
    """Closing in the middle says how far it came."""
    left, right = ends
    left.sendall(b"abc")
    left.close()
    with pytest.raises(EOFError, match="closed after 3 of 12 bytes"):
        receive(right)


def test_foreign_bytes_are_refused_before_anything_is_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A web client's greeting is no message, and no memory is taken for the length it spells."""
    left, right = ends
    left.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="speaks another language"):
        receive(right)
    assert exactly(right, 3) == b".1\r"
