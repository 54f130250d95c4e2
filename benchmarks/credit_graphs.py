"""Learn worlds whose states recur and that reward only the win, with credit from the shared graph of a task's rollouts.

::

    python -m benchmarks.credit_graphs --games frozen_lake --seeds 0 1 2     # from the repository's root
    python -m benchmarks.credit_graphs --ratios [runs.jsonl]
    python -m benchmarks.credit_graphs --directions

As in :mod:`benchmarks.credit`, every arm of a game and a seed learns from the same warm start on the same tasks. The
candidates of papers from 2026 are plain callables here; where a text leaves a choice open, each choice is an arm. The
states of a task's rollouts are the nodes of a graph, and its edges are their turns. ``coin_collector`` and
``households`` need the extras alfworld and textworld.
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal, cast

import numpy as np

from agentsgym.credit._comparison import Scale, center, final_rewards, mean_of_all, turn_values
from agentsgym.credit.registry import get_estimator
from agentsgym.credit.returns import discounted_returns, same_state
from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs.Gymnasium import GymnasiumEnv, RandomPlayer
from agentsgym.seeding import derive_seed
from agentsgym.tiny import tiny_policy
from benchmarks import credit_worlds
from benchmarks.credit import Arm, Game, main
from benchmarks.credit_report import FRACTION, Run, read_runs
from benchmarks.credit_scorecard import Row, at_turns, large_cells, pair_cells
from benchmarks.credit_watched import Watched

Numbers = list[list[float]]
Nodes = Sequence[Sequence[Hashable]]
Values = Callable[[Sequence[ScoredRollout], Nodes, float], Mapping[Hashable, float]]
GroupOf = Callable[[ScoredRollout, int], Hashable]

OUT: Final = "outputs/credit_graphs"
_END: Final = "end"


def nodes_of(rollouts: Sequence[ScoredRollout]) -> Nodes:
    """The node of each turn of each rollout, and the end after the last one, (K + 1,) each."""
    return [
        [
            *(
                (one.group, i if key is None else None, k if key is None else key)
                for k, key in enumerate(one.state_keys)
            ),
            _END,
        ]
        for i, one in enumerate(rollouts)
    ]


def mean_values(rollouts: Sequence[ScoredRollout], nodes: Nodes, discount: float) -> Mapping[Hashable, float]:
    """The mean return of all visits to a node."""
    returns: defaultdict[Hashable, list[float]] = defaultdict(list)
    for one, path in zip(rollouts, nodes, strict=True):
        for node, value in zip(path, discounted_returns(one.turn_rewards, discount=discount), strict=False):
            returns[node].append(value)
    return {node: fmean(values) for node, values in returns.items()} | {_END: 0.0}


def graph_values(rollouts: Sequence[ScoredRollout], nodes: Nodes, discount: float) -> Mapping[Hashable, float]:
    """The value of a random walk along the edges: V(s) = mean of r + γ V(s') over the turns taken in s."""
    index = {node: i for i, node in enumerate(dict.fromkeys(node for path in nodes for node in path[:-1]))}
    visits, rewards, onward = np.zeros(len(index)), np.zeros(len(index)), np.zeros((len(index), len(index)))
    for one, path in zip(rollouts, nodes, strict=True):
        for k, reward in enumerate(one.turn_rewards):
            node, following = index[path[k]], index.get(path[k + 1])
            visits[node] += 1
            rewards[node] += reward
            if following is not None:
                onward[node, following] += discount
    solved = np.linalg.solve(np.diag(visits) - onward, rewards)
    return dict(zip(index, solved.tolist(), strict=True)) | {_END: 0.0}


def best_values(rollouts: Sequence[ScoredRollout], nodes: Nodes, discount: float) -> Mapping[Hashable, float]:
    """The value of the best walk along the edges: V(s) = max of r + γ V(s') over the turns taken in s."""
    edges = {
        (path[k], r, path[k + 1])
        for one, path in zip(rollouts, nodes, strict=True)
        for k, r in enumerate(one.turn_rewards)
    }
    values: dict[Hashable, float] = dict.fromkeys((node for path in nodes for node in path), -math.inf) | {_END: 0.0}
    for _ in values:  # no shortest path is longer
        before = dict(values)
        for node, reward, following in edges:
            values[node] = max(values[node], reward + discount * values[following])
        if values == before:
            break
    return values


_VALUES: Final[Mapping[str, Values]] = {"mean": mean_values, "graph": graph_values, "best": best_values}


def _same_task(rollout: ScoredRollout, _k: int) -> Hashable:
    return rollout.group


_COMPARED: Final[Mapping[str, GroupOf]] = {"task": _same_task, "state": same_state}


def with_outcome(rollouts: Sequence[ScoredRollout], turns: Numbers, scale: Scale, weight: float = 1.0) -> Numbers:
    """The advantage of ``grpo`` plus a weighted number for each turn."""
    outcomes = center(rollouts, final_rewards(rollouts), mean_of_all, scale)
    return [[a + weight * b for a, b in zip(*rows, strict=True)] for rows in zip(outcomes, turns, strict=True)]


def compared(rollouts: Sequence[ScoredRollout], turns: Numbers, group_of: GroupOf, scale: Scale) -> Numbers:
    """Numbers of turns, standardized within the groups of these turns."""
    by_rollout = {id(one): numbers for one, numbers in zip(rollouts, turns, strict=True)}
    return center(rollouts, turn_values(rollouts, lambda one: by_rollout[id(one)], group_of), mean_of_all, scale)


def g2po(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,
    scale: Scale = "group",
    values: Literal["mean", "graph", "best"] = "mean",
    gae_lambda: float = 0.0,
    outcome: bool = True,
) -> Numbers:
    """TD errors of the values of nodes, compared over all edges of the task (G2PO, 2606.22995; GAGPO, 2605.13217).

    G2PO has ``values="mean"``, GAGPO a ``gae_lambda`` and no ``outcome``.
    """
    nodes = nodes_of(rollouts)
    worth = _VALUES[values](rollouts, nodes, discount)
    errors: Numbers = []
    for one, path in zip(rollouts, nodes, strict=True):
        row: list[float] = []
        following = 0.0
        for k in reversed(range(len(one.turn_rewards))):
            error = one.turn_rewards[k] + discount * worth[path[k + 1]] - worth[path[k]]
            following = error + discount * gae_lambda * following
            row.append(following)
        errors.append(row[::-1])
    turns = compared(rollouts, errors, _same_task, scale)
    return with_outcome(rollouts, turns, scale) if outcome else turns


def graphgpo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # all estimators have these arguments
    scale: Scale = "group",
    compare: Literal["task", "state"] = "state",
) -> Numbers:
    """By how much a turn shortens the way to a win along the edges of the task (GraphGPO, 2605.26684)."""
    nodes = [
        [*path[:-1], (one.group, "won" if one.final_reward > 0 else _END)]
        for one, path in zip(rollouts, nodes_of(rollouts), strict=True)
    ]
    before: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    for path in nodes:
        for node, following in pairwise(path):
            before[following].add(node)
    distances: dict[Hashable, float] = {(one.group, "won"): 0.0 for one in rollouts}
    reached = deque(distances)
    while reached:
        node = reached.popleft()
        for other in before[node] - distances.keys():
            distances[other] = distances[node] + 1
            reached.append(other)
    far = 1 + max(distances.values(), default=0.0)
    shortened = [
        [distances.get(node, far) - distances.get(after, far) for node, after in pairwise(path)] for path in nodes
    ]
    return with_outcome(rollouts, compared(rollouts, shortened, _COMPARED[compare], scale), scale)


