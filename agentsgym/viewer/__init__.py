"""A web page that shows stored rollouts: per-token credit, task groups side by side, and learning curves.

::

    RolloutStore ─▶ Answers ─▶ serve       the page requests the data that it shows
                          └──▶ write_page  a single file that contains all data
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.viewer.server import serve as serve
    from agentsgym.viewer.server import write_page as write_page

__getattr__, __all__ = lazy(__name__, {".server": ["serve", "write_page"]})
