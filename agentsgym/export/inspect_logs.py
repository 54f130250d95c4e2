"""Write stored rollouts as Inspect logs, with inspect_ai's own types and writer (``agentsgym[inspect]``).

::

    RolloutStore ─▶ by environment, agent and run ─▶ EvalLog, one EvalSample per rollout ─▶ FILE.eval, FILE.json, FOLDER
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentsgym.envs.datasets.naming import name_of_env
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.fields import is_int, require
from agentsgym.statistics.metrics import summarize
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.store.values import from_json, to_json
from agentsgym.texts import visible
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalMetric, EvalResults, EvalSample, EvalScore, EvalSpec

    from agentsgym.statistics.metrics import Evaluation

_SHARED: Final = ("env_class_path", "env_config", "agent", "run", "source")  # equal for all rollouts of a log
_EVALUATION: Final = "evaluation"
_MAX_CHARACTERS: Final = 50_000_000  # total for the conversations of a log, which is kept in memory until written


def write_inspect_logs(store: RolloutStore, path: str | Path, *, max_samples: int = 5000) -> list[Path]:
    """Write the rollouts of a store as Inspect logs, which ``inspect view`` shows and ``read_eval_log`` reads.

    A log has one task, so each environment (class and configuration), agent, run and source gets a separate log, as
    does each evaluation within a run, by its step. A sample is a rollout: its epoch is its index among the rollouts of
    its task, from 1 (``rollout_index + 1``, or the index in its task group), its scores are ``success`` (if the
    environment defines it), ``reward`` and ``turns``; a failed rollout has an error and no scores. Tokens, masks and
    log-probabilities are not written, since the format does not support them.

    Args:
        store: The rollouts; a filtered store is also accepted.
        path: ``FILE.eval`` or ``FILE.json`` for a single log, or a new folder for any number of ``.eval`` files.
            Nothing is overwritten, and either everything is written or nothing.
        max_samples: Maximum number of samples per log, since samples are in memory until it is written; a log also ends
            at 50 million characters of conversation. The rest follows in further logs with separate results, numbered
            in ``metadata["part"]``.

    Returns:
        The files, in the order in which they were written.

    Raises:
        ConfigError: ``path`` already exists, has another suffix, or is one file although there would be several logs,
            or there are no rollouts.
        MissingDependencyError: inspect_ai is not installed.
        StoreError: A file of the store cannot be read.
        OSError: The files cannot be written.
    """
    if importlib.util.find_spec("inspect_ai") is None:
        raise MissingDependencyError("inspect_ai", "inspect")
    require("max_samples", max_samples, is_int(1), "a positive int")
    path = Path(path)
    if path.suffix and path.suffix not in {".eval", ".json"}:
        raise ConfigError(f"the path of Inspect logs must be FILE.eval, FILE.json or a folder, got {path}")
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} already exists")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: the folder {path.parent} does not exist")
    groups = _groups(store)
    if not groups:
        raise ConfigError(f"{store!r} has no rollouts to write")
    is_file = bool(path.suffix)
    if is_file and len(groups) > 1:
        raise _several(path, [_title(one) for one in groups])
    with _renamed_on_success(path) as place:
        if not is_file:
            place.mkdir()
        return [path if is_file else path / one.name for one in _written(store, groups, place, max_samples, path)]


def _written(
    store: RolloutStore, groups: Sequence[Mapping[str, Any]], place: Path, max_samples: int, path: Path
) -> Iterator[Path]:
    """Write the logs to a folder, or a single log to a file."""
    from inspect_ai.log import write_eval_log  # noqa: PLC0415

    is_file = bool(path.suffix)
    names: Counter[str] = Counter()
    for shared in groups:
        for log in _logs(_chosen(store, shared), shared, max_samples):
            if is_file and names:
                raise _several(path, [f"{_title(shared)}, in parts of {max_samples} samples at most"])
            # named like Inspect's own logs, with only letters, digits and dashes
            parts = (_task_name(shared), shared["agent"], shared["run"], _step_name(shared))
            plain = (re.sub(r"[^A-Za-z0-9.]+", "-", str(one)).strip("-.")[:60] for one in parts if one)
            name = "_".join(one or "unknown" for one in plain)
            names[name] += 1
            number = f"_{names[name]}" if names[name] > 1 else ""
            file = place if is_file else place / f"{name}{number}.eval"
            write_eval_log(log, str(file.absolute()))
            yield file


def _several(path: Path, titles: Sequence[str]) -> ConfigError:
    listed = "; ".join(titles[:5]) + ("; …" if len(titles) > 5 else "")
    return ConfigError(
        f"an Inspect log has one task, and these rollouts need several ({listed}): use a folder, such as "
        f"{path.with_suffix('')}, or select fewer rollouts"
    )


@contextlib.contextmanager
def _renamed_on_success(path: Path) -> Generator[Path]:
    """Yield a temporary path, which is renamed to ``path`` on success and deleted on failure."""
    place = path.absolute().with_name(f".unfinished-{secrets.token_hex(4)}-{path.name}")
    try:
        yield place
        if path.exists():
            raise ConfigError(f"{path} already exists")
        place.rename(path)
    finally:
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)


def _chosen(store: RolloutStore, shared: Mapping[str, Any]) -> RolloutStore:
    """Select the rollouts with these values; ``env_config`` is compared as text, in which NaN equals itself."""
    config = shared["env_config"]
    wanted = {name: value for name, value in shared.items() if name != "step" or shared["source"] == _EVALUATION}

    def is_same(value: Any) -> bool:
        return value is None if config is None else to_json(value) == config

    return store.filter(**{**wanted, "env_config": is_same})


def _groups(store: RolloutStore) -> list[dict[str, Any]]:
    """Return the values that the rollouts of each log share, in the order of the store."""
    names = (*_SHARED, "step")
    columns: list[list[Any]] = [column.to_pylist() for column in store.table(names).columns]
    rows = [dict(zip(names, one, strict=True)) for one in dict.fromkeys(zip(*columns, strict=True))]
    groups = [row | {"step": row["step"] if row["source"] == _EVALUATION else None} for row in rows]
    return [dict(one) for one in dict.fromkeys(tuple(group.items()) for group in groups)]


def _title(shared: Mapping[str, Any]) -> str:
    own = (shared["agent"], shared["run"], _step_name(shared))
    return visible(" ".join([_task_name(shared), *(f"({one})" for one in own if one)]))


def _step_name(shared: Mapping[str, Any]) -> str:
    return "" if shared["step"] is None else f"step {shared['step']}"


def _task_name(shared: Mapping[str, Any]) -> str:
    config = shared["env_config"]
    return name_of_env(shared["env_class_path"], from_json(config) if config else {}) or "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The samples of one log, and their outcomes.

    Attributes:
        samples: The samples.
        outcomes: The rollout of each sample, without its conversation and tokens.
        times: The time at which each rollout was stored.
    """

    samples: list[EvalSample] = field(default_factory=list["EvalSample"])
    outcomes: list[Trajectory] = field(default_factory=list[Trajectory])
    times: list[str] = field(default_factory=list[str])


