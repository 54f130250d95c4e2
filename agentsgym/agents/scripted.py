"""Agents that need no model: a fixed script, and random choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.errors import AgentError
from agentsgym.fields import is_strings, require
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest


class ScriptedAgent(Agent):
    """An agent that plays the same list of actions in every conversation, the k-th at turn k.

    Its ``agent_state`` is the index of the next action, so any number of sessions can be interleaved. Every action is
    built once, at construction, so a turn costs only a lookup.
    """

    def __init__(self, actions: Sequence[str | Action], *, repeat_last: bool = False) -> None:
        """Build the table of actions.

        Args:
            actions: The answer for each turn; an :class:`Action` may have token ids and log-probabilities, and its
                ``agent_state`` is replaced.
            repeat_last: Whether the last action is repeated when the script has ended; if False, the session gets an
                :class:`AgentError`.

        Raises:
            ConfigError: The script is not a list, is empty, or contains an item that is neither a string nor an Action.
        """
        script: Any = actions  # unchecked
        require("a script", script, lambda it: it and not isinstance(it, str), "a list of at least one action")
        self._actions: list[Action] = []
        for turn, action in enumerate(script):
            require(f"action {turn} of a script", action, lambda it: isinstance(it, str | Action), "a str or an Action")
            full_action = Action(text=action) if isinstance(action, str) else action
            self._actions.append(replace(full_action, agent_state=turn + 1))
        self._repeat_last = repeat_last

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer each session with the action for its turn."""
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
                        f"the script has only {len(actions)} actions, and the episode needs another: "
                        "pass a longer script or repeat_last=True"
                    )
                )
        return answers


class RandomAgent(Agent):
    """An agent that answers with a random choice among a few texts, regardless of the conversation.

    Every session has its own random stream, seeded by the agent's seed and the session's number in the order of first
    requests. Environments start sessions in task order, so two agents with equal seeds play equal episodes however the
    turns of different sessions are interleaved; the rollouts of one task still differ. The numbering continues from one
    ``rollout`` to the next: create a new agent to repeat the same draws. A conversation whose request has a seed is not
    numbered; its draws depend on that seed and the agent's.
    """

    def __init__(self, choices: Sequence[str], *, seed: int = 0) -> None:
        """Check and store the texts.

        Args:
            choices: The texts to draw from.
            seed: Seed of the random streams.

        Raises:
            ConfigError: The choices are not a non-empty list of strings.
        """
        texts: Any = choices  # unchecked
        require("choices", texts, lambda given: given and is_strings(given), "a list of at least one string")
        self._choices = tuple(choices)
        self._seed = seed
        self._num_sessions = 0
        self._streams: dict[str, random.Random] = {}

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session with a draw from its random stream."""
        answers: list[Action] = []
        for request in requests:
            seeded: random.Random | None = request.agent_state
            if request.seed is not None:
                seeded = seeded or random.Random(derive_seed("random agent", self._seed, "conversation", request.seed))
                answers.append(Action(text=seeded.choice(self._choices), agent_state=seeded))
                continue
            stream = self._streams.get(request.session_id)
            if stream is None:
                stream = random.Random(derive_seed("random agent", self._seed, self._num_sessions))
                self._num_sessions += 1
                self._streams[request.session_id] = stream
            answers.append(Action(text=stream.choice(self._choices)))
        return answers

    def finish(self) -> None:
        """Drop the random streams of the sessions, which have ended."""
        self._streams.clear()