def hgpo(
    rollouts: Sequence[ScoredRollout], *, discount: float = 1.0, scale: Scale = "group", depth: int = 2
) -> Numbers:
    """``gigpo`` over turns with the same state and 0 to ``depth`` states before it, in common (HGPO, 2602.22817)."""
    turns: Numbers = [[0.0] * len(one.turn_rewards) for one in rollouts]
    returns = [discounted_returns(one.turn_rewards, discount=discount) for one in rollouts]
    for length in range(depth + 1):

        def history(one: ScoredRollout, k: int, length: int = length) -> Hashable:
            return one.group, k < length, tuple(one.state_keys[max(0, k - length) : k + 1])

        weight = (length + 1) / sum(range(1, depth + 2))
        numbers = compared(rollouts, returns, history, scale)
        turns = [[a + weight * b for a, b in zip(*rows, strict=True)] for rows in zip(turns, numbers, strict=True)]
    return with_outcome(rollouts, turns, scale)


def pgpo(rollouts: Sequence[ScoredRollout], *, discount: float = 1.0, scale: Scale = "group") -> Numbers:  # noqa: ARG001
    """By how much a turn raises the mean final reward of the rollouts that visit the node (after PGPO, 2609.02236)."""
    nodes = nodes_of(rollouts)
    visits: defaultdict[Hashable, list[float]] = defaultdict(list)
    for one, path in zip(rollouts, nodes, strict=True):
        for node in {*path[:-1]}:
            visits[node].append(one.final_reward)
    raised: Numbers = []
    for one, path in zip(rollouts, nodes, strict=True):
        potentials = [*(fmean(visits[node]) for node in path[:-1]), one.final_reward]
        raised.append([after - now for now, after in pairwise(potentials)])
    return with_outcome(rollouts, compared(rollouts, raised, _same_task, scale), scale)


