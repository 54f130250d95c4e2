"""One place in a notebook that is drawn again and again. Outside of a notebook nothing of this is imported."""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Whether this process answers a notebook, whose displays can be updated; a terminal's IPython does not.

    IPython is not imported: whoever runs in a notebook has it loaded.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class LiveDisplay:
    """Shows one thing in the cell that runs, in the place of what it showed before; outside of a notebook nothing."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, thing: Any) -> None:
        """Show it.

        Args:
            thing: Anything that a notebook can draw, a :class:`~agentsgym.reports.plots.style.Picture` for example.
        """
        if not in_notebook():
            return
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(thing, display_id=True)
        else:
            self._handle.update(thing)
