"""The exceptions that agentsgym raises on purpose.

::

    AgentsGymError
    ├── ConfigError               a setting is unknown, of the wrong type, or impossible (also a ValueError)
    ├── TaskError                 a ``task_data`` cannot be played (also a ValueError)
    ├── TemplateError             a chat template does not allow an exact record of the tokens
    ├── MissingDependencyError    an optional package is needed (also an ImportError)
    ├── CheckpointError           a checkpoint could not be written (also an OSError)
    ├── StoreError                a rollout store cannot be read or written (also an OSError)
    ├── TooManyFailuresError      more rollouts failed than ``max_failed_fraction`` allows
    ├── ContractError             an environment violates the contract (``check_env``)
    ├── NonFiniteError            a loss, a gradient, a weight or a logit is NaN or infinite
    └── EpisodeError              one episode failed; the others continue
        ├── EnvError                  the environment raised, returned something invalid or took too long
        ├── AgentError                the agent raised, returned something invalid or took too long
        └── JudgeError                a judge gave no score
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from typing import TYPE_CHECKING

from agentsgym.removed import REMOVED
from agentsgym.texts import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from agentsgym.types import Trajectory

_MAX_NAMES = 40  # listed in a hint
_signature = functools.lru_cache(inspect.signature)  # takes milliseconds where there are two hundred arguments
#: What other libraries call a setting: its name here or, if it is not an argument, its place.
OTHER_NAMES = {
    **{"inputs": "task_data_list", "api_base": "base_url", "estimator": "advantage_estimator", "gae": "turn_gae"},
    **{"gamma": "discount", "max_prompt_length": "env_config['max_trajectory_tokens']"},
    **dict.fromkeys(("max_turns", "max_steps", "max_episode_steps"), "env_config['max_steps_per_episode']"),
    "env_config": "the environment's env_config",
    "peft_config": "the trainer's peft_config, in a file model_settings.use_peft",
}


class AgentsGymError(Exception):
    """The base class of all exceptions that agentsgym raises on purpose.

    Attributes:
        trajectories: The rollouts that had finished when the error ended an ``evaluate``.
    """

    trajectories: Sequence[Trajectory] = ()


class ConfigError(AgentsGymError, ValueError):
    """A setting is unknown, of the wrong type, or impossible."""


class TaskError(AgentsGymError, ValueError):
    """A ``task_data`` is incomplete or cannot be played."""


class TemplateError(AgentsGymError):
    """A chat template does not allow an exact record of the tokens."""


class MissingDependencyError(AgentsGymError, ImportError):
    """An optional package is missing; the message has the command that installs it."""

    def __init__(self, package: str, extra: str = "", *, command: str = "") -> None:
        how = command or f"pip install 'agentsgym[{extra}]'"
        super().__init__(f"{package!r} is not installed; install it with: {how}")


def import_extra(module: str, extra: str) -> Any:
    """Import a module that a pip extra installs.

    Raises:
        MissingDependencyError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # the module is installed, but one of its requirements is not
        raise MissingDependencyError(package.replace("_", "-"), extra) from error


class CheckpointError(AgentsGymError, OSError):
    """A checkpoint could not be written, usually because the disk is full; earlier checkpoints are intact."""


class StoreError(AgentsGymError, OSError):
    """A rollout store is missing or cannot be read, or its disk is full; the message names the file."""


class TooManyFailuresError(AgentsGymError):
    """More rollouts failed than ``max_failed_fraction`` allows; the message shows the first failure."""


class ContractError(AgentsGymError):
    """An environment violates the contract, as found by ``check_env``.

    Attributes:
        report: All findings, an :class:`~agentsgym.envs.check.probe.EnvReport`.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class NonFiniteError(AgentsGymError):
    """A loss, a gradient, a weight or a logit is NaN or infinite; the message names where it was first seen."""


class EpisodeError(AgentsGymError):
    """One episode failed; it is recorded as failed and the others continue.

    Attributes:
        place: File and line, as in ``"guess.py:31"``, of the user's code that raised or of the hook that returned
            something invalid; empty if unknown.
        trace: The traceback as text, without frames of the library; empty if nothing was raised.
    """

    place: str = ""
    trace: str = ""


class EnvError(EpisodeError):
    """The environment raised, or returned something that is not a step.

    (Not ``EnvironmentError``, which is Python's own name for ``OSError``.)
    """


class AgentError(EpisodeError):
    """The agent raised, or returned something that is not an action."""


class JudgeError(EpisodeError):
    """A judge of the environment gave no score: its agent failed, or its answer could not be read twice."""


def did_you_mean(given: object, known: Iterable[str], *, kind: str = "") -> str:
    """Suggest the most similar known name, or list the known names, as the end of an error message.

    What was given may be of any type. For a name that an earlier version had, it states what to use instead
    (:mod:`agentsgym.removed`), which is also looked up behind ``kind``, as in ``"estimator tree"``.

    >>> did_you_mean("free_shot", ["free_shots", "history"])
    "; did you mean 'free_shots'?"
    >>> did_you_mean("zzz", ["free_shots", "history"])
    "; valid names: 'free_shots', 'history'"
    """
    word = given if isinstance(given, str) else shown(given)
    for name in (word, f"{kind} {word}"):
        if name in REMOVED:
            return f": {REMOVED[name]}"
    names, meant = sorted(known), OTHER_NAMES.get(word, "")
    own = meant.removeprefix("env_config['").removesuffix("']")
    near = [own] if own in names else difflib.get_close_matches(word[:100], names, n=1)
    if meant and own not in names and not meant.isidentifier():
        return f"; did you mean {meant}?"
    if near:
        return f"; did you mean {shown(near[0])}?"
    more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return "; valid names: " + ", ".join([*map(shown, names[:_MAX_NAMES]), *more])


def check_options(
    given: Iterable[str], *functions: Callable[..., Any], relatives: Sequence[Callable[..., Any]] = ()
) -> None:
    """Reject unknown keyword arguments, and suggest the most similar valid one.

    Args:
        given: The names of the keyword arguments.
        functions: The function that was called, followed by the functions to which it forwards keyword arguments. It
            supplies their required arguments itself.
        relatives: Functions that the caller may have meant instead.
    """
    called, *forwarded_to = (_signature(function).parameters.values() for function in functions)
    optional = (one for parameters in forwarded_to for one in parameters if one.default is not one.empty)
    known = {one.name for one in (*called, *optional) if one.kind is not one.VAR_KEYWORD}
    for name in given:
        if name not in known:
            owner = next((one.__name__ for one in relatives if name in inspect.signature(one).parameters), None)
            hint = did_you_mean(name, known) if owner is None else f": it is an argument of {owner}"
            raise TypeError(f"{functions[0].__name__} has no argument {shown(name)}{hint}")


def misspelled(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that differs from ``word`` by one letter, or by two swapped neighboring letters.

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
