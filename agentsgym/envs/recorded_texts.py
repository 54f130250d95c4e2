"""Collect what is said in an environment by playing it: the words that a tiny tokenizer is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.agents.base import as_agent
from agentsgym.agents.exploring import ExploringAgent
from agentsgym.envs.check.plays import record
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.errors import ConfigError
from agentsgym.failures import headline
from agentsgym.fields import is_int, require
from agentsgym.seeding import derive_seed
from agentsgym.types import ToolCall

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

CallText = Callable[[str, Mapping[str, Any]], str]


def recorded_texts(
    env: MultistepEnv, tasks: Any, agent: Any, num_episodes: int, call_text: CallText, *, seed: int = 0
) -> list[str]:
    """Play episodes and give every text in them once: prompts, observations, results of tools, answers and calls.

    Args:
        env: The environment.
        tasks: ``task_data`` dicts or dataset rows, played in turn, from the second time on with other seeds; None for
            its own training tasks.
        agent: Who plays; None for an :class:`~agentsgym.agents.exploring.ExploringAgent`.
        num_episodes: How many episodes are played.
        call_text: Writes a call of a tool as the chat template prints it.
        seed: Of the agent, and of tasks without one.

    Raises:
        ConfigError: There are no tasks, or every episode failed.
    """
    require("num_episodes", num_episodes, is_int(1), "a positive int")
    actor = as_agent(ExploringAgent(seed=seed) if agent is None else agent)
    trajectories, scripts = record(env, _tasks(env, tasks, num_episodes, seed), actor, max_concurrent=256)
    if all(trajectory.failed for trajectory in trajectories):
        raise ConfigError(
            f"no words can be recorded, since every episode failed: {headline(trajectories[0].error or '')}"
        )
    names = [str(tool.get("function", tool).get("name", "")) for tool in env.tool_schemas]
    texts = dict.fromkeys(call_text(name, {}) for name in names)  # also of tools that nobody called
    for trajectory in trajectories:
        texts |= dict.fromkeys(message["content"] for message in trajectory.messages)
    for script in scripts:
        for action in script:
            texts |= dict.fromkeys([action.text, *(_written(call, call_text) for call in action.tool_calls)])
    return list(texts)


def _tasks(env: MultistepEnv, tasks: Any, num_episodes: int, seed: int) -> Sequence[Mapping[str, Any]]:
    if tasks is None:
        try:
            tasks = env.get_train_dataset()
        except NotImplementedError as error:
            raise ConfigError(f"words are recorded from episodes, and there are no tasks to play: {error}") from error
    given = tasks_of_rows(env, tasks, "tasks")
    seeds = [derive_seed("recorded texts", seed, episode) for episode in range(num_episodes)]
    first = [task if task.get("seed") is not None else {**task, "seed": own} for task, own in zip(given, seeds)]  # noqa: B905  # the shorter
    again = [{**given[i % len(given)], "seed": seeds[i]} for i in range(len(given), num_episodes)]
    return [*first, *again][:num_episodes]


def _written(call: ToolCall, call_text: CallText) -> str:
    return call_text(call.name, call.arguments)