def _logs(store: RolloutStore, shared: Mapping[str, Any], max_samples: int) -> Iterator[EvalLog]:
    """Yield the logs of the rollouts of one group; they are numbered only if there are several."""
    parts = _parts(store.records(), max_samples)
    part, following, number = next(parts), next(parts, None), 1
    while following is not None:
        yield _log(part, shared, number)
        part, following, number = following, next(parts, None), number + 1
    yield _log(part, shared, number if number > 1 else None)


def _parts(records: Iterator[StoredRollout], max_samples: int) -> Iterator[_Part]:
    from agentsgym.export.inspect_samples import sample_of  # noqa: PLC0415

    identities = _Identities()
    part, num_characters = _Part(), 0
    for record in records:
        size = sum(len(str(message["content"])) for message in record.trajectory.messages)
        if part.samples and (len(part.samples) >= max_samples or num_characters + size > _MAX_CHARACTERS):
            yield part
            part, num_characters = _Part(), 0
        num_characters += size
        task, sample_id, epoch = identities.of(record)
        part.samples.append(sample_of(record, sample_id=sample_id, epoch=epoch))
        turns = [
            replace(turn, start=0, stop=0, prompt_start=0, prompt_messages=None) for turn in record.trajectory.turns
        ]
        # without the fields that use much memory
        thin: dict[str, Any] = {"token_ids": (), "messages": (), "logprobs": None, "per_token_rewards": ()}
        part.outcomes.append(replace(record.trajectory, turns=turns, task_index=task, **thin))
        part.times.append(record.created_at.isoformat())
    yield part


