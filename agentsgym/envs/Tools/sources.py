"""Define and register the sources of tools: functions, methods of a per-episode object, and servers."""

from __future__ import annotations

import asyncio
import enum
import inspect
import random
import threading
import types
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

from agentsgym.envs.shared.timed import CallTimeoutError
from agentsgym.errors import ConfigError, TaskError, did_you_mean
from agentsgym.event_loop import run_coroutine
from agentsgym.fields import is_seconds, is_str, or_none, require
from agentsgym.texts import shown


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server whose tools an environment offers: a command (stdio), a URL (HTTP), or an in-process object.

    It is opened at first use in each process and closed with the environment. Requires ``agentsgym[mcp]``.

    Attributes:
        command: The program and arguments of a server that communicates over stdin and stdout.
        url: The address of a server with streamable HTTP.
        server: A server object of the MCP SDK, or a function that makes one (required for a process pool).
        env: Environment variables for ``command``, in addition to the few that the SDK passes.
        cwd: The working directory of ``command``; None for the current one.
        headers: HTTP headers for every request to ``url``.
        per_session: Whether each session opens a separate server, which isolates the state of stateful servers;
            otherwise, all sessions of a process share one server.
        tools: The names of the tools to offer; None for all.
        start_timeout_s: The time limit for starting the server and listing its tools.
    """

    command: Sequence[str] | None = None
    url: str | None = None
    server: Any = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    per_session: bool = False
    tools: Sequence[str] | None = None
    start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        given = [name for name in ("command", "url", "server") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"McpServer requires exactly one of command, url and server, got {', '.join(given) or 'none'}"
            )
        is_command = or_none(lambda value: not isinstance(value, str) and bool(value))
        require("McpServer.command", self.command, is_command, "a list of program and arguments")
        require("McpServer.url", self.url, or_none(lambda url: url.startswith(("http://", "https://"))), "an HTTP URL")
        require("McpServer.tools", self.tools, lambda tools: not is_str(tools), "a list of names")
        require("McpServer.start_timeout_s", self.start_timeout_s, is_seconds, "a positive number")

    def __deepcopy__(self, memo: Any) -> Self:
        """Share the server object: it cannot be copied, and each environment opens separate connections."""
        return self

    @property
    def label(self) -> str:
        """The server's name in error messages."""
        if self.url is not None:
            return f"the MCP server at {self.url}"
        return f"the MCP server {shown([*self.command] if self.command else self.server, 100)}"


Function = TypeVar("Function", bound=Callable[..., Any])
Names = Literal["all"] | Sequence[str]

_PARALLEL = "_agentsgym_parallel"
_NO_OBJECT = object()  # stands in for self, which schemas omit
_CLOSE = "close"  # a method of a session's object that is called when its episode ends, and not a tool


class Tool(NamedTuple):
    """One tool, bound to a session.

    Attributes:
        call: The function that makes a call from its arguments, by name, and the time limit.
        is_parallel: Whether it may run concurrently with other calls in the turn.
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
    """Whether ``names`` includes a tool's name."""
    return names == "all" or name in names


