"""Play plain generators, for tests of what plays trials."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from agentsgym.rollouts import driver

_BARE = SimpleNamespace(env=None, session_id="", may_wait=False)


def drive(trials: Iterable[Any], agent: Any, **options: Any) -> list[Any]:
    made = (one if hasattr(one, "play") else SimpleNamespace(**vars(_BARE), play=partial(iter, one)) for one in trials)
    return driver.drive(made, agent, **options)
