"""Write stored rollouts into trackio's own local database: metrics by step, and every rollout as a trace.

The database is written as trackio's own importers do it, without a trackio run: a run would query the Hugging Face Hub
for the user, monitor the machine, and only warn if the disk is full.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import uuid
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError, MissingDependencyError, StoreError
from agentsgym.observers.conversations import Conversation, escape_json, trace_of
from agentsgym.statistics.metrics import summarize_outcomes
from agentsgym.store.values import to_json
from agentsgym.texts import sentence_of, shown, visible
from agentsgym.training.metrics.rollouts import RolloutSummary, evaluation_metrics, rollout_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from agentsgym.store.reader import RolloutStore
    from agentsgym.store.records import StoredRollout

logger = logging.getLogger(__name__)

_CHUNK: Final = 256  # traces written at once
_KINDS: Final = {"training": "train", "evaluation": "eval"}  # the prefixes that transformers' own callback uses


def export_to_trackio(store: RolloutStore, project: str, run: str | None = None) -> list[str]:
    """Write the rollouts of a store to trackio's local database; nothing is uploaded.

    The rollouts of a training run become the curves ``train/…`` and ``eval/…`` by optimizer step, under the names that
    are logged during training; those of an evaluation become one point. Each rollout becomes a trace with its turns,
    rewards and, if stored, advantages. If the export is interrupted, its data are removed from the database; if a full
    disk prevents even that, a warning names the partially written runs.

    Args:
        store: The rollouts.
        project: The trackio project; it is created if it does not exist.
        run: The name of the trackio run; None for the names of the stored runs, or of the agents if these have none.

    Returns:
        The names of the runs that were written.

    Raises:
        ConfigError: The project's name is invalid, the project has a run of that name already, or ``run`` would mix
            several.
        MissingDependencyError: trackio is not installed.
        StoreError: A file cannot be read, or the database cannot be written.
    """
    try:
        from trackio import utils  # noqa: PLC0415  # an extra
        from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError("trackio", "trackio") from error

    database: Any = SQLiteStorage
    points = _points(store, run)
    ids = {name: uuid.uuid4().hex for name, _, _ in points}
    with _database_errors(utils.TRACKIO_DIR):
        try:
            database.validate_project_name(project)
        except ValueError as error:
            raise ConfigError(sentence_of(error)) from error
        there = {record["name"] for record in database.get_run_records(project)}
        if taken := [name for name in ids if name in there]:
            raise ConfigError(
                f"trackio's project {shown(project)} already has a run {shown(taken[0])}: choose "
                "another project or another name"
            )
        with _deleted_on_failure(database, project, ids):
            _write(database, project, ids, store, points)
    return list(ids)


def _points(store: RolloutStore, run: str | None) -> dict[tuple[str, str, int], list[int]]:
    """Group the indices of the rollouts by run, source and step; runs in the order of the store, then by step."""
    columns: Mapping[str, list[Any]] = store.table(["run", "agent", "source", "step"]).to_pydict()
    rows = list(zip(*columns.values(), strict=True))
    own = [visible(name or agent or store.path.name or "rollouts") for name, agent, *_ in rows]
    if run is not None and len(set(own)) > 1:
        raise ConfigError(
            f"these rollouts belong to {len(set(own))} runs ({shown(sorted(set(own)))}), whose curves would be mixed: "
            "leave the name out, or select a run or an agent"
        )
    points: dict[tuple[str, str, int], list[int]] = {}
    for index, (name, (_, _, source, step)) in enumerate(zip(own, rows, strict=True)):
        points.setdefault((run or name, source or "rollout", step or 0), []).append(index)
    order = {name: number for number, name in enumerate(dict.fromkeys(name for name, _, _ in points))}
    return dict(sorted(points.items(), key=lambda point: (order[point[0][0]], point[0][2])))


def _write(
    database: Any,
    project: str,
    ids: Mapping[str, str],
    store: RolloutStore,
    points: Mapping[tuple[str, str, int], Sequence[int]],
) -> None:
    """Write the traces of each point in chunks, and with the last chunk the metrics of all its rollouts."""
    configured: set[str] = set()
    for (run, source, step), indices in points.items():
        kind = _KINDS.get(source, visible(source))
        summaries: list[RolloutSummary] = []
        tasks: list[Hashable] = []
        for start in range(0, len(indices), _CHUNK):
            records = [store.record(index) for index in indices[start : start + _CHUNK]]
            for record in records:
                trajectory = record.trajectory
                scored = ScoredRollout.from_trajectory(trajectory, group=record.group or 0)
                summary = RolloutSummary.of(trajectory, LAYOUTS["turn"](0, trajectory), scored)
                summaries.append(replace(summary, environment=_environment(record)))
                task = to_json(trajectory.task_data) if trajectory.task_data else trajectory.task_index
                tasks.append((record.env_class_path, task))
            logged: dict[str, Any] = {f"{kind}/rollouts": list(map(_trace, records))}
            first = records[0]
            own = {"environment": first.env_class_path, "env_config": first.env_config, "agent": first.agent}
            config = {**escape_json(own), "_Username": None, "_Created": first.created_at.isoformat(), "_Group": None}
            if start + _CHUNK >= len(indices):
                logged |= _metrics(kind, summaries, tasks)
            database.bulk_log(
                project=project,
                run=run,
                run_id=ids[run],
                metrics_list=[logged],
                steps=[step],
                timestamps=[records[-1].created_at.isoformat()],
                config=None if run in configured else config,
                log_ids=[uuid.uuid4().hex],
            )
            configured.add(run)


def _metrics(kind: str, summaries: Sequence[RolloutSummary], tasks: Sequence[Hashable]) -> dict[str, float]:
    """Return the metrics that a training run logs for such rollouts; for an evaluation, with intervals over tasks."""
    metrics = rollout_metrics(summaries)
    if kind == "eval":
        labels = [one.environment for one in summaries]
        metrics |= evaluation_metrics(summarize_outcomes(summaries, (), clusters=tasks, environments=labels))
    return {f"{kind}/{visible(name)}": value for name, value in metrics.items()}


def _environment(record: StoredRollout) -> str:
    return visible((record.env_class_path or "").rpartition(".")[2])


def _trace(record: StoredRollout) -> dict[str, Any]:
    import trackio  # noqa: PLC0415  # an extra

    messages, metadata = trace_of(
        Conversation.of(record.trajectory, record.advantages, _environment(record)),
        {
            **({} if record.step is None else {"step": record.step}),
            **({} if record.group is None else {"group": record.group, "generation": record.generation}),
            **({} if record.agent is None else {"agent": visible(record.agent)}),
        },
    )
    return cast("Any", trackio.Trace(messages, metadata))._to_dict(project="", run="")


@contextlib.contextmanager
def _deleted_on_failure(database: Any, project: str, ids: Mapping[str, str]) -> Generator[None]:
    """Delete the data of an interrupted export: runs, copies of their traces, and a newly created project."""
    from trackio import agent_sessions, utils  # noqa: PLC0415  # an extra

    file: Path = database.get_project_db_path(project)
    was_there = file.exists()
    traces: Path = utils.project_trace_sessions_dir(project)
    copies = [folder for folder in (traces / agent_sessions.safe_id(name) for name in ids) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in copies:
            shutil.rmtree(folder, ignore_errors=True)
        if was_there:
            _delete_runs(database, project, ids)
        else:
            for suffix in ("", "-wal", "-shm"):
                file.with_name(file.name + suffix).unlink(missing_ok=True)
        raise


def _delete_runs(database: Any, project: str, ids: Mapping[str, str]) -> None:
    with contextlib.suppress(sqlite3.Error, OSError):
        for name, run_id in ids.items():
            database.delete_run(project, name, run_id=run_id)
    left = {record["name"] for record in database.get_run_records(project)} & set(ids)
    if left:
        logger.warning(
            "the trackio project %s contains a partial export that could not be deleted: delete its runs %s",
            shown(project),
            shown(sorted(left)),
        )


@contextlib.contextmanager
def _database_errors(folder: Path) -> Generator[None]:
    try:
        yield
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"trackio's database in {folder} cannot be written: {sentence_of(error)}") from error
