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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError, MissingDependencyError, StoreError
from agentsgym.observers.conversations import Conversation, inert, trace_of
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
_KINDS: Final = {"training": "train", "evaluation": "eval"}  # as transformers' own callback begins its keys


class _Place(NamedTuple):
    """Which point of which curves a rollout belongs to."""

    run: str
    source: str
    step: int


def export_to_trackio(store: RolloutStore, project: str, run: str | None = None) -> list[str]:
    """Write the rollouts of a store to trackio's local database; nothing is uploaded.

    The rollouts of a training run become the curves ``train/…`` and ``eval/…`` by optimizer step, under the names that
    are logged during training; those of an evaluation one point. Each rollout becomes a trace with its turns, rewards
    and, if stored, advantages. If the export is interrupted, its data are removed from the database; if a full disk
    prevents even that, a warning names the partially written runs.

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
    storage = _storage()
    places = _places(store, run)
    names = list(dict.fromkeys(place.run for place in places))
    with _database_errors(storage.path):
        _check_names(storage.database, project, names)
    ids = {name: uuid.uuid4().hex for name in names}
    with _database_errors(storage.path), _nothing_left_of(storage, project, ids):
        begun: set[str] = set()
        for place, indices in places.items():
            writer = _Writer(storage.database, project, place, ids[place.run], is_first=place.run not in begun)
            writer.write(store, indices)
            begun.add(place.run)
    return names


class _Storage(NamedTuple):
    """trackio's database, the folder that it is in, and the folder of a run's copies of traces."""

    database: Any
    path: Path
    traces: Any


def _storage() -> _Storage:
    try:
        from trackio import agent_sessions, utils  # noqa: PLC0415  # an extra
        from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError("trackio", "trackio") from error

    def traces(project: str, name: str) -> Path:
        return utils.project_trace_sessions_dir(project) / agent_sessions.safe_id(name)

    return _Storage(database=SQLiteStorage, path=utils.TRACKIO_DIR, traces=traces)


def _places(store: RolloutStore, run: str | None) -> dict[_Place, list[int]]:
    """Sort the rollouts by run and step, the runs in the order of the store."""
    columns: Mapping[str, list[Any]] = store.table(["run", "agent", "source", "step"]).to_pydict()
    rows = list(zip(*columns.values(), strict=True))
    own = [visible(name or agent or store.path.name or "rollouts") for name, agent, *_ in rows]
    if run is not None and len(set(own)) > 1:
        raise ConfigError(
            f"these rollouts belong to {len(set(own))} runs ({shown(sorted(set(own)))}), whose curves would be mixed: "
            "leave the name out, or select a run or an agent"
        )
    places: dict[_Place, list[int]] = {}
    for index, (name, (_, _, source, step)) in enumerate(zip(own, rows, strict=True)):
        places.setdefault(_Place(run=run or name, source=source or "rollout", step=step or 0), []).append(index)
    order = {name: number for number, name in enumerate(dict.fromkeys(place.run for place in places))}
    return dict(sorted(places.items(), key=lambda item: (order[item[0].run], item[0].step)))


def _check_names(database: Any, project: str, names: Sequence[str]) -> None:
    try:
        database.validate_project_name(project)
    except ValueError as error:
        raise ConfigError(sentence_of(error)) from error
    there = {record["name"] for record in database.get_run_records(project)}
    if taken := [name for name in names if name in there]:
        raise ConfigError(
            f"trackio's project {shown(project)} already has a run {shown(taken[0])}: choose "
            "another project or another name"
        )


class _Writer(NamedTuple):
    """Writes one point: where it goes, and whether it is the first of its run."""

    database: Any
    project: str
    place: _Place
    run_id: str
    is_first: bool

    def write(self, store: RolloutStore, indices: Sequence[int]) -> None:
        """Write the traces of these rollouts, and with the last of them the metrics of all."""
        summaries: list[RolloutSummary] = []
        tasks: list[Hashable] = []
        source = self.place.source
        for start in range(0, len(indices), _CHUNK):
            records = [store.record(index) for index in indices[start : start + _CHUNK]]
            summaries += map(_summary, records)
            tasks += map(_task, records)
            logged: dict[str, Any] = {f"{_kind(source)}/rollouts": list(map(_trace, records))}
            if start + _CHUNK >= len(indices):
                logged |= _metrics(source, summaries, tasks)
            self.database.bulk_log(
                project=self.project,
                run=self.place.run,
                run_id=self.run_id,
                metrics_list=[logged],
                steps=[self.place.step],
                timestamps=[records[-1].created_at.isoformat()],
                config=_config(records[0]) if self.is_first and not start else None,
                log_ids=[uuid.uuid4().hex],
            )


def _kind(source: str) -> str:
    return _KINDS.get(source, visible(source))


def _metrics(source: str, summaries: Sequence[RolloutSummary], tasks: Sequence[Hashable]) -> dict[str, float]:
    """What a training run logs of such rollouts; of an evaluation with intervals over its tasks."""
    metrics = rollout_metrics(summaries)
    if _kind(source) == "eval":
        labels = [one.environment for one in summaries]
        metrics |= evaluation_metrics(summarize_outcomes(summaries, (), clusters=tasks, environments=labels))
    return {f"{_kind(source)}/{visible(name)}": value for name, value in metrics.items()}


def _summary(record: StoredRollout) -> RolloutSummary:
    trajectory = record.trajectory
    scored = ScoredRollout.from_trajectory(trajectory, group=record.group or 0)
    summary = RolloutSummary.of(trajectory, LAYOUTS["turn"](0, trajectory), scored)
    return replace(summary, environment=_environment(record))


def _task(record: StoredRollout) -> Hashable:
    own = record.trajectory
    return record.env_class_path, to_json(own.task_data) if own.task_data else own.task_index


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


def _config(record: StoredRollout) -> dict[str, Any]:
    own = {"environment": record.env_class_path, "env_config": record.env_config, "agent": record.agent}
    return {**inert(own), "_Username": None, "_Created": record.created_at.isoformat(), "_Group": None}


@contextlib.contextmanager
def _nothing_left_of(storage: _Storage, project: str, ids: Mapping[str, str]) -> Generator[None]:
    """Delete the data of an interrupted export: runs, copies of their traces, and a newly created project."""
    database: Path = storage.database.get_project_db_path(project)
    was_there = database.exists()
    copies = [folder for folder in (storage.traces(project, name) for name in ids) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in copies:
            shutil.rmtree(folder, ignore_errors=True)
        if was_there:
            _delete_runs(storage, project, ids)
        else:
            for suffix in ("", "-wal", "-shm"):
                database.with_name(database.name + suffix).unlink(missing_ok=True)
        raise


def _delete_runs(storage: _Storage, project: str, ids: Mapping[str, str]) -> None:
    with contextlib.suppress(sqlite3.Error, OSError):
        for name, run_id in ids.items():
            storage.database.delete_run(project, name, run_id=run_id)
    left = {record["name"] for record in storage.database.get_run_records(project)} & set(ids)
    if left:
        logger.warning(
            "the trackio project %s contains a partial export that could not be deleted: delete its runs %s",
            shown(project),
            shown(sorted(left)),
        )


@contextlib.contextmanager
def _database_errors(path: Path) -> Generator[None]:
    try:
        yield
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"trackio's database in {path} cannot be written: {sentence_of(error)}") from error
