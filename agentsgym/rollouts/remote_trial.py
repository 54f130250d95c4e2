"""A trial that lives in a worker process, as the pool sees it, and the evidence against it when processes die."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from agentsgym.errors import EnvError, EpisodeError
from agentsgym.interruptions import is_interruption
from agentsgym.rollouts.interfaces import Finished, PlayableTrial, Raised
from agentsgym.rollouts.workers.handle import WorkerHandle
from agentsgym.rollouts.workers.wire import RequestDelta, TrialEnd, WireInput
from agentsgym.texts import sentence_of
from agentsgym.types import Message, TurnRequest

_PROOFS_OF_A_KILL = 2  # deaths by signals that also come from outside, as when memory is short, that count as proof


class RemoteTrial:
    """A trial that lives in a worker.

    Attributes:
        index: Its index in the run.
        trial: It.
        dumped: It, pickled with a name in place of its environment.
        env_name: The name of that environment.
        worker: Its process; None while it waits for one.
        agent_state: State to return to the agent.
        inputs: Inputs that it has processed.
        in_flight: Its current input; None at its start.
        is_stepping: Whether the scheduler waits for its next outcome.
        has_requested: Whether it has reached its first request.
        is_replaying: Whether it is being replayed in a new process.
        error: Error that ends it once it is replayed.
        end: Its result, where it ended while the scheduler did not wait for it.
        company: With how many trials, itself included, it may share a process. It shrinks with every death that it may
            have caused.
        is_suspect: Whether it was being stepped when a process died: it is tried alone, in a process that none but it
            has ever known, until it has got past that turn.
        bystanders: Other trials of its process, which are suspects once it is cleared.
    """

    def __init__(self, index: int, trial: PlayableTrial[Any], dumped: bytes, env_name: str, company: int) -> None:
        self.index = index
        self.trial = trial
        self.env_name = env_name
        self.worker: WorkerHandle | None = None
        self.agent_state: Any = None
        self.inputs: list[WireInput] = []
        self.in_flight: WireInput | None = None
        self.is_stepping = True
        self.has_requested = self.is_replaying = False
        self.error: EpisodeError | None = None
        self.end: Finished | None = None
        self.company = company
        self.is_suspect = False
        self.bystanders: list[RemoteTrial] = []
        self.dumped = dumped
        self._messages: list[Message] = []  # these and the next three: of its last request
        self._token_ids: list[int] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._max_new_tokens: int | None = None
        self._num_deaths_alone = 0  # at this turn

    def leave(self) -> None:
        """Remove it from its process."""
        if self.worker is not None:
            self.worker.residents.discard(self.index)
            self.worker = None

    def next_request(self, delta: RequestDelta) -> tuple[TurnRequest, bool]:
        """Apply the difference that a process sent; returns the request, and whether a replay's differs from the last.

        Lists that are extended stay the same objects.
        """
        before = (self._messages, self._token_ids, self._max_new_tokens)
        if delta.num_messages == 0:
            self._messages = []
        if delta.num_tokens == 0:
            self._token_ids = []
        self._messages += delta.messages
        self._token_ids += delta.token_ids
        self._max_new_tokens = delta.max_new_tokens
        self._tools = self._tools if delta.tools is None else delta.tools
        request = TurnRequest(
            session_id=self.trial.session_id,
            messages=self._messages,
            token_ids=self._token_ids,
            agent_state=self.agent_state if delta.has_state else None,
            max_new_tokens=delta.max_new_tokens,
            tools=self._tools,
        )
        return request, self.is_replaying and before != (self._messages, self._token_ids, self._max_new_tokens)

    def outcome(self, end: TrialEnd) -> Finished | Raised:
        """Read its end."""
        if isinstance(end.outcome, str):
            return self.failed(f"its result cannot be sent by its process: {end.outcome}")
        try:
            return pickle.loads(end.outcome)
        except BaseException as error:  # foreign code: what an environment put into its info
            if is_interruption(error):
                raise
            return self.failed(
                f"its result cannot be read by the receiving process: {type(error).__name__}: {sentence_of(error)}"
            )

    def failed(self, sentence: str) -> Finished:
        """Make the result of a trial that cannot continue."""
        return Finished(self.trial.abandon(EnvError(f"session {self.trial.session_id}: {sentence}")))

    def differs(self) -> EnvError:
        """Make the error of a trial whose replay differs."""
        return EnvError(
            f"session {self.trial.session_id}: its process died, and replaying its {len(self.inputs)} "
            "recorded actions gave another episode; an environment must be deterministic given task, seed and actions"
        )

    # Suspicion

    def clear_suspicion(self) -> None:
        """Clear a trial that continued alone: another trial caused the death of their process."""
        self._num_deaths_alone = 0
        if self.is_suspect:
            self.is_suspect = False
            for one in (self, *self.bystanders):
                one.company = max(1, one.company // 2)
            self.bystanders = []

    def is_proven(self, worker: WorkerHandle) -> bool:
        """Count a death of a process in which it was alone; returns whether that proves that it caused it."""
        self._num_deaths_alone += 1
        return self._num_deaths_alone >= (_PROOFS_OF_A_KILL if worker.may_be_killed_externally else 1)
