"""Serve a policy to programs that run elsewhere: sessions of calls, each of which becomes a rollout.

::

    with serve_policy(agent, tokenizer) as server:
        session = server.open({"question": "…"})
        … any program, with session.base_url and session.api_key …
        rollout = session.finish(1.0)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.agents.base import Agent, as_agent
from agentsgym.credit.components import GivenReward
from agentsgym.envs.AgentProgram import AgentProgramEnv, Endpoint
from agentsgym.envs.AgentProgram.calls import CallError
from agentsgym.envs.AgentProgram.server import current_endpoint
from agentsgym.envs.AgentProgram.session import Session
from agentsgym.errors import AgentsGymError, EnvError, check_options
from agentsgym.event_loop import agents_loop, run_coroutine
from agentsgym.fields import is_int, is_seconds, or_none, require
from agentsgym.rollouts.driver import TrialStream
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_OPENING_S: Final = 60.0  # for a session to begin; longer only if the agent blocks the process
_CLOSING_S: Final = 10.0  # for all open sessions to end
_CHECKING_S: Final = 0.5  # between checks that the server still plays


class PolicySession:
    """The calls of one program.

    Attributes:
        endpoint: The URL and the key for the program's client.
        task_data: The task.
        has_begun: Whether the endpoint accepted calls before the time limit.
        rollout: The finished rollout; None until :meth:`finish`.
    """

    def __init__(self, task_data: dict[str, Any], idle_s: float | None, check: Callable[[], None]) -> None:
        self.task_data = task_data
        self._check = check
        self.rollout: Trajectory | None = None
        self._begun: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
        self._over, self._stored = threading.Event(), threading.Event()
        self._idle_s = idle_s
        self.has_begun = False
        self._grade: Any = 0.0, {}

    @property
    def base_url(self) -> str:
        """The URL for OpenAI clients; without ``/v1``, for Anthropic's."""
        return self.endpoint.base_url

    @property
    def api_key(self) -> str:
        """The key of this session."""
        return self.endpoint.api_key

    def reward(self, value: GivenReward, call_id: str | None = None) -> None:
        """Reward a call: see :meth:`~agentsgym.envs.AgentProgram.programs.Endpoint.reward`."""
        self.endpoint.reward(value, call_id)

    def finish(self, reward: GivenReward | None = None, *, success: bool | None = None) -> Trajectory:
        """End the session.

        Args:
            reward: The reward of the outcome, which the last call receives.
            success: Whether the task was solved; None if unknown.

        Returns:
            The rollout; failed if no call was answered. That a budget cut it is its ``stop_reason``, and logged.

        Raises:
            AgentsGymError: The server was closed, or an error of the agent or of ``on_rollout`` ended it.
        """
        self._grade = 0.0 if reward is None else reward, {} if success is None else {"success": success}
        self.end()
        while not self._stored.wait(_CHECKING_S):
            self._check()
        if self.rollout is None:
            raise EnvError("the server was closed before the session ended")
        if self.rollout.stop_reason.truncated:
            text = "session %s was cut after %d calls (%s), and calls after them were rejected with status 403"
            logger.warning(text, self.rollout.session_id, len(self.rollout.turns), self.rollout.stop_reason.value)
        return self.rollout

    # Called by the server

    def play(self, endpoint: Endpoint) -> Any:
        """Wait for the end of the session, as a program, and return its grade."""
        endpoint.session.on_final, endpoint.session.is_ended_by_owner = self.end, True
        self._begun.put(endpoint)
        while not self._over.wait(self._idle_s):
            if time.monotonic() - endpoint.session.last_used >= cast("float", self._idle_s):
                break
        return self._grade

    def wait_for_start(self) -> None:
        """Wait until the endpoint accepts calls."""
        try:
            self.endpoint = self._begun.get(timeout=_OPENING_S)
        except queue.Empty as error:
            self.end()  # so that it takes no slot later
            raise EnvError(
                f"the session did not begin within {_OPENING_S:g} s: the server is full or closed"
            ) from error
        self.has_begun = True

    def store(self, rollout: Trajectory | None) -> None:
        """Keep the finished rollout."""
        self.rollout = rollout
        self._stored.set()

    def end(self) -> None:
        """Let the program that stands for this session end."""
        self._over.set()

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the rollout is recorded."""
        self._stored.wait(timeout_s)


class PolicyServer(AbstractContextManager["PolicyServer"]):
    """Answers the calls of any number of sessions with one agent; made by :func:`serve_policy`.

    Attributes:
        url: The base URL for OpenAI clients.
        key: A key with which any program may open sessions by itself: the header ``x-agentsgym-session`` names one, and
            ``{"final": true}`` to ``POST /v1/reward`` ends it.
    """

    def __init__(  # noqa: PLR0913  # keywords, most of them left out
        self,
        agent: Agent,
        tokenizer: PreTrainedTokenizerBase | None = None,
        env_config: dict[str, Any] | None = None,
        *,
        max_sessions: int = 256,
        on_rollout: Callable[[Trajectory], None] | None = None,
        max_turn_tokens: int | None = 1024,
        max_completion_length: int | None = None,
        idle_s: float | None = None,
        port: int = 0,
    ) -> None:
        """Listen on 127.0.0.1, without sessions.

        Args:
            agent: What answers the calls: a :class:`~agentsgym.agents.policy.agent.PolicyAgent`, or any other agent.
            tokenizer: The policy's tokenizer; None for an agent that exchanges only text.
            env_config: Keys of :class:`~agentsgym.envs.AgentProgram.AgentProgramEnv`.
            max_sessions: Maximum number of open sessions.
            on_rollout: Called with each finished rollout, for example the ``add`` of a rollout store's writer.
            max_turn_tokens: Maximum number of tokens of an answer, if the program does not set a smaller one.
            max_completion_length: Maximum number of tokens of a conversation after its first prompt.
            idle_s: Seconds without a call after which a session ends; None for never.
            port: The port, if no program has been played in this process yet; 0 picks a free one.

        Raises:
            ConfigError: An argument is not valid, or the port cannot be used.
            MissingDependencyError: The packages of the extra ``programs`` are not installed.
        """
        require("max_sessions", max_sessions, is_int(1), "a positive int")
        require("idle_s", idle_s, or_none(is_seconds), "a positive number of seconds or None")
        require("on_rollout", on_rollout, or_none(callable), "a function of a rollout, or None")
        self._limits = {"max_turn_tokens": max_turn_tokens, "max_completion_length": max_completion_length}
        self._on_rollout, self._idle_s = on_rollout, idle_s
        self._env = AgentProgramEnv(tokenizer, env_config, program=self._play)
        self._sessions: dict[str, PolicySession] = {}
        self._named: dict[str, asyncio.Future[PolicySession]] = {}
        self._endpoint = run_coroutine(current_endpoint(port))
        self.url, self.key = f"{self._endpoint.url}/v1", f"sk-{secrets.token_hex(16)}"
        self._stream = TrialStream(as_agent(agent), self._finished, max_concurrent=max_sessions)
        self._endpoint.openers[self.key] = self._session_named

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, task_data: Mapping[str, Any] | None = None) -> PolicySession:
        """Open a session, which gets a new key.

        Raises:
            TaskError: The task is not a dict of values that can be copied.
            EnvError: All sessions are taken.
            AgentsGymError: The agent raised an error that ended the server.
        """
        self._stream.check()
        [trial] = self._env.trials([dict(task_data or {})], 1, **self._limits)
        session = self._sessions[trial.session_id] = PolicySession(trial.task_data, self._idle_s, self._stream.check)
        trial.task_data = {**trial.task_data, "session": trial.session_id}
        self._stream.add([trial])
        session.wait_for_start()
        return session

    def close(self) -> None:
        """End all sessions; those that are still open become rollouts without a reward."""
        self._endpoint.openers.pop(self.key, None)
        live, until = [*self._sessions.values()], time.monotonic() + _CLOSING_S
        for session in live:
            session.end()
        for session in live:
            session.wait_for_end(max(0.0, until - time.monotonic()))
        self._stream.close()
        for session in live:
            session.store(session.rollout)

    async def _session_named(self, name: str) -> Session:
        """Return the open session of a name, which its first call opens."""
        if name not in self._named or (self._named[name].done() and self._named[name].exception()):
            self._named[name] = asyncio.ensure_future(asyncio.to_thread(self.open, {"name": name}))
        try:
            return (await asyncio.shield(self._named[name])).endpoint.session
        except AgentsGymError as error:
            raise CallError(str(error), status=503) from error

    def _play(self, task_data: dict[str, Any], endpoint: Endpoint) -> Any:
        return self._sessions[task_data["session"]].play(endpoint)

    def _finished(self, rollout: Trajectory) -> None:
        session = self._sessions.pop(rollout.session_id)
        rollout = dataclasses.replace(rollout, task_data=session.task_data)  # without the key by which _play found it
        if self._named and "name" in session.task_data:
            agents_loop().call_soon_threadsafe(self._named.pop, session.task_data["name"], None)
        if self._on_rollout is not None and session.has_begun:
            self._on_rollout(rollout)
        session.store(rollout)


def serve_policy(
    agent: Agent,
    tokenizer: PreTrainedTokenizerBase | None = None,
    env_config: dict[str, Any] | None = None,
    **options: Any,
) -> PolicyServer:
    """Serve an agent over the APIs of OpenAI and Anthropic, until the server or its ``with`` block is closed.

    Args:
        agent: See :class:`PolicyServer`, as for the other arguments.
        tokenizer: The policy's tokenizer.
        env_config: Keys of the environment.
        **options: The keywords of :class:`PolicyServer`.
    """
    check_options(options, PolicyServer.__init__)
    return PolicyServer(agent, tokenizer, env_config, **options)
