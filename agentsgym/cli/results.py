"""Show evaluations in tables that fit narrow terminals: one row per metric, one column per agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentsgym.cli.console import cell, new_table, out
from agentsgym.statistics.passing import max_k, pass_at_k_interval, pass_hat_k_interval

if TYPE_CHECKING:
    from rich.text import Text

    from agentsgym.cli.agent_runs import AgentRun
    from agentsgym.statistics.metrics import Estimate, Evaluation

_PERCENT, _NUMBER = "{:z.1%}", "{:z.2f}"
_INFO = "info/"  # prefix of the environment's metrics
_REWARDS = "rewards/"  # prefix of named rewards
_MEASURES: tuple[tuple[str, Callable[[Evaluation], Estimate | None], str], ...] = (
    ("win rate", lambda one: one.win_rate, _PERCENT),
    ("reward", lambda one: one.reward, _NUMBER),
    ("turns", lambda one: one.turns, _NUMBER),
    ("of optimal", lambda one: one.fraction_of_optimal, _PERCENT),
)


def choices_of_k(num_rollouts: int) -> list[int]:
    """Return the values of k to show for pass@k: the powers of two, and the number of rollouts.

    >>> choices_of_k(1), choices_of_k(6)
    ([1], [1, 2, 4, 6])
    """
    powers = [2**power for power in range(num_rollouts.bit_length()) if 2**power <= num_rollouts]
    return sorted({*powers, num_rollouts} - {0})


def passes(evaluation: Evaluation, seed: int, cluster_of: Mapping[int, Any] | None = None) -> dict[str, Any]:
    """Estimate pass@k and pass^k for each k, keyed by ``"pass@k"`` and ``"pass^k"``.

    The result is empty if no outcome is known, or with one rollout per task, since both then equal the win rate.
    """
    if evaluation.win_rate is None:
        return {}
    played = evaluation.trajectories
    clusters = None if cluster_of is None else [cluster_of[one.task_index] for one in played]
    options: dict[str, Any] = {"clusters": clusters, "confidence": evaluation.confidence, "seed": seed}
    ks = choices_of_k(max_k(played))
    if ks == [1]:
        return {}
    return {
        f"{name}{k}": estimate(played, k, **options)
        for name, estimate in (("pass@", pass_at_k_interval), ("pass^", pass_hat_k_interval))
        for k in ks
    }


def show_runs(runs: Sequence[AgentRun], seed: int, cluster_of: Mapping[int, Any] | None = None) -> None:
    """Print a table of results, and the stop reasons of each agent's episodes."""
    known = next((one.anchors for one in runs if one.anchors is not None and one.anchors.exact), None)
    table = new_table()
    table.add_column("", no_wrap=True)
    ends = ("random*", "optimal*") if known is not None else ()
    ends_of_reward = (known.random, known.optimal) if known is not None else ()
    for label in [*(one.label for one in runs), *ends]:
        table.add_column(cell(label), justify="right", overflow="fold")
    estimates = [_estimates(one.evaluation, seed, cluster_of) for one in runs]
    forms = {name: form for name, _, form in _MEASURES}
    for name in dict.fromkeys(name for found in estimates for name, value in found.items() if value is not None):
        form = forms.get(name, _NUMBER if name.startswith((_INFO, _REWARDS)) else _PERCENT)
        ends_of_row = [_NUMBER.format(value) if name == "reward" else "" for value in ends_of_reward]
        table.add_row(cell(name), *(_cell(found.get(name), form) for found in estimates), *ends_of_row)
    table.add_row("episodes", *(str(one.evaluation.num_episodes if one.evaluation else 0) for one in runs))
    if any(one.evaluation and one.evaluation.num_failed for one in runs):
        failed = [str(one.evaluation.num_failed if one.evaluation else 0) for one in runs]
        table.add_row("failed", *failed, style="red")
    out().print(table)
    if known is not None:
        out().print("* rewards of random and optimal play, known exactly for these tasks", style="dim")
    for one in runs:
        if one.evaluation is not None:
            reasons = ", ".join(f"{reason} {count}" for reason, count in one.evaluation.stop_reasons.items())
            out().print(cell(f"{one.label}, stop reasons: {reasons}"), style="dim")


def run_as_dict(one: AgentRun, seed: int, cluster_of: Mapping[int, Any] | None = None) -> dict[str, Any]:
    """Return the results of one agent as JSON values; ``"results"`` is None if it finished no episode."""
    found = one.evaluation
    estimates = {} if found is None else passes(found, seed, cluster_of)
    return {
        "agent": one.label,
        "results": None if found is None else found.as_dict(),
        "passes": {name: {"mean": e.mean, "interval": [e.low, e.high]} for name, e in estimates.items()},
        "known_rewards": None if one.anchors is None else asdict(one.anchors),
        "num_planned": one.planned,
        "num_resumed": one.num_resumed,
        "ended_by": one.ended_by,
    }


def _estimates(
    evaluation: Evaluation | None, seed: int, cluster_of: Mapping[int, Any] | None
) -> dict[str, Estimate | None]:
    if evaluation is None:
        return {}
    found = {name: value(evaluation) for name, value, _ in _MEASURES}
    found |= {f"{_REWARDS}{name}": estimate for name, estimate in evaluation.components.items()}
    found |= {f"{_INFO}{name}": estimate for name, estimate in evaluation.metrics.items()}
    more = passes(evaluation, seed, cluster_of)
    return found | {name: value for name, value in more.items() if name[5:] != "1"}  # for k = 1 it is the win rate


def _cell(estimate: Estimate | None, form: str) -> Text:
    """Format the mean, with the interval below it."""
    from rich.text import Text  # noqa: PLC0415

    if estimate is None:
        return Text("-")
    low, high = (form.format(bound).removesuffix("%") for bound in (estimate.low, estimate.high))
    return Text.assemble((form.format(estimate.mean), "bold"), "\n", (f"[{low}, {high}]", "dim"))
