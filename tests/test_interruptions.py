"""SIGTERM as an exception: the first one only, in this process only, and only where nobody handles it already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentsgym.interruptions import Terminated, raising_on_sigterm

FORKED = """
import os, signal, time
from agentsgym.interruptions import raising_on_sigterm
with raising_on_sigterm():
    ready, is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(is_ready, b".")  # a signal that comes right at the fork is dropped by Python
        time.sleep(20)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_first_is_raised_and_copies_of_it_are_passed_over() -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with raising_on_sigterm():
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_is_there_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with raising_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_ended() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, env=environment, timeout=30
    )
    assert done.stdout == f"{-signal.SIGTERM}\n", done.stderr
