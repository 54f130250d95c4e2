"""Messages between a process pool and one worker, verified before they are unpickled.

A worker runs the user's code, which can write to any of its file descriptors, read from them or close them. Each frame
therefore has a digest of its number, its length and its content that only the two ends can compute::

    magic (4) | number (8) | length (8) | digest of the payload (16) | digest of these fields (16) | payload

Stray bytes, missing bytes and broken frames raise :class:`BrokenChannelError` and are never unpickled. This protects
against accidents. It is not a sandbox: the code in a worker is trusted like the code in the pool's process.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import socket
import struct
import sys
from collections.abc import Callable

_MAGIC = b"\xa7gym"
_PREFIX = struct.Struct(">4sQQ16s")
_DIGEST_SIZE = 16
_HEADER_SIZE = _PREFIX.size + _DIGEST_SIZE
_JOINED_SIZE = 1 << 16  # payloads up to this size are copied, to send the frame in one call


class BrokenChannelError(Exception):
    """The received bytes are not a valid frame, or the next frame is overdue."""


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection = connection
        self._key = key
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes) -> None:
        """Send one message.

        Raises:
            OSError: The connection is gone, or the other end has not read for too long.
        """
        prefix = _PREFIX.pack(_MAGIC, self._num_sent, len(payload), self._digest(payload))
        header = prefix + self._digest(prefix)
        self._num_sent += 1
        if len(payload) <= _JOINED_SIZE:
            self.connection.sendall(header + payload)
        else:
            self.connection.sendall(header)
            self.connection.sendall(payload)

    def receive(self, on_silence: Callable[[], None] | None = None) -> bytes:
        """Wait for the next message.

        Args:
            on_silence: Called whenever nothing has arrived within the time set by :meth:`limit_waits`; an exception
                from it ends the wait.

        Raises:
            EOFError: The other end is gone.
            OSError: This end is closed.
            BrokenChannelError: The received bytes are not a message.
        """
        header = self._read(_HEADER_SIZE, on_silence)
        prefix, digest = header[: _PREFIX.size], header[_PREFIX.size :]
        _, number, length, payload_digest = _PREFIX.unpack(prefix)
        if not hmac.compare_digest(digest, self._digest(prefix)) or number != self._num_received:
            raise BrokenChannelError(f"its pipe carried bytes that are not a message: {header[:16]!r}")
        payload = self._read(length, on_silence)
        if not hmac.compare_digest(payload_digest, self._digest(payload)):
            raise BrokenChannelError("a message in its pipe was mixed with other bytes")
        self._num_received += 1
        return payload

    def limit_waits(self, receiving_s: int, sending_s: int) -> None:
        """Set time limits (not on Windows), after which ``receive`` calls ``on_silence`` and ``send`` raises."""
        if sys.platform != "win32":
            for option, seconds in ((socket.SO_RCVTIMEO, receiving_s), (socket.SO_SNDTIMEO, sending_s)):
                self.connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def num_unread(self) -> int:
        """Count the sent bytes that the other end has not read yet; 0 if the system cannot report it."""
        try:
            import fcntl  # noqa: PLC0415  # not on Windows
            import termios  # noqa: PLC0415

            return int.from_bytes(fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except (ImportError, OSError):
            return 0

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _read(self, size: int, on_silence: Callable[[], None] | None) -> bytes:
        data = bytearray()
        while len(data) < size:  # usually all of it arrives in one part
            try:
                part = self.connection.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EWOULDBLOCK} or on_silence is None:
                    raise
                on_silence()
                continue
            if len(part) == size:
                return part
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_DIGEST_SIZE, key=self._key).digest()


def make_pipe() -> tuple[socket.socket, socket.socket, bytes]:
    """Make two connected sockets, and the key for the channels over them."""
    ours, theirs = socket.socketpair()
    return ours, theirs, secrets.token_bytes(16)
