"""Keep the beginning and the end of a command's output, as text that can be shown anywhere."""

from __future__ import annotations

import re

# Control sequences (CSI), strings such as window titles (OSC and others), and the remaining escapes of two characters.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\)|[ -/]*[0-~])", re.DOTALL)
# The only line of unit tests that differs between runs.
_TEST_TIME = re.compile(r"^(Ran \d+ tests? in )\d+\.\d+s$", re.MULTILINE)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Capture:
    """The output of one command: at most ``limit`` bytes of it are kept, half from its beginning, half from its end."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head, self._tail = bytearray(), bytearray()
        self._num_left_out = 0

    def add(self, data: bytes) -> None:
        """Add the next part of the output."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room else data
        surplus = len(self._tail) - self._half
        if surplus > 0:
            self._num_left_out += surplus
            del self._tail[:surplus]

    def take(self) -> str:
        """Return the output so far as text, with a note about what was left out, and start anew."""
        left_out = f"\n[{self._num_left_out} bytes of output left out]\n"
        parts = [self._head, self._tail] if self._num_left_out else [self._head + self._tail]
        text = left_out.join(printable(bytes(part)) for part in parts)
        self._head, self._tail, self._num_left_out = bytearray(), bytearray(), 0
        return text


def printable(data: bytes) -> str:
    r"""Decode output: invalid bytes and control characters become U+FFFD, and escape sequences are removed.

    The time that Python's unit tests report becomes 0.000s, so that an episode can be replayed.

    >>> printable(b"\x1b[31mred\x1b[0m \xff\x00 caf\xc3\xa9")
    'red �� café'
    """
    text = data.decode(errors="replace").replace("\r\n", "\n")
    text = _CONTROLS.sub("\ufffd", _ESCAPES.sub("", text).replace("\r", "\n"))
    return _TEST_TIME.sub(r"\g<1>0.000s", text)
