"""What runs in a worker process: the episodes that live there, and the messages that it exchanges with the pool.

An episode's state cannot leave the process it began in, so an episode stays where it was started: an action comes in,
what is new in the conversation goes out. The pool keeps its own copy of each conversation (a :class:`Mirror`).
"""

from __future__ import annotations

import io
import pickle
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from agentsgym.errors import AgentsGymError, EpisodeFault
from agentsgym.rollouts.scheduler import SLICE_S, Finished, Outcome, Playing, Raised, advance
from agentsgym.types import Action, FinishReason, Message, TurnRequest

NOBODY = -1
HELLO = b"ready"
GOODBYE = b""

WireAction = tuple[str, Sequence[int] | None, Sequence[float] | None, FinishReason]
WireMove = WireAction | EpisodeFault


class Start(NamedTuple):
    """Begin an episode.

    Attributes:
        place: Its index in the run.
        episode: It, pickled with :func:`dump_episode`.
        moves: What it was given already, where it lived in a process that is gone.
    """

    place: int
    episode: bytes
    moves: list[WireMove]


class Batch(NamedTuple):
    """What the pool sends.

    Attributes:
        shared: Pickled environments, by name.
        forgotten: Names of those that are not needed any more.
        items: What to do, in order; a plain pair is a move of an episode that was started.
    """

    shared: dict[str, bytes]
    forgotten: set[str]
    items: list[Start | tuple[int, WireMove]]


class News(NamedTuple):
    """What an episode asks, as the difference to what it asked before.

    Attributes:
        place: Its index in the run.
        num_messages: How many messages of the copy are kept: all of them, or none where there is another list now.
        messages: What follows them.
        num_tokens: As ``num_messages``, for the token ids.
        token_ids: What follows them.
        max_new_tokens: The budget.
        has_state: Whether the agent gets back the state of its last action: it never leaves the agent's process.
    """

    place: int
    num_messages: int
    messages: Sequence[Message]
    num_tokens: int
    token_ids: Sequence[int]
    max_new_tokens: int | None
    has_state: bool


class End(NamedTuple):
    """What an episode came to; what it raised; or why neither can be sent."""

    place: int
    outcome: Finished | Raised | str


class Unusable(NamedTuple):
    """Why an environment or an episode that was sent cannot be read here."""

    reason: str


Reply = News | End | Unusable


class _EpisodePickler(pickle.Pickler):
    """Writes a name where the environment stands."""

    def __init__(self, buffer: io.BytesIO, env: Any, name: str) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._env = env
        self._name = name

    def persistent_id(self, obj: Any) -> str | None:
        return self._name if obj is self._env and obj is not None else None


class _EpisodeUnpickler(pickle.Unpickler):
    """Puts the environment of that name where one stands."""

    def __init__(self, buffer: io.BytesIO, envs: dict[str, Any]) -> None:
        super().__init__(buffer)
        self._envs = envs

    def persistent_load(self, pid: str) -> Any:
        return self._envs[pid]


def dump_episode(episode: Any, env: Any, name: str) -> bytes:
    """Pickle an episode, its environment left out and named."""
    buffer = io.BytesIO()
    _EpisodePickler(buffer, env, name).dump(episode)
    return buffer.getvalue()


