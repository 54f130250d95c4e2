"""Fork the rollouts of a generation batch: choose turns within a budget of tokens, and play them anew."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Final

from agentsgym.credit.returns import discounted_returns
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, is_int, one_of, require
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.batch.layouts import TrainingRow
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.training.metrics.rollouts import RolloutSummary
    from agentsgym.types import Trajectory

FORK_AT: Final = ("uniform", "entropy", "value")
"""The rules by which turns are chosen."""

_OPTIONS: Final[Mapping[str, tuple[Any, Check, str]]] = {
    "at": ("uniform", one_of(*FORK_AT), "one of " + ", ".join(map(repr, FORK_AT))),
    "width": (3, is_int(1), "a positive int"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSettings:
    """How rollouts are forked.

    Attributes:
        budget: Number of tokens that the forks of a task group may sample, on average over the task groups.
        at: Rule by which turns are chosen, one of :data:`FORK_AT`: all alike (``"uniform"``), or in proportion to the
            mean of -log p of the turns with the same index (``"entropy"``), or to the spread of the returns of the task
            group's turns in the same state or, without a state key, with the same index (``"value"``).
        width: Number of forks of a chosen turn.
    """

    budget: int
    at: str = "uniform"
    width: int = 3

    @classmethod
    def of(cls, budget: int, options: Mapping[str, Any]) -> ForkSettings | None:
        """Check the options of ``fork_kwargs``; None without a budget.

        Raises:
            ConfigError: An option is unknown or invalid, or there are options without a budget.
        """
        for name, value in options.items():
            if name not in _OPTIONS:
                raise ConfigError(f"GRPOEnvConfig.fork_kwargs[{shown(name)}] is unknown{did_you_mean(name, _OPTIONS)}")
            require(f"GRPOEnvConfig.fork_kwargs[{shown(name)}]", value, *_OPTIONS[name][1:])
        if options and not budget:
            raise ConfigError(f"GRPOEnvConfig.fork_kwargs requires fork_budget > 0, got {shown(dict(options))}")
        return cls(budget=budget, **options) if budget else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """The forks of a generation batch.

    Attributes:
        trajectories: This rank's forks, (F,).
        parents: The index of each one's rollout among those of this rank, (F,).
        first: Index of this rank's first fork in ``summaries``.
        summaries: The forks of all ranks.
        num_rows: Number of training rows of the forks of each rank.
        num_prefilled: Number of tokens before the forks of all ranks, once for each forked turn.
    """

    trajectories: Sequence[Trajectory]
    parents: Sequence[int]
    first: int
    summaries: Sequence[RolloutSummary]
    num_rows: Sequence[int]
    num_prefilled: int

    def metrics(self) -> dict[str, float]:
        """The number of forks, the tokens that they cost, and the fraction that failed."""
        played = [one for one in self.summaries if not one.failed]
        return {
            "forks/number": float(len(self.summaries)),
            "forks/sampled_tokens": float(sum(one.num_agent_tokens for one in played)),
            "forks/prefilled_tokens": float(self.num_prefilled),
            "forks/trained_tokens": float(sum(one.num_row_tokens for one in played)),
            "forks/failed": 1 - len(played) / len(self.summaries) if self.summaries else 0.0,
        }


def choose_turns(
    trajectories: Sequence[Trajectory],
    scored: Sequence[ScoredRollout],
    settings: ForkSettings,
    seed: int,
    discount: float = 1.0,
) -> list[tuple[int, int]]:
    """Draw the turns to fork, without replacement, as long as the expected cost stays within the budget.

    A fork is expected to sample as many tokens as its rollout did from that turn on. First turns are not chosen: they
    are what the rollouts of a task group have in common anyway.

    Args:
        trajectories: The rollouts of this rank, in complete task groups, (B,).
        scored: The same rollouts as estimators see them, (B,).
        settings: The settings.
        seed: Seed of the draws.
        discount: γ of the returns whose spread counts.

    Returns:
        Pairs of the index of a rollout and of a turn, sorted.
    """
    weights = _WEIGHTS[settings.at](trajectories, scored, discount)
    generator = random.Random(seed)
    # Efraimidis & Spirakis 2006: the largest of u^(1/w) are a weighted sample without replacement.
    keys = {place: generator.random() ** (1 / weight) for place, weight in weights.items() if weight > 0}
    left = settings.budget * len({one.group for one in scored})
    chosen: list[tuple[int, int]] = []
    for i, k in sorted(keys, key=lambda place: -keys[place]):
        turns = trajectories[i].turns[k:]
        left -= settings.width * sum(turn.stop - turn.start for turn in turns)
        if left < 0:
            break
        chosen.append((i, k))
    return sorted(chosen)


_Weights = dict[tuple[int, int], float]


def _uniform(trajectories: Sequence[Trajectory], scored: Sequence[ScoredRollout], _discount: float) -> _Weights:
    return {
        (i, k): 1.0
        for i, (one, own) in enumerate(zip(trajectories, scored, strict=True))
        for k in range(1, len(one.turns))
        if own.included
    }


def _by_entropy(trajectories: Sequence[Trajectory], scored: Sequence[ScoredRollout], discount: float) -> _Weights:
    surprises: defaultdict[int, list[float]] = defaultdict(list)
    weights = _uniform(trajectories, scored, discount)
    for i, k in weights:
        turn, logprobs = trajectories[i].turns[k], trajectories[i].logprobs
        if logprobs is not None and turn.stop > turn.start:
            surprises[k].append(-sum(logprobs[turn.start : turn.stop]))
    means = {k: fmean(own) for k, own in surprises.items()}
    return _positive({place: means.get(place[1], 0.0) for place in weights})


def _by_value(trajectories: Sequence[Trajectory], scored: Sequence[ScoredRollout], discount: float) -> _Weights:
    weights = _uniform(trajectories, scored, discount)
    returns = [discounted_returns(one.turn_rewards, discount=discount) for one in scored]
    by_state: defaultdict[Any, list[float]] = defaultdict(list)
    by_turn: defaultdict[Any, list[float]] = defaultdict(list)
    for i, k in weights:
        by_state[scored[i].group, scored[i].state_keys[k]].append(returns[i][k])
        by_turn[scored[i].group, k].append(returns[i][k])
    spreads: _Weights = {}
    for i, k in weights:
        own, key = by_state[scored[i].group, scored[i].state_keys[k]], scored[i].state_keys[k]
        spreads[i, k] = pstdev(own if key is not None and len(own) > 1 else by_turn[scored[i].group, k])
    return _positive(spreads)


def _positive(weights: _Weights) -> _Weights:
    """Return the weights if any is positive, and equal weights otherwise."""
    return weights if any(weight > 0 for weight in weights.values()) else dict.fromkeys(weights, 1.0)


_WEIGHTS: Final = {"uniform": _uniform, "entropy": _by_entropy, "value": _by_value}


def with_owners(scored: ScoredRollout, owner: int, fork: Mapping[str, int] | None = None) -> ScoredRollout:
    """Mark the turns of a rollout as its own, or those before a fork as its parent's."""
    num_turns, shared = len(scored.turn_rewards), fork["turn"] if fork else 0
    counts = scored.token_counts and [0] * shared + list(scored.token_counts[shared:])
    parent = fork["rollout"] if fork else owner
    return replace(scored, owners=[parent] * shared + [owner] * (num_turns - shared), token_counts=counts)


def own_rows(rows: Sequence[TrainingRow], fork: Mapping[str, int]) -> list[TrainingRow]:
    """Return the rows of a fork without the turns that it shares; rows without others are dropped."""
    kept = [replace(row, turns=[(k, turn) for k, turn in row.turns if k >= fork["turn"]]) for row in rows]
    return [row for row in kept if row.turns]


def prefilled_tokens(forks: Sequence[Trajectory]) -> int:
    """Count the tokens that forks did not sample: the prompt of each forked turn once, and later observations."""
    prompts: dict[tuple[int, int, int], int] = {}
    later = 0
    for fork in forks:
        rollout, turn = fork.info["fork"]["rollout"], fork.info["fork"]["turn"]
        edge = None
        for one in fork.turns[turn:]:
            start = one.prompt_start if edge is None or one.prompt_start >= edge else edge
            if edge is None:
                prompts[fork.task_index, rollout, turn] = one.start - start
            else:
                later += one.start - start
            edge = one.stop
    return sum(prompts.values()) + later
