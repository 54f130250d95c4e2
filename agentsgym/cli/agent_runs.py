"""Play many episodes with one agent, and show the results: one row per metric, one column per agent.

If the run is interrupted, the finished episodes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsgym.cli.console import TERMINATED, cell, err, new_table, out, remark
from agentsgym.cli.players import Player
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.players import anchors_of
from agentsgym.envs.spec import Anchors
from agentsgym.errors import AgentsGymError
from agentsgym.evaluation.run import OnFinish, evaluate
from agentsgym.interruptions import Terminated
from agentsgym.statistics.metrics import Evaluation, summarize
from agentsgym.statistics.optimality import anchors_of_info
from agentsgym.statistics.passing import max_k, pass_at_k_interval, pass_hat_k_interval
from agentsgym.store.reader import RolloutStore
from agentsgym.texts import sentence_of

if TYPE_CHECKING:
    from rich.text import Text

    from agentsgym.statistics.metrics import Estimate
    from agentsgym.types import Trajectory

_PERCENT, _NUMBER = "{:z.1%}", "{:z.2f}"
_INFO = "info/"  # prefix of the environment's metrics
_REWARDS = "rewards/"  # prefix of named rewards
_MEASURES: tuple[tuple[str, Callable[[Evaluation], Estimate | None], str], ...] = (
    ("win rate", lambda one: one.win_rate, _PERCENT),
    ("reward", lambda one: one.reward, _NUMBER),
    ("turns", lambda one: one.turns, _NUMBER),
    ("of optimal", lambda one: one.fraction_of_optimal, _PERCENT),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A description of the episodes to play, which are the same for every agent.

    Attributes:
        tasks: Tasks or dataset rows.
        num_rollouts: Episodes per task.
        seed: Random seed for tasks without a seed, and for the confidence intervals.
        cluster_by: Task key by whose values tasks are clustered for the confidence intervals; None for one cluster per
            task.
        max_failed_fraction: Maximum fraction of episodes that may fail.
        max_concurrent: Maximum number of concurrent episodes.
        store: Folder of the store that every episode is written to; None to store none.
        resume: Whether to skip episodes that the store already contains, except failed ones.
    """

    tasks: Sequence[Any]
    num_rollouts: int = 1
    seed: int = 0
    cluster_by: str | None = None
    max_failed_fraction: float | None = None
    max_concurrent: int = 256  # more would use memory without making a small model faster
    store: Path | None = None
    resume: bool = False

    @property
    def num_episodes(self) -> int:
        """Number of episodes per agent."""
        return len(self.tasks) * self.num_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """The results of one agent.

    Attributes:
        label: Name of the agent.
        evaluation: Evaluation of the finished episodes; None if there are none.
        planned: Number of episodes planned.
        num_resumed: Number of episodes read from the store instead of played.
        ended_by: Why the run was interrupted, in one sentence; None if it was completed.
        exit_code: Exit code of the command if the run was interrupted.
        anchors: Mean rewards of random and optimal play on these tasks; None if they are unknown.
    """

    label: str
    evaluation: Evaluation | None
    planned: int
    num_resumed: int = 0
    ended_by: str | None = None
    exit_code: int = 1
    anchors: Anchors | None = None


def run_agent(player: Player, plan: Plan) -> AgentRun:
    """Play all episodes of a plan with one agent; after an error, Ctrl-C or SIGTERM, return the finished ones."""
    references, tasks = anchors_of(player.env), tasks_of_rows(player.env, plan.tasks, "tasks")
    played: list[Trajectory] = []
    resumed: list[Trajectory] = []
    evaluation, ended_by, exit_code = None, None, 1
    with _bar(player.label, plan.num_episodes, played, resumed) as (on_finish, on_resume):
        writer = None if plan.store is None else RolloutStore.writer(plan.store)
        try:
            try:
                evaluation = evaluate(
                    player.env,
                    player.agent,
                    plan.tasks,
                    plan.num_rollouts,
                    cluster_by=plan.cluster_by,
                    seed=plan.seed,
                    max_failed_fraction=plan.max_failed_fraction,
                    on_finish=on_finish,
                    references=references,
                    max_concurrent=plan.max_concurrent,
                    store=writer,
                    resume="failed" if plan.resume else False,
                    agent_name=writer and (player.stored_as or player.label),
                    on_resume=on_resume,
                )
            finally:
                if writer is not None:  # also after a failure: --resume continues from what was stored
                    writer.close(strict=evaluation is not None)
        except AgentsGymError as error:
            ended_by = sentence_of(error).replace("max_failed_fraction = ", "--max-failed ")
        except KeyboardInterrupt:
            ended_by = "stopped by Ctrl-C"
        except Terminated:
            ended_by, exit_code = "stopped by SIGTERM", TERMINATED
    anchors = [anchors_of_info(one.info) if references is None else references(tasks[one.task_index]) for one in played]
    if evaluation is None and played:
        clusters = None if plan.cluster_by is None else [repr(tasks[one.task_index][plan.cluster_by]) for one in played]
        evaluation = summarize(played, clusters=clusters, seed=plan.seed, anchors=anchors)
    return AgentRun(
        label=player.label,
        evaluation=evaluation,
        planned=plan.num_episodes,
        num_resumed=len(resumed),
        ended_by=ended_by,
        exit_code=exit_code,
        anchors=_mean([own for one, own in zip(played, anchors, strict=True) if not one.failed]),
    )