class Mirror:
    """The pool's copy of what an episode asked last."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.messages: list[Message] = []
        self.token_ids: list[int] = []

    def request(self, news: News, agent_state: Any) -> TurnRequest:
        """Take in what is new; lists that go on stay the same objects."""
        if news.num_messages == 0:
            self.messages = []
        if news.num_tokens == 0:
            self.token_ids = []
        self.messages += news.messages
        self.token_ids += news.token_ids
        return TurnRequest(
            session_id=self.session_id,
            messages=self.messages,
            token_ids=self.token_ids,
            agent_state=agent_state if news.has_state else None,
            max_new_tokens=news.max_new_tokens,
        )


class _Session:
    """An episode in play, and how much of its conversation the pool knows."""

    def __init__(self, playing: Playing[Any]) -> None:
        self.playing = playing
        self.messages: Sequence[Message] = ()
        self.token_ids: Sequence[int] = ()
        self.num_messages = 0
        self.num_tokens = 0

    def advance(self, move: WireMove | None) -> Outcome:
        """Let it go on."""
        if not isinstance(move, tuple):
            return advance(self.playing, move)
        text, token_ids, logprobs, finish_reason = move
        return advance(
            self.playing,
            # Any state but None will do: the pool gives back the real one.
            Action(text=text, token_ids=token_ids, logprobs=logprobs, agent_state=True, finish_reason=finish_reason),
        )

    def news(self, index: int, request: TurnRequest) -> News:
        """What the pool does not know yet."""
        if request.messages is not self.messages:
            self.messages, self.num_messages = request.messages, 0
        if request.token_ids is not self.token_ids:
            self.token_ids, self.num_tokens = request.token_ids, 0
        news = News(
            index,
            self.num_messages,
            request.messages[self.num_messages :],
            self.num_tokens,
            request.token_ids[self.num_tokens :],
            request.max_new_tokens,
            request.agent_state is not None,
        )
        self.num_messages, self.num_tokens = len(request.messages), len(request.token_ids)
        return news


class _Worker:
    """One process's environments and sessions.

    Attributes:
        progress: Shared with the pool: which episode is advanced at this moment (:data:`NOBODY`: none), since when.
    """

    def __init__(self, connection: Connection, progress: Any) -> None:
        self.connection = connection
        self.progress = progress
        self.shared: dict[str, Any] = {}
        self.sessions: dict[int, _Session] = {}

    def work(self, batch: Batch) -> None:
        """Do all of it; what is done is sent in slices, the last reply with the word that it is the last."""
        if not batch.items:
            self.sessions.clear()  # the run was broken off
            return
        try:
            for name in batch.forgotten:
                self.shared.pop(name, None)
            for name, dumped in batch.shared.items():
                self.shared[name] = pickle.loads(dumped)
        except Exception as error:  # noqa: BLE001  # foreign code: its classes say how they are read
            self._send([Unusable(f"{type(error).__name__}: {error}")], is_last=True)
            return
        replies: list[Reply] = []
        sent = time.monotonic()
        for place, item in enumerate(batch.items):
            replies.append(self._reply(item))
            is_last = place == len(batch.items) - 1
            now = time.monotonic()
            if is_last or now - sent > SLICE_S:
                self._send(replies, is_last=is_last)
                replies, sent = [], now

    def _reply(self, item: Start | tuple[int, WireMove]) -> Reply:
        index = item[0]
        if isinstance(item, Start):
            try:
                episode = _EpisodeUnpickler(io.BytesIO(item.episode), self.shared).load()
                self.sessions[index] = _Session(episode.play())
            except Exception as error:  # noqa: BLE001  # as above
                return Unusable(f"{type(error).__name__}: {error}")
            outcome = self._step(index, None)
            for move in item.moves:
                if isinstance(outcome, TurnRequest):
                    outcome = self._step(index, move)
        else:
            outcome = self._step(index, item[1])
        if isinstance(outcome, TurnRequest):
            return self.sessions[index].news(index, outcome)
        del self.sessions[index]
        return End(index, outcome if isinstance(outcome, Finished) else Raised(_portable(outcome.error)))

    def _step(self, index: int, move: WireMove | None) -> Outcome:
        self.progress[1] = time.monotonic()
        self.progress[0] = index
        outcome = self.sessions[index].advance(move)
        self.progress[0] = NOBODY
        return outcome

    def _send(self, replies: list[Reply], *, is_last: bool) -> None:
        try:
            message = pickle.dumps((replies, is_last), pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001  # foreign values: any of a game's info, state keys or messages
            message = pickle.dumps(([_sendable(reply) for reply in replies], is_last), pickle.HIGHEST_PROTOCOL)
        self.connection.send_bytes(message)


def serve(connection: Connection, progress: Any) -> None:
    """Do what the pool sends until it says goodbye, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the pool's owner decides
    worker = _Worker(connection, progress)
    with suppress(EOFError, OSError):
        connection.send_bytes(HELLO)
        while (message := connection.recv_bytes()) != GOODBYE:
            worker.work(pickle.loads(message))


def _sendable(reply: Reply) -> Reply:
    try:
        pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # as above
        if isinstance(reply, Unusable):
            raise
        return End(reply.place, f"{type(error).__name__}: {error}")
    return reply


def _portable(error: BaseException) -> BaseException:
    """The error as the pool can raise it, with its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # as above
        copied = AgentsGymError(f"{type(error).__name__}: {error}")
    copied.add_note(f"It was raised in a worker process:\n{text}")
    return copied
