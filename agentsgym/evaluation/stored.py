"""Store the rollouts of an evaluation, and play only the ones that are not stored yet."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentsgym.agents.base import as_agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.environments import stored_columns
from agentsgym.envs.finished import hooks_of
from agentsgym.envs.play import play
from agentsgym.errors import ConfigError
from agentsgym.failures import FailurePolicy, as_policy
from agentsgym.fields import is_str, or_none, require
from agentsgym.store.reader import RolloutStore
from agentsgym.store.runs import new_run_name
from agentsgym.store.values import from_json, to_json
from agentsgym.store.writer import RolloutWriter
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.envs.play import OnFinish
    from agentsgym.envs.trial import Trial
    from agentsgym.types import Trajectory

    Play = Callable[..., list[Trajectory]]

logger = logging.getLogger(__name__)

_LIMITS = ("max_turn_tokens", "max_completion_length")  # these limits affect episodes
_KEY = "evaluation_key"


class StoredEvaluation(AbstractContextManager["StoredEvaluation"]):
    """The rollouts of one evaluation in a store.

    Attributes:
        known: The stored rollouts, which are not played again, by task index and rollout index.
    """

    def __init__(  # noqa: PLR0913  # the arguments of an evaluation
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
        """Open the store without playing anything.

        Args:
            envs: The environment of each task.
            agent: The agent.
            task_data: The tasks, each with its seed.
            options: Further options of ``env.rollout``; with several environments, only the token limits.
            store: The folder of a rollout store, or a writer.
            resume: Whether to skip stored rollouts; with ``"failed"``, failed rollouts are played again.
            agent_name: The agent's name in the store.

        Raises:
            ConfigError: An argument is invalid, or ``resume`` is set without a store or the agent's name.
            StoreError: The store cannot be created.
        """
        self._is_own = not isinstance(store, RolloutWriter)
        name = agent_name or (store.shared.get("agent") if isinstance(store, RolloutWriter) else None)
        if not isinstance(store, str | Path | RolloutWriter | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"store must be a folder or a writer from RolloutStore.writer, got {shown(store)}")
        if resume is not True and resume is not False and resume != "failed":
            raise ConfigError(f"resume must be a bool or 'failed', got {shown(resume)}")
        require("agent_name", name, or_none(is_str), "a string or None")
        if store is None:
            raise ConfigError(f"{'resume' if resume else 'agent_name'} requires store, a folder of rollouts")
        if resume and name is None:
            raise ConfigError(
                "resume requires agent_name, the name of the agent whose stored rollouts are to be skipped"
            )
        self._envs, self._agent, self._options = envs, agent, options
        self._resume = resume
        self._name = name or type(agent).__name__
        limits = {limit: options.get(limit) for limit in _LIMITS}
        self._prefixes = {
            id(env): [
                *(class_path(type(env)), _canonical(env.env_config), limits, env.tokenizer is not None, self._name),
                *(hook.identity for hook in hooks_of(env)),
            ]
            for env in {id(env): env for env in envs}.values()
        }
        # Each task, and the number of equal tasks before it in its environment.
        self._tasks: list[tuple[Mapping[str, Any], int]] = []
        seen: Counter[tuple[int, str]] = Counter()
        for env, task in zip(envs, task_data, strict=True):
            key = id(env), _canonical(task)
            self._tasks.append((task, seen[key]))
            seen[key] += 1
        self._writer = RolloutWriter(store) if isinstance(store, str | Path) else store
        self.known: dict[tuple[int, int], Trajectory] = {}
        self._run: str | None = self._writer.shared.get("run")

    def __exit__(self, *_: object) -> None:
        """Write pending rollouts; errors are only logged, since the evaluation returns all rollouts."""
        if self._is_own:
            self._writer.close(strict=False)
        else:
            self._writer.flush(wait=False)

    def playing(self, play: Play, num_rollouts: int) -> Play:
        """Wrap ``play`` so that it skips stored rollouts and stores the others.

        Args:
            play: The ``rollout`` method of the only environment.
            num_rollouts: The number of rollouts per task.
        """
        self.look_up(num_rollouts)
        if self.known and type(self._envs[0]).rollout is not MultistepEnv.rollout:
            name = type(self._envs[0]).__name__
            raise ConfigError(f"{name} overrides rollout, so individual rollouts cannot be skipped: use resume=False")
        return partial(self._play, play, num_rollouts)

    def look_up(self, num_rollouts: int) -> None:
        """Find the newest stored rollout of each task and rollout index, if resuming; otherwise only warn of them."""
        if self._resume or self._run is None:
            if self._resume and not self._is_own:
                self._writer.flush()
            places = {self._key(i, j): (i, j) for i in range(len(self._tasks)) for j in range(num_rollouts)}
            store = RolloutStore(self._writer.path)
            table = store.table(["extra", "run", "stop_reason"])
            extras, reasons = (table.column(name).to_pylist() for name in ("extra", "stop_reason"))
            rows: dict[tuple[int, int], int] = {}
            for row, (extra, reason) in enumerate(zip(extras, reasons, strict=True)):
                place = places.get(from_json(extra).get(_KEY)) if _KEY in extra else None
                if place is not None and not (self._resume == "failed" and reason == "failed"):
                    rows[place] = row
            if rows and not self._resume:
                text = "%s has %d rollouts of this evaluation by %s, to which others are added: resume=True skips them"
                logger.warning(text, self._writer.path, len(rows), self._name)
                rows = {}
            elif not rows and self._resume and (others := len(store.filter(agent=self._name))):
                logger.warning(
                    "%s has %d rollouts of %s, but none of this evaluation: its tasks, environment, env_config, limits "
                    "or judges are others, so that everything is played",
                    *(self._writer.path, others, self._name),
                )
            if rows and self._run is None:
                self._run = table.column("run")[max(rows.values())].as_py()
            sizes = Counter(task_index for task_index, _ in rows)
            self.known = {
                place: replace(store[row], task_index=place[0])
                for place, row in sorted(rows.items(), key=itemgetter(1))  # in this order, each file is read once
                # An incomplete task group is played again if a hook takes its rollouts at once.
                if sizes[place[0]] == num_rollouts
                or not any(hook.takes_groups for hook in hooks_of(self._envs[place[0]]))
            }
        self._run = self._run or new_run_name("evaluation")

    def play_missing(
        self, trials: Sequence[Trial], policy: FailurePolicy, on_finish: OnFinish, **options: Any
    ) -> list[Trajectory]:
        """Play and store the trials that are not stored yet; returns all rollouts in the order of the trials."""
        missing = [one for one in trials if (one.task_index, one.rollout_index) not in self.known]
        # Called even if nothing is missing: more of the stored rollouts may have failed than this policy allows.
        options = {"on_finish": self._storing(on_finish), "finished_before": [*self.known.values()], **options}
        played = play(missing, as_agent(self._agent), policy, **options)
        results = self.known | {(one.task_index, one.rollout_index): one for one in played}
        return [results[one.task_index, one.rollout_index] for one in trials]

    def _play(self, play: Play, num_rollouts: int, *, on_finish: OnFinish, **given: Any) -> list[Trajectory]:
        if not self.known:
            return play(on_finish=self._storing(on_finish), **given)
        env, options = self._envs[0], dict(self._options)
        limits = {name: options.pop(name) for name in _LIMITS if name in options}
        trials = env.trials([task for task, _ in self._tasks], num_rollouts, **limits)
        everything = self.play_missing(trials, as_policy(given.get("failures")), on_finish, **options)
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
        """Return a rollout's key in the store, which is the same in every process."""
        task, number = self._tasks[task_index]
        prefix = self._prefixes[id(self._envs[task_index])]
        text = json.dumps([*prefix, _canonical(task), number, rollout_index], sort_keys=True)
        return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _canonical(value: Mapping[str, Any]) -> str:
    """Serialize a dict as JSON so that equal dicts have equal texts, regardless of the order of keys."""
    return json.dumps(json.loads(to_json(value)), sort_keys=True)