@dataclass(frozen=True)
class SessionTools:
    """Stateful tools: the public methods of an object that is created for each episode.

    Static methods are tools as well. Methods whose names begin with an underscore are not, and neither are class
    methods, which usually construct objects, or ``close``, which is called when the episode ends. A call that arrives
    while an earlier one is still running (after its timeout) fails, except for parallel tools.

    Attributes:
        tools_class: The class whose typed methods define the schemas.
        make: The function that creates the object from the task and the session's random generator; None to call
            the class. Its constructor gets what its arguments name: keys of the task, ``task_data`` and ``rng``; if it
            requires two arguments with other names, the task and the generator.
    """

    tools_class: type[Any]
    make: Callable[[dict[str, Any], random.Random], Any] | None = None

    def __post_init__(self) -> None:
        require("SessionTools.tools_class", self.tools_class, inspect.isclass, "a class")
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

    def arguments(self, task_data: Mapping[str, Any], generator: random.Random) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments of ``make`` or the class, by position and by name.

        Raises:
            TaskError: The task lacks a key that the constructor requires.
        """
        if self.make is not None:
            return (task_data, generator), {}
        parameters = inspect.signature(self.tools_class).parameters
        known = {**task_data, "task_data": task_data, "rng": generator}
        required = [name for name, one in parameters.items() if one.default is one.empty]
        missing = [name for name in required if name not in known]
        if not missing:
            return (), {name: known[name] for name in parameters if name in known}
        if len(required) == 2 or parameters[missing[0]].kind is inspect.Parameter.VAR_POSITIONAL:
            return (task_data, generator), {}
        raise TaskError(
            f"the constructor of {self.tools_class.__name__} requires {shown(missing[0])}, which must be a key of the "
            f"task, 'task_data' or 'rng'; the task has {shown([*task_data])}"
        )

    def begin(
        self, task_data: dict[str, Any], generator: random.Random, parallel_names: Names = ()
    ) -> tuple[dict[str, Tool], Callable[[], None]]:
        """Create an episode's object; returns its tools and the function that closes it.

        Args:
            task_data: The task.
            generator: The session's random generator.
            parallel_names: Names of tools, or ``"all"``, as for :func:`is_parallel`.
        """
        given, named = self.arguments(task_data, generator)
        holder = (self.make or self.tools_class)(*given, **named)
        busy = threading.Lock()
        tools: dict[str, Tool] = {}
        for method in self.methods():
            bound, may_overlap = getattr(holder, method.__name__), is_parallel(method, parallel_names)
            tools[method.__name__] = make_tool(bound, is_parallel=may_overlap, busy=busy)
        return tools, getattr(holder, _CLOSE, lambda: None)


Source = Callable[..., Any] | SessionTools | McpServer
Sources = Source | Sequence[Source]

_registered: dict[str, tuple[Source, ...]] = {}


def register_tools(name: str, tools: Sources) -> None:
    """Register tools under a name for ``env_config["tools"]``, since dataset rows are JSON and cannot contain code.

    Args:
        name: The name for ``env_config["tools"]``.
        tools: A function, :class:`SessionTools` or :class:`McpServer`, or a list of these.

    Raises:
        ConfigError: The tools are invalid, or other tools are registered under that name.
    """
    sources = as_sources(tools, f"register_tools({name!r}) accepts")
    if _registered.get(name, sources) != sources:
        raise ConfigError(f"other tools are already registered as {shown(name)}: choose another name")
    _registered[name] = sources


def registered_tools(names: str | Sequence[str] | None) -> tuple[Source, ...]:
    """Look up registered tools by name."""
    chosen = [names] if isinstance(names, str) else [*(names or ())]
    for name in chosen:
        if name not in _registered:
            hint = did_you_mean(name, _registered) if _registered else ""
            raise ConfigError(
                f"env_config['tools'] names {shown(name)}, which is not registered with register_tools{hint}"
            )
    return tuple(source for name in chosen for source in _registered[name])


def as_sources(tools: Any, who: str) -> tuple[Source, ...]:
    """Validate tools passed by the user.

    Args:
        tools: A source of tools, or a list of these.
        who: The beginning of error messages, such as ``"ToolEnv(tools=…) accepts"``.
    """
    given = (tools,) if _is_source(tools) else tools
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"{who} a function, SessionTools or McpServer, or a list of these, got {shown(tools)}")
    for one in cast("Sequence[Any]", given):
        if not _is_source(one):
            hint = f": write SessionTools(tools_class={one.__name__})" if isinstance(one, type) else ""
            raise ConfigError(f"{who} functions, SessionTools and McpServer, got {shown(one)}{hint}")
    for method in _methods_of(cast("Sequence[Source]", given)):
        if inspect.isasyncgenfunction(method):
            name = method.__name__
            raise ConfigError(f"the tool {name!r} is an async generator: return the result instead of yielding it")
    return tuple(cast("Sequence[Source]", given))


def has_async(sources: Sequence[Source]) -> bool:
    """Whether a function, or a method of a session's object, is async."""
    return any(map(inspect.iscoroutinefunction, _methods_of(sources)))


