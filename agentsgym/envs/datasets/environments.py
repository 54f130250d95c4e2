"""Build the environments that dataset rows name, and trials of their tasks; describe them in columns of a store.

Only registered classes are built, since a dataset must not import code.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs import PACKAGED
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.config import validated_config
from agentsgym.envs.dataset_rows import (
    DatasetRow,
    check_row,
    class_path,
    drop_null_columns,
    environment_key,
    registered_classes,
)
from agentsgym.envs.spec import installed_entry_points
from agentsgym.envs.subclass import build
from agentsgym.errors import ConfigError, TaskError, did_you_mean
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentsgym.envs.trial import Trial
    from agentsgym.types import Trajectory


def register(env_class: type[MultistepEnv], path: str | None = None) -> type[MultistepEnv]:
    """Register an environment class so that dataset rows can name it; usable as a decorator.

    Args:
        env_class: The class to register.
        path: Its ``env_class_path``; by default its module and name.

    Raises:
        ConfigError: ``env_class`` is not an environment class, or another class is registered under that path.
    """
    if not (isinstance(env_class, type) and issubclass(env_class, MultistepEnv)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"env_class must be a subclass of MultistepEnv, got {shown(env_class)}")
    key = path or class_path(env_class)
    if registered_classes().get(key, env_class) is not env_class or key in PACKAGED.values():
        raise ConfigError(f"env_class_path {shown(key)} is already registered for another class")
    registered_classes()[key] = env_class
    return env_class


def find(path: str, *, allow_import: bool = False) -> type[MultistepEnv]:
    """Return the class that ``path`` names.

    Args:
        path: An ``env_class_path``.
        allow_import: Whether to import a path that is not registered; only for datasets that you trust like code.

    Raises:
        ConfigError: The path is unknown, or does not name an environment.
    """
    if path in registered_classes():
        return registered_classes()[path]
    if path in PACKAGED.values() or allow_import:
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: no absolute module name
            raise ConfigError(f"env_class_path {shown(path)} cannot be imported: {sentence_of(error)}") from error
        return _check_class(path, found)
    entry_points = installed_entry_points()
    for name, entry in entry_points.items():
        if path in {name, entry.value.replace(":", ".")}:  # the environment's own rows contain the latter
            return _check_class(path, entry.load())
    known = {*PACKAGED.values(), *registered_classes(), *entry_points}
    raise ConfigError(
        f"env_class_path {shown(path)} is not registered{did_you_mean(path, known)}"
        " (register your own class with agentsgym.register, or import one that you trust with allow_import=True)"
    )


def make(
    row: DatasetRow | str, tokenizer: PreTrainedTokenizerBase | None = None, *, allow_import: bool = False
) -> MultistepEnv:
    """Build the environment that a dataset row (or just an ``env_class_path``) names.

    The task is not checked: a row without ``task_data`` is rejected only when it is played.

    Raises:
        ConfigError: The row has no ``env_class_path``, or the path or ``env_config`` is invalid.
    """
    if isinstance(row, str):
        row = {"env_class_path": row}
    if not isinstance(row, Mapping) or not isinstance(row.get("env_class_path"), str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a row must be a dict with an 'env_class_path' (str), got {shown(row)}")
    env_class = find(row["env_class_path"], allow_import=allow_import)
    config = row.get("env_config")
    is_dict = isinstance(config, Mapping)
    return build(env_class, tokenizer, drop_null_columns(cast("DatasetRow", config), env_class) if is_dict else config)


def _check_class(path: str, found: object) -> type[MultistepEnv]:
    if isinstance(found, type) and issubclass(found, MultistepEnv):
        return found
    raise ConfigError(
        f"env_class_path {shown(path)} must name a subclass of MultistepEnv, got {shown(cast('object', found))}"
    )


logger = logging.getLogger(__name__)


class Environments:
    """The environments of a run: one for each class and configuration that its rows name.

    Attributes:
        tokenizer: The policy's tokenizer.
    """

    def __init__(
        self,
        env: MultistepEnv | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        check: Callable[[MultistepEnv], None] = lambda _env: None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up the environments; those that rows name are built at first use.

        Args:
            env: The only environment of the run; None to build the environment that each row names.
            tokenizer: The policy's tokenizer.
            check: A function that raises if an environment is incompatible with the settings.
            template_options: The ``chat_template_kwargs`` for rows that do not set any.

        Raises:
            ConfigError: ``env`` has no tokenizer, or a tokenizer or ``chat_template_kwargs`` that differ.
        """
        if env is not None and not same_tokenizer(env.tokenizer, tokenizer):
            raise ConfigError("env.tokenizer must be the policy's tokenizer: build the environment with it")
        if env is not None and template_options:
            own = env.env_config["chat_template_kwargs"]
            if own != template_options:
                raise ConfigError(
                    f"GRPOEnvConfig(chat_template_kwargs={shown(template_options)}) and env, which was built with "
                    f"env_config['chat_template_kwargs']={shown(own)}, differ: build the environment with the same "
                    "options, or omit them from GRPOEnvConfig, since the environment renders every prompt"
                )
        self._env = env
        self._template_options = {**(template_options or {})}
        self.tokenizer = tokenizer
        self._check = check
        self._built: dict[str, MultistepEnv] = {}

    def check(self, rows: Iterable[DatasetRow], name: str = "the dataset") -> None:
        """Build every environment that the rows name, and check that each can play its tasks.

        Args:
            rows: The rows of one dataset.
            name: Name of the dataset in error messages.

        Raises:
            ConfigError: There are no rows, or a row has no ``task_data`` or does not match the run's environment.
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
            raise ConfigError(f"{name} must contain at least one row, got none")

    @property
    def env_config(self) -> dict[str, Any] | None:
        """What the only environment's configuration changes of the defaults; None if each row names its own."""
        if self._env is None:
            return None
        defaults = validated_config(type(self._env), None)
        return {key: value for key, value in self._env.env_config.items() if value != defaults.get(key)}

    def of(self, row: DatasetRow) -> MultistepEnv:
        """Return a row's environment, with the run's chat template options if the row sets none."""
        if not isinstance(row.get("task_data"), Mapping):
            given = shown(row["task_data"]) if "task_data" in row else f"the columns {sorted(row)}"
            raise ConfigError(f"a dataset row needs 'task_data' (a dict), got {given}")
        key = environment_key(row)
        if key not in self._built:
            env = self._env
            if env is not None:
                check_row(env, row, remedy="leave env=None to build the environment that each row names")
            else:
                config: Any = row.get("env_config")
                if self._template_options and isinstance(config, Mapping | None):
                    own = cast("Mapping[str, Any]", config or {})
                    if own.get("chat_template_kwargs") is None:
                        row = {**row, "env_config": {**own, "chat_template_kwargs": self._template_options}}
                env = make(row, self.tokenizer)
            self._check(env)
            self._built[key] = env
        return self._built[key]

    def identity(self, row: DatasetRow) -> Hashable:
        """Return a key for a row's class and configuration that does not change when a run is resumed."""
        env = self.of(row)
        config = json.dumps(env.env_config, sort_keys=True, default=lambda value: getattr(value, "__qualname__", ""))
        return class_path(type(env)), derive_seed("game", config)

    def label(self, row: DatasetRow) -> str:
        """Return the environment's name in metrics: the row's ``environment``, set by ``mix``, or else its class."""
        name = row.get("environment")
        return name if isinstance(name, str) and name else type(self.of(row)).__name__

    def trials(
        self,
        rows: Sequence[DatasetRow],
        seeds: Sequence[int],
        *,
        places: Iterable[tuple[int, int]],
        max_turn_tokens: int | None = None,
        max_completion_length: int | None = None,
    ) -> list[Trial]:
        """Build one trial per row without starting it.

        Args:
            rows: Dataset rows, (B,).
            seeds: Seeds for tasks that have none, (B,).
            places: Each trial's ``task_index`` and ``rollout_index``, (B,).
            max_turn_tokens: Maximum number of tokens in one action; None for no limit.
            max_completion_length: Maximum number of tokens after the first prompt; None for no limit.
        """
        trials: list[Trial] = []
        for row, seed, place in zip(rows, seeds, places, strict=True):
            task = dict(row["task_data"])
            if task.get("seed") is None:
                task["seed"] = seed
            [trial] = self.of(row).trials(
                [task], max_turn_tokens=max_turn_tokens, max_completion_length=max_completion_length
            )
            trial.task_index, trial.rollout_index = place
            trials.append(trial)
        return trials

    def check_starts(self, rows: Sequence[DatasetRow], trajectories: Sequence[Trajectory]) -> None:
        """Warn once per environment if the rollouts of a task group start with different prompts.

        Args:
            rows: The rows that were played, (B,).
            trajectories: Their rollouts, (B,), each with its task group as ``task_index``.
        """
        played: dict[int, tuple[MultistepEnv, list[Trajectory]]] = {}
        for row, trajectory in zip(rows, trajectories, strict=True):
            env = self.of(row)
            played.setdefault(id(env), (env, []))[1].append(trajectory)
        for env, own in played.values():
            env.check_starts(own)


def group_seeds(num_rows: int, num_rollouts: int, *parts: object, first: int = 0) -> list[int]:
    """Derive one seed per row by hashing ``parts``; the ``num_rollouts`` consecutive rows of a task group share it.

    ``first`` is the index of the first row among the rows of all ranks.
    """
    return [derive_seed("group", *parts, index // num_rollouts) for index in range(first, first + num_rows)]


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers have the same vocabulary and chat template; False if the first is None."""
    if one is None:
        return False
    return one is other or bool(one.get_vocab() == other.get_vocab() and one.chat_template == other.chat_template)


def stored_columns(env: MultistepEnv, trajectory: Trajectory) -> dict[str, Any]:
    """Return the columns that identify a rollout's environment: its class, its configuration and its tools.

    Args:
        env: The environment.
        trajectory: The rollout. If it failed, its tools are not stored, since they may be the cause.
    """
    tools: Any = None
    if not trajectory.failed:
        try:
            tools = env.tool_schemas or None
        except Exception:  # user code or an unreachable server; the rollout is still stored
            logger.exception("rollouts of %s are stored without tool schemas", type(env).__name__)
    return {"env_class_path": class_path(type(env)), "env_config": env.env_config, "tools": tools}
