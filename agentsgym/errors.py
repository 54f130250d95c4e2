"""Every exception that agentsgym raises on purpose.

::

    AgentsGymError
    ├── ConfigError               a setting is unknown, of the wrong type, or impossible (also a ValueError)
    ├── TaskError                 a ``task_data`` cannot be played (also a ValueError)
    ├── TemplateError             a chat template whose tokens cannot be kept exact
    ├── MissingDependencyError    an optional package is needed (also an ImportError)
    ├── CheckpointError           a checkpoint could not be written (also an OSError)
    ├── StoreError                a rollout store cannot be read or written (also an OSError)
    ├── TooManyFailuresError      more rollouts failed than ``max_failed_fraction`` allows
    ├── ContractError             an environment breaks the contract (``check_env``)
    ├── NonFiniteError            a loss, a gradient, a weight or a logit is NaN or infinite
    └── EpisodeError              one episode failed; the others continue
        ├── EnvError                  the environment raised, returned nonsense or took too long
        └── AgentError                the agent raised, answered nonsense or took too long
"""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING

from agentsgym.texts import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from agentsgym.types import Trajectory

_MAX_NAMES = 40  # of the known ones, in a hint


class AgentsGymError(Exception):
    """The root of the tree: ``except AgentsGymError`` catches all of it.

    Attributes:
        trajectories: The rollouts that were finished when it ended an ``evaluate``, so that none is lost.
    """

    trajectories: Sequence[Trajectory] = ()


class ConfigError(AgentsGymError, ValueError):
    """A setting is unknown, of the wrong type, or impossible."""


class TaskError(AgentsGymError, ValueError):
    """A ``task_data`` is missing something or cannot be played."""


class TemplateError(AgentsGymError):
    """A chat template does not allow an exact record of the tokens."""


class MissingDependencyError(AgentsGymError, ImportError):
    """An optional package is missing; the message has the command that installs it."""

    def __init__(self, package: str, extra: str = "", *, command: str = "") -> None:
        how = command or f"pip install 'agentsgym[{extra}]'"
        super().__init__(f"{package!r} is not installed; it comes with: {how}")


class CheckpointError(AgentsGymError, OSError):
    """A checkpoint could not be written, most often for a full disk; earlier ones are complete."""


class StoreError(AgentsGymError, OSError):
    """A rollout store is missing or cannot be read, or its disk is full; the message names the file."""


class TooManyFailuresError(AgentsGymError):
    """More rollouts failed than ``max_failed_fraction`` allows; the message names the first of them."""


class ContractError(AgentsGymError):
    """An environment breaks the contract: what ``check_env`` raises.

    Attributes:
        report: All findings, an :class:`~agentsgym.envs.check.report.EnvReport`.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class NonFiniteError(AgentsGymError):
    """A loss, a gradient, a weight or a logit is NaN or infinite; the message names where it was first seen."""


class EpisodeError(AgentsGymError):
    """One episode failed; it is recorded as failed and the others continue.

    Attributes:
        place: File and line of the user's code that raised, as in ``"guess.py:31"``, or that defines the hook which
            returned nonsense; empty if neither is known.
        trace: The traceback as text, without the library's own frames; empty if nothing was raised.
    """

    place: str = ""
    trace: str = ""


class EnvError(EpisodeError):
    """The environment raised, or returned something that is not a step.

    (Not ``EnvironmentError``, which is Python's own name for ``OSError``.)
    """


class AgentError(EpisodeError):
    """The agent raised, or returned something that is not an action."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Name the nearest known word, as the end of an error message.

    >>> did_you_mean("free_shot", ["free_shots", "history"])
    "; did you mean 'free_shots'?"
    >>> did_you_mean("zzz", ["free_shots", "history"])
    "; known are 'free_shots', 'history'"
    """
    names = sorted(known)
    near = difflib.get_close_matches(word[:100], names, n=1)
    if near:
        return f"; did you mean {shown(near[0])}?"
    more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return "; known are " + ", ".join([*map(shown, names[:_MAX_NAMES]), *more])


def check_options(
    given: Iterable[str], *functions: Callable[..., Any], relatives: Sequence[Callable[..., Any]] = ()
) -> None:
    """Refuse unknown keyword arguments, and name the nearest known one.

    Args:
        given: Their names.
        functions: The function that was called, and those that it passes keyword arguments to. Arguments that those
            require are passed by the first.
        relatives: Functions that may have been meant instead.

    Raises:
        TypeError: None of the functions has an argument of that name.
    """
    called, *handed_to = (inspect.signature(function).parameters.values() for function in functions)
    optional = (one for parameters in handed_to for one in parameters if one.default is not one.empty)
    known = {one.name for one in (*called, *optional) if one.kind is not one.VAR_KEYWORD}
    for name in given:
        if name not in known:
            owner = next((one.__name__ for one in relatives if name in inspect.signature(one).parameters), None)
            hint = did_you_mean(name, known) if owner is None else f", which {owner} has"
            raise TypeError(f"{functions[0].__name__} has no argument {shown(name)}{hint}")


def misspelled(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that differs from this one by one letter, or by two neighbors that changed places.

    >>> misspelled("sucess", ["invalid", "success"])
    'success'
    >>> misspelled("valid", ["invalid", "success"]) is None
    True
    """
    for name in known:
        pairs = enumerate(zip(word, name, strict=False))
        start = next((place for place, (a, b) in pairs if a != b), min(len(word), len(name)))
        one, other = word[start:], name[start:]
        swapped = one[:2][::-1] + one[2:]
        if word != name and (other in (one[1:], swapped) or other[1:] in (one, one[1:])):
            return name
    return None