class _Identities:
    """Assigns a name and an epoch to each rollout, unique within a log; rollouts of one task share their name."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, bytes], tuple[int, int | str]] = {}
        self._tasks_per_place: Counter[str] = Counter()
        self._rollouts_per_group: Counter[int | str] = Counter()
        self._seen: Counter[tuple[int | str, int]] = Counter()

    def of(self, record: StoredRollout) -> tuple[int, int | str, int]:
        """Return the number of a rollout's task, the name of its sample, and its epoch."""
        own = record.trajectory
        index = own.task_index if record.group is None else record.group
        place = str(index) if record.generation is None else f"batch-{record.generation}-task-{index}"
        text = to_json(own.task_data).encode("utf-8", "backslashreplace")
        key = (place, hashlib.blake2b(text, digest_size=16).digest())
        if key not in self._tasks:
            self._tasks_per_place[place] += 1
            plain = index if record.generation is None else place
            count = self._tasks_per_place[place]  # tasks of several evaluations may have the same index
            self._tasks[key] = (len(self._tasks), plain if count == 1 else f"{place}-other-{count}")
        number, name = self._tasks[key]
        epoch = own.rollout_index + 1
        if record.group is not None:  # a trainer plays each rollout of a task group as the first of a task
            self._rollouts_per_group[name] += 1
            epoch = self._rollouts_per_group[name]
        self._seen[name, epoch] += 1
        num_seen = self._seen[name, epoch]  # above 1 if, for example, a failed rollout was played again
        return number, name if num_seen == 1 else f"{name}-again-{num_seen}", epoch


def _log(part: _Part, shared: Mapping[str, Any], number: int | None) -> EvalLog:
    from inspect_ai.log import EvalLog, EvalStats  # noqa: PLC0415
    from inspect_ai.model import ModelUsage  # noqa: PLC0415

    from agentsgym.export.inspect_samples import unknown_success  # noqa: PLC0415

    evaluation = summarize(part.outcomes)
    usage: dict[str, ModelUsage] = {}
    for sample in part.samples:
        # Inspect's tables need the same scores in the same order in every sample
        if evaluation.win_rate is not None and sample.scores is not None and "success" not in sample.scores:
            sample.scores = {"success": unknown_success(), **sample.scores}
        for model, own in sample.model_usage.items():
            usage[model] = usage.get(model, ModelUsage()) + own
    return EvalLog(
        status="success",
        eval=_spec(part, shared, number),
        results=_results(part, evaluation),
        stats=EvalStats(started_at=min(part.times), completed_at=max(part.times), model_usage=usage),
        samples=part.samples,
    )


def _spec(part: _Part, shared: Mapping[str, Any], number: int | None) -> EvalSpec:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalSpec  # noqa: PLC0415

    from agentsgym.export.inspect_samples import UNKNOWN_MODEL, clean, text_of  # noqa: PLC0415

    task = text_of(_task_name(shared))
    known = {name: shared[name] for name in ("source", "run", "env_class_path", "step") if shared[name] is not None}
    named = to_json([shared[name] for name in _SHARED])
    try:
        packages = {"agentsgym": version("agentsgym")}
    except PackageNotFoundError:  # run from a checkout
        packages = {}
    return EvalSpec(
        created=min(part.times),
        task=task,
        task_id=_hash(named),
        run_id=_hash(text_of(shared["run"] or named)),
        eval_id=_hash(f"{named} {shared['step']} {number}"),
        task_args=clean(from_json(shared["env_config"])) if shared["env_config"] else {},
        dataset=EvalDataset(
            name=task,
            samples=len({one.task_index for one in part.outcomes}),
            sample_ids=list(dict.fromkeys(sample.id for sample in part.samples)),
        ),
        model=text_of(shared["agent"] or UNKNOWN_MODEL),
        config=EvalConfig(epochs=max(sample.epoch for sample in part.samples)),
        packages=packages,
        metadata=clean(known | ({} if number is None else {"part": number})),
    )


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=11).hexdigest()


def _results(part: _Part, evaluation: Evaluation) -> EvalResults:
    """Return the mean of each score over all samples, with its interval over tasks."""
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore  # noqa: PLC0415

    over = {"confidence": evaluation.confidence, "over": "tasks"}
    scores: list[EvalScore] = []
    estimates = {"success": evaluation.win_rate, "reward": evaluation.reward, "turns": evaluation.turns}
    estimates |= {f"rewards/{name}": estimate for name, estimate in evaluation.components.items()}
    for name, estimate in estimates.items():
        if estimate is None:
            continue
        mean = "accuracy" if name == "success" else "mean"
        metrics: dict[str, EvalMetric] = {
            mean: EvalMetric(name=mean, value=estimate.mean),
            "ci_low": EvalMetric(name="ci_low", value=estimate.low, params=over),
            "ci_high": EvalMetric(name="ci_high", value=estimate.high, params=over),
        }
        scores.append(
            EvalScore(
                name=name,
                scorer=name,
                scored_samples=evaluation.num_episodes,
                unscored_samples=evaluation.num_failed,
                metrics=metrics,
            )
        )
    return EvalResults(
        total_samples=len(part.samples),
        completed_samples=evaluation.num_episodes,
        scores=scores,
        metadata={"stop_reasons": {reason.value: count for reason, count in evaluation.stop_reasons.items()}},
    )
