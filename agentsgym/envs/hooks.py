"""Call what an environment's author wrote: whatever it raises is the episode's failure, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentsgym.errors import EnvError
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown


def call_environment(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook of the environment; whatever it raises becomes an :class:`EnvError`, the cause attached."""
    try:
        return hook(*arguments)
    except BaseException as error:
        if is_interruption(error):
            raise
        name = getattr(hook, "__qualname__", None)
        raise failure_of(EnvError, name or shown(hook), error, hook) from error


def failure_of_value(name: str, error: BaseException) -> EnvError:
    """Make the failure of an episode out of what a returned value raised when it was looked at.

    Args:
        name: What was returned, as in ``"_step_episode"``.
        error: As it was caught. What is no failure of the value, or names it already, is raised again.
    """
    if isinstance(error, EnvError) or is_interruption(error):
        raise error
    return failure_of(EnvError, f"what {name} returned", error)