def _mean(found: Sequence[Anchors | None]) -> Anchors | None:
    """Average the anchors of episodes; None unless all are known."""
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return Anchors(
        random=sum(one.random for one in known) / len(known),
        optimal=sum(one.optimal for one in known) / len(known),
        exact=all(one.exact for one in known),
    )


@contextmanager
def _bar(
    label: str, total: int, played: list[Trajectory], resumed: list[Trajectory]
) -> Generator[tuple[OnFinish, Callable[[Sequence[Trajectory]], None]]]:
    """Show a progress bar if standard error is a terminal; yields ``on_finish`` and ``on_resume``.

    They add all episodes to ``played``, and the resumed ones to ``resumed`` as well.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as progress:
        task = progress.add_task(cell(label).plain[:30], total=total)

        def on_finish(trajectory: Trajectory) -> None:
            played.append(trajectory)
            progress.advance(task)

        def on_resume(known: Sequence[Trajectory]) -> None:
            played.extend(known)
            resumed.extend(known)
            # Reset rather than advance: resumed episodes must not count toward the speed.
            progress.reset(task, completed=len(known))
            if known:
                remark(f"{label}: {len(known)} of {total} episodes were read from the store")

        yield on_finish, on_resume


def choices_of_k(num_rollouts: int) -> list[int]:
    """Return the values of k to show for pass@k: the powers of two, and the number of rollouts.

    >>> choices_of_k(1), choices_of_k(6)
    ([1], [1, 2, 4, 6])
    """
    powers = [2**power for power in range(num_rollouts.bit_length()) if 2**power <= num_rollouts]
    return sorted({*powers, num_rollouts} - {0})


def passes(evaluation: Evaluation, seed: int) -> dict[str, Any]:
    """Estimate pass@k and pass^k for each k, keyed by ``"pass@k"`` and ``"pass^k"``.

    The result is empty if no outcome is known, or with one rollout per task, since both then equal the win rate.
    """
    if evaluation.win_rate is None:
        return {}
    played = evaluation.trajectories
    options: dict[str, Any] = {"clusters": evaluation.clusters, "confidence": evaluation.confidence, "seed": seed}
    ks = choices_of_k(max_k(played))
    if ks == [1]:
        return {}
    return {
        f"{name}{k}": estimate(played, k, **options)
        for name, estimate in (("pass@", pass_at_k_interval), ("pass^", pass_hat_k_interval))
        for k in ks
    }


def show_runs(runs: Sequence[AgentRun], seed: int) -> None:
    """Print a table of results, and the stop reasons of each agent's episodes."""
    known = next((one.anchors for one in runs if one.anchors is not None and one.anchors.exact), None)
    table = new_table()
    table.add_column("", no_wrap=True)
    ends = ("random*", "optimal*") if known is not None else ()
    ends_of_reward = (known.random, known.optimal) if known is not None else ()
    for label in [*(one.label for one in runs), *ends]:
        table.add_column(cell(label), justify="right", overflow="fold")
    estimates = [_estimates(one.evaluation, seed) for one in runs]
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


def run_as_dict(one: AgentRun, seed: int) -> dict[str, Any]:
    """Return the results of one agent as JSON values; ``"results"`` is None if it finished no episode."""
    found = one.evaluation
    estimates = {} if found is None else passes(found, seed)
    return {
        "agent": one.label,
        "results": None if found is None else found.as_dict(),
        "passes": {name: {"mean": e.mean, "interval": [e.low, e.high]} for name, e in estimates.items()},
        "known_rewards": None if one.anchors is None else asdict(one.anchors),
        "num_planned": one.planned,
        "num_resumed": one.num_resumed,
        "ended_by": one.ended_by,
    }


def _estimates(evaluation: Evaluation | None, seed: int) -> dict[str, Estimate | None]:
    if evaluation is None:
        return {}
    found = {name: value(evaluation) for name, value, _ in _MEASURES}
    found |= {f"win rate as {role}": one.win_rate for role, one in evaluation.by_role.items()}
    found |= {f"{_REWARDS}{name}": estimate for name, estimate in evaluation.components.items()}
    found |= {f"{_INFO}{name}": estimate for name, estimate in evaluation.metrics.items()}
    more = passes(evaluation, seed)
    return found | {name: value for name, value in more.items() if name[5:] != "1"}  # for k = 1 it is the win rate


def _cell(estimate: Estimate | None, form: str) -> Text:
    """Format the mean, with the interval below it."""
    from rich.text import Text  # noqa: PLC0415

    if estimate is None:
        return Text("-")
    low, high = (form.format(bound).removesuffix("%") for bound in (estimate.low, estimate.high))
    return Text.assemble((form.format(estimate.mean), "bold"), "\n", (f"[{low}, {high}]", "dim"))
