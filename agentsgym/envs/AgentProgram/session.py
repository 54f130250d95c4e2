"""The calls of one running program, on their way from the endpoint to the trial that answers them.

::

    endpoint: await session.call(request) ─▶ queue ─▶ trial: await session.next_call()
    endpoint: ◀─────────────── reply or CallError ◀── trial: call.answer(…) or call.reject(…)

Everything here runs on the agents' event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from agentsgym.credit.components import GivenReward
from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.boundary import checked_reward
from agentsgym.errors import EnvError
from agentsgym.texts import shown
from agentsgym.types import Message

GONE = "the client closed the connection"  # nobody receives this error
NOTHING_TO_REWARD = "no call was answered yet, so there is nothing to reward"


def plain_id(call_id: str) -> str:
    """Remove the prefix that an API adds to the id of a call.

    >>> plain_id("chatcmpl-0b1c"), plain_id("resp_0b1c"), plain_id("0b1c")
    ('0b1c', '0b1c', '0b1c')
    """
    return call_id.rpartition("-")[2].rpartition("_")[2]


def received_reward(value: Any, name: str = "the program") -> GivenReward:
    """Return a reward, a number or a dict of numbers by name; raise :class:`CallError` for anything else."""
    try:
        return checked_reward(name, value)
    except EnvError as error:
        raise CallError(str(error), param="reward") from error


class ProgramCall:
    """One call that waits for its answer.

    Attributes:
        request: What the program requests.
        parent: The id of the call that caused this one, if the program named it.
        call_id: The identifier of the call.
        reply: The answer, which the endpoint waits for; canceled if the program no longer does.
    """

    def __init__(self, request: CallRequest, parent: str | None) -> None:
        self.request, self.parent = request, None if parent is None else plain_id(parent)
        self.call_id = secrets.token_hex(12)
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> bool:
        """Send the answer; return whether the program still waits for it."""
        if self.reply.done():
            return False
        self.reply.set_result(reply)
        return True

    def reject(self, error: CallError) -> None:
        """Send an error instead of an answer."""
        if not self.reply.done():
            self.reply.set_exception(error)


class Session:
    """One program's calls and rewards.

    Attributes:
        key: The API key by which the endpoint knows the program.
        rewards: The rewards in the order in which they arrived, each with the id of its call.
        has_all_rewards: Set once the program has announced that no reward follows.
        is_graded: Whether the outcome is graded, so that the rewards are final.
        last_used: When the last call arrived, on the monotonic clock.
        num_tokens: Returns the number of tokens in the prompt of a conversation; 0 without a tokenizer.
        on_final: Called when no reward follows.
        answered: The ids of the calls that were answered.
        closed: The error with which all calls are rejected; None if they are not.
        is_ended_by_owner: Whether the program ends by itself also after its calls are rejected, however long it takes.
        conversations: The conversations that a request may continue by the id of a response (``/v1/responses``).
    """

    def __init__(self) -> None:
        self.key = f"sk-{secrets.token_hex(16)}"
        self.rewards: list[tuple[str, GivenReward]] = []
        self.answered: list[str] = []
        self.has_all_rewards = asyncio.Event()
        self.is_graded = False
        self.last_used = time.monotonic()
        self.num_tokens: Callable[[CallRequest], int] = lambda _: 0
        self.is_ended_by_owner = False
        self.on_final: Callable[[], None] = lambda: None
        self.conversations: dict[str, Sequence[Message]] = {}
        self._queue: deque[ProgramCall] = deque()
        self._unanswered: set[ProgramCall] = set()
        self._changed = asyncio.Event()
        self.closed: CallError | None = None
        self._failure: str | None = None
        self._has_ended = False

    async def call(self, request: CallRequest, parent: str | None, leaving: asyncio.Future[None]) -> Sequence[Reply]:
        """Wait for the ``request.n`` answers of the policy, unless the program stops waiting.

        Args:
            request: What the program requests.
            parent: The id of the call that caused this one, if the program named it.
            leaving: Done once the program no longer waits.

        Raises:
            CallError: The call was rejected, the episode is over, or the program no longer waits.
        """
        if self.closed is not None:
            raise self.closed
        self.last_used = time.monotonic()
        calls = [ProgramCall(request, parent) for _ in range(request.n)]

        def drop(_: Any = None) -> None:
            for call in calls:
                call.reply.cancel()

        self._queue += calls
        self._unanswered.update(calls)
        self._changed.set()
        leaving.add_done_callback(drop)
        try:
            replies = await asyncio.gather(*(call.reply for call in calls))
        except asyncio.CancelledError:
            if leaving.done():
                raise CallError(GONE, status=499) from None
            raise
        finally:
            self._unanswered.difference_update(calls)
            drop()
        self.answered += [call.call_id for call in calls]
        return replies

    async def next_call(self) -> ProgramCall | None:
        """Return the next call that a program waits for; None once the program has ended.

        Raises:
            EnvError: The calls cannot arrive.
        """
        while True:
            if self._failure is not None:
                raise EnvError(self._failure)
            while self._queue:
                call = self._queue.popleft()
                if not call.reply.done():
                    return call
            if self._has_ended:
                return None
            self._changed.clear()
            await self._changed.wait()

    def add_reward(self, reward: GivenReward, call_id: str | None = None) -> None:
        """Add a reward of a call; None for the call that was answered last.

        Raises:
            CallError: It is not a reward, no call was answered yet, or none with this id.
        """
        if not isinstance(call_id, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            sentence = f"call must be the id of a call, a str, or None, got {shown(call_id)}: the reward comes first"
            raise CallError(sentence, param="call")
        reward = received_reward(reward)
        if self.is_graded:
            raise CallError("the rewards are final once the program has ended, unless reward_timeout_s waits for more")
        if not self.answered:
            raise CallError(NOTHING_TO_REWARD)
        known = self.answered[-1] if call_id is None else plain_id(call_id)
        if known not in self.answered:
            raise CallError(f"no call with the id {call_id!r} was answered", status=404, param="call")
        self.rewards.append((known, reward))

    def finish_rewards(self) -> None:
        """Announce that no reward follows."""
        self.has_all_rewards.set()
        self.on_final()

    def ended(self) -> None:
        """Note that the program has ended."""
        self._has_ended = True
        self._changed.set()

    def close(self, reason: str) -> None:
        """Reject the calls that wait, and all later ones."""
        self.closed = CallError(reason, status=403, code="episode_over")
        for call in self._unanswered:
            call.reject(self.closed)
        self._queue.clear()

    def fail(self, reason: str) -> None:
        """Fail the episode: its calls cannot arrive."""
        self._failure = reason
        self.close(reason)
        self._changed.set()
