"""View stored rollouts on a page: every token with its credit, task groups side by side, and what-if.

::

    RolloutStore ─▶ Answers ─▶ serve       the page requests what it shows
                          └──▶ write_page  one file that contains all of it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.viewer.server import serve
    from agentsgym.viewer.written import write_page

__all__ = ["serve", "write_page"]

__getattr__ = lazy(__name__)
