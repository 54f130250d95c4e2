"""Play many games of one agent, and keep what was played whatever ends them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsgym.cli.console import TERMINATED, cell, err, remark
from agentsgym.cli.players import Player
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.players import anchors_of
from agentsgym.errors import AgentsGymError, StoreError
from agentsgym.evaluation.run import evaluate
from agentsgym.interruptions import Terminated
from agentsgym.statistics.metrics import Evaluation, summarize
from agentsgym.statistics.optimality import anchors_of_info
from agentsgym.store.reader import RolloutStore
from agentsgym.texts import sentence_of

if TYPE_CHECKING:
    from agentsgym.envs.anchors import Anchors
    from agentsgym.store.writer import RolloutWriter
    from agentsgym.types import Trajectory

MAX_CONCURRENT = 256  # episodes that are live at once: more take memory and, of a small model, bring no more speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be played, by every agent alike.

    Attributes:
        tasks: Tasks or dataset rows.
        num_rollouts: Of each task.
        seed: Of tasks without one, and of the intervals.
        cluster_by: The key of a task whose equal values are one task to the intervals; None for each by itself.
        max_failed_fraction: The fraction of all rollouts that may fail.
        max_concurrent: How many are live at once.
        store: The folder that keeps every game; None for nowhere.
        resume: Whether games that it holds already, and that did not fail, are not played again.
    """

    tasks: Sequence[Any]
    num_rollouts: int = 1
    seed: int = 0
    cluster_by: str | None = None
    max_failed_fraction: float | None = None
    max_concurrent: int = MAX_CONCURRENT
    store: Path | None = None
    resume: bool = False

    @property
    def num_games(self) -> int:
        """How many games one agent plays."""
        return len(self.tasks) * self.num_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Games:
    """What one agent played.

    Attributes:
        label: The agent's.
        evaluation: Of what was played; None if no game was finished.
        planned: How many games were to be played.
        num_resumed: How many of them were not played, but read from a store.
        ended_by: What ended them early, a sentence; None if nothing did.
        exit_code: Of the command, if something did.
        anchors: What random and optimal play earn on average, in these games; None where that is not known.
    """

    label: str
    evaluation: Evaluation | None
    planned: int
    num_resumed: int = 0
    ended_by: str | None = None
    exit_code: int = 1
    anchors: Mapping[str, float] | None = None


def play_games(player: Player, plan: Plan) -> Games:
    """Play all games of a plan with one agent; errors, Ctrl-C and SIGTERM end them, and what was played is kept."""
    references = anchors_of(player.env)
    played: list[Trajectory] = []
    num_resumed = 0
    evaluation, ended_by, exit_code = None, None, 1
    with _bar(player.label, plan.num_games) as (advance, begin_at):

        def finished(trajectory: Trajectory) -> None:
            played.append(trajectory)
            advance()

        def resumed(known: Sequence[Trajectory]) -> None:
            nonlocal num_resumed
            num_resumed = len(known)
            played.extend(known)
            begin_at(num_resumed)
            if known:
                remark(f"{player.label}: {num_resumed} of {plan.num_games} games are kept and not played again")

        writer = None if plan.store is None else RolloutStore.writer(plan.store)
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
                agent_name=player.kept_as or player.label,
                on_resume=resumed,
            )
        except AgentsGymError as error:
            ended_by = sentence_of(error).replace("max_failed_fraction = ", "--max-failed ")
        except KeyboardInterrupt:
            ended_by = "stopped by Ctrl-C"
        except Terminated:
            ended_by, exit_code = "stopped by SIGTERM", TERMINATED
        ended_by = ended_by or _unkept(writer)
    if evaluation is None and played:
        evaluation = _partial(player, plan, played, references)
    return Games(
        label=player.label,
        evaluation=evaluation,
        planned=plan.num_games,
        num_resumed=num_resumed,
        ended_by=ended_by,
        exit_code=exit_code,
        anchors=_mean_anchors(player, plan, played, references),
    )


def _unkept(writer: RolloutWriter | None) -> str | None:
    """Have everything on disk; why it is not there, a sentence, else None."""
    try:
        if writer is not None:
            writer.close()
    except StoreError as error:
        return sentence_of(error)
    return None


def _partial(player: Player, plan: Plan, played: Sequence[Trajectory], references: Any) -> Evaluation:
    """Sum up the games that were finished before something ended them."""
    tasks = tasks_of_rows(player.env, plan.tasks, "tasks")
    clusters = None if plan.cluster_by is None else [repr(tasks[one.task_index][plan.cluster_by]) for one in played]
    anchors = None if references is None else [references(tasks[one.task_index]) for one in played]
    return summarize(played, clusters=clusters, seed=plan.seed, anchors=anchors)


def _mean_anchors(
    player: Player, plan: Plan, played: Sequence[Trajectory], references: Any
) -> Mapping[str, float] | None:
    """Average the anchors over the games that did not fail; None unless they are known of each."""
    if references is None:
        found: list[Anchors | None] = [anchors_of_info(one.info) for one in played if not one.failed]
    else:
        tasks = tasks_of_rows(player.env, plan.tasks, "tasks")
        found = [references(tasks[one.task_index]) for one in played if not one.failed]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return {
        "random": sum(one.random for one in known) / len(known),
        "optimal": sum(one.optimal for one in known) / len(known),
    }


@contextmanager
def _bar(label: str, total: int) -> Generator[tuple[Callable[[], None], Callable[[int], None]]]:
    """Show a progress bar on standard error, where that is a terminal; gives how to move it, and where it begins."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as progress:
        task = progress.add_task(cell(label).plain[:30], total=total)
        # What was known before says nothing of the speed: a reset forgets it.
        yield lambda: progress.advance(task), lambda count: progress.reset(task, completed=count)
