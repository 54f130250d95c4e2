"""The report of an audit of recorded rollouts: counts, and the problems found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentsgym.errors import AgentsGymError
from agentsgym.texts import shortened, shown

Check = Literal[
    "fields",  # a value is missing or has the wrong type; the trajectory's other checks are then skipped
    "lengths",  # a list does not have one value per token
    "token_ids",  # an id is not a valid token id
    "spans",  # turns overlap, are out of order or extend beyond the tokens
    "parents",  # a turn's parent is not an earlier turn
    "prompts",  # a turn's prompt does not extend the tokens before it
    "mask",  # the agent token mask is not the union of the spans
    "messages",  # an invalid message, or a turn that does not refer to its answer
    "logprobs",  # an invalid log-probability
    "rewards",  # a reward is not finite, or is assigned to the wrong tokens
    "outcome",  # the final reward, the stop reason and the error are inconsistent
]

_SHOWN, _SHOWN_BYTES = 20, 450  # problems in the text of a report, and the size limit of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of one trajectory.

    Attributes:
        check: The check that found it.
        trajectory: Index of the trajectory in the audited list.
        session_id: The trajectory's session id.
        turn: Index of the turn; None if the problem does not concern one turn.
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
    """The result of an audit; the counts exclude trajectories with missing or wrongly typed fields.

    Attributes:
        num_trajectories: Number of all audited trajectories.
        num_failed: Number of rollouts in which the environment or the agent failed.
        num_turns: Number of turns.
        num_segments: Number of segments (contiguous tokens in which history only grew).
        num_tokens: Number of tokens.
        num_agent_tokens: Number of agent tokens.
        num_invalid_turns: Number of turns that the environment marked as invalid.
        num_inexact_turns: Number of turns whose tokens were encoded from text.
        num_turns_without_logprobs: Number of turns that have tokens but no log-probabilities.
        problems: The problems, in the order of the trajectories.
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
        """Whether there are no problems."""
        return not self.problems

    def raise_if_broken(self) -> None:
        """Raise an :class:`~agentsgym.errors.AgentsGymError` with the text of the report if there are problems."""
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
