"""Call the agent of a judge or a gamemaster from many threads: within a limit, retried, and with its tokens counted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from agentsgym.agents.base import Agent, answer
from agentsgym.agents.usage import counted_tokens
from agentsgym.errors import AgentError, TemplateError
from agentsgym.event_loop import agents_loop
from agentsgym.judging.verdicts import VerdictError
from agentsgym.rollouts.agent_calls import call_agent
from agentsgym.texts import shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript
from agentsgym.types import Action, Message, TurnRequest

T = TypeVar("T")

_MAX_DELAY_S: Final = 30.0


class StoppedError(Exception):
    """The run was stopped, and its answers are no longer needed."""


@dataclass(slots=True, kw_only=True)
class Cost:
    """What one judgment has cost so far.

    Attributes:
        calls: Number of calls of the agent, including repeated ones.
        tokens: Number of input and output tokens; None if the agent does not report them.
        seconds: Seconds that the calls took, together.
        cached: Number of answers that came from the cache.
    """

    calls: int = 0
    tokens: int | None = None
    seconds: float = 0.0
    cached: int = 0


class Caller:
    """Calls one agent: an asynchronous one many times at once, any other with batches, one batch at a time."""

    def __init__(
        self, agent: Agent, *, max_concurrent: int, max_retries: int, retry_delay_s: float, timeout_s: float
    ) -> None:
        """Set the limits: see :class:`~agentsgym.judging.judge.Judge`."""
        self.agent: Any = agent
        self._max_batch, self._max_retries = max_concurrent, max_retries
        self._retry_delay_s, self._timeout_s = retry_delay_s, timeout_s
        self._is_async = callable(getattr(agent, "aact", None))
        self._slots = threading.BoundedSemaphore(max_concurrent)
        self._turn = threading.Lock()  # held while a batch is answered
        self._waiting: list[_Waiting] = []
        tokenizer = getattr(agent, "tokenizer", None)
        self._format = None if tokenizer is None else ChatFormat.of(tokenizer, guard_added_tokens=True)
        self._has_system = self._format is None or _accepts_system(self._format)

    def conversation(self, messages: Sequence[Message]) -> Transcript:
        """Begin a conversation with these messages, with exact tokens if the agent has a tokenizer.

        The system message is a part of the user's if the chat template has none.
        """
        first = [*messages]
        if not self._has_system:
            first = [Message(role="user", content="\n\n".join(one["content"] for one in messages))]
        transcript = Transcript(self._format, "append")
        transcript.observe(first)
        return transcript

    def call(self, request: TurnRequest, run: Run, cost: Cost) -> Action:
        """Call the agent, as often as the limits allow until it answers, and add to the cost.

        Raises:
            AgentError: Every attempt failed.
            ConfigError: The agent cannot be used at all.
            StoppedError: The run was stopped.
        """
        error = AgentError("it was not called")
        for attempt in range(self._max_retries + 1):
            if attempt:
                run.wait(min(_MAX_DELAY_S, self._retry_delay_s * 2 ** (attempt - 1)))
            given = self._attempt(request, run, cost)
            if isinstance(given, Action) and isinstance(cast("Any", given.text), str):
                return given
            wanted = f"{type(self.agent).__name__} must return an Action with a text"
            error = given if isinstance(given, AgentError) else AgentError(f"{wanted}, got {shown(given)}")
        raise error

    def _attempt(self, request: TurnRequest, run: Run, cost: Cost) -> Any:
        run.check()
        cost.calls += 1
        began = time.monotonic()
        with counted_tokens() as tokens:
            try:
                given = self._answer_alone(request, run) if self._is_async else self._answer_in_batch(request, run)
            finally:
                cost.seconds += time.monotonic() - began
        number = tokens.total
        if number is None and isinstance(given, Action) and given.token_ids is not None:
            number = len(request.token_ids) + len(given.token_ids)
        if number is not None:
            cost.tokens = (cost.tokens or 0) + number
        return given

    def _answer_alone(self, request: TurnRequest, run: Run) -> Any:
        with self._slots:
            run.check()
            future = asyncio.run_coroutine_threadsafe(self._limited(request), agents_loop())
            return run.result_of(future)

    async def _limited(self, request: TurnRequest) -> Any:
        try:
            return await asyncio.wait_for(answer(self.agent, request), self._timeout_s)
        except TimeoutError:
            return AgentError(f"{type(self.agent).__name__} took longer than timeout_s = {self._timeout_s:g}")

    def _answer_in_batch(self, request: TurnRequest, run: Run) -> Any:
        """Join the next batch; whoever comes first while no batch is being answered has it answered for all."""
        own = _Waiting(request)
        self._waiting.append(own)
        while not own.future.done():
            with self._turn:
                if own.future.done():
                    break
                run.check()
                batch, self._waiting[:] = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
                try:
                    answers = call_agent(self.agent, [one.request for one in batch])
                except BaseException as error:
                    for one in batch:
                        one.future.set_exception(error)
                    raise
                for one, given in zip(batch, answers, strict=True):
                    one.future.set_result(given)
        return own.future.result()


class Dialog:
    """One conversation with an agent: a request, and perhaps a second one after an answer that cannot be read."""

    def __init__(self, caller: Caller, messages: Sequence[Message], *, key: str, seed: int) -> None:
        """Begin without calling the agent; ``key`` identifies the conversation."""
        self._caller, self._session_id, self._seed = caller, f"judge-{key[:16]}", seed
        self._transcript, self._state = caller.conversation(messages), None

    def answer(self, run: Run, cost: Cost) -> Action:
        """Call the agent with the conversation so far; raises as :meth:`Caller.call` does."""
        request = TurnRequest(
            session_id=self._session_id,
            messages=self._transcript.messages,
            token_ids=self._transcript.token_ids,
            agent_state=self._state,
            seed=self._seed,
        )
        action = self._caller.call(request, run, cost)
        self._transcript.act(action)
        self._state = action.agent_state
        return action

    def read(
        self,
        parse: Callable[[Action], T],
        correction: Callable[[str], Message],
        *,
        num_corrections: int,
        run: Run,
        cost: Cost,
    ) -> tuple[T, str]:
        """Call the agent until its answer can be read; after one that cannot, it receives the reason.

        Args:
            parse: Reads an answer, and raises :class:`~agentsgym.judging.verdicts.VerdictError` if that is impossible.
            correction: Makes the message that requests another answer, from the reason.
            num_corrections: Maximum number of these messages.
            run: The run of which the calls are a part.
            cost: Receives their cost.

        Returns:
            What was read, and the text of the answer.

        Raises:
            VerdictError: The last answer cannot be read either.
            AgentError: The agent failed; the other errors of :meth:`Caller.call` too.
        """
        action = self.answer(run, cost)
        for _ in range(num_corrections):
            try:
                return parse(action), action.text
            except VerdictError as error:
                self.add(correction(str(error)))
            action = self.answer(run, cost)
        return parse(action), action.text

    def add(self, message: Message) -> None:
        """Add a message that follows the last answer."""
        self._transcript.observe([message])


def _accepts_system(chat_format: ChatFormat) -> bool:
    """Whether a chat template renders a system message."""
    try:
        Transcript(chat_format, "append").observe(
            [Message(role="system", content="Grade."), Message(role="user", content="This.")]
        )
    except TemplateError:
        return False
    return True


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for the next batch."""

    request: TurnRequest
    future: Future[Any] = field(default_factory=Future[Any])


class Run:
    """One use of a judge, which another thread may stop: waiting calls are canceled, and later ones do not start."""

    def __init__(self) -> None:
        self._is_stopped = threading.Event()
        self._open: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Stop the run; may be called from any thread."""
        with self._lock:
            self._is_stopped.set()
            for future in self._open:
                future.cancel()

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped."""
        return self._is_stopped.is_set()

    def check(self) -> None:
        """Raise :class:`StoppedError` if the run was stopped."""
        if self._is_stopped.is_set():
            raise StoppedError

    def wait(self, seconds: float) -> None:
        """Wait, unless the run is stopped."""
        if self._is_stopped.wait(seconds):
            raise StoppedError

    def result_of(self, future: Future[Any]) -> Any:
        """Wait for a coroutine of the run."""
        with self._lock:
            self._open.add(future)
            if self._is_stopped.is_set():
                future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise StoppedError from None
        finally:
            with self._lock:
                self._open.discard(future)
