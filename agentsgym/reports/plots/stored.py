"""Reading of the plotted fields of rollouts; of a store, only the necessary columns are read, in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

from agentsgym.errors import ConfigError
from agentsgym.reports.plots.style import TokenValues
from agentsgym.statistics.breakdown import SeatOutcome
from agentsgym.statistics.metrics import Estimate, summarize_outcomes
from agentsgym.store.reader import RolloutStore
from agentsgym.types import StopReason, Trajectory, outcome_of

_CHUNK: Final = 2048  # rollouts read together
_OUTCOME: Final = ("stop_reason", "success", "final_reward")
_TASK: Final = ("run", "generation", "group", "env_class_path", "env_config", "task_data", "task_index")
_CURVE: Final = ("source", "step", "agent", "num_turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """The plotted fields of a rollout.

    Attributes:
        outcome: The outcome, as in ``Trajectory.outcome``.
        final_reward: The final reward.
        num_turns: The number of turns.
        num_tokens: The number of tokens, T.
        task: A number shared by all rollouts of the same task, or in training of the same task group of a batch.
        rollout_index: The index among the rollouts of its task.
        turns: The spans and rewards of the turns; empty if only lengths are plotted.
        logprobs: The log-probabilities, (T,); None if they are unknown or not plotted.
    """

    outcome: str
    final_reward: float
    num_turns: int
    num_tokens: int
    task: int = 0
    rollout_index: int = 0
    turns: Sequence[DrawnTurn] = ()
    logprobs: Sequence[float] | None = None

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """Build one from the plotted fields of a trajectory."""
        return cls(
            outcome=trajectory.outcome,
            final_reward=trajectory.final_reward,
            num_turns=trajectory.num_turns,
            num_tokens=len(trajectory.token_ids),
            task=trajectory.task_index,
            rollout_index=trajectory.rollout_index,
            turns=[DrawnTurn(turn.start, turn.stop, turn.reward) for turn in trajectory.turns],
            logprobs=trajectory.logprobs,
        )


class DrawnTurn(NamedTuple):
    """The token span and the reward of a turn."""

    start: int
    stop: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveOfStore:
    """The learning curve of a stored training run.

    Attributes:
        points: One pair (number of training rollouts so far, win rate) per generation batch.
        evaluations: One pair (number of training rollouts before it, win rate) per evaluation of the policy.
        references: The win rates of other agents, by name.
    """

    points: list[tuple[float, float]]
    evaluations: list[tuple[float, Estimate]] = field(default_factory=list[tuple[float, Estimate]])
    references: dict[str, Estimate] = field(default_factory=dict[str, Estimate])


def lengths_of(source: Sequence[Trajectory] | RolloutStore) -> Sequence[DrawnRollout]:
    """Return rollouts to plot; from a store, only their lengths and outcomes are read."""
    if not isinstance(source, RolloutStore):
        return [*map(DrawnRollout.of, source)]
    return [_drawn(row, num_turns=row["num_turns"]) for row in _rows(source, (*_OUTCOME, "num_turns", "num_tokens"))]


def turns_of(
    source: Sequence[Trajectory] | RolloutStore, *, logprobs: bool = False
) -> tuple[Sequence[DrawnRollout], TokenValues | None]:
    """Return rollouts with their turns, and the stored advantages of each rollout, (T,).

    A rollout without advantages has an empty sequence; if no rollout has any, None is returned in their place.
    """
    if not isinstance(source, RolloutStore):
        return [*map(DrawnRollout.of, source)], None
    lists = ("advantages", "logprobs") if logprobs else ("advantages",)
    scalars = (*_OUTCOME, *_TASK, "rollout_index", "num_tokens", "turns")
    rollouts: list[DrawnRollout] = []
    advantages: list[Sequence[float]] = []
    tasks: dict[Hashable, int] = {}
    for row in _rows(source, scalars, lists):
        turns = [DrawnTurn(**{name: one[name] for name in DrawnTurn._fields}) for one in row["turns"]]
        task = tasks.setdefault(_task(row), len(tasks))
        more = {"task": task, "rollout_index": row["rollout_index"], "logprobs": row.get("logprobs")}
        rollouts.append(_drawn(row, num_turns=len(turns), turns=turns, **more))
        advantages.append(row["advantages"] or ())
    return rollouts, advantages if any(map(len, advantages)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A generation batch or an evaluation.

    Attributes:
        run: The name of the run.
        step: The number of optimizer steps before the batch or evaluation.
        tasks: The task of each rollout.
        rollouts: The outcome of each rollout.
    """

    run: str | None
    step: int
    tasks: list[int] = field(default_factory=list[int])
    rollouts: list[SeatOutcome] = field(default_factory=list[SeatOutcome])

    @property
    def win_rate(self) -> float | None:
        """The fraction of rollouts that succeeded; None if it is unknown for all of them."""
        wins = [bool(one.success) for one in self.rollouts if not one.failed]
        is_known = any(one.success is not None for one in self.rollouts)
        return sum(wins) / len(wins) if wins and is_known else None


