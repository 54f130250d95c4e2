"""Train on rollouts that were recorded elsewhere: an environment that returns them instead of playing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.trial import Trial
from agentsgym.errors import ConfigError, TaskError
from agentsgym.fields import is_int, require
from agentsgym.types import Action, Trajectory, TurnRequest

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


class RecordedTrial(Trial):
    """A trial whose rollout is known."""

    def play(self) -> Generator[TurnRequest, Action, Trajectory]:
        """Return the rollout without calling the agent."""
        yield from ()
        env = cast("RecordedEnv", self.env)
        if self.rollout_index >= env.num_generations:
            raise ConfigError(f"num_generations must be {env.num_generations}, as in RecordedEnv: got a larger number")
        first: int = self.task_data["first"]
        found = env.trajectories[first + self.rollout_index]
        return dataclasses.replace(
            found, session_id=self.session_id, task_index=self.task_index, rollout_index=self.rollout_index
        )


class RecordedEnv(MultistepEnv):
    """Recorded rollouts as an environment, so that a trainer trains on them; the agent is never called.

    The rollouts were sampled by other weights than those that are trained. Set
    ``GRPOEnvConfig(vllm_importance_sampling_correction=True)`` to correct for that, which requires rollouts with
    log-probabilities, and train for one epoch only.

    Attributes:
        trajectories: The rollouts; those of one task group are consecutive.
        num_generations: The size of a task group.
    """

    trial_class = RecordedTrial
    task_fields: ClassVar[Collection[str] | None] = ("first",)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, trajectories: Sequence[Trajectory], *, num_generations: int
    ) -> None:
        """Sort the rollouts into task groups by their ``task_index``.

        Args:
            tokenizer: The tokenizer of the policy that sampled them.
            trajectories: The rollouts, none of them failed.
            num_generations: The size of a task group, as in ``GRPOEnvConfig``.

        Raises:
            ConfigError: A rollout failed or has no tokens, or the number of a task's rollouts is not a multiple of
                ``num_generations``.
        """
        super().__init__(tokenizer)
        require("num_generations", num_generations, is_int(1), "a positive int")
        self.env_config["history"] = "calls"  # a rollout may have several segments
        by_task: dict[int, list[Trajectory]] = {}
        for index, one in enumerate(trajectories):
            if one.failed or not one.turns or not one.token_ids:
                raise ConfigError(
                    f"trajectories[{index}] cannot be trained on: it failed, or has no turns or no tokens"
                )
            by_task.setdefault(one.task_index, []).append(one)
        for task, own in by_task.items():
            if len(own) % num_generations:
                raise ConfigError(
                    f"each task must have a multiple of num_generations ({num_generations}) rollouts, got {len(own)} "
                    f"with task_index={task}"
                )
        self.trajectories: list[Trajectory] = [one for own in by_task.values() for one in own]
        self.num_generations = num_generations

    def rows(self) -> Dataset:
        """Return the dataset to train on, one row per task group."""
        from datasets import Dataset  # noqa: PLC0415  # slow to import

        rows = [{"task_data": {"first": first, "seed": first}} for first in self._firsts]
        return Dataset.from_list(rows)  # pyright: ignore[reportUnknownMemberType]

    @property
    def _firsts(self) -> range:
        return range(0, len(self.trajectories), self.num_generations)

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        if task_data.get("first") not in self._firsts:
            raise TaskError(f"first must be the index of the first rollout of a task group, got {task_data}")

    def _not_played(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the rollouts are recorded")

    _initialize_episode = _format_prompt = _step_episode = _not_played
