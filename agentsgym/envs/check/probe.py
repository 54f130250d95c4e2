"""Observe an environment's hooks while they run (the generators they use, the state they change), and report it."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any, Literal, Self, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.check.plays import Start, start_of
from agentsgym.envs.user_checks import place_of_hook
from agentsgym.event_loop import awaited
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown

_HOOKS = (
    *("_initialize_episode", "_format_prompt", "_step_episode", "_step_action", "_final_reward", "_state_key"),
    *("_role", "_potential", "_score_state", "_calculate_rewards", "_close_episode", "_system_prompt"),
)
# These receive a state and must not change it.
_READERS = ("_format_prompt", "_state_key", "_role", "_potential", "_score_state")
_TOOL_HOOK = "_call_tool"  # defined by environments with tools
_BASE_ATTRIBUTES = {
    *("active_states", "tables", "_generators", "_starts", "_chat_format", "_tool_schemas", "_processes"),
    *(*_HOOKS, _TOOL_HOOK),
}
_MAX_STATE_BYTES = 100_000  # larger states are not compared
_MAX_DEPTH, _MAX_ITEMS = 2, 20  # limits of the compared parts of an attribute


class HookProbe:
    """Watches the hooks of one environment, inside a ``with`` block.

    Attributes:
        findings: The findings, one per check, hook and subject.
        changed: The attributes of the environment that hooks changed, each with the first hook that did.
        roles: The roles that ``_role`` returned.
        rewarded_roles: The roles in ``info["rewards"]``, each with the first hook that rewarded it.
        calls: By tool, the errors of its calls, None where it returned.
        starts: Initial states of the episodes, in order, one list for each ``with`` block.
        steps_again: Whether the action that ended an episode is repeated on a copy of its last state.
    """

    def __init__(self, env: MultistepEnv) -> None:
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.changed: dict[str, str] = {}
        self.roles: set[Hashable] = set()
        self.rewarded_roles: dict[Hashable, str] = {}
        self.calls: defaultdict[str, list[BaseException | None]] = defaultdict(list)
        self.starts: list[list[Start]] = []
        self._env = env
        self._starts: dict[int, tuple[str, Any]] = {}  # keeps the states alive, so that ids stay unique
        self.steps_again = False
        self._num_uses = 0  # detected uses of global generators

    def __enter__(self) -> Self:
        self.starts.append([])
        for name in _HOOKS:
            vars(self._env)[name] = self._watched(name, getattr(self._env, name))
        if hasattr(type(self._env), _TOOL_HOOK):
            vars(self._env)[_TOOL_HOOK] = self._watched_calls(getattr(self._env, _TOOL_HOOK))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        for name in (*_HOOKS, _TOOL_HOOK):
            vars(self._env).pop(name, None)

    def add(self, check: str, hook: str, text: str, is_error: bool = True, *, place: str = "", about: str = "") -> None:
        """Record a finding, once per hook and subject.

        Args:
            check: Name of the check.
            hook: The hook concerned, or an empty string.
            text: Description of the problem.
            is_error: True for an error, False for a warning.
            place: File and line; by default, the hook's definition.
            about: Key that distinguishes the finding from others of this check and hook.
        """
        place = place or place_of_hook(type(self._env), hook)
        finding = Finding(check=check, severity="error" if is_error else "warning", text=text, place=place)
        self.findings.setdefault((check, hook, about), finding)

    def _watched(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def watched(*args: Any) -> Any:
            generators, attributes, num_uses = global_generators(), self._attributes(), self._num_uses
            state = _bytes_of(args[0]) if name in _READERS else None
            try:
                result = awaited(hook(*args))
            finally:
                if self._num_uses == num_uses:  # otherwise, a hook called by this one used them
                    self._check_generators(name, generators)
                for attribute, value in self._attributes().items():
                    if attributes.get(attribute) != value:
                        self.changed.setdefault(attribute, name)
            if state is not None and _bytes_of(args[0]) not in (state, None):
                text = f"{name} changes the state that is passed to it: only a step may, and it returns the next state"
                self.add("state-isolation", name, text, is_error=False)
            self._check_result(name, hook, args, result)
            return result

        return watched

    def _watched_calls(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Watch the hook that calls a tool: draws are attributed to the tool, not to the step."""

        @wraps(hook)
        def watched(session_id: str, state: Any, call: Any) -> Any:
            generators, name = global_generators(), str(getattr(call, "name", ""))
            raised: BaseException | None = None
            try:
                return awaited(hook(session_id, state, call))
            except BaseException as error:
                raised = error
                raise
            finally:
                self.calls[name].append(raised)
                remedy = "a generator of the session (an instance of tools_class receives one)"
                self._check_generators(f"the tool {name!r}", generators, remedy, place_of_tool(self._env, [name]))

        return watched

    def _check_generators(
        self, name: str, before: Mapping[str, Any], remedy: str = "self.rng(session_id)", place: str = ""
    ) -> None:
        after = global_generators()
        for package, state in before.items():
            if after.get(package) != state:
                self._num_uses += 1
                text = f"{name} uses the global generator of {package}, which every session and the trainer share: "
                self.add("global-random", name, f"{text}draw from {remedy}", place=place, about=package)

    def _attributes(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self._env).items() if name not in _BASE_ATTRIBUTES}
        return {name: _fingerprint(value) for name, value in own.items()}

    def _check_result(self, name: str, hook: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        if name == "_initialize_episode":
            session_id: str = args[0]
            first, _ = self._starts.setdefault(id(result), (session_id, result))
            self.starts[-1].append(start_of(session_id, result))
            if first != session_id:
                text = "_initialize_episode returns the same dict for two sessions: it must create a new one for each"
                self.add("state-isolation", "_initialize_episode", text)
        elif name == "_role" and isinstance(result, Hashable):
            self.roles.add(result)
        elif name in ("_step_episode", "_step_action") and isinstance(result, tuple):
            step = cast("tuple[Any, ...]", result)
            if len(step) == 4 and name == ("_step_action" if self._env.overrides_step_action else "_step_episode"):
                self._check_step(name, hook, args, step)

    def _check_step(self, name: str, hook: Callable[..., Any], args: tuple[Any, ...], step: tuple[Any, ...]) -> None:
        next_state, reward, done, info = step
        for one in _numbers(reward):
            if _is_number(one) and not math.isfinite(one):
                text = f"{name} returned the reward {reward!r}: rewards must be finite numbers"
                self.add("finite-rewards", name, text, about=repr(reward))
        rewards: Any = cast("Mapping[Any, Any]", info).get("rewards") if isinstance(info, Mapping) else None
        if rewards is not None and not isinstance(rewards, Mapping):
            self.add("roles", name, f"info['rewards'] must be a dict of one reward per role, got {shown(rewards)}")
            rewards = None
        for role, amount in cast("Mapping[Any, Any]", {} if rewards is None else rewards).items():
            self.rewarded_roles.setdefault(role, name)
            if not all(_is_number(one) and math.isfinite(one) for one in _numbers(amount)):
                text = f"info['rewards'][{shown(role)}] is {shown(amount)}: rewards must be finite numbers"
                self.add("finite-rewards", name, text, about=shown(role))
        if self.steps_again and done is True:
            self._step_again(name, hook, args, next_state)

    def _step_again(self, name: str, hook: Callable[..., Any], args: tuple[Any, ...], last_state: Any) -> None:
        try:
            copied: Any = copy.deepcopy(last_state)
            copied["done"] = True
            _, _, done, _ = awaited(hook(args[0], copied, *args[2:]))
        except BaseException as error:
            if is_interruption(error):
                raise
            return  # an episode that rejects further steps is over
        if done is False:
            text = (
                f"{name} returned done=False when the action that ended the episode was repeated on the last state: "
                "an episode that is over must stay over (or raise)"
            )
            self.add("done-sticks", name, text, is_error=False)


def place_of_tool(env: MultistepEnv, names: Sequence[str]) -> str:
    """File and line of the first of the named tools that is a function; empty if none is."""
    untyped: Any = env
    given = untyped._tools()
    sources: list[Any] = [*given] if isinstance(given, list | tuple) else [given]
    tools: list[Any] = [tool for one in sources for tool in (one.methods() if hasattr(one, "methods") else [one])]
    functions = {str(getattr(tool, "__name__", "")): tool for tool in tools if callable(tool)}
    codes = (getattr(functions.get(name), "__code__", None) for name in names)
    return next((f"{code.co_filename}:{code.co_firstlineno}" for code in codes if code is not None), "")


def global_generators() -> dict[str, Any]:
    """Return the comparable states of the global generators that a hook might use, by package."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def _bytes_of(value: Any) -> bytes | None:
    """A fingerprint of a value, to detect changes; None if the value cannot be pickled or is too large."""
    written = _BoundedBytes()
    try:
        pickle.Pickler(written).dump(value)
    except BaseException as error:
        if is_interruption(error):
            raise
        return None
    return written.getvalue()


class _BoundedBytes(io.BytesIO):
    """A file with a size limit, so that large states are not pickled completely."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MAX_STATE_BYTES:
            raise ValueError("the state is too large to be compared")
        return super().write(data)


def _fingerprint(value: Any, depth: int = 0) -> Any:
    """A fingerprint that usually changes with the value, and is cheap for large values."""
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if depth >= _MAX_DEPTH:
        return id(value)
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = [part for pair in islice(cast("Mapping[Any, Any]", value).items(), _MAX_ITEMS) for part in pair]
    elif isinstance(value, list | tuple | set):
        inner = list(islice(cast("Iterable[Any]", value), _MAX_ITEMS))
    elif hasattr(value, "__dict__"):
        inner = list(islice(cast("dict[str, Any]", vars(value)).values(), _MAX_ITEMS))
    size = len(cast("Any", value)) if isinstance(value, Mapping | list | tuple | set) else 0
    return (id(cast("object", value)), size, *(_fingerprint(part, depth + 1) for part in inner))


def _numbers(reward: Any) -> list[Any]:
    """Return the numbers of a reward, which may be named."""
    return [*cast("Mapping[Any, Any]", reward).values()] if isinstance(reward, Mapping) else [reward]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or hasattr(value, "__float__")


Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of an environment.

    Attributes:
        check: Name of the check, such as ``"global-random"``.
        severity: ``"error"`` if training or evaluation would be wrong; ``"warning"`` if it would be costly, or may be
            wrong.
        text: The problem and its fix, in a sentence.
        place: File and line of the hook concerned; empty if there is none.
    """

    check: str
    severity: Severity
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.severity} [{self.check}]{f' {self.place}' if self.place else ''}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """The findings of :func:`agentsgym.check_env`.

    Attributes:
        findings: The findings, errors first.
        num_episodes: Number of episodes that were played.
        num_turns: Number of turns in these episodes.
        num_calls: Number of tool calls in them that were parsed from their tokens.
        call: A call in the format in which they are parsed; empty without a tokenizer, or if calls are plain text.
    """

    findings: Sequence[Finding]
    num_episodes: int
    num_turns: int
    num_calls: int = 0
    call: str = ""

    @property
    def played(self) -> str:
        """What was played, in a few words."""
        calls = f", {self.num_calls} calls parsed in the form {shown(self.call, 200)}" if self.call else ""
        return f"{self.num_episodes} episodes, {self.num_turns} turns{calls}"

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def __str__(self) -> str:
        if not self.findings:
            return f"no problems in {self.played}"
        num_errors = len(self.errors)
        counts = f"{num_errors} errors and {len(self.findings) - num_errors} warnings in {self.played}"
        return "\n".join([f"{counts}:", *map(str, self.findings)])
