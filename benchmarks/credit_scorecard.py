"""Compute the expected gradient of each advantage estimator exactly, by enumeration, without sampling.

The game and its language model are those of ``tests/credit/tabular.py``: three states that recur, turns of one token or
two, episodes of one to four turns. For every estimator the expected gradient is a sum over all groups of rollouts that
can be drawn, and is set beside the true gradient of the mean final reward.

``python benchmarks/credit_scorecard.py`` prints the tables of ``docs/credit.md``, ``--write`` puts them there.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "credit"))

from tabular import (  # noqa: E402  # it stands beside the tests that hold the estimators to it
    EVEN_ODDS,
    Estimate,
    Estimator,
    Fit,
    Game,
    Group,
    aggregated,
    as_played,
    at_turns,
    fit,
    in_proportion,
    masking_truncated,
    moments,
    unordered_groups,
    with_wrong_values,
)

from agentsgym.credit.advantages import ScoredRollout, get_estimator, grpo, zero_variance_groups  # noqa: E402

PAGE = ROOT / "docs" / "credit.md"
BEGIN, END = "<!-- scorecard:begin -->", "<!-- scorecard:end -->"
GAMES = {horizon: Game(horizon=horizon, logits=EVEN_ODDS) for horizon in (3, 4)}
PAIRS, FOURS = (2, 4), (4, 3)  # rollouts in a group, horizon
BANDIT_SIZES = (4, 8, 16, 32)


class Row(NamedTuple):
    """A line of the scorecard.

    Attributes:
        name: What is chosen, as a reader would write it.
        estimate: Gives the advantages of a group's tokens.
        resampled: Whether groups of equal final rewards are drawn anew.
    """

    name: str
    estimate: Estimate
    resampled: bool = False


class Score(NamedTuple):
    """The results of a row for one group size.

    Attributes:
        fit: How the expected gradient lies to the true one.
        variance: The trace of the covariance of a group's estimate, in squared lengths of the expected gradient.
    """

    fit: Fit
    variance: float


def named(name: str, *, scale: Any = "none", discount: float = 1.0, **options: Any) -> Estimator:
    """An estimator as the trainer would call it."""
    return partial(get_estimator(name, **options), discount=discount, scale=scale)


def remembering(name: str, *, scale: Any = "none", **options: Any) -> Estimator:
    """One whose baselines an earlier batch has left, the same for every group."""
    bound = get_estimator(name, decay=0.0, **options)
    bound([play.scored for play in GAMES[4].plays], discount=1.0, scale="none")
    return lambda rollouts: deepcopy(bound)(rollouts, discount=1.0, scale=scale)


def shaped(name: str, **options: Any) -> Estimator:
    """One that sees rewards shaped by the potential of each state."""
    return partial(get_estimator(name, **options, potential_weight=1.0), discount=1.0, scale="none")


def over_groups(aggregation: str, *, scale: Any = "none", name: str = "rloo") -> Estimate:
    """An estimator under a loss aggregation."""
    return aggregated(at_turns(named(name, scale=scale)), aggregation)


EXACT = (
    Row("`return_to_go`", at_turns(named("return_to_go"))),
    Row("`return_to_go`, baseline `batch`", at_turns(named("return_to_go", baseline="batch"))),
    Row("`return_to_go`, baseline `role_ema`", at_turns(remembering("return_to_go", baseline="role_ema"))),
    Row("`return_to_go`, baseline `none`", at_turns(named("return_to_go", baseline="none"))),
    Row("`return_to_go`, baseline `none`, potential shaping", at_turns(shaped("return_to_go", baseline="none"))),
    Row("`gigpo`, baseline `others`", at_turns(named("gigpo", baseline="others"))),
    Row("`rloo`", at_turns(named("rloo"))),
    Row("`rae`", at_turns(remembering("rae"))),
    Row("`grpo`", at_turns(named("grpo"))),
    Row("`turn_gae`, λ = 1, wrong values", at_turns(named("turn_gae", gae_lambda=1.0), with_wrong_values)),
    Row("`turn_gae`, λ = 1, exact values", at_turns(named("turn_gae", gae_lambda=1.0))),
    Row("`turn_gae`, λ = 0.95, exact values", at_turns(named("turn_gae"))),
    Row("`bilevel_gae`, λ = 0.95, exact values", at_turns(named("bilevel_gae"))),
    Row("`rloo`, zero-variance groups resampled", at_turns(named("rloo")), resampled=True),
    Row("`rloo`, loss divided by a constant", aggregated(at_turns(named("rloo")), "constant", constant=5)),
)
BIASED = (
    Row("`return_to_go`, scale `group`", at_turns(named("return_to_go", scale="group"))),
    Row("`return_to_go`, scale `batch`", at_turns(named("return_to_go", scale="batch"))),
    Row("`return_to_go`, discount 0.9", at_turns(named("return_to_go", discount=0.9))),
    Row("`return_to_go`, zero-variance groups resampled", at_turns(named("return_to_go")), resampled=True),
    Row("`grpo`, scale `group`", at_turns(named("grpo", scale="group"))),
    Row("`gigpo`", at_turns(named("gigpo"))),
    Row("`gigpo`, scale `group`", at_turns(named("gigpo", scale="group"))),
    Row("`rebn`", at_turns(named("rebn"))),
    Row("`rebn`, scale `group` (as published)", at_turns(named("rebn", scale="group"))),
    Row("`mt_grpo`", at_turns(named("mt_grpo"))),
    Row("`mt_grpo`, scale `group` (as published)", at_turns(named("mt_grpo", scale="group"))),
    Row("`rae`, scale `group`", at_turns(remembering("rae", scale="group"))),
    Row("`reward`", at_turns(named("reward"))),
    Row("`turn_gae`, λ = 0.95, wrong values", at_turns(named("turn_gae"), with_wrong_values)),
    Row("`turn_gae`, λ = 0.5, wrong values", at_turns(named("turn_gae", gae_lambda=0.5), with_wrong_values)),
    Row("`rloo`, truncated rollouts masked", masking_truncated(at_turns(named("rloo")))),
    Row("`rloo`, loss averaged over `trajectory`", over_groups("trajectory")),
    Row("`rloo`, loss averaged over `turn`", over_groups("turn")),
    Row("`rloo`, loss averaged over `token`", over_groups("token")),
    Row(
        "`grpo`, scale `group`, loss averaged over `trajectory`", over_groups("trajectory", name="grpo", scale="group")
    ),
)


def groups_of(num_rollouts: int, horizon: int, *, resampled: bool) -> Iterator[Group]:
    """All groups that are trained on, each with how often it is drawn."""
    groups = unordered_groups(GAMES[horizon], num_rollouts=num_rollouts)
    if not resampled:
        return groups
    kept = [(chance, plays) for chance, plays in groups if not zero_variance_groups([*map(as_played, plays)])]
    fraction = math.fsum(chance for chance, _ in kept)
    return ((chance / fraction, plays) for chance, plays in kept)


def score(row: Row, num_rollouts: int, horizon: int) -> Score:
    """Compute a row for one size of group."""
    mean, variance = moments(groups_of(num_rollouts, horizon, resampled=row.resampled), row.estimate)
    return Score(fit(mean, GAMES[horizon].gradient), variance / float(mean @ mean))


def limit(row: Row, horizon: int = 3) -> Fit:
    """Compute a row for a group, and batch, that grows without end."""
    mean, _ = moments([(1.0, in_proportion(GAMES[horizon]))], row.estimate)
    return fit(mean, GAMES[horizon].gradient)


def pair_cells(row: Row) -> list[str]:
    """What the table shows of a row for groups of two."""
    direction, variance = score(row, *PAIRS)
    return [f"{direction.cosine:.3f}", f"{variance:.1f}"]


def large_cells(row: Row) -> list[str]:
    """What it shows for larger groups."""
    return [f"{score(row, *FOURS).fit.cosine:.3f}", f"{limit(row).cosine:.3f}"]


def line(row: Row) -> str:
    """A row of the scorecard."""
    return table_line([row.name, *pair_cells(row), *large_cells(row)])


def table_line(entries: Sequence[str]) -> str:
    """A row of a markdown table."""
    return f"| {' | '.join(entries)} |"


def scorecard() -> list[str]:
    """The table of all estimators."""
    header = ["estimator (scale `none` unless stated)", "n = 2: cos", "n = 2: variance", "n = 4: cos", "n → ∞: cos"]
    lines = [table_line(header), table_line(["---"] * len(header))]
    for title, rows in (("**exactly the direction of the gradient**", EXACT), ("**biased**", BIASED)):
        lines += [table_line([title, *[""] * (len(header) - 1)]), *map(line, rows)]
    return lines


def bandit_slope(num_rollouts: int, scale: Any) -> float:
    """What :func:`grpo` expects a group of pulls to do to the logit of the better arm.

    Two arms, policy uniform: one gives 0.1 for sure, the better one 1 in a quarter of cases. The sum is over how
    many of the group's pulls had each of the three outcomes.

    Args:
        num_rollouts: Pulls in a group.
        scale: As the estimator takes it.
    """
    outcomes = [(-0.5, 0.1, 1 / 2), (0.5, 0.0, 3 / 8), (0.5, 1.0, 1 / 8)]  # (∇ log π, reward, probability)
    slope = 0.0
    for counts in itertools.product(range(num_rollouts + 1), repeat=3):
        if sum(counts) != num_rollouts:
            continue
        orders = math.factorial(num_rollouts) / math.prod(map(math.factorial, counts))
        chance = orders * math.prod(p**n for n, (_, _, p) in zip(counts, outcomes, strict=True))
        pulls = [one for one, n in zip(outcomes, counts, strict=True) for _ in range(n)]
        rollouts = [
            ScoredRollout(turn_rewards=[reward], final_reward=reward, group=0, state_keys=[None])
            for _, reward, _ in pulls
        ]
        numbers = np.ravel(grpo(rollouts, scale=scale))
        slope += chance * float(numbers @ [step for step, _, _ in pulls]) / num_rollouts
    return slope


def bandit() -> list[str]:
    """The table of the bandit, on which dividing by a small group's spread points the wrong way."""
    header = ["rollouts in a group", "true gradient", "`grpo`, scale `none`", "`grpo`, scale `group`"]
    lines = [table_line(header), table_line(["---"] * len(header))]
    for size in BANDIT_SIZES:
        found = [f"{bandit_slope(size, scale):+.4f}" for scale in ("none", "group")]
        lines.append(table_line([str(size), f"{0.25 * (0.25 - 0.1):+.4f}", *found]))
    return lines


def page_with(page: str, tables: str) -> str:
    """Put the tables between the page's markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/credit.md")
    arguments = parser.parse_args()
    tables = "\n".join([*scorecard(), "", *bandit()])
    if arguments.write:
        PAGE.write_text(page_with(PAGE.read_text(), tables))
    else:
        print(tables)


if __name__ == "__main__":
    main()
