"""Estimate advantages from returns and turn rewards, compared turn by turn.

The rules that all estimators share, and ``scale``, are described in :mod:`agentsgym.credit.advantages`.

**The baselines of** :func:`return_to_go`. No baseline depends on the rollout that it is subtracted from, so with
``scale="none"`` and no discount each gives an unbiased estimate of the gradient; they differ in variance. If
there is no other rollout to compare with, b is 0 (and the advantage is 0 with ``scale="group"``, since there is no
spread). ``"others"`` is leave-one-out (Kool et al. 2019; 2402.14740) over the rollouts that have a turn k: if there is
only one, its b is 0, since an advantage of 0 instead would weight late turns too little.
``"role_ema"`` updates ``b ← decay·b + (1 - decay)·mean G`` from b = 0, once per call for each environment and role of
the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean
from typing import Final, Literal, get_args

from agentsgym.credit._comparison import (
    BaselineFn,
    Sample,
    Scale,
    by_group,
    center,
    center_on,
    final_rewards,
    mean_of_all,
    mean_of_others,
    turn_values,
)
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.traits import Declaration, EstimatorTraits, Options, Use, estimator_traits
from agentsgym.errors import ConfigError
from agentsgym.fields import check_choice, check_number

Baseline = Literal["self", "others"]
Follow = Literal["turns", "calls"]
ReturnBaseline = Literal["none", "batch", "others", "role_ema"]
GroupOf = Callable[[ScoredRollout, int], Hashable]

_DECAY = 0.95
_RETURNS: Final[tuple[Use, ...]] = ("discount", "turn_rewards")


def discounted_returns(rewards: Sequence[float], *, discount: float) -> list[float]:
    """Sum each turn's reward and the later rewards, ``G_k = r_k + γ·G_{k+1}`` (Sutton & Barto 2018, eq. 3.9).

    Args:
        rewards: One reward per turn, (K,).
        discount: γ in [0, 1].

    Returns:
        One return per turn, (K,).

    >>> discounted_returns([0.0, 0.0, 1.0], discount=0.5)
    [0.25, 0.5, 1.0]
    """
    returns: list[float] = []
    following = 0.0
    for own in reversed(rewards):
        following = own + discount * following
        returns.append(following)
    return returns[::-1]


def call_returns(rewards: Sequence[float], parents: Sequence[int | None], *, discount: float) -> list[float]:
    """Add to each call's reward the mean return of its children, ``G_k = r_k + γ · mean_c G_c``.

    This is AReaL's discounting over a tree of calls (pull request 1666 of its repository). c are the turns whose parent
    is k; without any, ``G_k = r_k``. If each turn is the parent of the next one, these are :func:`discounted_returns`.

    Args:
        rewards: One reward per turn, (K,).
        parents: The index of the earlier turn that each turn follows, (K,), None for a root.
        discount: γ in [0, 1].

    Returns:
        One return per turn, (K,).

    >>> call_returns([0.0, 1.0, 0.0, 3.0], [None, 0, 0, 2], discount=1.0)
    [2.0, 1.0, 3.0, 3.0]
    """
    returns = [*rewards]
    children: defaultdict[int | None, list[float]] = defaultdict(list)
    for k in reversed(range(len(returns))):
        if k in children:
            returns[k] += discount * fmean(children[k])
        children[parents[k]].append(returns[k])
    return returns


def _return_to_go_traits(options: Options) -> EstimatorTraits:
    baseline = options.get("baseline", "others")
    uses: list[Use] = [*_RETURNS]
    if baseline in ("none", "role_ema"):  # "none" scales by role
        uses.append("roles")
    if options.get("follow") == "calls":
        uses.append("parents")
    return EstimatorTraits(uses=frozenset(uses), compares_in_task_groups=baseline == "others")


@Declaration(
    traits_of=_return_to_go_traits, keeps_state=lambda options: options.get("baseline") == "role_ema"
).attach_to
def return_to_go(  # noqa: PLR0913  # three are those of all estimators, the others are options
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,
    scale: Scale = "group",
    baseline: ReturnBaseline = "others",
    decay: float | None = None,
    follow: Follow = "turns",
    state: EMABaselines | None = None,
) -> list[list[float]]:
    """Each turn's return against a baseline, ``A_k,i = G_k,i - b_k,i``: REINFORCE with reward-to-go.

    =============  =======================================================================  ======================
    ``baseline``   b                                                                        groups of ``scale``
    =============  =======================================================================  ======================
    ``"others"``   mean of G over the task group's other rollouts at the same turn index k  task group and k
    ``"batch"``    mean of G over all turns of the environment's other rollouts             environment
    ``"role_ema"`` moving average of G by (env, role), as it was before this batch          environment and role
    ``"none"``     0                                                                        environment and role
    =============  =======================================================================  ======================

    With ``follow="calls"``, G are the :func:`call_returns`: a reward counts only for its turn and the ancestors of this
    turn. This removes the noise of other branches, but is biased unless the turns of each rollout form a chain. The
    mean counts the branches of a turn equally, so this is not the gradient of the total reward: a turn that starts two
    calls with a reward of 1 each gets a return of 1, less than a turn with a reward of 1.5 and no calls. And a turn
    gets no credit for the rewards of other branches, even if these use its result.

    Args:
        rollouts: The batch.
        discount: γ in ``G_k = r_k + γ·G_{k+1}``.
        scale: The divisor of the difference; for the last two baselines, the standard deviation is about b.
        baseline: One of the four baselines.
        decay: The weight of the old moving average in each update, in [0, 1]; None for 0.95, or if there is none.
        follow: What follows a turn: ``"turns"``, the rollout's next turn; or ``"calls"``, the turns whose parent it is
            (:attr:`agentsgym.types.Turn.parent`). A turn without parent is then a root, so without any parents, each
            turn's return is its own reward; training refuses this in the first batch.
        state: Moving averages; without them, each call starts from 0.

    Raises:
        ConfigError: An option is invalid or unused, or an environment or role cannot be stored in a checkpoint.

    >>> long = ScoredRollout(turn_rewards=[1.0, 2.0], final_reward=3.0, group=0, state_keys=[None] * 2)
    >>> short = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None])
    >>> return_to_go([long, short], scale="none")
    [[2.0, 2.0], [-2.0]]
    >>> return_to_go([long, short], scale="none", baseline="batch")
    [[2.0, 1.0], [-1.5]]
    """
    check_choice("baseline", baseline, _GROUPS)
    check_choice("follow", follow, get_args(Follow))
    if decay is not None:
        check_number("decay", decay, 0.0, 1.0)
        if baseline != "role_ema":
            raise ConfigError(
                f"decay can be set only with baseline='role_ema', got decay={decay!r} with baseline={baseline!r}"
            )
    samples = _returns(rollouts, discount, _GROUPS[baseline], follow)
    if baseline == "none":
        return center_on(rollouts, samples, lambda _group: 0.0, scale)
    if baseline != "role_ema":
        return center(rollouts, samples, mean_of_others, scale)
    averages = EMABaselines() if state is None else state
    advantages = center_on(rollouts, samples, averages.get, scale)
    for group, indices in by_group(samples).items():
        mean = fmean([samples[index].value for index in indices])
        averages.update(group, mean, decay=_DECAY if decay is None else decay)
    return advantages


@estimator_traits(uses=_RETURNS)
def rebn(rollouts: Sequence[ScoredRollout], *, discount: float = 1.0, scale: Scale = "group") -> list[list[float]]:
    """Each turn's return against the entire batch, ``A_k = (G_k - mean G) / (std G + 1e-4)`` (ReBN, 2510.01051).

    The mean and the standard deviation are over all turns of the same environment in the batch, across tasks and
    including the turn itself. No task groups are needed, but the difficulty of a task becomes part of the advantage,
    and long rollouts weigh more in the mean.
    Biased, because the rollout's returns are part of the mean and the standard deviation. The bias decreases with the
    number of rollouts: a large batch nearly preserves the gradient's direction, a batch of a few rollouts does not. The
    paper adds 1e-9 to the standard deviation.

    Args:
        rollouts: The batch.
        discount: γ in ``G_k = r_k + γ·G_{k+1}``; below 1 in the paper.
        scale: The divisor of the difference; ``"group"``, as in the paper, is the environment's standard deviation.

    Raises:
        ConfigError: ``scale`` is unknown.

    >>> rollout = ScoredRollout(turn_rewards=[1.0, 2.0], final_reward=3.0, group=0, state_keys=[None] * 2)
    >>> rebn([rollout], scale="none")
    [[0.5, -0.5]]
    """
    return center(rollouts, _returns(rollouts, discount, _same_environment), mean_of_all, scale)


@estimator_traits(uses=["turn_rewards", "final_reward"], compares_in_task_groups=True)
def mt_grpo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # all estimators have these arguments
    scale: Scale = "group",
    turn_weight: float = 1.0,
) -> list[list[float]]:
    """The outcome for every turn, plus the turn's own reward for all but the last turn (MT-GRPO, 2505.11821).

    ``A_k = A_O + c·A_T,k``, and ``A_k = A_O`` for the last turn of a rollout. ``A_O`` is the advantage of
    :func:`~agentsgym.credit.outcomes.grpo`; ``A_T,k = (r_k - mean r_k) / (std r_k + 1e-4)`` compares the turn's
    reward with the rewards of the same turn in the task group's rollouts that continued after it. With two turns, this
    is the formula of the paper, whose outcome reward corresponds to the final reward.

    Biased, even with ``scale="none"``: c·A_T depends only on a turn's immediate reward and not on its consequences, so
    it adds the gradient of the immediate rewards to the gradient of R. Besides, which rollouts are compared at k
    depends on which of them continued. A turn with an immediate reward and a higher later cost gets a positive
    advantage.

    Args:
        rollouts: The batch.
        discount: Not used: R and the rewards of turns are not discounted.
        scale: The divisor of the differences, computed separately for ``A_O`` and ``A_T``.
        turn_weight: c, the weight of ``A_T``.

    Raises:
        ConfigError: ``turn_weight`` or ``scale`` is invalid.

    >>> one, two = (
    ...     ScoredRollout(turn_rewards=[r, 1.0], final_reward=1.0, group=0, state_keys=[None] * 2) for r in (0.0, 0.5)
    ... )
    >>> mt_grpo([one, two], scale="none")
    [[-0.25, 0.0], [0.25, 0.0]]
    """
    check_number("turn_weight", turn_weight, 0.0)
    turns = turn_values(rollouts, lambda one: one.turn_rewards[:-1], _same_turn)
    return _sum(
        center(rollouts, final_rewards(rollouts), mean_of_all, scale),
        center(rollouts, turns, mean_of_all, scale),
        turn_weight,
    )


@estimator_traits(uses=[*_RETURNS, "final_reward", "state_keys"], compares_in_task_groups=True)
def gigpo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,
    scale: Scale = "group",
    step_weight: float = 1.0,
    baseline: Baseline = "self",
) -> list[list[float]]:
    """The rollout against its task group, and each turn against turns in the same state (GiGPO, 2505.10978).

    ``A_k = A_E + w·A_S,k``, where ``A_E`` is the advantage of :func:`~agentsgym.credit.outcomes.grpo` and
    ``A_S,k = (G_k - mean_s G) / (std_s G + 1e-4)`` is over all turns of the task group with the state key of turn k.
    ``A_S`` is 0 if no other turn is in the same state or the environment returns no key, so without any keys this is
    ``grpo``.

    ``baseline="self"``, the default, is that of the paper: the mean includes the turn that it is subtracted from. A
    rollout that returns to a state is then compared with its own future, which biases the gradient. Published results
    use this form, and ``scale="group"`` changes the exact direction in any case.
    ``baseline="others"`` excludes the entire rollout from its baselines, so that ``A_E`` is the advantage of ``rloo``:
    with ``scale="none"`` and no discount, the expected result is exactly ``1 + w`` times the gradient. If no other
    rollout was in the state, the baseline is 0 (with ``scale="group"``, the advantage is 0).

    Args:
        rollouts: The batch.
        discount: γ in ``G_k = r_k + γ·G_{k+1}``; 0.95 in the paper.
        scale: The divisor of the differences, computed separately for ``A_E`` and ``A_S``.
        step_weight: w.
        baseline: ``"self"`` or ``"others"``.

    Raises:
        ConfigError: ``baseline``, ``step_weight`` or ``scale`` is invalid.

    >>> left, right = (
    ...     ScoredRollout(turn_rewards=[0.0, r], final_reward=r, group=0, state_keys=["start", r]) for r in (1.0, 3.0)
    ... )
    >>> gigpo([left, right], scale="none")
    [[-2.0, -1.0], [2.0, 1.0]]
    """
    check_choice("baseline", baseline, _MEANS)
    check_number("step_weight", step_weight, 0.0)
    mean = _MEANS[baseline]
    return _sum(
        center(rollouts, final_rewards(rollouts), mean, scale),
        center(rollouts, _returns(rollouts, discount, same_state), mean, scale),
        step_weight,
    )


def same_state(rollout: ScoredRollout, k: int) -> Hashable:
    """The group within which :func:`gigpo` compares a turn: task group and state key; None without a key."""
    key = rollout.state_keys[k]
    return None if key is None else (rollout.group, key)


def _same_turn(rollout: ScoredRollout, k: int) -> Hashable:
    return rollout.group, k


def _same_environment(rollout: ScoredRollout, _k: int) -> Hashable:
    return rollout.environment, *rollout.final_rewards  # in a part of a split rollout, the key of these is its role


def _same_role(rollout: ScoredRollout, k: int) -> Hashable:
    return rollout.environment, rollout.role(k)


_MEANS: Final[Mapping[str, BaselineFn]] = {"self": mean_of_all, "others": mean_of_others}
_GROUPS: Final[Mapping[str, GroupOf]] = {
    "none": _same_role,
    "batch": _same_environment,
    "others": _same_turn,
    "role_ema": _same_role,
}


def _returns(
    rollouts: Sequence[ScoredRollout], discount: float, group_of: GroupOf, follow: Follow = "turns"
) -> list[Sample]:
    def returns_of(one: ScoredRollout) -> list[float]:
        if follow == "turns":
            return discounted_returns(one.turn_rewards, discount=discount)
        return call_returns(one.turn_rewards, one.parents or [None] * len(one.turn_rewards), discount=discount)

    return turn_values(rollouts, returns_of, group_of)


def _sum(first: list[list[float]], second: list[list[float]], weight: float) -> list[list[float]]:
    return [
        [one + weight * other for one, other in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)
    ]
