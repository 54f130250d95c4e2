"""Make the fork server, the only process that imports this module, exit after its workers.

When a pool's owner exits, its fork server exits as well, and the kernel then kills the workers (see
:mod:`agentsgym.rollouts.workers.main`). Since workers that notice the owner's exit close their episodes first,
the fork server waits for them briefly.

It also ignores signals that are sent to all processes of a job but meant for the owner: otherwise no worker could be
started, and existing ones would be killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

_WAIT_S = 3.0
_IGNORED = (signal.SIGTERM, signal.SIGHUP)


@atexit.register
def _wait_for_children() -> None:
    ending = time.monotonic() + _WAIT_S
    while time.monotonic() < ending:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # none are left
        if not ended:
            time.sleep(0.02)


def _restore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_restore_signals)  # in all processes forked from here, not only pool workers
