"""Declare the contract between a trial and its environment."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from agentsgym.credit.components import GivenReward
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, Message, Trajectory

State = dict[str, Any]
Prompt = str | list[Message]
Stepped = tuple[State, GivenReward, bool, dict[str, Any]]
"""The next state, the reward, whether the episode is over, and info."""


class PlayableEnv(Protocol):
    """The members of an environment that a trial uses: the contract in its shortest form.

    :class:`~agentsgym.envs.base.MultistepEnv` documents the others, and the hooks, whose names start with an
    underscore; a trial calls them in the order in which they are declared here.

    Attributes:
        tables: The players of each live session that has opponents, by ``session_id``.
        overrides_step_action: Whether the class overrides ``_step_action``, to receive more than an action's text.
        overrides_final_reward: Whether the class overrides ``_final_reward``, so that it need not be the sum.
        overrides_score_state: Whether the class overrides ``_score_state``, so that turns are rewarded for its changes.
    """

    overrides_step_action: ClassVar[bool]
    overrides_final_reward: ClassVar[bool]
    overrides_score_state: ClassVar[bool]
    exchange_class: ClassVar[type[Any]]
    has_coroutines: bool
    env_config: dict[str, Any]
    active_states: dict[str, State]
    opponents: Any
    tables: dict[str, Any]
    opponent_stream: ClassVar[str]

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """The JSON schemas of the environment's tools; empty without tools."""
        ...

    @property
    def chat_format(self) -> ChatFormat | None:
        """The tokenizer's chat format; None without a tokenizer."""
        ...

    def start_session(self, session_id: str, task_data: Mapping[str, Any], seed: int, episode: int = 0) -> State:
        """Seed the session's generator for one episode and put its initial state in ``active_states``."""
        ...

    def close_session(self, session_id: str, state: State) -> None:
        """Close an episode, and notify its opponents."""
        ...

    def _own_opponent(self, name: str, rng: random.Random) -> Callable[[list[Message], State], Action]: ...

    def _prepare_play(self, tasks: Sequence[Mapping[str, Any]], num_live: int) -> None: ...

    def _system_prompt(self) -> str | None: ...

    def _format_prompt(self, state: State, step: int) -> Prompt | Awaitable[Prompt]: ...

    def _state_key(self, state: State) -> Hashable | None: ...

    def _role(self, state: State) -> Hashable | None: ...

    def _potential(self, state: State) -> float | None: ...

    def _score_state(self, state: State) -> GivenReward | Awaitable[GivenReward]: ...

    def _step_episode(self, session_id: str, state: State, action: str) -> Stepped | Awaitable[Stepped]: ...

    def _step_action(self, session_id: str, state: State, action: Action) -> Stepped | Awaitable[Stepped]: ...

    def _last_message(self, state: State) -> str | list[Message] | None: ...

    def _final_reward(self, state: State, turn_rewards: list[float]) -> GivenReward: ...

    def _calculate_rewards(self, trajectory: Trajectory) -> list[float]: ...

    def _close_episode(self, session_id: str, state: State) -> Awaitable[None] | None: ...

    def drop_session(self, session_id: str) -> None:
        """Forget the session's state and generator."""
        ...
