"""Every exception that agentsgym raises on purpose.

::

    AgentsGymError
    ├── ConfigError          a setting is unknown, of the wrong type, or impossible (also a ValueError)
    ├── TaskError            a ``task_data`` cannot be played (also a ValueError)
    ├── TemplateError        a chat template whose tokens cannot be kept exact
    ├── MissingDependency    an optional package is needed (also an ImportError)
    └── EpisodeFault         one episode broke; the others go on
        ├── EnvironmentFault     the game raised, answered nonsense or took too long
        └── AgentFault           the agent raised, answered nonsense or took too long
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class AgentsGymError(Exception):
    """The root of the tree: ``except AgentsGymError`` catches all of it."""


class ConfigError(AgentsGymError, ValueError):
    """A setting is unknown, of the wrong type, or impossible."""


class TaskError(AgentsGymError, ValueError):
    """A ``task_data`` is missing something or cannot be played."""


class TemplateError(AgentsGymError):
    """A chat template does not allow an exact record of the tokens."""


class MissingDependency(AgentsGymError, ImportError):
    """An optional package is missing; the message says how to install it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is not installed; it comes with: pip install 'agentsgym[{extra}]'")


class EpisodeFault(AgentsGymError):
    """One episode broke; it is recorded as failed and the others go on."""


class EnvironmentFault(EpisodeFault):
    """The game raised or returned something that is no step."""


class AgentFault(EpisodeFault):
    """The agent raised or returned something that is no action."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Say which known word is nearest, as the end of an error message.

    >>> did_you_mean("free_shot", ["free_shots", "history"])
    "; did you mean 'free_shots'?"
    >>> did_you_mean("zzz", ["free_shots", "history"])
    "; known are 'free_shots', 'history'"
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; known are " + ", ".join(map(repr, names))
