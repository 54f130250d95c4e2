"""End a run: its pool, its place in the process group, and the group's threads.

A thread of gloo that is still at work when the interpreter ends asks for a Python that is gone, and aborts the process
(``terminate called without an active exception``). ``destroy_process_group`` ends the threads only where nothing else
holds the group. The wrapped model does, and a trainer, which is in reference cycles with its parts, holds that until
the garbage is collected: so references are dropped and garbage is collected first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import WeakSet

import torch.distributed as dist
from accelerate import PartialState

from agentsgym.errors import AgentsGymError

_open: WeakSet[OpenRun] = WeakSet()


class OpenRun:
    """A trainer's mark that it is open; the group of processes ends with the last one of the process."""

    def __init__(self) -> None:
        """Open it; the mark is gone with whoever holds it."""
        _open.add(self)

    def check(self) -> None:
        """Raise :class:`AgentsGymError` if it is closed."""
        if self not in _open:
            raise AgentsGymError("this trainer is closed, its pool and its process group with it: build another")

    def close(self, release: Callable[[], None], *, after_error: bool) -> None:
        """Collective unless after an error: free what is held; the last one's ranks leave the group together.

        A second time nothing is done.

        Args:
            release: Ends what keeps running, and drops what holds the group.
            after_error: Whether other ranks may have nothing to wait for: then none is waited for.
        """
        if self not in _open:
            return
        _open.discard(self)
        if not after_error:
            PartialState().wait_for_everyone()  # none leaves while another sends
        try:
            release()
        finally:
            gc.collect()
        if not _open:
            end_process_group()


def end_process_group() -> None:
    """End this process's part in the group, threads included, unless something still holds the group."""
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        PartialState().destroy_process_group()