def _methods_of(sources: Sequence[Source]) -> list[Any]:
    """The functions, and the methods of sessions' objects."""
    methods = [one.methods() if isinstance(one, SessionTools) else [one] for one in sources]
    return [method for own in methods for method in own]


def make_tool(function: Callable[..., Any], *, is_parallel: bool, busy: threading.Lock | None = None) -> Tool:
    """Make a tool from a function: JSON values are converted to its annotated types, and coroutines are awaited.

    Args:
        function: The function, or a method of a session's object.
        is_parallel: Whether its calls may run concurrently.
        busy: The lock that a non-parallel call holds; while it is held, other such calls are rejected.
    """
    try:
        given = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001  # an annotation may be any expression
        given = {}
    hints = {name: hint for name, hint in given.items() if name != "return" and _needs_conversion(hint)}
    lock = None if is_parallel else busy
    is_async = inspect.iscoroutinefunction(function)

    def call(arguments: Mapping[str, Any], limit_s: float | None) -> Any:
        if lock is not None and not lock.acquire(blocking=False):
            raise BusyError("an earlier call is still running, so this call was not made")
        try:
            converted = {name: convert_to_hint(arguments[name], hints[name]) for name in hints if name in arguments}
            value = function(**{**arguments, **converted})
            return run_coroutine(_within(value, limit_s if is_async else None)) if inspect.iscoroutine(value) else value
        finally:
            if lock is not None:
                lock.release()

    return Tool(call, is_parallel, keeps_time=is_async)


async def _within(coroutine: Coroutine[Any, Any, Any], limit_s: float | None) -> Any:
    """Await a coroutine; raise :class:`CallTimeoutError` and cancel it if it takes longer than its limit."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await coroutine
    except TimeoutError:
        if limit.expired():
            raise CallTimeoutError from None
        raise


def convert_to_hint(value: Any, hint: Any) -> Any:
    """Convert a JSON value to the annotated type if that contains enums or tuples; otherwise return it unchanged.

    >>> convert_to_hint([[1, 2], [3, 4]], list[tuple[int, int]])
    [(1, 2), (3, 4)]
    """
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next((member for member in hint if member.value == value), value)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        converted = (convert_to_hint(value, part) for part in parts)
        return next((one for one in converted if one is not value), value)
    if isinstance(value, list) and (origin is tuple or hint is tuple):
        items = cast("list[Any]", value)
        each = [parts[0]] * len(items) if len(parts) == 2 and parts[1] is Ellipsis else [*parts]
        rest = [None] * (len(items) - len(each))
        return tuple(convert_to_hint(item, part) for item, part in zip(items, [*each, *rest], strict=False))
    if isinstance(value, list) and origin is list and _needs_conversion(hint):
        return [convert_to_hint(item, parts[0]) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping) and origin is dict and _needs_conversion(hint):
        return {key: convert_to_hint(item, parts[1]) for key, item in cast("Mapping[str, Any]", value).items()}
    return cast("Any", value)


def _needs_conversion(hint: Any) -> bool:
    """Whether values of an annotated type may have no direct JSON form."""
    if hint is tuple or typing.get_origin(hint) is tuple or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return False
    return any(_needs_conversion(part) for part in typing.get_args(hint))


def _is_source(value: Any) -> bool:
    return isinstance(value, SessionTools | McpServer) or (callable(value) and not isinstance(value, type))


class BusyError(Exception):
    """An earlier call of a session's object is still running."""
