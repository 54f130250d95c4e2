"""Adapt an environment to verifiers: a taskset, and an environment that answers the agent as its user."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.play import EpisodeByHand, Observation
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.interop.prompts import as_prompt, seeded
from agentsgym.texts import shown

# pyright: reportUntypedBaseClass=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
# verifiers requires another version of mcp than the extra, so its types are not installed beside it.


def as_verifiers(env: MultistepEnv, tasks: Sequence[Any]) -> tuple[type[Any], type[Any]]:
    """Make the taskset and the environment of a verifiers module (0.4) that plays an environment.

    The agent gets the environment's system message and, as its user's turns, the observations; each of its replies is
    one action. The trace's reward ``episode`` is the final reward, or the sum so far if the agent was stopped; numbers
    of the last ``info`` are metrics. If the environment raises, the episode fails.

    Args:
        env: The environment of all tasks, without tools. A tokenizer is not needed.
        tasks: Tasks or dataset rows; a task without a seed gets the same one in every rollout.

    Returns:
        The subclasses of ``Taskset`` and ``Env``, which the module must name in ``__all__``.

    Raises:
        ConfigError: ``env`` is not an environment, or it has tools or several episodes per trial.
        TaskError: A task is not a task of ``env``.
        MissingDependencyError: The package ``verifiers`` is not installed.
    """
    if not isinstance(env, MultistepEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"env must be a MultistepEnv, got {shown(env)}")
    if env.tool_schemas or env.env_config["episodes_per_trial"] != 1:
        raise ConfigError(
            "as_verifiers requires an environment without tools and with one episode per trial, got "
            f"{type(env).__name__}"
        )
    try:
        vf: Any = importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("verifiers", command="pip install 'verifiers>=0.4'") from error
    played = [seeded(task, as_prompt(task)) for task in tasks_of_rows(env, tasks, "tasks")]

    class EpisodeData(vf.TaskData):
        """A task on the wire."""

        task_data: dict[str, Any]

    class EpisodeTask(vf.Task[EpisodeData]):
        """A task of the environment."""

    class EpisodeTaskset(vf.Taskset[EpisodeTask, vf.TasksetConfig]):
        """The tasks."""

        def load(self) -> Iterator[EpisodeTask]:
            for index, task in enumerate(played):
                data = EpisodeData(name=f"{type(env).__name__}#{index}", prompt=None, task_data=task)
                yield EpisodeTask(data, self.config.task)

    class EpisodeConfig(vf.EnvConfig):
        """The configuration, with the agent that plays."""

        player: vf.AgentConfig = vf.AgentConfig()  # pyright: ignore[reportInvalidTypeForm]

    class EpisodeEnv(vf.Env[EpisodeConfig]):
        """Answers the agent as its user."""

        async def run(self, task: Any, agents: Any) -> None:
            await _play(env, task, agents.player)

    for made, part in ((EpisodeTaskset, "Taskset"), (EpisodeEnv, "Player")):
        made.__name__ = made.__qualname__ = f"{type(env).__name__}{part}"
    return EpisodeTaskset, EpisodeEnv


async def _play(env: MultistepEnv, task: Any, player: Any) -> None:
    """Play one episode, and record its reward and metrics in the trace."""
    episode, rewards = EpisodeByHand(env.trials([task.data.task_data])[0]), 0.0
    try:
        system, text = _texts(episode.observation())
        async with player.interaction(task.with_system_prompt(system) if system else task) as interaction:
            segment = await interaction.turn(text)
            while not segment.terminated:
                observation, reward, done, _ = episode.step(segment.last_reply)
                rewards += reward
                if done:
                    break
                segment = await interaction.turn(_texts(observation)[1])
    finally:
        episode.close()
    over = episode.trajectory
    interaction.trace.record_reward("episode", rewards if over is None else over.final_reward)
    if over is not None:
        success = {} if over.success is None else {"success": float(over.success)}
        interaction.trace.record_metrics({**over.metrics, **success})


def _texts(messages: Observation) -> tuple[str, str]:
    """Return the system messages and all others, each joined to one text."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message["content"] for message in messages if message["role"] != "system"]
    return "\n\n".join(system), "\n\n".join(others)
