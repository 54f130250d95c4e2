"""Play one episode step by step, to try out an environment."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from agentsgym.envs.play import prepare_play
from agentsgym.envs.trial import Trial
from agentsgym.errors import ConfigError, EnvError
from agentsgym.texts import shown
from agentsgym.types import Action, Message, StopReason, Trajectory, TurnRequest

Observation = list[Message]


class EpisodeByHand:
    """An episode whose actions are passed one by one, played like any other trial.

    Attributes:
        trajectory: The finished trajectory; None while the episode is running.
    """

    def __init__(self, trial: Trial) -> None:
        """Start the first episode of a trial.

        Raises:
            EnvError: The environment failed.
            ConfigError: The environment cannot play this task now, or the first prompt uses up the token budget.
        """
        trial.episodes = range(1)
        prepare_play([trial])
        self._trial = trial
        self._generator: Generator[TurnRequest, Action, Trajectory] = trial.play()
        self.trajectory: Trajectory | None = None
        self._advance(None)
        if self.trajectory is not None:
            raise ConfigError("the first prompt uses up all tokens of env_config['max_trajectory_tokens']: raise it")

    def observation(self) -> Observation:
        """Return the messages since the last action."""
        conversation = self._trial.conversation
        start = conversation.turns[-1].message_index + 1 if conversation.turns else 0
        return [message.copy() for message in conversation.transcript.messages[start:]]

    def step(self, action: str | Action) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play one action: see :meth:`~agentsgym.envs.base.MultistepEnv.step`."""
        if self.trajectory is not None:
            raise ConfigError(f"the episode is over ({self.trajectory.stop_reason}): call reset(task_data) first")
        if not isinstance(action, str | Action):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"step requires the agent's text or an Action, got {shown(action)}")
        self._advance(Action(text=action) if isinstance(action, str) else action)
        over = self.trajectory
        info = dict(self._trial.conversation.info)
        if over is not None:
            info["stop_reason"] = over.stop_reason
        return self.observation(), self._trial.conversation.turns[-1].reward, over is not None, info

    def close(self) -> None:
        """End the episode at any point."""
        self._generator.close()

    def _advance(self, action: Action | None) -> None:
        generator: Any = self._generator
        try:
            generator.send(action)
        except StopIteration as over:
            self.trajectory = over.value
            if over.value.stop_reason is StopReason.FAILED:
                raise EnvError(over.value.error) from None
