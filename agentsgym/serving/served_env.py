"""An environment as OpenEnv's clients see it: the task that a reset selects, the tools, and the schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.boundary import is_unicode
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.trial import Trial
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import has_str_keys, is_int, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.types import Action, ToolCall

_ANSWER: Final[dict[str, Any]] = {  # the tool for a plain-text answer, as in TRL's tool loop
    "name": "answer",
    "description": "Give the final answer.",
    "input_schema": {
        "type": "object",
        "properties": {"action": {"type": "string", "description": "The answer."}},
        "required": ["action"],
    },
}
_RESET_ARGUMENTS: Final = ("seed", "split", "index", "task", "episode_id")


def is_text(value: Any) -> bool:
    """Accept strings that can be recorded: valid Unicode."""
    return isinstance(value, str) and is_unicode(value)


class ServedEnv:
    """An environment with its tasks; many sessions play it concurrently.

    Attributes:
        env: The environment, without a tokenizer.
        tools: The environment's tools in OpenEnv's form, and one for a plain-text answer if the environment does not
            have a tool for it; empty for an environment without tools.
    """

    def __init__(self, env: MultistepEnv, tasks: Mapping[str, Sequence[Any]], *, split: str = "train") -> None:
        """Check the tasks.

        Raises:
            ConfigError: ``tasks`` has no such split, or a trial of the environment has several episodes.
            TaskError: A split is empty, or an entry is not a task of this environment.
        """
        num_episodes = env.env_config["episodes_per_trial"]
        require("env_config['episodes_per_trial']", num_episodes, lambda number: number == 1, "1 to be served")
        require("split", split, lambda name: name in tasks, f"one of {', '.join(tasks)}")
        self.env = env
        self.tools: list[dict[str, Any]] = [
            {"name": one["name"], "description": one.get("description") or "", "input_schema": one["parameters"]}
            for one in (schema["function"] for schema in env.tool_schemas)
        ]
        has_answer = env.env_config.get("submit_tool") is not None or "answer" in {one["name"] for one in self.tools}
        if self.tools and not has_answer:
            self.tools.append(_ANSWER)
        self._tasks: dict[str, list[dict[str, Any]]] = {
            name: tasks_of_rows(env, rows, f"tasks[{name!r}]") for name, rows in tasks.items()
        }
        self._split = split

    def trial(self, arguments: Mapping[str, Any]) -> Trial:
        """Create the trial that a reset's arguments select, the same for the same arguments.

        Args:
            arguments: ``seed`` (required) selects a task of ``split``, unless ``index`` or ``task`` does, and is
                the seed of a task without one. ``episode_id`` is ignored. Arguments that are None count as missing.

        Raises:
            ConfigError: An argument is unknown or invalid.
            TaskError: The task cannot be played.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        for name in given:
            if name not in _RESET_ARGUMENTS:
                raise ConfigError(f"reset has no argument {shown(name)}{did_you_mean(name, _RESET_ARGUMENTS)}")
        require("seed", given["seed"], lambda seed: type(seed) is int and seed >= 0, "an int of at least 0")
        require("episode_id", given.get("episode_id", ""), is_text, "a str")
        task = self._task(given)
        if task.get("seed") is None:
            task = {**task, "seed": given["seed"]}
        return self.env.trials([task])[0]

    def _task(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if "task" in given:
            if given.keys() & {"split", "index"}:
                raise ConfigError("task is a complete task, so it cannot be combined with split or index")
            require("task", given["task"], has_str_keys, "a JSON object")
            self.env.check_task(given["task"], "task")
            return given["task"]
        split = given.get("split", self._split)
        require("split", split, [*self._tasks].__contains__, f"one of {', '.join(self._tasks)}")
        tasks: Any = self._tasks[split]
        index = given.get("index", derive_seed("served task", given["seed"]) % len(tasks))
        expected = f"an int from 0 to {len(tasks) - 1}, since {split!r} has {len(tasks)} tasks"
        require("index", index, lambda value: is_int(0)(value) and value < len(tasks), expected)
        return tasks[index]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Action:
        """Return the action that calls a tool.

        Raises:
            ConfigError: The argument of the tool for a plain-text answer is not a text.
        """
        if name == "answer" and _ANSWER in self.tools:
            require("the argument 'action' of 'answer'", arguments.get("action"), is_text, "a str")
            return Action(text=arguments["action"])
        return Action(text="", tool_calls=[ToolCall(name=name, arguments=arguments)])

    def schemas(self) -> dict[str, Any]:
        """Return the JSON schemas of actions, of observations after a step and after a reset, and of the state."""
        text = _schema("TextObservation", text={"type": "string"})
        action, observation = _schema("TextAction", message={"type": "string"}), text
        if self.tools:
            arguments: dict[str, Any] = {"type": "object", "additionalProperties": True, "default": {}}
            name: dict[str, Any] = {"type": "string", "enum": [tool["name"] for tool in self.tools]}
            kind = {"type": "string", "const": "call_tool", "default": "call_tool"}
            action = _schema("CallToolAction", type=kind, tool_name=name, arguments=arguments)
            observation = _schema("CallToolObservation", tool_name={"type": "string"}, result={"type": "string"})
        state = _schema("State", episode_id={"type": ["string", "null"]}, step_count={"type": "integer"})
        return {"action": action, "observation": observation, "reset_observation": text, "state": state}


def _schema(title: str, **fields: dict[str, Any]) -> dict[str, Any]:
    required = [name for name, field in fields.items() if "default" not in field]
    return {"type": "object", "title": title, "properties": fields, "required": required}
