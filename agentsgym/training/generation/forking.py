"""Fork the rollouts of a generation batch: choose turns within a budget of tokens, and play them anew."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Final

from agentsgym.credit.returns import discounted_returns
from agentsgym.credit.roles import has_several_roles
from agentsgym.errors import ConfigError

if TYPE_CHECKING:
    from agentsgym.batch.layouts import TrainingRow
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.training.fork_settings import ForkSettings
    from agentsgym.training.metrics.rollouts import RolloutSummary
    from agentsgym.types import Trajectory


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A turn that may be forked.

    Attributes:
        rollout: Index of its rollout among those of all ranks.
        turn: Its index.
        weight: Its chance to be chosen, relative to those of others.
        cost: Number of tokens that one fork is expected to sample: those of the rollout from this turn on.
    """

    rollout: int
    turn: int
    weight: float
    cost: int


def candidates(
    trajectories: Sequence[Trajectory], scored: Sequence[ScoredRollout], settings: ForkSettings, *, first: int = 0
) -> list[Candidate]:
    """Weigh the turns of complete task groups.

    First turns are not forked: they are what the rollouts of a task group have in common anyway.

    Args:
        trajectories: The rollouts of this rank, (B,).
        scored: The same rollouts as estimators see them, (B,).
        settings: The settings.
        first: Index of the first one among the rollouts of all ranks.

    Raises:
        ConfigError: A rollout has turns of several roles.
    """
    if any(map(has_several_roles, scored)):
        raise ConfigError("rollouts with turns of several roles cannot be forked in training: set fork_budget=0")
    places = [(i, k) for i, one in enumerate(scored) if one.included for k in range(1, len(one.turn_rewards))]
    weights = _WEIGHTS[settings.at](places, trajectories, scored)
    return [
        Candidate(
            rollout=first + i,
            turn=k,
            weight=weight,
            cost=sum(turn.stop - turn.start for turn in trajectories[i].turns[k:]),
        )
        for (i, k), weight in zip(places, weights, strict=True)
        if weight > 0
    ]


def draw(found: Sequence[Candidate], settings: ForkSettings, num_groups: int, seed: int) -> list[Candidate]:
    """Draw turns without replacement, by weight, as long as their expected cost stays within the budget.

    Args:
        found: The candidates of all ranks.
        settings: The settings.
        num_groups: Number of task groups of all ranks, which the budget is for.
        seed: Seed of the draws.
    """
    generator = random.Random(seed)
    # Efraimidis & Spirakis 2006: the largest of u^(1/w) are a weighted sample without replacement.
    keys = [generator.random() ** (1 / one.weight) for one in found]
    left, chosen = settings.budget * num_groups, list[Candidate]()
    for place in sorted(range(len(found)), key=lambda place: -keys[place]):
        left -= settings.width * found[place].cost
        if left < 0:
            break
        chosen.append(found[place])
    return sorted(chosen, key=lambda one: (one.rollout, one.turn))


_Places = Sequence[tuple[int, int]]


def _uniform(places: _Places, _trajectories: Sequence[Trajectory], _scored: Sequence[ScoredRollout]) -> list[float]:
    return [1.0] * len(places)


def _by_entropy(places: _Places, trajectories: Sequence[Trajectory], scored: Sequence[ScoredRollout]) -> list[float]:
    surprises: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for i, k in places:
        turn, logprobs = trajectories[i].turns[k], trajectories[i].logprobs
        if logprobs is not None and turn.stop > turn.start:
            surprises[scored[i].group, k].append(-sum(logprobs[turn.start : turn.stop]))
    means = {key: fmean(own) for key, own in surprises.items()}
    return [means.get((scored[i].group, k), 0.0) for i, k in places]


def _by_value(places: _Places, _trajectories: Sequence[Trajectory], scored: Sequence[ScoredRollout]) -> list[float]:
    returns = [discounted_returns(one.turn_rewards, discount=1.0) for one in scored]
    keys = [(scored[i].group, scored[i].state_keys[k]) for i, k in places]
    by_state: defaultdict[Hashable, list[float]] = defaultdict(list)
    by_turn: defaultdict[Hashable, list[float]] = defaultdict(list)
    for (i, k), key in zip(places, keys, strict=True):
        by_state[key].append(returns[i][k])
        by_turn[scored[i].group, k].append(returns[i][k])
    return [
        pstdev(by_state[key] if key[1] is not None and len(by_state[key]) > 1 else by_turn[key[0], k])
        for (_, k), key in zip(places, keys, strict=True)
    ]


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
