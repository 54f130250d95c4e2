"""What the runs of the benchmark of credit come to: how many episodes each arm takes, as tables and as pictures."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so strict checking knows none of its methods.

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from agentsgym.reports.plots import moving_average
from agentsgym.seeding import derive_seed
from agentsgym.statistics.metrics import fraction_of_optimal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW_EPISODES: Final = 256
FRACTION: Final = 0.8  # of the way from random to best play
CONFIDENCE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is kept of one run.

    Attributes:
        game: What was played.
        arm: How credit was given.
        seed: Of the warm start, the tasks and the draws.
        batch_size: Episodes of a generation batch.
        random_score: Expected score of random play.
        optimal_score: Expected score of best play.
        scores: Mean score of each generation batch while learning, in order.
        final_score: Mean score of the games played after learning.
        final_win_rate: The fraction of them that was won.
        num_evaluated: How many they are.
        cpu_s: CPU seconds of learning.
        held_out_win_rate: The fraction that was won of games unlike those that were learned; None without such.
    """

    game: str
    arm: str
    seed: int
    batch_size: int
    random_score: float
    optimal_score: float
    scores: Sequence[float]
    final_score: float
    final_win_rate: float
    num_evaluated: int
    cpu_s: float
    held_out_win_rate: float | None = None

    @property
    def num_episodes(self) -> int:
        """Episodes played while learning."""
        return self.batch_size * len(self.scores)

    @property
    def final_fraction(self) -> float:
        """Where play after learning stands between random (0) and best play (1)."""
        return fraction_of_optimal(self.final_score, random=self.random_score, optimal=self.optimal_score)

    def curve(self) -> list[tuple[int, float]]:
        """(episodes played, fraction of optimal of the last 256 of them), one point a generation batch."""
        window = max(1, WINDOW_EPISODES // self.batch_size)
        smoothed = moving_average(self.scores, window)
        return [
            (
                self.batch_size * (i + 1),
                fraction_of_optimal(score, random=self.random_score, optimal=self.optimal_score),
            )
            for i, score in enumerate(smoothed)
        ]

    def episodes_to(self, fraction: float) -> float:
        """Episodes after which the curve first reaches a fraction of optimal, interpolated; infinite if never."""
        return first_crossing([(0, -math.inf), *self.curve()], fraction)


def first_crossing(points: Sequence[tuple[float, float]], height: float) -> float:
    """Where the line through points first reaches a height; infinite if it never does.

    >>> first_crossing([(0, 0.0), (10, 0.5), (20, 1.0)], 0.75)
    15.0
    """
    for (x, y), (next_x, next_y) in pairwise(points):
        if next_y >= height:
            return next_x if math.isinf(y) else x + (next_x - x) * (height - y) / (next_y - y)
    return math.inf


class Median(NamedTuple):
    """A median over seeds and the interval that a bootstrap over the seeds gives it."""

    value: float
    low: float
    high: float


def median_over_seeds(values: Sequence[float], over: Sequence[float] | None = None) -> Median:
    """The median of values, or the ratio of the medians of two paired samples, with its bootstrap interval.

    Seeds are drawn with replacement, the same for both samples. Infinite values are larger than all others.

    Args:
        values: One a seed, (S,).
        over: The denominators, one a seed, finite and not 0; None for 1.

    >>> median_over_seeds([2.0, 4.0, 6.0], [2.0, 2.0, 2.0]).value
    2.0
    """
    everyone = np.arange(len(values))[None]
    drawn = np.random.default_rng(derive_seed("median over seeds")).integers(len(values), size=(10_000, len(values)))

    def ratio(seeds: NDArray[np.int64]) -> NDArray[np.float64]:
        denominators = np.ones(len(values)) if over is None else np.asarray(over)
        return _middle(np.asarray(values)[seeds]) / _middle(denominators[seeds])

    bounds = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(ratio(drawn), bounds, method="inverted_cdf")
    return Median(float(ratio(everyone)[0]), float(low), float(high))


def _middle(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each row; of an even number of values the upper of the two in the middle."""
    return np.sort(samples, axis=-1)[..., samples.shape[-1] // 2]


def read_runs(path: Path) -> list[Run]:
    """Read what was kept of the runs; the last of equal game, arm and seed counts."""
    if not path.exists():
        return []
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return list({(row["game"], row["arm"], row["seed"]): Run(**row) for row in rows}.values())


def keep(run: Run, path: Path) -> None:
    """Add a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def write_report(runs: Sequence[Run], folder: Path) -> str:
    """Write ``report.md`` and a picture for each game.

    Args:
        runs: Of any games, arms and seeds.
        folder: Where to.

    Returns:
        What stands in ``report.md``.
    """
    by_game: defaultdict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: run.seed):
        by_game[run.game][run.arm].append(run)
    parts = [_overview(by_game)]
    for game, arms in by_game.items():
        draw(arms, folder / f"credit_{game}.png", title=game.replace("_", " "))
        parts += [f"## {game}", _anchors(arms), _arms_table(arms), f"![](credit_{game}.png)"]
    text = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def _overview(by_game: Mapping[str, Mapping[str, Sequence[Run]]]) -> str:
    """Tabulate the results of each arm in each game, one row per arm."""
    arms = dict.fromkeys(arm for arms in by_game.values() for arm in arms)

    def cell(runs: Sequence[Run]) -> str:
        if not runs:
            return ""
        episodes = median_over_seeds([run.episodes_to(FRACTION) for run in runs]).value
        final = median_over_seeds([run.final_fraction for run in runs]).value
        return f"{'never' if math.isinf(episodes) else f'{episodes:,.0f}'} · {final:.0%}"

    rows = [[f"`{arm}`", *(cell(arms.get(arm, ())) for arms in by_game.values())] for arm in arms]
    header = ["arm", *(game.replace("_", " ") for game in by_game)]
    return (
        f"Episodes to {FRACTION:.0%} of the way from random to best play, and how far along it play is in the "
        f"end; medians over seeds.\n\n{markdown_table(header, rows)}"
    )


def _anchors(arms: Mapping[str, Sequence[Run]]) -> str:
    run = next(iter(arms.values()))[0]
    return (
        f"Random play scores {run.random_score:.3f}, best play {run.optimal_score:.3f}; {run.num_episodes:,} episodes, "
        f"{min(map(len, arms.values()))} or more seeds an arm. Medians over seeds, in brackets {CONFIDENCE:.0%} "
        f"intervals of a bootstrap over the seeds. Episodes until the last {WINDOW_EPISODES} of training stood at "
        f"{FRACTION:.0%} of the way from random to best play, also divided "
        f"by those of `grpo` and `win_grpo` (`<` where these never got there); final: where play stood after training, "
        f"over {run.num_evaluated:,} episodes a seed."
    )


def _arms_table(arms: Mapping[str, Sequence[Run]]) -> str:
    """Episodes until play stood at a fraction of optimal, and how it stood afterwards, a row an arm."""
    header = ["arm", f"to {FRACTION:.0%}", "over `grpo`", "over `win_grpo`", "final"]
    has_held_out = any(run.held_out_win_rate is not None for runs in arms.values() for run in runs)
    rows = [
        [
            f"`{arm}`",
            _episodes([run.episodes_to(FRACTION) for run in runs]),
            *(_ratio(arm, reference, arms) for reference in ("grpo", "win_grpo")),
            _cell(median_over_seeds([run.final_fraction for run in runs]), "{:.0%}"),
            *([_cell(median_over_seeds([run.held_out_win_rate or 0.0 for run in runs]), "{:.0%}")] * has_held_out),
        ]
        for arm, runs in arms.items()
    ]
    return markdown_table([*header, *["won, held out"] * has_held_out], rows)


def _ratio(arm: str, reference: str, arms: Mapping[str, Sequence[Run]]) -> str:
    """The episodes that an arm takes over those of a reference, over the seeds that both played; empty without any."""
    if arm == reference or (arm.startswith("win_") and reference == "grpo"):
        return ""
    theirs = {run.seed: run for run in arms.get(reference, ())}
    pairs = [(run, theirs[run.seed]) for run in arms[arm] if run.seed in theirs]
    if not pairs:
        return ""
    ours = [run.episodes_to(FRACTION) for run, _ in pairs]
    if math.isinf(median_over_seeds(ours).value):
        return "not reached"
    needed = [other.episodes_to(FRACTION) for _, other in pairs]
    is_bound = math.isinf(median_over_seeds(needed).value)
    at_least = [min(episodes, other.num_episodes) for episodes, (_, other) in zip(needed, pairs, strict=True)]
    return ("< " if is_bound else "") + _cell(median_over_seeds(ours, at_least), "{:.2f}")


def _episodes(values: Sequence[float]) -> str:
    reached = sum(map(math.isfinite, values))
    median = median_over_seeds(values)
    if math.isinf(median.value):
        return f"not reached ({reached} of {len(values)})" if reached else "not reached"
    return _cell(median, "{:,.0f}")


def _cell(median: Median, form: str) -> str:
    value, low, high = ("∞" if math.isinf(number) else form.format(number) for number in median)
    return f"{value} [{low}, {high}]"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table.

    >>> print(markdown_table(["arm", "final"], [["grpo", "80%"]]))
    | arm | final |
    | --- | --- |
    | grpo | 80% |
    """
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def draw(arms: Mapping[str, Sequence[Run]], path: Path, *, title: str) -> None:
    """Draw the median curve of each arm, and the range over its seeds as a band; arms on the same reward share a panel.

    Args:
        arms: Runs by the name of their arm.
        path: The PNG; its folder is made if needed.
        title: The headline.
    """
    learned = [arm for arm, runs in arms.items() if all(run.scores for run in runs)]
    panels = {
        "rewards for turns": [arm for arm in learned if not arm.startswith("win_")],
        "reward for the win alone": [arm for arm in learned if arm.startswith("win_")],
    }
    panels = {name: names for name, names in panels.items() if names}
    figure = Figure(figsize=(6.0 * len(panels), 4.8), dpi=160, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    for axes, (name, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.set_title(name, loc="left", fontsize=10)
        for index, arm in enumerate(names):
            _draw_arm(axes, arm, arms[arm], index)
        axes.set_ylim(min(-0.05, axes.get_ylim()[0]), 1.02)  # below 0 is worse than random play
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("episodes played in training")
        axes.set_ylabel("from random (0) to best play (1)")
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_arm(axes: Axes, arm: str, runs: Sequence[Run], index: int) -> None:
    length = min(len(run.scores) for run in runs)
    xs = [x for x, _ in runs[0].curve()[:length]]
    heights = np.array([[y for _, y in run.curve()[:length]] for run in runs])  # (S, N)
    color = colormaps["tab10"](index % 10)
    style = ("-", "--", ":")[index // 10 % 3]
    axes.plot(xs, np.median(heights, axis=0), color=color, linestyle=style, linewidth=1.6, label=arm)
    axes.fill_between(xs, heights.min(axis=0), heights.max(axis=0), color=color, alpha=0.08, linewidth=0)
