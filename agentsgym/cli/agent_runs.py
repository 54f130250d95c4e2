"""Play many episodes with one agent; if the run is interrupted, the finished episodes are kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsgym.cli.console import TERMINATED, cell, err, remark
from agentsgym.cli.players import Player
from agentsgym.envs.anchors import Anchors
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.players import anchors_of
from agentsgym.errors import AgentsGymError
from agentsgym.evaluation.run import evaluate
from agentsgym.interruptions import Terminated
from agentsgym.statistics.metrics import Evaluation, summarize
from agentsgym.statistics.optimality import anchors_of_info
from agentsgym.store.reader import RolloutStore
from agentsgym.texts import sentence_of

if TYPE_CHECKING:
    from agentsgym.types import Trajectory


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


_ENDS = {Terminated: ("stopped by SIGTERM", TERMINATED), KeyboardInterrupt: ("stopped by Ctrl-C", 1)}


def run_agent(player: Player, plan: Plan) -> AgentRun:
    """Play all episodes of a plan with one agent; after an error, Ctrl-C or SIGTERM, return the finished ones."""
    references = anchors_of(player.env)
    played: list[Trajectory] = []
    num_resumed, evaluation, ended_by, exit_code = 0, None, None, 1
    with _bar(player.label, plan.num_episodes) as (advance, begin_at):

        def finished(trajectory: Trajectory) -> None:
            played.append(trajectory)
            advance()

        def resumed(known: Sequence[Trajectory]) -> None:
            nonlocal num_resumed
            num_resumed = len(known)
            played.extend(known)
            begin_at(num_resumed)
            if known:
                remark(f"{player.label}: {num_resumed} of {plan.num_episodes} episodes were read from the store")

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
                    on_finish=finished,
                    references=references,
                    max_concurrent=plan.max_concurrent,
                    store=writer,
                    resume="failed" if plan.resume else False,
                    agent_name=player.stored_as or player.label,
                    on_resume=resumed,
                )
            finally:
                if writer is not None:  # also after a failure: --resume continues from what was stored
                    writer.close(strict=evaluation is not None)
        except AgentsGymError as error:
            ended_by = sentence_of(error).replace("max_failed_fraction = ", "--max-failed ")
        except (KeyboardInterrupt, Terminated) as stop:
            ended_by, exit_code = _ENDS[Terminated if isinstance(stop, Terminated) else KeyboardInterrupt]
    if evaluation is None and played:
        evaluation = _partial(player, plan, played, references)
    return AgentRun(
        label=player.label,
        evaluation=evaluation,
        planned=plan.num_episodes,
        num_resumed=num_resumed,
        ended_by=ended_by,
        exit_code=exit_code,
        anchors=_mean_anchors(player, plan, played, references),
    )


def _partial(player: Player, plan: Plan, played: Sequence[Trajectory], references: Any) -> Evaluation:
    """Summarize the episodes that finished before an interruption."""
    tasks = tasks_of_rows(player.env, plan.tasks, "tasks")
    clusters = None if plan.cluster_by is None else [repr(tasks[one.task_index][plan.cluster_by]) for one in played]
    anchors = None if references is None else [references(tasks[one.task_index]) for one in played]
    return summarize(played, clusters=clusters, seed=plan.seed, anchors=anchors)


def _mean_anchors(player: Player, plan: Plan, played: Sequence[Trajectory], references: Any) -> Anchors | None:
    """Average the anchors over the episodes that did not fail; None unless all are known."""
    if references is None:
        found: list[Anchors | None] = [anchors_of_info(one.info) for one in played if not one.failed]
    else:
        tasks = tasks_of_rows(player.env, plan.tasks, "tasks")
        found = [references(tasks[one.task_index]) for one in played if not one.failed]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return Anchors(
        random=sum(one.random for one in known) / len(known),
        optimal=sum(one.optimal for one in known) / len(known),
        exact=all(one.exact for one in known),
    )


@contextmanager
def _bar(label: str, total: int) -> Generator[tuple[Callable[[], None], Callable[[int], None]]]:
    """Show a progress bar if standard error is a terminal; yields functions that advance it and set its start."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as progress:
        task = progress.add_task(cell(label).plain[:30], total=total)
        # Reset rather than advance: resumed episodes must not count toward the speed.
        yield lambda: progress.advance(task), lambda count: progress.reset(task, completed=count)
