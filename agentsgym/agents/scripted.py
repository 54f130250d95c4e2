"""Agents that need no model: a fixed script and blind chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.errors import AgentError, ConfigError
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.types import Action, TurnRequest


class ScriptedAgent(Agent):
    """Plays the same list of actions in every conversation, the k-th at turn k.

    Its ``agent_state`` is the index of the next action, so any number of sessions can be interleaved. Every action is
    built once, at construction: a turn costs one look-up.
    """

    def __init__(self, actions: Sequence[str | Action], *, repeat_last: bool = False) -> None:
        """Build the table of actions.

        Args:
            actions: Answers, turn by turn; an :class:`Action` may have its own token ids and log-probabilities,
                its ``agent_state`` is replaced.
            repeat_last: What happens after the last action: it is played again (True), or the session gets an
                :class:`AgentError` (False).

        Raises:
            ConfigError: The script is not a list, is empty, or holds something that is neither text nor an Action.
        """
        script: Any = actions  # foreign data: checked before it is believed
        if isinstance(script, str) or not script:
            raise ConfigError(f"a script must be a list of at least one action, got {shown(script)}")
        self._actions = tuple(
            replace(_as_action(action, turn), agent_state=turn + 1) for turn, action in enumerate(actions)
        )
        self._repeat_last = repeat_last

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer each session with the action of its own turn."""
        actions = self._actions
        num_actions = len(actions)
        answers: list[Action | AgentError] = []
        for request in requests:
            turn = request.agent_state or 0
            answers.append(actions[turn] if turn < num_actions else self._after_the_end())
        return answers

    def _after_the_end(self) -> Action | AgentError:
        if self._repeat_last:
            return self._actions[-1]
        return AgentError(
            f"the script has {len(self._actions)} actions and the environment needs one more; "
            "give a longer script or repeat_last=True"
        )


class RandomAgent(Agent):
    """Says one of a few texts, each equally likely, whatever the conversation.

    Every session has a private stream of draws, seeded by the agent's seed and the session's number in the order in
    which sessions come for their first answer. Environments start sessions in task order, so two agents with equal
    seeds play equal episodes however the turns of different sessions are interleaved; the rollouts of one task still
    differ. The numbering continues from one ``rollout`` to the next: make a new agent to get the same draws again. A
    request that brings a seed decides the draws of its conversation, with the agent's seed, and takes no number.
    """

    def __init__(self, choices: Sequence[str], *, seed: int = 0) -> None:
        """Keep the texts.

        Args:
            choices: The texts to draw from.
            seed: Names the streams.

        Raises:
            ConfigError: The choices are not a list, are empty, or are not all texts.
        """
        texts: Any = choices  # foreign data: checked before it is believed
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"choices must be a list of at least one string, got {shown(texts)}")
        self._choices = tuple(choices)
        self._seed = seed
        self._num_sessions = 0
        self._streams: dict[str, random.Random] = {}

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session with a draw from its own stream."""
        return [self._answer_from(request) for request in requests]

    def finish(self) -> None:
        """Forget the streams of the sessions that have ended."""
        self._streams.clear()

    def _answer_from(self, request: TurnRequest) -> Action:
        if request.seed is None:
            return Action(text=self._stream(request.session_id).choice(self._choices))
        stream: random.Random | None = request.agent_state
        if stream is None:
            stream = random.Random(derive_seed("random agent", self._seed, "conversation", request.seed))
        return Action(text=stream.choice(self._choices), agent_state=stream)

    def _stream(self, session_id: str) -> random.Random:
        stream = self._streams.get(session_id)
        if stream is None:
            stream = random.Random(derive_seed("random agent", self._seed, self._num_sessions))
            self._num_sessions += 1
            self._streams[session_id] = stream
        return stream


def _as_action(action: Any, turn: int) -> Action:
    if isinstance(action, str):
        return Action(text=action)
    if isinstance(action, Action):
        return action
    raise ConfigError(f"action {turn} of a script must be a string or an Action, got {shown(action)}")
