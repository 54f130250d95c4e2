"""The environment and the tasks of ScienceWorld."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

from agentsgym.agents.base import Agent
from agentsgym.agents.exploring import ExploringAgent
from agentsgym.envs.config import validated_config
from agentsgym.envs.contract import State
from agentsgym.envs.datasets.options import SEED_OPTION, Part, checked_options, rows_of
from agentsgym.envs.ScienceWorld import SPEC
from agentsgym.envs.ScienceWorld.engine import find_java
from agentsgym.envs.shared.text_worlds import (
    ImitationPlayer,
    RandomPlayer,
    ReferencePlayer,
    TextWorldBase,
    process_fields,
)
from agentsgym.errors import ConfigError, MissingDependencyError, TaskError, did_you_mean
from agentsgym.fields import Field, is_bool, is_int, is_number, is_strings, one_of, or_none, require
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset

SIMPLIFICATIONS = (
    "easy", "noElectricalAction", "openContainers", "openDoors", "selfWateringFlowerPots", "teleportAction",
)  # fmt: skip
_ELECTRICAL = ("power-component", "conductivity")
_COMMANDS = (
    "open, close, activate, deactivate, connect … to …, disconnect, use … on …, look around, look at, look in, read, "
    "move … to …, pick up, put down, pour … in …, dunk … in …, mix, go to, eat, flush, focus on, wait, wait1, task, "
    "inventory"
)
_MB_PER_EPISODE = 16  # of JVM heap: 11 to 12 MB stay in use; the rest is for the garbage that each step creates
_NEEDS_GOLD_PATH = "this player follows the gold path: create the environment with env_config={'gold_path': True}"


class ScienceWorldEnv(TextWorldBase):
    """The 30 tasks of ScienceWorld (arXiv 2203.07540): text experiments in a simulated house.

    A task is ``{"task": "boil", "variation": 3}``; if ``variation`` is missing, a training variation is derived from
    the task's ``seed``. The simulator runs in Java, with many episodes in one JVM.

    Keys of ``env_config`` in addition to the common ones:

    - ``simplifications``: names from :data:`SIMPLIFICATIONS`; ``"easy"`` selects all that the task allows.
    - ``admissible_commands``: whether each prompt lists the commands that the simulator considers possible: hundreds or
      thousands, some of which it then rejects.
    - ``gold_path``: whether a solution is computed for each episode, for the players that follow it.
    - ``failure_score``: the return of an episode whose task is failed, such as by focusing on a wrong object;
      ScienceWorld itself uses -1 (-100 of 100).
    - ``memory_mb``: the maximum heap of each JVM, in MB; each episode is allotted 16 MB.
    - ``num_processes``, ``step_timeout_s``, ``start_timeout_s``: the settings of the engine's processes, one JVM each;
      additional processes are started if the active episodes do not fit.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "simplifications": Field(
            default=[],
            expected=f"a list of distinct names from {', '.join(SIMPLIFICATIONS)}",
            valid=lambda value: is_strings(value) and {*value} <= {*SIMPLIFICATIONS} and len({*value}) == len(value),
        ),
        "gold_path": Field(default=False, expected="True or False", valid=is_bool),
        "failure_score": Field(default=0.0, expected="a number", valid=is_number()),
        "memory_mb": Field(default=1024, expected="an int of at least 256", valid=is_int(256)),
        "admissible_commands": Field(default=False, expected="True or False", valid=is_bool),
        **process_fields(num_processes=2),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 100, "error_allowance": 100}
    task_fields: ClassVar[Collection[str] | None] = ("task", "variation")

    engine: ClassVar[str] = "agentsgym.envs.ScienceWorld.engine:ScienceWorldEngine"

    def _check_config(self, config: dict[str, Any]) -> None:
        super()._check_config(config)
        if find_java() is None:
            raise MissingDependencyError(
                "java", command="apt-get install default-jre-headless (any Java 8 or newer works)"
            )

    def _process_limits(self) -> dict[str, int]:
        return {"max_sessions_per_process": self.env_config["memory_mb"] // _MB_PER_EPISODE}

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        name: Any = task_data.get("task")
        variation: Any = task_data.get("variation")
        if not isinstance(name, str) or name not in TASKS:
            hint = did_you_mean(name, TASKS) if isinstance(name, str) else ""
            raise TaskError(f"task_data['task'] must be the name of a ScienceWorld task, got {shown(name)}{hint}")
        last, place = TASKS[name].num - 1, f"task_data['variation'] of {name!r}"
        is_variation = or_none(lambda value: is_int(0)(value) and value <= last)
        require(place, variation, is_variation, f"an int from 0 to {last}", TaskError)
        if "noElectricalAction" in self.env_config["simplifications"] and any(word in name for word in _ELECTRICAL):
            raise TaskError(
                f"the task {name!r} needs wires, which 'noElectricalAction' removes: drop it from "
                "env_config['simplifications'], or choose another task"
            )

    def _engine_task(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        config = self.env_config
        name, variation = task_data["task"], task_data.get("variation")
        return {
            "task": name,
            "variation": task_data["seed"] % TASKS[name].train if variation is None else variation,
            "simplifications": ",".join(sorted(config["simplifications"])),
            **{key: config[key] for key in ("gold_path", "admissible_commands", "memory_mb")},
        }

    def _rejection_reason(self, state: State, command: str) -> str | None:
        return "The task cannot be restarted." if command.lower().startswith("reset") else None

    def _return(self, response: Mapping[str, Any]) -> float:
        return self.env_config["failure_score"] if response["score"] < 0 else response["score"]

    def _system_prompt(self) -> str:
        return (
            "You solve a task of science in a house of several rooms. Answer each turn with one command in one line. "
            f"The commands are: {_COMMANDS}. Focus only on what the task asks you to focus on: a wrong focus fails it."
        )

    def random_player(self, seed: int = 0) -> Agent:
        """Create the random player: it picks a listed command or, without a list, explores based on the text."""
        return RandomPlayer(self, seed) if self.env_config["admissible_commands"] else ExploringAgent(seed=seed)

    def reference_player(self, seed: int = 0) -> ReferencePlayer:
        """Create the player that follows the gold path.

        Raises:
            ConfigError: ``env_config["gold_path"]`` is False.
        """
        if not self.env_config["gold_path"]:
            raise ConfigError(_NEEDS_GOLD_PATH)
        return ReferencePlayer(self, seed)

    def imitation_player(self, seed: int = 0) -> ImitationPlayer:
        """Create the player that demonstrates the gold path; the errors are those of :meth:`reference_player`."""
        if not self.env_config["gold_path"]:
            raise ConfigError(_NEEDS_GOLD_PATH)
        return ImitationPlayer(self, seed)

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to train on; the options are those of :class:`~.tasks.DatasetOptions`."""
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:  # type: ignore[override]
        """Return rows of the development or test variations; otherwise like :meth:`get_train_dataset`."""
        return task_dataset(cls, env_config, "eval", options)


@dataclass(frozen=True, slots=True)
class Variations:
    """The number of variations in each split of a task; their indices are in the order train, dev, test."""

    train: int
    dev: int
    test: int

    def indices(self, split: str) -> range:
        """Return the indices of a split: ``"train"``, ``"dev"`` or ``"test"``."""
        ends = {"train": (0, self.train), "dev": (self.train, self.train + self.dev)}
        first, stop = ends.get(split, (self.train + self.dev, self.num))
        return range(first, stop)

    @property
    def num(self) -> int:
        """The total number of variations."""
        return self.train + self.dev + self.test


#: The splits of ScienceWorld 1.2.3.
TASKS: Mapping[str, Variations] = {
    "boil": Variations(14, 7, 9),
    "change-the-state-of-matter-of": Variations(14, 7, 9),
    "chemistry-mix": Variations(16, 8, 8),
    "chemistry-mix-paint-secondary-color": Variations(18, 9, 9),
    "chemistry-mix-paint-tertiary-color": Variations(18, 9, 9),
    "find-animal": Variations(150, 75, 75),
    "find-living-thing": Variations(150, 75, 75),
    "find-non-living-thing": Variations(150, 75, 75),
    "find-plant": Variations(150, 75, 75),
    "freeze": Variations(14, 7, 9),
    "grow-fruit": Variations(62, 31, 33),
    "grow-plant": Variations(62, 31, 33),
    "identify-life-stages-1": Variations(6, 3, 5),
    "identify-life-stages-2": Variations(4, 2, 4),
    "inclined-plane-determine-angle": Variations(84, 42, 42),
    "inclined-plane-friction-named-surfaces": Variations(692, 346, 348),
    "inclined-plane-friction-unnamed-surfaces": Variations(80, 40, 42),
    "lifespan-longest-lived": Variations(62, 31, 32),
    "lifespan-longest-lived-then-shortest-lived": Variations(62, 31, 32),
    "lifespan-shortest-lived": Variations(62, 31, 32),
    "measure-melting-point-known-substance": Variations(218, 109, 109),
    "measure-melting-point-unknown-substance": Variations(150, 75, 75),
    "melt": Variations(14, 7, 9),
    "mendelian-genetics-known-plant": Variations(60, 30, 30),
    "mendelian-genetics-unknown-plant": Variations(240, 120, 120),
    "power-component": Variations(10, 5, 5),
    "power-component-renewable-vs-nonrenewable-energy": Variations(10, 5, 5),
    "test-conductivity": Variations(450, 225, 225),
    "test-conductivity-of-unknown-substances": Variations(300, 150, 150),
    "use-thermometer": Variations(270, 135, 135),
}


class DatasetOptions(TypedDict, total=False):
    """Options of the generated rows.

    Attributes:
        tasks: Names from :data:`TASKS`; None for all tasks.
        num_variations: The maximum number of variations per task, so that no task dominates; None for all.
        split: The split for evaluation, ``"dev"`` (default) or ``"test"``.
        size: The number of rows; by default one per variation.
        seed: The seed that determines the order of rows and the tasks' seeds.
    """

    tasks: Sequence[str] | None
    num_variations: int | None
    split: str
    size: int | None
    seed: int


_OPTIONS: Mapping[str, Field] = {
    "tasks": Field(default=None, expected="a list of task names or None", valid=or_none(is_strings)),
    "num_variations": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "size": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    **SEED_OPTION,
}
_SPLIT = Field(default="dev", expected="'dev' or 'test'", valid=one_of("dev", "test"))


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return rows of the training variations, or of the development or test variations."""
    validated_config(env_class, env_config)
    settings = checked_options(options, _OPTIONS if part == "train" else {**_OPTIONS, "split": _SPLIT})
    names: Sequence[str] = [*TASKS] if settings["tasks"] is None else settings["tasks"]
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"tasks must be names of ScienceWorld tasks, got {name!r}{did_you_mean(name, TASKS)}")
    if not names:
        raise ConfigError("tasks must name at least one of ScienceWorld's tasks, got []")
    limit, split = settings["num_variations"], settings.get("split", "train")
    tasks = [{"task": name, "variation": index} for name in names for index in TASKS[name].indices(split)[:limit]]
    return rows_of(tasks, env_class, env_config, part, settings)
