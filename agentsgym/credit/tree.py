"""Estimate advantages from rollouts that share their first turns: the forks of a task group form a tree.

The rules that all estimators share, and ``scale``, are described in :mod:`agentsgym.credit.advantages`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from agentsgym.credit._comparison import Sample, Scale, center, mean_of_others
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.traits import estimator_traits
from agentsgym.fields import check_choice


@estimator_traits(uses=["discount", "turn_rewards", "owners"], compares_in_task_groups=True)
def tree(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,
    scale: Scale = "group",
    weights: Literal["equal", "shared"] = "equal",
) -> list[list[float]]:
    """Each turn's mean return over all rollouts that continue it, against turns sampled in the same state.

    ``A_k = Q_k - b_k`` with ``Q_k = r_k + γ · mean_c Q_c`` over the turns c that were sampled after turn k. A *branch*
    is a state in which several turns were sampled, by a rollout and its forks; the start of a task group is one, too.
    b is the mean over the other turns of the last branch: of their Q at the branch itself (leave-one-out, Kool et al.
    2019), and after it of the Q of the turns with the same index k that followed them. With a fork in every turn, Q and
    b are Monte-Carlo values (VinePPO, 2410.01679) that include the rollout itself. Without forks, this is
    :func:`~agentsgym.credit.returns.return_to_go`.

    A turn that forks share gets one advantage, in the rollout that sampled it, and 0 in its forks. With
    ``weights="equal"`` every turn counts alike, so the turns after a branch count more than in rollouts without forks,
    which changes the direction of the gradient. ``weights="shared"`` divides the weight of a rollout among the turns of
    a branch: with ``scale="none"`` and no discount, the estimate of the gradient is then unbiased if the turns to fork
    are chosen independently of what follows them.

    Args:
        rollouts: The batch.
        discount: γ.
        scale: The divisor of the differences.
        weights: ``"equal"`` or ``"shared"``.

    Raises:
        ConfigError: ``scale`` or ``weights`` is unknown.

    >>> whole, fork = (
    ...     ScoredRollout(turn_rewards=[0.0, r], final_reward=r, group=0, state_keys=[None] * 2, owners=[0, owner])
    ...     for r, owner in ((1.0, 0), (0.0, 1))
    ... )
    >>> other = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], owners=[2])
    >>> tree([whole, fork, other], scale="none")
    [[-0.5, 1.0], [0.0, -1.0], [0.5]]
    """
    check_choice("weights", weights, ("equal", "shared"))
    starts: defaultdict[int, _Node] = defaultdict(_Node)
    for i, rollout in enumerate(rollouts):
        if rollout.included:
            _grow(starts[rollout.group], rollout, i)
    for start in starts.values():
        _evaluate(start, discount)
    samples = [sample for group, start in starts.items() for sample in _samples(start, (group,), 0)]
    advantages = center(rollouts, samples, mean_of_others, scale)
    if weights == "shared":
        for start in starts.values():
            for index, k, weight in _shared_weights(start):
                advantages[index][k] *= weight
    return advantages


@dataclass(slots=True, eq=False)
class _Node:
    """A turn of one or several rollouts, or the start of a task group.

    Attributes:
        index: Index of a rollout that has the turn, which is the one that sampled it if that is included.
        is_own: Whether this rollout sampled it.
        reward: The turn's reward.
        levels: Q of the turn, and the mean Q of the turns that follow it after one, two, … turns.
        children: The turns sampled after it, by owner.
    """

    index: int = -1
    is_own: bool = False
    reward: float = 0.0
    levels: list[float] = field(default_factory=list[float])
    children: dict[Hashable, _Node] = field(default_factory=dict[Hashable, "_Node"])


def _grow(start: _Node, rollout: ScoredRollout, index: int) -> None:
    """Add a rollout to the tree of its task group."""
    owners = rollout.owners or [("unshared", index)] * len(rollout.turn_rewards)
    node = start
    for owner, reward in zip(owners, rollout.turn_rewards, strict=True):
        node = node.children.setdefault(owner, _Node(index, reward=reward))
        if owner == owners[-1]:
            node.index, node.is_own = index, True


def _evaluate(start: _Node, discount: float) -> None:
    """Compute Q from the leaves up."""
    order = [start]
    for node in order:
        order += node.children.values()
    for node in reversed(order):
        below = [child.levels for child in node.children.values()]
        following = below[0] if len(below) == 1 else [*map(_mean, zip_longest(*below))]
        node.levels = [node.reward + discount * (following[0] if following else 0.0), *following]


def _mean(level: Sequence[float | None]) -> float:
    known = [one for one in level if one is not None]
    return sum(known) / len(known)


def _shared_weights(start: _Node) -> Iterator[tuple[int, int, float]]:
    """Yield (rollout, turn, weight): each turn's share of the rollouts that start the task group, 1 each."""
    level = [(child, 1.0) for child in start.children.values()]
    k = 0
    while level:
        yield from ((node.index, k, weight) for node, weight in level if node.is_own)
        level = [(child, weight / len(node.children)) for node, weight in level for child in node.children.values()]
        k += 1


def _samples(branch: _Node, name: tuple[Hashable, ...], depth: int) -> Iterator[Sample]:
    """Yield what a branch compares, and then what the branches below it compare."""
    for owner, child in branch.children.items():
        node: _Node | None = child
        for k, value in enumerate(child.levels, depth):
            turns = (k,) if node is not None and node.is_own else ()
            yield Sample(value=value, rollout_index=(node or child).index, turns=turns, group=(name, k))
            if node is not None and len(node.children) > 1:
                yield from _samples(node, (*name, owner, k), k + 1)
                node = None
            elif node is not None:
                node = next(iter(node.children.values()), None)
