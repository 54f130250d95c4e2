"""Keep the rollouts of an evaluation in a store, and play only those that it does not hold yet."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from agentsgym.agents.base import as_agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.stored_columns import stored_columns
from agentsgym.envs.play import play
from agentsgym.errors import ConfigError
from agentsgym.failure_policy import FailurePolicy, as_policy
from agentsgym.fields import is_str, or_none, require
from agentsgym.store.reader import RolloutStore
from agentsgym.store.values import from_json, to_json
from agentsgym.store.writer import RolloutWriter
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.envs.play import OnFinish
    from agentsgym.envs.trial import Trial
    from agentsgym.types import Trajectory

    Play = Callable[..., list[Trajectory]]

LIMITS = ("max_turn_tokens", "max_completion_length")  # without them an episode is another
_KEY = "evaluation_key"


class StoredEvaluation:
    """The rollouts of one evaluation, on disk: what is there already, and where new ones go.

    Attributes:
        known: Those that are not played again, by task and rollout index.
    """

    def __init__(  # noqa: PLR0913  # what an evaluation is made of
        self,
        envs: Sequence[MultistepEnv],
        agent: Any,
        task_data: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        store: str | Path | RolloutWriter | None,
        resume: bool | Literal["failed"],
        agent_name: str | None,
    ) -> None:
        """Open the store; nothing is played.

        Args:
            envs: The environment of each task.
            agent: The agent.
            task_data: The tasks as they are asked for, each with its seed.
            options: What ``env.rollout`` takes besides; of several environments, the limits of tokens.
            store: A folder, or a writer.
            resume: Whether to look for what is there; ``"failed"``: for what is there and did not fail.
            agent_name: What the agent is called.

        Raises:
            ConfigError: There is nothing to resume from, or nobody says who played.
            StoreError: There can be no store.
        """
        self._is_own = not isinstance(store, RolloutWriter)
        name = agent_name or (store.shared.get("agent") if isinstance(store, RolloutWriter) else None)
        _check(store, resume, name)
        self._envs, self._agent, self._options = envs, agent, options
        self._resume = resume
        self._name = name or type(agent).__name__
        limits = {limit: options.get(limit) for limit in LIMITS}
        self._prefixes = {
            id(env): [
                class_path(type(env)),
                _canonical(env.env_config),
                limits,
                env.tokenizer is not None,
                self._name,
            ]
            for env in {id(env): env for env in envs}.values()
        }
        self._tasks = _numbered(envs, task_data)
        self._writer = RolloutWriter(store) if isinstance(store, str | Path) else cast("RolloutWriter", store)
        self.known: dict[tuple[int, int], Trajectory] = {}
        self._run: str | None = self._writer.shared.get("run")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what is left; a disk that takes nothing is logged, for the evaluation has all rollouts."""
        if self._is_own:
            self._writer.close(strict=False)
        else:
            self._writer.flush(wait=False)

    def playing(self, play: Play, num_rollouts: int) -> Play:
        """Give a function that plays as the given one does, stores what it plays, and leaves out what is stored.

        It is for one environment, whose ``rollout`` is the given function.
        """
        self.look_up(num_rollouts)
        if not self.known:
            return partial(self._play_all, play)
        env = self._envs[0]
        if type(env).rollout is not MultistepEnv.rollout:
            raise ConfigError(
                f"{type(env).__name__} overrides rollout, so single rollouts cannot be skipped: use resume=False"
            )
        return partial(self._play_missing, env, num_rollouts)

    def look_up(self, num_rollouts: int) -> None:
        """Find what is stored already, if it is not to be played again."""
        self.known = self._find(num_rollouts) if self._resume else {}
        self._run = self._run or f"evaluation-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"

    def play_missing(
        self, trials: Sequence[Trial], policy: FailurePolicy, on_finish: OnFinish, **options: Any
    ) -> list[Trajectory]:
        """Play the trials that are not stored, store them, and give all rollouts in the order of the trials."""
        missing = [one for one in trials if (one.task_index, one.rollout_index) not in self.known]
        # Also where nothing is missing: more of the known ones may have failed than is allowed this time.
        options = {"on_finish": self._storing(on_finish), "finished_before": [*self.known.values()], **options}
        played = play(missing, as_agent(self._agent), policy, **options)
        results = self.known | {(one.task_index, one.rollout_index): one for one in played}
        return [results[one.task_index, one.rollout_index] for one in trials]

    def _play_all(self, play: Play, *, on_finish: OnFinish, **options: Any) -> list[Trajectory]:
        return play(on_finish=self._storing(on_finish), **options)

    def _play_missing(
        self,
        env: MultistepEnv,
        num_rollouts: int,
        *,
        on_finish: OnFinish,
        failures: FailurePolicy | None = None,
    ) -> list[Trajectory]:
        options = dict(self._options)
        limits = {name: options.pop(name) for name in LIMITS if name in options}
        trials = env.trials([task for task, _ in self._tasks], num_rollouts, **limits)
        everything = self.play_missing(trials, as_policy(failures), on_finish, **options)
        env.check_starts(everything)
        return everything

    def _storing(self, on_finish: OnFinish) -> OnFinish:
        each = {id(env): env for env in self._envs}
        tokenizers = {key: self._writer.keep_tokenizer(env.tokenizer) for key, env in each.items()}

        def finished(trajectory: Trajectory) -> None:
            key = self._key(trajectory.task_index, trajectory.rollout_index)
            env, shared = self._envs[trajectory.task_index], self._writer.shared
            columns: dict[str, Any] = {
                "source": "evaluation",
                **stored_columns(env, trajectory),
                "agent": self._name,
                "run": self._run,
                "tokenizer": tokenizers[id(env)],
            }
            given = {name: value for name, value in columns.items() if name not in shared}
            self._writer.add(trajectory, **given, extra={**shared.get("extra", {}), _KEY: key})
            on_finish(trajectory)

        return finished

    def _key(self, task_index: int, rollout_index: int) -> str:
        """Name one rollout of this evaluation, equal for equal arguments in any process."""
        task, number = self._tasks[task_index]
        prefix = self._prefixes[id(self._envs[task_index])]
        text = json.dumps([*prefix, _canonical(task), number, rollout_index], sort_keys=True)
        return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()

    def _find(self, num_rollouts: int) -> dict[tuple[int, int], Trajectory]:
        """Find the rollouts that are there, the newest of each."""
        if not self._is_own:
            self._writer.flush()
        places = {self._key(i, j): (i, j) for i in range(len(self._tasks)) for j in range(num_rollouts)}
        store = RolloutStore(self._writer.path)
        table = store.table(["extra", "run", "stop_reason"])
        rows: dict[tuple[int, int], int] = {}
        for row, (extra, reason) in enumerate(
            zip(table.column("extra").to_pylist(), table.column("stop_reason").to_pylist(), strict=True)
        ):
            place = places.get(from_json(extra).get(_KEY)) if _KEY in extra else None
            if place is not None and not (self._resume == "failed" and reason == "failed"):
                rows[place] = row
        if rows and self._run is None:
            self._run = table.column("run")[max(rows.values())].as_py()
        return {
            place: replace(store[row], task_index=place[0])
            for place, row in sorted(
                rows.items(), key=lambda item: item[1]
            )  # as they lie, so that each part is read once
        }


def _check(store: Any, resume: Any, agent_name: str | None) -> None:
    if not isinstance(store, str | Path | RolloutWriter | None):
        raise ConfigError(f"store must be a folder or a writer from RolloutStore.writer, got {shown(store)}")
    require("resume", resume, lambda value: value is True or value is False or value == "failed", "a bool or 'failed'")
    require("agent_name", agent_name, or_none(is_str), "a string or None")
    if store is None:
        raise ConfigError("resume requires store, the folder to resume from")
    if resume and agent_name is None:
        raise ConfigError("resume requires agent_name, the agent whose rollouts in the store are continued")


def _numbered(envs: Sequence[MultistepEnv], tasks: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Each task with its number among those of its environment that are equal to it."""
    seen: Counter[tuple[int, str]] = Counter()
    numbered: list[tuple[Mapping[str, Any], int]] = []
    for env, task in zip(envs, tasks, strict=True):
        key = (id(env), _canonical(task))
        numbered.append((task, seen[key]))
        seen[key] += 1
    return numbered


def _canonical(value: Mapping[str, Any]) -> str:
    """Write a dict so that equal ones are equal texts, whatever the order of their keys."""
    return json.dumps(json.loads(to_json(value)), sort_keys=True)
