"""Advantage estimators: from the rewards of task groups to one number a turn.

An estimator is a plain function of the rollouts of a whole batch. What it returns, one number for each turn of each
rollout, multiplies the policy gradient of that turn's tokens (:func:`token_advantages`). All share three rules:

* ``R`` of a rollout is its final reward; ``G_k`` is the return of turn k, what it was paid and what follows it.
* A failed rollout is in no baseline and no spread, and gets 0.0 for every turn.
* Where all that is compared is equal, the advantage is exactly 0.0, not what floating point leaves over.

``scale`` says what a value minus its baseline is divided by, within the groups that the estimator compares:
``"none"`` nothing; ``"group"`` ``s + 1e-4``, s the standard deviation (n - 1 in the denominator, as in TRL) of the
values compared; ``"batch"`` ``s + 1e-4``, s that of all such differences in the batch, about 0, where their mean
lies. Only ``"none"`` leaves an unbiased estimator unbiased; ``"batch"`` all but keeps its direction; ``"group"``
often learns faster, but points the wrong way in expectation where groups are small and wins are rare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal, Protocol, Self

from agentsgym.credit._comparison import Mean, Sample, Scale, compare, mean_of_all, mean_of_others, nearly_equal
from agentsgym.credit.rewards import credited_turn_rewards, place_on_tokens, token_counts
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.types import Trajectory

Baseline = Literal["self", "others"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """What an estimator sees of one rollout: scalars and keys, no tokens.

    Attributes:
        turn_rewards: What each turn is paid, after ``turn_credit``, (K,).
        final_reward: R, the reward of the whole rollout, whatever the ``turn_credit``.
        group: Which task group it belongs to, unique over the whole batch.
        state_keys: Equal keys within a task group are the same decision problem, (K,); None where the game does not
            say.
        failed: Whether the environment or the agent broke.
    """

    turn_rewards: Sequence[float]
    final_reward: float
    group: int
    state_keys: Sequence[Hashable]
    failed: bool = False

    def __post_init__(self) -> None:
        if len(self.turn_rewards) != len(self.state_keys):
            raise ValueError(
                f"each turn needs a reward and a state key, got {len(self.turn_rewards)} and {len(self.state_keys)}"
            )

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, *, group: int, turn_credit: str = "step") -> Self:
        """Take from a trajectory what the estimators need.

        Args:
            trajectory: One rollout.
            group: Which task group it belongs to, unique over the whole batch.
            turn_credit: Which turn is paid, a key of :data:`agentsgym.credit.rewards.TURN_CREDITS`.

        Raises:
            ConfigError: ``turn_credit`` is unknown.
        """
        return cls(
            turn_rewards=credited_turn_rewards(
                trajectory.turn_rewards, trajectory.final_reward, token_counts(trajectory), turn_credit
            ),
            final_reward=trajectory.final_reward,
            group=group,
            state_keys=[turn.state_key for turn in trajectory.turns],
            failed=trajectory.failed,
        )


class Estimator(Protocol):
    """What a function must look like to estimate advantages."""

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[float]]:
        """Return one number for each turn of each rollout."""
        ...


def reward(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # every estimator is called alike
    scale: Scale = "group",  # noqa: ARG001  # likewise
) -> list[list[float]]:
    """Each turn's own reward, ``A_k = r_k``: no baseline, no look ahead, no scale.

    The one estimator that works token by token: :func:`token_advantages` takes the trajectory's per-token rewards,
    in which ``_calculate_rewards`` of the environment has the last word, in place of these numbers.

    Args:
        rollouts: The batch.
        discount: Not used.
        scale: Not used.

    Returns:
        One number for each turn of each rollout.
    """
    return [[0.0] * len(rollout.turn_rewards) if rollout.failed else list(rollout.turn_rewards) for rollout in rollouts]


def grpo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # every estimator is called alike
    scale: Scale = "group",
) -> list[list[float]]:
    """The final reward against its task group's mean, ``A_k = (R - mean_g R) / (std_g R + 1e-4)`` (GRPO, 2402.03300).

    The same number for every turn. With ``scale="none"`` it is the form of Dr. GRPO (2503.20783), in expectation
    ``(n - 1) / n`` times the gradient of a group of n. A group of one gets 0.

    Args:
        rollouts: The batch.
        discount: Not used: R is never discounted.
        scale: What the difference is divided by.

    Returns:
        One number for each turn of each rollout.

    >>> pair = [ScoredRollout(turn_rewards=[r], final_reward=r, group=0, state_keys=[None]) for r in (1.0, 3.0)]
    >>> grpo(pair, scale="none")
    [[-1.0], [1.0]]
    """
    return _compare_final_rewards(rollouts, mean_of_all, scale)


def rloo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # every estimator is called alike
    scale: Scale = "group",
) -> list[list[float]]:
    """The final reward against the mean of the others, ``A_k,i = R_i - mean_{j≠i} R_j`` (RLOO, 2402.14740).

    The same number for every turn. With ``scale="none"``, as in the paper, an unbiased estimate of the gradient; a
    group of one then has the baseline 0. With ``scale="group"`` a group of one gets 0, since it has no spread.

    Args:
        rollouts: The batch.
        discount: Not used: R is never discounted.
        scale: What the difference is divided by.

    Returns:
        One number for each turn of each rollout.

    >>> pair = [ScoredRollout(turn_rewards=[r], final_reward=r, group=0, state_keys=[None]) for r in (1.0, 3.0)]
    >>> rloo(pair, scale="none")
    [[-2.0], [2.0]]
    """
    return _compare_final_rewards(rollouts, mean_of_others, scale)


def return_to_go(
    rollouts: Sequence[ScoredRollout], *, discount: float = 1.0, scale: Scale = "group"
) -> list[list[float]]:
    """Each turn's return against that of the others at the same turn, ``A_k,i = G_k,i - mean_{j≠i} G_k,j``.

    REINFORCE with reward to go and a leave-one-out baseline (Kool et al. 2019; 2402.14740) for each turn index k of
    each task group, over the rollouts that are still in play at k. With ``scale="none"`` and no discount an unbiased
    estimate of the gradient, also though rollouts differ in length: the last one in play has the baseline 0, since
    any other choice that spares it (an advantage of 0, say) weighs late turns too little. With ``scale="group"`` the
    last one gets 0, since it has no spread to be divided by.

    Args:
        rollouts: The batch.
        discount: γ in ``G_k = r_k + γ·G_{k+1}``.
        scale: What the difference is divided by.

    Returns:
        One number for each turn of each rollout.

    >>> long = ScoredRollout(turn_rewards=[1.0, 2.0], final_reward=3.0, group=0, state_keys=[None] * 2)
    >>> short = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None])
    >>> return_to_go([long, short], scale="none")
    [[2.0, 2.0], [-2.0]]
    """
    return _compare_returns(rollouts, lambda rollout, k: (rollout.group, k), discount, mean_of_others, scale)


def gigpo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,
    scale: Scale = "group",
    step_weight: float = 1.0,
    baseline: Baseline = "self",
) -> list[list[float]]:
    """The whole rollout against its task group, and each turn against those in the same state (GiGPO, 2505.10978).

    ``A_k = A_E + w·A_S,k`` with ``A_E`` that of :func:`grpo` and ``A_S,k = (G_k - mean_s G) / (std_s G + 1e-4)``
    over all turns of the task group whose state key is that of turn k. ``A_S`` is 0 where nothing is in the same
    state and where the game gives no key, so without any keys this is :func:`grpo`.

    ``baseline="self"``, the default, is the paper's: the mean includes what it is compared with. A rollout that
    comes back to a state then holds its own future against itself, which bends the gradient; what remains is the
    form with published results, and under ``scale="group"`` the exact direction is given up anyway.
    ``baseline="others"`` leaves the whole rollout out of its baselines, ``A_E`` being that of :func:`rloo`: with
    ``scale="none"`` and no discount it is in expectation exactly ``1 + w`` times the gradient. Where no other rollout
    was in the state, the baseline is then 0 (under ``scale="group"`` the advantage is).

    Args:
        rollouts: The batch.
        discount: γ in ``G_k = r_k + γ·G_{k+1}``; 0.95 in the paper.
        scale: What the differences are divided by, ``A_E`` and ``A_S`` each for itself.
        step_weight: w, the weight of ``A_S``.
        baseline: ``"self"`` or ``"others"``.

    Returns:
        One number for each turn of each rollout.

    Raises:
        ConfigError: ``baseline`` or ``scale`` is unknown.

    >>> left, right = (
    ...     ScoredRollout(turn_rewards=[0.0, r], final_reward=r, group=0, state_keys=["start", r]) for r in (1.0, 3.0)
    ... )
    >>> gigpo([left, right], scale="none")
    [[-2.0, -1.0], [2.0, 1.0]]
    """
    if baseline not in _BASELINES:
        raise ConfigError(f"baseline is unknown: {baseline!r}{did_you_mean(str(baseline), _BASELINES)}")
    mean = _BASELINES[baseline]
    whole = _compare_final_rewards(rollouts, mean, scale)
    steps = _compare_returns(rollouts, _same_state, discount, mean, scale)
    return [
        [whole_k + step_weight * step_k for whole_k, step_k in zip(*pair, strict=True)]
        for pair in zip(whole, steps, strict=True)
    ]


ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "reward": reward,
    "grpo": grpo,
    "rloo": rloo,
    "return_to_go": return_to_go,
    "gigpo": gigpo,
}


def get_estimator(name_or_callable: str | Estimator) -> Estimator:
    """Find an estimator by name, and take a callable as it is.

    Args:
        name_or_callable: A key of :data:`ESTIMATORS`, or a function that looks like :class:`Estimator`.

    Raises:
        ConfigError: It is neither.
    """
    if callable(name_or_callable):
        return name_or_callable
    if name_or_callable not in ESTIMATORS:
        hint = did_you_mean(str(name_or_callable), ESTIMATORS)
        raise ConfigError(f"advantage_estimator is neither known nor callable: {name_or_callable!r}{hint}")
    return ESTIMATORS[name_or_callable]


def token_advantages(trajectory: Trajectory, turn_advantages: Sequence[float], *, estimator: Estimator) -> list[float]:
    """Put what an estimator gave for a rollout on the rollout's tokens.

    Args:
        trajectory: The rollout.
        turn_advantages: What ``estimator`` returned for it, (K,).
        estimator: Who returned it; for :func:`reward` the trajectory's per-token rewards are taken instead.

    Returns:
        (T,): 0.0 on environment tokens, and on all tokens of a failed rollout under :func:`reward`.

    Raises:
        ValueError: There is not one number for each turn.
    """
    if estimator is not reward:
        return expand_to_tokens(trajectory, turn_advantages)
    if trajectory.failed or not trajectory.per_token_rewards:
        return [0.0] * len(trajectory.token_ids)
    return list(trajectory.per_token_rewards)


def expand_to_tokens(trajectory: Trajectory, turn_advantages: Sequence[float]) -> list[float]:
    """Put each turn's number on all of its tokens.

    Args:
        trajectory: Gives the spans of the turns and the number of tokens T.
        turn_advantages: One number a turn, (K,).

    Returns:
        (T,), 0.0 on every environment token.

    Raises:
        ValueError: There is not one number for each turn.
    """
    return place_on_tokens(trajectory, turn_advantages, "each")


def discounted_returns(rewards: Sequence[float], *, discount: float) -> list[float]:
    """Sum each turn's reward and what follows it, ``G_k = r_k + γ·G_{k+1}`` (Sutton & Barto 2018, eq. 3.9).

    Args:
        rewards: One a turn, (K,).
        discount: γ in [0, 1].

    Returns:
        One return a turn, (K,).

    >>> discounted_returns([0.0, 0.0, 1.0], discount=0.5)
    [0.25, 0.5, 1.0]
    """
    returns: list[float] = []
    following = 0.0
    for own in reversed(rewards):
        following = own + discount * following
        returns.append(following)
    return returns[::-1]


def zero_variance_share(rollouts: Sequence[ScoredRollout]) -> float:
    """The share of task groups whose final rewards are all equal, so that :func:`grpo` learns nothing from them.

    A group of one counts as equal; failed rollouts, and groups that have no other, do not count.

    Args:
        rollouts: The batch.

    Returns:
        In [0, 1]; 0.0 without any group.
    """
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.failed:
            groups[rollout.group].append(rollout.final_reward)
    return fmean(map(nearly_equal, groups.values())) if groups else 0.0


_BASELINES: Final[Mapping[str, Mean]] = {"self": mean_of_all, "others": mean_of_others}


def _compare_final_rewards(rollouts: Sequence[ScoredRollout], mean: Mean, scale: Scale) -> list[list[float]]:
    """Compare final rewards within task groups; each rollout's number stands for all of its turns."""
    played = [i for i, rollout in enumerate(rollouts) if not rollout.failed]
    samples = [Sample(value=rollouts[i].final_reward, rollout=i, group=rollouts[i].group) for i in played]
    numbers = dict(zip(played, compare(samples, mean, scale), strict=True))
    return [[numbers.get(i, 0.0)] * len(rollout.turn_rewards) for i, rollout in enumerate(rollouts)]


def _same_state(rollout: ScoredRollout, k: int) -> Hashable:
    key = rollout.state_keys[k]
    return None if key is None else (rollout.group, key)


def _compare_returns(
    rollouts: Sequence[ScoredRollout],
    group_of: Callable[[ScoredRollout, int], Hashable],
    discount: float,
    mean: Mean,
    scale: Scale,
) -> list[list[float]]:
    """Compare the returns of turns that ``group_of`` puts together; a turn that it gives None gets 0."""
    places: list[tuple[int, int]] = []
    samples: list[Sample] = []
    for i, rollout in enumerate(rollouts):
        if rollout.failed:
            continue
        for k, value in enumerate(discounted_returns(rollout.turn_rewards, discount=discount)):
            group = group_of(rollout, k)
            if group is not None:
                places.append((i, k))
                samples.append(Sample(value=value, rollout=i, group=group))
    advantages = [[0.0] * len(rollout.turn_rewards) for rollout in rollouts]
    for (i, k), number in zip(places, compare(samples, mean, scale), strict=True):
        advantages[i][k] = number
    return advantages
