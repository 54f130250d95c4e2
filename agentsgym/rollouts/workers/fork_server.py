"""Imported by the process that workers are forked from, and by nothing else: it ends after them.

When a pool's owner is gone, its fork server ends at once, and the kernel kills the workers with it (see
:mod:`agentsgym.rollouts.workers.owner_watch`). Workers that notice by themselves first close their episodes: so it
waits for them a little.

A signal that is sent to all processes of a job, for whose owner it is, does not end it either: no worker could be
started then, and existing ones would be killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

_WAIT_S = 3.0
_IGNORED = (signal.SIGTERM, signal.SIGHUP)


def _wait_for_children() -> None:
    ending = time.monotonic() + _WAIT_S
    while time.monotonic() < ending:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # none are left
        if not ended:
            time.sleep(0.02)


def _ignore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_restore_signals)  # all that is forked from here, by others than pools as well


def _restore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


atexit.register(_wait_for_children)
if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    _ignore_signals()
