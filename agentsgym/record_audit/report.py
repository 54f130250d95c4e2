"""The report of an audit of recorded rollouts: its counts, and the problems that were found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentsgym.errors import AgentsGymError
from agentsgym.texts import shortened, shown

Check = Literal[
    "fields",  # a value is missing or of the wrong kind; nothing else of the trajectory is checked then
    "lengths",  # a list does not hold one value a token
    "token_ids",  # an id is not a token
    "spans",  # turns overlap, are out of order or leave the tokens
    "prompts",  # a turn's prompt does not extend the tokens before it
    "mask",  # the agent token mask is not the union of the spans
    "messages",  # an invalid message, or a turn that does not point at its own answer
    "logprobs",  # an invalid log-probability
    "rewards",  # a reward is not finite, or does not lie where it belongs
    "outcome",  # the final reward, the stop reason and the error do not fit each other
]

_SHOWN, _SHOWN_BYTES = 20, 450  # problems in the text of a report, and the most of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with one trajectory.

    Attributes:
        check: The check that found it.
        trajectory: Index in the list that was audited.
        session_id: Its session.
        turn: Index of the turn; None if it is not about one turn.
        message: The problem and the expected value, in one sentence.
    """

    check: Check
    trajectory: int
    session_id: str
    turn: int | None
    message: str

    def __str__(self) -> str:
        turn = "" if self.turn is None else f", turn {self.turn}"
        session = f" (session {shown(self.session_id)[1:-1]})" if self.session_id else ""
        return f"trajectory {self.trajectory}{session}{turn}: [{self.check}] {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit; the counts leave out trajectories whose fields cannot be read.

    Attributes:
        num_trajectories: All that were given.
        num_failed: Rollouts in which the environment or the agent failed.
        num_turns: Actions.
        num_segments: Stretches of tokens in which history only grew.
        num_tokens: All tokens.
        num_agent_tokens: Tokens of agents.
        num_invalid_turns: Turns that the environment called invalid.
        num_inexact_turns: Turns of text that was encoded afterwards.
        num_turns_without_logprobs: Turns that have tokens, but no log-probabilities.
        problems: Everything that is wrong, in the order of the trajectories.
    """

    num_trajectories: int
    num_failed: int
    num_turns: int
    num_segments: int
    num_tokens: int
    num_agent_tokens: int
    num_invalid_turns: int
    num_inexact_turns: int
    num_turns_without_logprobs: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def raise_if_broken(self) -> None:
        """Raise an :class:`~agentsgym.errors.AgentsGymError` with the text of the report where something is wrong."""
        if self.problems:
            raise AgentsGymError(str(self))

    def __str__(self) -> str:
        lines = [
            f"{self.num_trajectories} trajectories ({self.num_failed} failed), {self.num_turns} turns "
            f"({self.num_invalid_turns} invalid, {self.num_inexact_turns} encoded afterwards, "
            f"{self.num_turns_without_logprobs} without log-probabilities), {self.num_tokens} tokens "
            f"({self.num_agent_tokens} of agents) in {self.num_segments} segments",
            f"{len(self.problems)} problems" if self.problems else "no problems",
        ]
        lines += [shortened(f"  {problem}", _SHOWN_BYTES, tail=0) for problem in self.problems[:_SHOWN]]
        more = [f"  and {len(self.problems) - _SHOWN} more"] if len(self.problems) > _SHOWN else []
        return "\n".join([*lines, *more])
