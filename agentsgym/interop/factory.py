"""Adapt an environment to TRL's tool loop, as a class with ``reset`` and one method per tool."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.trial import Trial
from agentsgym.errors import ConfigError
from agentsgym.interop.prompts import as_prompt, row_of, seeded
from agentsgym.texts import shown
from agentsgym.types import Action, Message, ToolCall, Trajectory, TurnRequest

_TYPES: Final[Mapping[str, Any]] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_RESERVED: Final = frozenset({"reset", "get_reward"})
_HEADING: Final = re.compile(r"(Args|Returns|Raises):")
_REMEDY: Final = "make the dataset with agentsgym.interop.prompt_dataset(rows, instruction=...)"
_OVER: Final = "The episode is over."


class ToolLoopEnvironment:
    """An environment for TRL's tool loop; :func:`as_environment_factory` makes a subclass whose methods are its tools.

    TRL calls ``reset`` with a dataset row before each rollout, a tool's method for each of the model's calls, and
    ``get_reward`` at the end.
    """

    _env: ClassVar[MultistepEnv]

    def __init__(self) -> None:
        self._trial: Trial | None = None
        self._playing: Generator[TurnRequest, Any, Trajectory] | None = None
        self._played: Trajectory | None = None
        self._num_shown = 0

    def reset(self, **row: Any) -> str:
        """Start an episode of a row's task, and return the first observation, including the system message.

        If the row has a prompt, the observation starts with a blank line, since TRL appends it to the prompt without a
        separator.

        Args:
            **row: A row of :func:`~agentsgym.interop.prompts.prompt_dataset` with an instruction, or a row with
                ``task_data``; if the task has no seed, every rollout of it gets the same one.
        """
        known = row if "task_data" in row else row_of(row.get("task"), "the column 'task' of the row", _REMEDY)
        [task] = tasks_of_rows(self._env, [known])
        self._end()
        # TRL does not identify task groups, so the seed is derived from the task, which a group's rollouts share.
        [self._trial] = self._env.trials([seeded(task, as_prompt(task))])
        self._playing, self._played, self._num_shown = self._trial.play(), None, 0
        return f"\n\n{self._advance(None)}" if row.get("prompt") else self._advance(None)

    def get_reward(self) -> float | None:
        """Return the final reward, or the sum so far if the model stopped early; None if the episode failed."""
        played, trial = self._played, self._trial
        self._end()
        if played is not None:
            return None if played.failed else played.final_reward
        return None if trial is None else float(sum(turn.reward for turn in trial.conversation.turns))

    def _act(self, action: Action) -> str:
        if self._playing is None:
            raise ValueError(_OVER)  # TRL reports the error to the model
        return self._advance(action)

    def _advance(self, action: Action | None) -> str:
        playing = cast("Generator[TurnRequest, Any, Trajectory]", self._playing)
        try:
            request = playing.send(action)
        except StopIteration as end:
            self._played, self._playing = cast("Trajectory", end.value), None
            return _OVER if action is not None else f"{_text_of(self._played.messages)}\n\n{_OVER}"
        new = request.messages[self._num_shown :]
        self._num_shown = len(request.messages) + 1  # + 1 skips the next action: the model wrote it and need not see it
        return _text_of(new)

    def _end(self) -> None:
        """Close the active episode, if there is one."""
        if self._playing is not None:
            self._playing.close()
        self._playing = self._trial = None


def as_environment_factory(env: MultistepEnv, *, tool_name: str = "act") -> type[ToolLoopEnvironment]:
    """Make the ``environment_factory`` of a stock ``trl.GRPOTrainer`` that exposes an environment as tools.

    The environment's tools become methods. A further method, ``answer``, accepts plain text, because TRL's tool
    loop does not pass a message without tool calls to the environment. An environment without tools gets a single tool,
    whose argument is the action as text.

    Limitations: the policy must write well-formed calls; observations are messages of the role ``tool``, and the
    environment's system message becomes part of the first user message; there is one reward per rollout, without
    turn-level credit; there is no token budget per turn; and stop reasons and failures are not logged.

    Args:
        env: The environment of all rows. A tokenizer is not needed; without one, no tokens are recorded.
        tool_name: The name of the single tool of an environment without tools.

    Raises:
        ConfigError: ``env`` is not an environment, or a tool's name is reserved or not a valid method name.
    """
    if not isinstance(env, MultistepEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"env must be a MultistepEnv, got {shown(env)}")
    methods = {schema["function"]["name"]: _tool(schema["function"]) for schema in env.tool_schemas}
    if not methods:
        methods[tool_name] = _text_tool(tool_name, "Do something, and see what happens.", "What to do or say.")
    elif env.env_config.get("submit_tool") is None:
        methods.setdefault("answer", _text_tool("answer", "Give the final answer.", "The answer."))
    for name in methods:
        if not name.isidentifier() or name in _RESERVED or name.startswith("_"):
            raise ConfigError(
                f"{name!r} cannot be a tool's name, since TRL's tool loop turns tools into methods: it must be an "
                "identifier that is not reserved and has no leading underscore"
            )
    return type(f"{type(env).__name__}Tools", (ToolLoopEnvironment,), {"_env": env, **methods})


def _text_tool(name: str, summary: str, argument: str) -> Callable[..., str]:
    def tool(self: ToolLoopEnvironment, action: str) -> str:
        return self._act(Action(text=action))  # pyright: ignore[reportPrivateUsage]  # a method of that class

    return _with_signature(tool, name, summary, {"action": {"type": "string", "description": argument}}, ["action"])


def _tool(schema: Mapping[str, Any]) -> Callable[..., str]:
    name: str = schema["name"]

    def tool(self: ToolLoopEnvironment, **arguments: Any) -> str:
        call = ToolCall(name=name, arguments=arguments)
        return self._act(Action(text="", tool_calls=[call]))  # pyright: ignore[reportPrivateUsage]  # as above

    parameters = schema.get("parameters", {})
    summary = schema.get("description") or name
    return _with_signature(tool, name, summary, parameters.get("properties", {}), parameters.get("required", ()))


def _with_signature(
    tool: Callable[..., str], name: str, summary: str, properties: Mapping[str, Any], required: Sequence[str]
) -> Callable[..., str]:
    """Set a method's signature and docstring, from which transformers builds the schema."""
    for argument in properties:
        if not argument.isidentifier() or keyword.iskeyword(argument) or argument == "self":
            raise ConfigError(
                f"the tool {name!r} has the argument {argument!r}, which cannot be a parameter name: TRL's tool "
                "loop turns tools into methods, so rename the argument"
            )
    kinds = {argument: _python_type(schema) for argument, schema in properties.items()}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for argument in sorted(properties, key=lambda argument: argument not in required):
        default: Any = inspect.Parameter.empty if argument in required else properties[argument].get("default")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(argument, kind, default=default, annotation=kinds[argument]))
    # transformers parses one line per argument; "Returns:" in a description would be parsed as the start of a section.
    summary = _HEADING.sub(r"\1", summary).strip() or name
    lines: list[str] = []
    for argument, schema in properties.items():
        words = _HEADING.sub(r"\1", schema.get("description") or "").split()
        lines.append(f"        {argument}: {' '.join(words) or argument}")
    docstring = f"{summary}\n\n    Args:\n" + "\n".join(lines) if lines else summary
    method: Any = tool
    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"{docstring}\n\n    Returns:\n        What happened."
    method.__annotations__ = {**kinds, "return": str}
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)
    return method


def _python_type(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return Literal[tuple(schema["enum"])]
    named = schema.get("type") or [one.get("type") for one in schema.get("anyOf", ())]
    names: list[Any] = [named] if isinstance(named, str) else named  # several types if it may be null, for example
    return next((_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES), str)


def _text_of(messages: Sequence[Message]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages if message["role"] != "assistant")
