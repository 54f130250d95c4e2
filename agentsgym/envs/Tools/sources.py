"""The sources of tools: functions, the methods of a per-episode object, servers; by name."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from agentsgym.envs.Tools.mcp_server import McpServer
from agentsgym.envs.Tools.typed import typed, typed_hints
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.texts import shown

Function = TypeVar("Function", bound=Callable[..., Any])
Names = Literal["all"] | Sequence[str]

_PARALLEL = "_agentsgym_parallel"
_NO_OBJECT = object()  # stands in for self, which a schema leaves out
_CLOSE = "close"  # method of a session's object, called when its episode ends; not a tool


class Tool(NamedTuple):
    """One tool, bound to a session.

    Attributes:
        call: The function of the arguments by name, and of the time limit.
        is_parallel: Whether it may run concurrently with other calls of its turn.
        keeps_time: Whether it enforces the time limit itself.
    """

    call: Callable[[Mapping[str, Any], float | None], Any]
    is_parallel: bool = False
    keeps_time: bool = False


def parallel(function: Function) -> Function:
    """Mark a tool whose calls may run concurrently within a turn; it must be thread-safe.

    >>> @parallel
    ... def look_up(word: str) -> str: ...
    """
    setattr(function, _PARALLEL, True)
    return function


def is_parallel(function: Callable[..., Any], names: Names) -> bool:
    """Whether calls of a tool may run concurrently: it is marked, or ``env_config["parallel_tools"]`` names it.

    Args:
        function: The tool.
        names: Names of tools, or ``"all"``.
    """
    return hasattr(function, _PARALLEL) or is_named(function.__name__, names)


def is_named(name: str, names: Names) -> bool:
    """Whether a tool's name is among the given ones."""
    return names == "all" or name in names


@dataclass(frozen=True, kw_only=True)
class SessionTools:
    """Tools with a state: the public methods of an object that is made for each episode.

    Static methods are tools as well. Methods whose names begin with an underscore are not, and neither are class
    methods, which usually construct objects, and ``close``, which is called when the episode ends. A call that arrives
    while an earlier one is still running (after its timeout) fails, except for parallel tools.

    Attributes:
        tools_class: The class whose typed methods define the schemas.
        make: The function that makes the object from the task and the session's generator; None calls the class with
            the two.
    """

    tools_class: type[Any]
    make: Callable[[dict[str, Any], random.Random], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tools_class, type):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"SessionTools.tools_class must be a class, got {shown(self.tools_class)}")
        if not self.methods():
            raise ConfigError(f"SessionTools: {self.tools_class.__name__} has no public methods to use as tools")

    def methods(self) -> list[Callable[..., Any]]:
        """Return the unbound methods that are tools, in definition order."""
        names = dict.fromkeys(name for base in reversed(self.tools_class.__mro__) for name in vars(base))
        public = [name for name in names if not name.startswith("_") and name != _CLOSE]
        found = {name: inspect.getattr_static(self.tools_class, name) for name in public}
        methods: list[Callable[..., Any]] = []
        for method in found.values():
            if inspect.isfunction(method):
                methods.append(MethodType(method, _NO_OBJECT))
            elif isinstance(method, staticmethod):
                methods.append(cast("staticmethod[..., Any]", method).__func__)
        return methods

    def begin(
        self, task_data: dict[str, Any], generator: random.Random, parallel_names: Names = ()
    ) -> tuple[dict[str, Tool], Callable[[], None]]:
        """Make one episode's object; returns its tools and the function that closes it.

        Args:
            task_data: The task.
            generator: The session's random generator.
            parallel_names: Names of tools, or ``"all"``, as for :func:`is_parallel`.
        """
        holder = (self.make or self.tools_class)(task_data, generator)
        busy = threading.Lock()
        tools: dict[str, Tool] = {}
        for method in self.methods():
            bound = getattr(holder, method.__name__)
            may_overlap = is_parallel(method, parallel_names)
            call = _call if may_overlap else _call_alone(busy)
            tools[method.__name__] = Tool(partial(call, _typed(bound)), may_overlap)
        return tools, getattr(holder, _CLOSE, _nothing)


Source = Callable[..., Any] | SessionTools | McpServer
Sources = Source | Sequence[Source]

_registered: dict[str, tuple[Source, ...]] = {}


def register_tools(name: str, tools: Sources) -> None:
    """Register tools for ``env_config["tools"]``, so that dataset rows can name them: a row is JSON without code.

    Args:
        name: The name for dataset rows.
        tools: One or several functions, :class:`SessionTools` and :class:`McpServer`.

    Raises:
        ConfigError: The tools are invalid, or the name is taken by other tools.
    """
    sources = as_sources(tools, f"register_tools({name!r}) takes")
    if _registered.get(name, sources) != sources:
        raise ConfigError(f"other tools are already registered as {shown(name)}: choose another name")
    _registered[name] = sources


def registered_tools(names: str | Sequence[str] | None) -> tuple[Source, ...]:
    """Look up registered tools by name.

    Raises:
        ConfigError: A name is not registered in this process.
    """
    chosen = [names] if isinstance(names, str) else [*(names or ())]
    for name in chosen:
        if name not in _registered:
            hint = did_you_mean(name, _registered) if _registered else ""
            raise ConfigError(
                f"env_config['tools'] names {shown(name)}, which is not registered by register_tools{hint}"
            )
    return tuple(source for name in chosen for source in _registered[name])


def as_sources(tools: Any, who: str) -> tuple[Source, ...]:
    """Validate tools that were passed in.

    Args:
        tools: One or several.
        who: The beginning of the error message: ``"ToolEnv(tools=…) takes"``.

    Raises:
        ConfigError: One of them is not a tool.
    """
    given = (tools,) if _is_source(tools) else tools
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"{who} functions, SessionTools or McpServer, one or a list, got {shown(tools)}")
    for one in cast("Sequence[Any]", given):
        if not _is_source(one):
            hint = f": write SessionTools(tools_class={one.__name__})" if isinstance(one, type) else ""
            raise ConfigError(f"{who} functions, SessionTools and McpServer, got {shown(one)}{hint}")
    return tuple(cast("Sequence[Source]", given))


def function_tools(functions: Sequence[Any], parallel_names: Names = ()) -> dict[str, Tool]:
    """Make the tools of plain functions, by name; ``parallel_names`` as for :func:`is_parallel`."""
    return {one.__name__: Tool(partial(_call, _typed(one)), is_parallel(one, parallel_names)) for one in functions}


def _is_source(value: Any) -> bool:
    return isinstance(value, SessionTools | McpServer) or (callable(value) and not isinstance(value, type))


def _typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it accepts JSON values; returned unchanged if its types need no conversion."""
    hints = typed_hints(function)

    def call(**arguments: Any) -> Any:
        return function(**typed(arguments, hints))

    return call if hints else function


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], limit_s: float | None) -> Any:  # noqa: ARG001  # for the caller
    """Call a tool; a coroutine function runs on a separate event loop."""
    value = function(**arguments)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _call_alone(busy: threading.Lock) -> Callable[..., Any]:
    """Call an object's method, unless an earlier call is still running."""

    def call(function: Callable[..., Any], arguments: Mapping[str, Any], limit_s: float | None) -> Any:
        if not busy.acquire(blocking=False):
            raise BusyError("an earlier call is still running, so this call was not made")
        try:
            return _call(function, arguments, limit_s)
        finally:
            busy.release()

    return call


class BusyError(Exception):
    """An earlier call of a session's object is still running."""


def _nothing() -> None:
    """Do nothing, for tools that need no closing."""
