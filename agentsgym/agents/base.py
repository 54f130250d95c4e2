"""What an agent is: something that answers a turn."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

from agentsgym.errors import AgentFault, ConfigError
from agentsgym.types import Action, Message, TurnRequest


class Agent:
    """Answers turns, one conversation at a time or many at once.

    A simple agent writes :meth:`get_action`; one that gains from batches writes :meth:`act`. Neither tokenizes for
    training: an agent returns the ids that it sampled, or only text.
    """

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Answer one turn.

        Args:
            messages: The conversation so far, ending with the new observation; not to be changed.
            agent_state: What this agent returned last time in this conversation; None at first.

        Returns:
            The answer and the state to be handed back at the next turn.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_action or act")

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentFault]:
        """Answer one turn of many sessions, in the order of ``requests``.

        A session that cannot be answered gets an :class:`AgentFault` in place of its action, and the others play on.
        """
        return [self._answer(request) for request in requests]

    def finish(self) -> None:
        """Learn that no episode is live any more; the place to free caches."""

    def _answer(self, request: TurnRequest) -> Action | AgentFault:
        try:
            answer: Any = self.get_action(request.messages, request.agent_state)  # type: ignore[arg-type]  # a live list
        except Exception:  # noqa: BLE001  # foreign code: one agent's error is one failed episode
            return AgentFault(f"{_class_name(self)}.get_action raised\n{traceback.format_exc()}")
        if not _is_answer(answer):
            return AgentFault(f"{_class_name(self)}.get_action must return (text, agent_state), got {answer!r}")
        text, agent_state = answer
        return Action(text=text, agent_state=agent_state)


def _is_answer(answer: Any) -> TypeGuard[tuple[str, Any]]:
    return isinstance(answer, tuple) and len(cast("tuple[Any, ...]", answer)) == 2 and isinstance(answer[0], str)


class _Adapted(Agent):
    """Any object that has ``get_action(messages, agent_state)``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.get_action = inner.get_action


def _class_name(agent: Agent) -> str:
    """The class that the user wrote."""
    return type(agent.inner if isinstance(agent, _Adapted) else agent).__name__


def as_agent(agent: Any) -> Agent:
    """Take an :class:`Agent` as it is and adapt any object that has ``get_action(messages, agent_state)``.

    Raises:
        ConfigError: It has neither.
    """
    if isinstance(agent, Agent):
        return agent
    if not isinstance(agent, type) and callable(getattr(agent, "get_action", None)):
        return _Adapted(agent)
    raise ConfigError(f"an agent needs get_action(messages, agent_state) or to subclass agentsgym.Agent, got {agent!r}")