def _arm(estimator: Any, discount: float = 0.95, scale: str = "group") -> Arm:
    return Arm(estimator=estimator, discount=discount, scale=scale)  # the worlds themselves reward only the win


ARMS: Final[Mapping[str, Arm]] = {
    "grpo": _arm("grpo", 1.0),
    "gigpo": _arm("gigpo"),
    "gigpo_batch": _arm("gigpo", scale="batch"),
    "g2po": _arm(g2po),
    "g2po_batch": _arm(g2po, scale="batch"),
    "g2po_graph": _arm(partial(g2po, values="graph")),
    "g2po_graph_alone": _arm(partial(g2po, values="graph", outcome=False)),
    "g2po_best": _arm(partial(g2po, values="best")),
    "gagpo": _arm(partial(g2po, gae_lambda=0.95, outcome=False)),
    "gagpo_outcome": _arm(partial(g2po, gae_lambda=0.95)),
    "graphgpo": _arm(graphgpo),
    "graphgpo_task": _arm(partial(graphgpo, compare="task")),
    "hgpo": _arm(hgpo),
    "pgpo": _arm(pgpo),
}


class WatchedLake(Watched, GymnasiumEnv):
    """FrozenLake without slipping, scored by the win; a text is a word for each row of the map, and the place."""

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return " ".join([*state["map"], str(int(state["observation"]))])

    def anchors(self) -> dict[str, float]:
        """Every map has a way to the goal."""
        return {"optimal_reward": 1.0, "random_reward": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lakes(Game):
    """FrozenLake with a random map for each task.

    Attributes:
        num_maps: The number of maps to learn, each several times.
        map_size: Rows and columns of a map.
    """

    num_maps: int = 24
    map_size: int = 4

    def policy(self, seed: int) -> tuple[Any, Any]:
        """Make the model, and a tokenizer that knows the rows of all maps."""
        env = self.make()
        tasks = self.tasks("vocabulary", seed, 10 * self.num_maps)
        played = env.rollout(tasks, self.demonstrator(env, seed))
        cells = [str(cell) for cell in range(self.map_size**2)]
        return tiny_policy(sorted({*cells, *(one["content"] for game in played for one in game.messages)}), seed=seed)

    def tasks(self, purpose: str, seed: int, count: int) -> list[dict[str, Any]]:
        """Maps in a random order, all of them before one comes again."""
        rows: Any = GymnasiumEnv.get_train_dataset(size=self.num_maps, random_maps=True, map_size=self.map_size)
        maps = [row["task_data"]["map"] for row in rows]
        generator = random.Random(derive_seed("lakes", purpose, seed))
        drawn = [one for _ in range(-(-count // len(maps))) for one in generator.sample(maps, len(maps))]
        return [{"map": one, "seed": derive_seed("lake", purpose, seed, i)} for i, one in enumerate(drawn[:count])]


_COINS, _HOUSES = credit_worlds.GAMES["coin_collector"], credit_worlds.GAMES["households"]
GAMES: Final[Mapping[str, Game]] = {
    "frozen_lake": Lakes(
        env_class=WatchedLake,
        env_config={"make_kwargs": {"is_slippery": False}, "max_steps_per_episode": 20, "system_prompt": ""},
        demonstrator=lambda env, seed: RandomPlayer(env, seed=seed),
        num_demonstrations=512,
        warm_start_steps=150,
        num_episodes=7680,
        batch_size=64,
        num_evaluated=192,
    ),
    "coin_collector": replace(_COINS, env_config={**_COINS.env_config, "progress_share": 0.0}),
    "households": replace(_HOUSES, env_config={**_HOUSES.env_config, "reward": "success"}),
}


def ratios(path: Path, base: str = "gigpo") -> str:
    """The episodes to 80 % of each arm over those of ``base``, medians over seeds with 95 % bootstrap intervals.

    A run that does not reach 80 % counts with all its episodes, which are fewer than it needs.
    """
    runs: defaultdict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in read_runs(path):
        runs[run.game][run.arm][run.seed] = run
    lines = [
        "| world | arm | seeds | reached | episodes to 80 % | ratio to `gigpo` | mean of the curve | final |",
        "| --- " * 8 + "|",
    ]
    for (game, arms), arm in ((one, arm) for one in runs.items() for arm in one[1]):
        pairs = [(arms[arm][seed], arms[base][seed]) for seed in sorted(arms[arm].keys() & arms[base].keys())]
        needed = [(_episodes(one), _episodes(other)) for one, other in pairs]
        generator = random.Random(0)
        draws = sorted(_ratio(generator.choices(needed, k=len(needed))) for _ in range(4000))
        reached = sum(math.isfinite(one.episodes_to(FRACTION)) for one, _ in pairs)
        curve = fmean(fmean(one.scores) for one, _ in pairs)
        final = median(one.final_fraction for one, _ in pairs)
        lines.append(
            f"| {game} | `{arm}` | {len(pairs)} | {reached} | {median(mine for mine, _ in needed):,.0f} "
            f"| {_ratio(needed):.2f} [{draws[100]:.2f}, {draws[-101]:.2f}] | {curve:.0%} | {final:.0%} |"
        )
    return "\n".join(lines)


def _episodes(run: Run) -> float:
    return min(run.episodes_to(FRACTION), run.num_episodes)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    mine, theirs = (median(column) for column in zip(*pairs, strict=True))
    return mine / theirs


def directions() -> str:
    """How the expected gradient of each arm lies to the true one, by enumeration, as in ``credit_scorecard``."""
    lines = ["| estimator | scale | n = 2: cos | n = 2: variance | n = 4: cos | n → ∞: cos |", "| --- " * 6 + "|"]
    for scale, (name, arm) in product(("none", "group"), ARMS.items()):
        if arm.scale == "group":
            row = direction_of(name, arm, scale)
            lines.append(f"| `{name}` | {' | '.join([f'`{scale}`', *pair_cells(row), *large_cells(row)])} |")
    return "\n".join(lines)


def direction_of(name: str, arm: Arm, scale: str) -> Row:
    """An arm as a row of the scorecard, without its discount."""
    return Row(name, at_turns(partial(get_estimator(arm.estimator), discount=1.0, scale=cast("Scale", scale))))


if __name__ == "__main__":
    if "--directions" in sys.argv:
        print(directions())
    elif "--ratios" in sys.argv:
        print(ratios(Path([*sys.argv, f"{OUT}/runs.jsonl"][2])))
    else:
        main(GAMES, [*ARMS], OUT, ARMS)
