"""What may come of a call with values that make no sense: a result, or an error that names what was wrong."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from hypothesis import HealthCheck, settings

import agentsgym
from agentsgym.errors import AgentsGymError

_PACKAGE = str(Path(agentsgym.__file__).parent)
#: Finds by their place, if the campaign collects them instead of ending at the first.
collected: dict[str, str] | None = None


def fuzzed(num_examples: int) -> Callable[[Any], Any]:
    """Let a test run with so many examples, however long they take to make."""
    return settings(max_examples=num_examples, deadline=None, suppress_health_check=[*HealthCheck])


class UnexpectedError(AssertionError):
    """A call ended in an error that does not explain what people did wrong."""


def survives(
    call: Callable[..., Any], *args: Any, accepted: tuple[type[BaseException], ...] = (), **kwargs: Any
) -> Any:
    """Call a public function, and return its result, or the error if it is one of ours.

    Args:
        call: The function.
        *args: Its arguments.
        accepted: Further errors that its documentation names.
        **kwargs: Its keyword arguments.

    Raises:
        UnexpectedError: Another error was raised: nobody sees from it what was wrong with the values.
    """
    try:
        return call(*args, **kwargs)
    except (AgentsGymError, *accepted) as error:
        if not str(error).strip():
            raise UnexpectedError(f"{type(error).__name__} without a sentence") from error
        return error
    except (Exception, RecursionError) as error:
        if isinstance(error, TypeError) and _is_of_wrong_call(error.__traceback__):
            return error
        if _is_from_values(error.__traceback__):
            return error
        place = f"{type(error).__name__} at {_place(error)}"
        if collected is not None:
            collected.setdefault(place, "".join(traceback.format_exception(error, limit=-6))[-2500:])
            return error
        raise UnexpectedError(f"{place}: {error}") from error


def _is_of_wrong_call(trace: TracebackType | None) -> bool:
    """Whether Python refused the arguments of the call itself, or the package raised the TypeError on purpose."""
    last = traceback.extract_tb(trace)[-1]
    line = linecache.getline(last.filename, last.lineno or 0)
    return last.filename == __file__ or "raise TypeError" in line


def _is_from_values(trace: TracebackType | None) -> bool:
    """Whether an object of the tests raised it: what a user's own object raises is the user's to see."""
    return Path(traceback.extract_tb(trace)[-1].filename).name == "values.py"


def _place(error: BaseException) -> str:
    """The innermost line of the package that an error passed."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(_PACKAGE)]
    return f"{Path(frames[-1].filename).relative_to(_PACKAGE)}:{frames[-1].lineno}" if frames else "outside"