def curve_of(store: RolloutStore) -> CurveOfStore:
    """Compute the learning curve of a stored training run."""
    trained: dict[int, _Batch] = {}
    evaluated: dict[tuple[str, int | None], _Batch] = {}
    tasks: dict[Hashable, int] = {}
    for row in _rows(store, (*_OUTCOME, *_TASK, *_CURVE)):
        task = tasks.setdefault(_task({**row, "run": None, "generation": None}), len(tasks))
        batches: dict[Any, _Batch]
        if row["generation"] is not None:
            batches, key = trained, row["generation"]
        elif row["source"] == "evaluation":
            batches, key = evaluated, (str(row["agent"]), row["step"])
        else:
            continue
        if key not in batches or batches[key].run != row["run"]:  # a resumed run repeats some batches
            batches[key] = _Batch(run=row["run"], step=row["step"] or 0)
        reason = StopReason(row["stop_reason"])
        outcome = SeatOutcome(
            role=None,
            stop_reason=reason,
            success=row["success"],
            final_reward=row["final_reward"],
            num_turns=row["num_turns"],
            failed=reason is StopReason.FAILED,
        )
        batches[key].tasks.append(task)
        batches[key].rollouts.append(outcome)
    if not trained and not evaluated:
        raise ConfigError(
            f"{store!r} has no learning curve, because it contains neither training rollouts nor evaluations"
        )
    return _curve([trained[generation] for generation in sorted(trained)], evaluated)


def _curve(batches: Sequence[_Batch], evaluated: Mapping[tuple[str, int | None], _Batch]) -> CurveOfStore:
    """Order batches and evaluations by the number of training rollouts so far."""
    counts = [*accumulate(len(batch.rollouts) for batch in batches)]
    curve = CurveOfStore(points=[])
    for count, batch in zip(counts, batches, strict=True):
        if batch.win_rate is not None:
            curve.points.append((float(count), batch.win_rate))
    for (name, step), evaluation in evaluated.items():
        win_rate = summarize_outcomes(evaluation.rollouts, (), clusters=evaluation.tasks).win_rate
        if win_rate is None:
            continue
        if step is None:  # not an evaluation of the policy in training
            curve.references[name] = win_rate
        else:
            before = [count for count, batch in zip(counts, batches, strict=True) if batch.step < step]
            curve.evaluations.append((float(max(before, default=0)), win_rate))
    curve.evaluations.sort(key=itemgetter(0))
    return curve


def _drawn(row: Mapping[str, Any], **fields: Any) -> DrawnRollout:
    outcome = outcome_of(StopReason(row["stop_reason"]), row["success"])
    return DrawnRollout(outcome=outcome, final_reward=row["final_reward"], num_tokens=row["num_tokens"], **fields)


def _task(row: Mapping[str, Any]) -> Hashable:
    """Return a key that identifies a row's task, or in training its task group."""
    if row["generation"] is not None:  # each batch numbers its task groups from 0
        return tuple(row[name] for name in ("run", "generation", "group"))
    task = row["task_data"] if row["task_data"] not in {None, "{}"} else (row["run"], row["task_index"])
    return row["env_class_path"], row["env_config"], task


def _rows(store: RolloutStore, scalars: Sequence[str], lists: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a dict per row with the given columns; those in ``lists`` are arrays of numbers, or None if missing."""
    for start in range(0, len(store), _CHUNK):
        table = store[start : start + _CHUNK].table([*dict.fromkeys([*scalars, *lists])])
        rows: list[dict[str, Any]] = table.select([*dict.fromkeys(scalars)]).to_pylist()
        for index, row in enumerate(rows):
            for name in lists:
                values: Any = table.column(name)[index].values
                numbers = None if values is None else values.to_numpy(zero_copy_only=False).astype("float64")
                row[name] = None if numbers is None else array("d", numbers.tobytes())
            yield row
