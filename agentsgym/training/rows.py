"""From dataset rows to environments and tasks: which game a row plays, and with which seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.envs.registry import class_path, make, without_filling
from agentsgym.errors import ConfigError, TaskError
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.trial import Trial

Row = Mapping[str, Any]


class Environments:
    """The environments of a run, one for each class and configuration that its rows name."""

    def __init__(
        self,
        env: MultistepEnv | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        check: Callable[[MultistepEnv], None] = lambda _env: None,
    ) -> None:
        """Take the one environment of the run, or None to build each row's own.

        Args:
            env: The one environment, or None.
            tokenizer: The policy's.
            check: Raises what speaks against an environment.

        Raises:
            ConfigError: ``env`` has no tokenizer or another one than the policy's.
        """
        if env is not None and not _same_tokenizer(env.tokenizer, tokenizer):
            raise ConfigError("env.tokenizer must be the trainer's: build the environment with the policy's tokenizer")
        self._env = env
        self._tokenizer = tokenizer
        self._check = check
        self._built: dict[tuple[str, str], MultistepEnv] = {}

    def check(self, rows: Iterable[Row], name: str = "the dataset") -> None:
        """Build every environment that the rows name, and check that each can play its tasks.

        Args:
            rows: The rows of one dataset.
            name: What errors call it.

        Raises:
            ConfigError: There are no rows, or one has no ``task_data``, or names a class or configuration that is not
                to be played here.
            TaskError: A row's task cannot be played.
        """
        index = -1
        for index, row in enumerate(rows):
            try:
                self.of(row).check_task(row["task_data"])
            except ConfigError as error:
                raise ConfigError(f"row {index} of {name}: {error}") from error
            except TaskError as error:
                raise TaskError(f"row {index} of {name}: {error}") from error
        if index < 0:
            raise ConfigError(f"{name} must hold at least one row, got none")

    def of(self, row: Row) -> MultistepEnv:
        """The environment of a row."""
        if not isinstance(row.get("task_data"), Mapping):
            raise ConfigError(f"a dataset row needs 'task_data' (a dict), got the columns {sorted(row)}")
        key = (str(row.get("env_class_path")), json.dumps(row.get("env_config"), sort_keys=True, default=repr))
        if key not in self._built:
            env = make(row, self._tokenizer) if self._env is None else self._given(self._env, row)
            self._check(env)
            self._built[key] = env
        return self._built[key]

    def game(self, row: Row) -> Hashable:
        """What a row plays, its environment's class and configuration: equal for equal games, also after a resume."""
        env = self.of(row)
        config = json.dumps(env.env_config, sort_keys=True, default=lambda value: getattr(value, "__qualname__", ""))
        return class_path(type(env)), derive_seed("game", config)

    def trials(
        self,
        rows: Sequence[Row],
        seeds: Sequence[int],
        *,
        max_turn_tokens: int | None = None,
        max_completion_length: int | None = None,
    ) -> list[Trial]:
        """One trial a row, not started yet; a row whose task has no seed of its own gets that of ``seeds``."""
        trials: list[Trial] = []
        for index, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
            task = dict(row["task_data"])
            if task.get("seed") is None:
                task["seed"] = seed
            [trial] = self.of(row).trials(
                [task], max_turn_tokens=max_turn_tokens, max_completion_length=max_completion_length
            )
            trial.task_index = index
            trials.append(trial)
        return trials

    def _given(self, env: MultistepEnv, row: Row) -> MultistepEnv:
        path, wanted = row.get("env_class_path"), class_path(type(env))
        if path is not None and path != wanted:
            raise ConfigError(f"a dataset row is of {path!r}, and the environment given is {wanted!r}")
        config = row.get("env_config")
        if config is not None and not _is_configured(env, config):
            raise ConfigError(
                f"a dataset row has env_config {config!r}, which is not that of the environment given; "
                "leave env=None to build each row's own"
            )
        return env


def group_seeds(num_rows: int, num_rollouts: int, *parts: object, first: int = 0) -> list[int]:
    """One seed a row, equal for the ``num_rollouts`` consecutive rows of a task group, hashed from ``parts``.

    ``first`` is the place of the first row among the rows of all ranks.
    """
    return [derive_seed("group", *parts, index // num_rollouts) for index in range(first, first + num_rows)]


def _is_configured(env: MultistepEnv, config: Mapping[str, Any]) -> bool:
    wanted = type(env)(None, without_filling(config, type(env))).env_config
    # A row is plain JSON: that it does not name a callable of the environment says nothing.
    return all(wanted[key] == value or (callable(value) and key not in config) for key, value in env.env_config.items())


def _same_tokenizer(one: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase) -> bool:
    if one is None:
        return False
    return one is other or (one.get_vocab() == other.get_vocab() and one.chat_template == other.chat_template)
