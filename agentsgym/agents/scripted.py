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
        script: Any = actions  # the user's: checked first
        if isinstance(script, str) or not script:
            raise ConfigError(f"a script must be a list of at least one action, got {shown(script)}")
        self._actions: list[Action] = []
        for turn, action in enumerate(script):
            if not isinstance(action, str | Action):
                raise ConfigError(f"action {turn} of a script must be a string or an Action, got {shown(action)}")
            whole = Action(text=action) if isinstance(action, str) else action
            self._actions.append(replace(whole, agent_state=turn + 1))
        self._repeat_last = repeat_last

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer each session with the action of its own turn."""
        actions = self._actions
        answers: list[Action | AgentError] = []
        for request in requests:
            turn = request.agent_state or 0
            if turn < len(actions):
                answers.append(actions[turn])
            elif self._repeat_last:
                answers.append(actions[-1])
            else:
                answers.append(
                    AgentError(
                        f"the script has {len(actions)} actions and the environment needs one more; "
                        "give a longer script or repeat_last=True"
                    )
                )
        return answers


class RandomAgent(Agent):
    """Answers with one of a few texts, each equally likely, whatever the conversation.

    Every session has its own stream of draws, seeded by the agent's seed and the session's number in the order of
    first requests. Environments start sessions in task order, so two agents with equal seeds play equal episodes
    however the turns of different sessions are interleaved; the rollouts of one task still differ. The numbering
    continues from one ``rollout`` to the next: make a new agent to get the same draws again. A request with a seed
    takes no number: its seed and the agent's decide the draws of its conversation.
    """

    def __init__(self, choices: Sequence[str], *, seed: int = 0) -> None:
        """Keep the texts.

        Args:
            choices: The texts to draw from.
            seed: Seed of the streams.

        Raises:
            ConfigError: The choices are not a list, are empty, or are not all texts.
        """
        texts: Any = choices  # the user's: checked first
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"choices must be a list of at least one string, got {shown(texts)}")
        self._choices = tuple(choices)
        self._seed = seed
        self._num_sessions = 0
        self._streams: dict[str, random.Random] = {}

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session with a draw from its own stream."""
        answers: list[Action] = []
        for request in requests:
            own: random.Random | None = request.agent_state
            if request.seed is not None:
                own = own or random.Random(derive_seed("random agent", self._seed, "conversation", request.seed))
                answers.append(Action(text=own.choice(self._choices), agent_state=own))
                continue
            stream = self._streams.get(request.session_id)
            if stream is None:
                stream = random.Random(derive_seed("random agent", self._seed, self._num_sessions))
                self._num_sessions += 1
                self._streams[request.session_id] = stream
            answers.append(Action(text=stream.choice(self._choices)))
        return answers

    def finish(self) -> None:
        """Forget the streams of the sessions that have ended."""
        self._streams.clear()
