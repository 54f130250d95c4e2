"""Read only the plotted columns of a rollout store, in chunks."""

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

_PIECE: Final = 2048  # rollouts that are read at once
_OUTCOME: Final = ("stop_reason", "success", "final_reward")
_TASK: Final = ("run", "generation", "group", "env_class_path", "env_config", "task_data", "task_index")
_CURVE: Final = ("source", "step", "agent", "num_turns")

Rollouts = Sequence[Trajectory]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """The plotted fields of a rollout.

    Attributes:
        outcome: The outcome, as in ``Trajectory.outcome``.
        final_reward: The final reward.
        num_turns: The number of turns.
        num_tokens: The number of tokens, T.
        task: A key shared by rollouts of one task, or in training of one task group of one batch.
        rollout_index: The index among the rollouts of its task.
        turns: The spans and rewards of its turns; empty if only lengths are drawn.
        logprobs: The log-probabilities, (T,); None if they are unknown or not drawn.
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
        """Take what is drawn of a rollout that is at hand."""
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
    """The span of a turn's tokens, and its reward."""

    start: int
    stop: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Rollouts as far as a plot needs them.

    Attributes:
        rollouts: The rollouts.
        advantages: (T,) for each, empty where it is not known; None if no rollout has any.
    """

    rollouts: Sequence[DrawnRollout]
    advantages: TokenValues | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveOfStore:
    """A learning curve, as a store of training has it.

    Attributes:
        points: (rollouts played so far, win rate), one a generation batch.
        evaluations: (rollouts played before it, win rate) of the policy's evaluations.
        references: The win rates of other players, by their names.
    """

    points: list[tuple[float, float]]
    evaluations: list[tuple[float, Estimate]] = field(default_factory=list[tuple[float, Estimate]])
    references: dict[str, Estimate] = field(default_factory=dict[str, Estimate])


def lengths_of(source: Rollouts | RolloutStore) -> Sequence[DrawnRollout]:
    """Give rollouts with their lengths and outcomes alone."""
    if not isinstance(source, RolloutStore):
        return [*map(DrawnRollout.of, source)]
    return [_drawn(row, num_turns=row["num_turns"]) for row in _rows(source, (*_OUTCOME, "num_turns", "num_tokens"))]


def turns_of(source: Rollouts | RolloutStore, *, logprobs: bool = False) -> Drawn:
    """Give rollouts with their turns, and those of a store with their advantages."""
    if not isinstance(source, RolloutStore):
        return Drawn(rollouts=[*map(DrawnRollout.of, source)])
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
    return Drawn(rollouts=rollouts, advantages=advantages if any(map(len, advantages)) else None)


def curve_of(store: RolloutStore) -> CurveOfStore:
    """Find the learning curve in a store of training.

    Raises:
        ConfigError: It has neither rollouts of training nor evaluations.
    """
    batches: dict[int, _Batch] = {}
    evaluated: dict[tuple[str, int | None], _Batch] = {}
    tasks: dict[Hashable, int] = {}
    for row in _rows(store, (*_OUTCOME, *_TASK, *_CURVE)):
        task = tasks.setdefault(_task({**row, "run": None, "generation": None}), len(tasks))
        reason = StopReason(row["stop_reason"])
        one = SeatOutcome(
            role=None,
            stop_reason=reason,
            success=row["success"],
            final_reward=row["final_reward"],
            num_turns=row["num_turns"],
            failed=reason is StopReason.FAILED,
        )
        if row["generation"] is not None:
            batch = batches.get(row["generation"])
            if batch is None or batch.run != row["run"]:  # a run that goes on plays some batches again
                batch = batches[row["generation"]] = _Batch(run=row["run"], step=row["step"] or 0)
            batch.add(task, one)
        elif row["source"] == "evaluation":
            named = str(row["agent"]), row["step"]
            if named not in evaluated or evaluated[named].run != row["run"]:  # likewise
                evaluated[named] = _Batch(run=row["run"], step=row["step"] or 0)
            evaluated[named].add(task, one)
    if not batches and not evaluated:
        raise ConfigError(f"{store!r} has no learning curve: it has no rollouts of training or evaluations")
    return _curve([batches[generation] for generation in sorted(batches)], evaluated)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A generation batch, or an evaluation.

    Attributes:
        run: Its run.
        step: The optimizer steps that were done before it.
        tasks: The task of each rollout.
        rollouts: What came of each.
    """

    run: str | None
    step: int
    tasks: list[int] = field(default_factory=list[int])
    rollouts: list[SeatOutcome] = field(default_factory=list[SeatOutcome])

    def add(self, task: int, rollout: SeatOutcome) -> None:
        """Count a rollout in."""
        self.tasks.append(task)
        self.rollouts.append(rollout)

    @property
    def win_rate(self) -> float | None:
        """The share of its rollouts that was won; None if the environment does not say of any."""
        wins = [bool(one.success) for one in self.rollouts if not one.failed]
        is_known = any(one.success is not None for one in self.rollouts)
        return sum(wins) / len(wins) if wins and is_known else None


def _curve(batches: Sequence[_Batch], evaluated: Mapping[tuple[str, int | None], _Batch]) -> CurveOfStore:
    """Lay everything along the rollouts that were played until then."""
    played = [*accumulate(len(batch.rollouts) for batch in batches)]
    curve = CurveOfStore(
        points=[
            (float(count), batch.win_rate)
            for count, batch in zip(played, batches, strict=True)
            if batch.win_rate is not None
        ]
    )
    for (name, step), evaluation in evaluated.items():
        win_rate = summarize_outcomes(evaluation.rollouts, (), clusters=evaluation.tasks).win_rate
        if win_rate is None:
            continue
        if step is None:  # not of the policy in training
            curve.references[name] = win_rate
        else:
            before = [count for count, batch in zip(played, batches, strict=True) if batch.step < step]
            curve.evaluations.append((float(max(before, default=0)), win_rate))
    curve.evaluations.sort(key=itemgetter(0))
    return curve


def _drawn(row: Mapping[str, Any], **fields: Any) -> DrawnRollout:
    outcome = outcome_of(StopReason(row["stop_reason"]), row["success"])
    return DrawnRollout(outcome=outcome, final_reward=row["final_reward"], num_tokens=row["num_tokens"], **fields)


def _task(row: Mapping[str, Any]) -> Hashable:
    """What rollouts of one task, or of one task group of training, have in common."""
    if row["generation"] is not None:  # the batches of an evaluation each count their task groups from 0
        return tuple(row[name] for name in ("run", "generation", "group"))
    given = row["task_data"] if row["task_data"] not in {None, "{}"} else (row["run"], row["task_index"])
    return row["env_class_path"], row["env_config"], given


def _rows(store: RolloutStore, scalars: Sequence[str], lists: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Read columns row by row; those of ``lists`` as arrays of numbers, None where a rollout has none."""
    for start in range(0, len(store), _PIECE):
        table = store[start : start + _PIECE].table([*dict.fromkeys([*scalars, *lists])])
        plain: list[dict[str, Any]] = table.select([*dict.fromkeys(scalars)]).to_pylist()
        for index, row in enumerate(plain):
            yield row | {name: _numbers(table.column(name)[index].values) for name in lists}


def _numbers(values: Any) -> array[float] | None:
    return None if values is None else array("d", values.to_numpy(zero_copy_only=False).astype("float64").tobytes())
