"""Frames between a pool and its workers: what is no frame of the other end is refused before it is read."""

import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from agentsgym.rollouts.workers.wire import BrokenChannelError, Channel, make_pipe

PAYLOADS = [b"", b"x", b"two words", bytes(200_000)]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs, key = make_pipe()
    with ours, theirs:
        yield Channel(ours, key), Channel(theirs, key)


def test_messages_come_as_they_were_sent(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    for payload in PAYLOADS[:-1]:
        one.send(payload)
        other.send(payload[::-1])
    assert [other.receive() for _ in PAYLOADS[:-1]] == PAYLOADS[:-1]
    assert [one.receive()[::-1] for _ in PAYLOADS[:-1]] == PAYLOADS[:-1]


def recorded(payload: bytes, key: bytes) -> bytes:
    """A frame as it travels."""
    one, other = socket.socketpair()
    with one, other:
        Channel(one, key).send(payload)
        return other.recv(1 << 20)


@pytest.mark.parametrize(
    "damage",
    [
        lambda frame, key: b"stray" + frame,
        lambda frame, key: b"\x00" * 64,
        lambda frame, key: frame[:20] + b"stray" + frame[20:],
        lambda frame, key: frame[:-3] + b"str" + frame[-3:],
        lambda frame, key: frame[7:] + bytes(64),
        lambda frame, key: frame[:12] + struct.pack(">Q", 1 << 40) + frame[20:],
        lambda frame, key: recorded(b"payload", os.urandom(16)),
    ],
    ids=["before", "instead", "in the header", "in the payload", "stolen", "another length", "another key"],
)
def test_what_is_no_message_of_the_other_end_is_refused(damage: Callable[[bytes, bytes], bytes]) -> None:
    ours, theirs, key = make_pipe()
    with ours, theirs:
        theirs.sendall(damage(recorded(b"payload", key), key))
        with pytest.raises(BrokenChannelError):
            Channel(ours, key).receive()


def test_a_message_that_comes_twice_is_refused() -> None:
    ours, theirs, key = make_pipe()
    with ours, theirs:
        channel = Channel(ours, key)
        theirs.sendall(2 * recorded(b"payload", key))
        assert channel.receive() == b"payload"
        with pytest.raises(BrokenChannelError):
            channel.receive()


def test_a_message_that_breaks_off_is_an_end() -> None:
    ours, theirs, key = make_pipe()
    with ours:
        theirs.sendall(recorded(b"payload", key)[:-1])
        theirs.close()
        with pytest.raises(EOFError):
            Channel(ours, key).receive()


def test_what_was_not_taken_is_counted(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(b"payload")
    assert one.num_unread() > 0
    other.receive()
    assert one.num_unread() == 0
