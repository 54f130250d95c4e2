"""The environments of a recipe, each built once with its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.datasets.mix import mix
from agentsgym.envs.datasets.naming import NamedEnv, find_env
from agentsgym.envs.datasets.options import tasks_of
from agentsgym.errors import AgentsGymError
from agentsgym.recipes.sections import PlacedError
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from datasets import Dataset

    from agentsgym.recipes.recipe import EnvironmentPart, Recipe


@dataclass(frozen=True, kw_only=True)
class World:
    """An environment of a recipe.

    Attributes:
        label: Name in metrics and evaluations.
        weight: Weight relative to the other environments.
        named: Class and configuration.
        env: Environment without a tokenizer.
        eval_named: Class and configuration for evaluation.
        eval_env: Environment for evaluation, without a tokenizer.
        dataset: Options of its dataset.
    """

    label: str
    weight: float
    named: NamedEnv
    env: MultistepEnv
    eval_named: NamedEnv
    eval_env: MultistepEnv
    dataset: Mapping[str, Any]

    def tasks(self, split: str, most: int, *, seed: int) -> list[dict[str, Any]]:
        """Return tasks of the environment, checked and with seeds.

        Raises:
            AgentsGymError: A task is invalid, or the dataset cannot be built.
        """
        env = self.env if split == "train" else self.eval_env
        rows = tasks_of(env, split, self.dataset, most, seed=seed)
        tasks = tasks_of_rows(env, rows, "tasks")
        for index, task in enumerate(tasks):
            if task.get("seed") is None:
                task["seed"] = derive_seed("recipe", split, seed, index)
            env.check_task(task, f"tasks[{index}]")
        return tasks


class Worlds(list[World]):
    """All environments of a recipe.

    Attributes:
        train: Training tasks by label.
        eval: Evaluation tasks by label.
    """

    def __init__(self, recipe: Recipe, *, seed: int) -> None:
        """Build the environments and their tasks.

        Args:
            recipe: The recipe.
            seed: Random seed for tasks and for the order of a mixture.
        """
        super().__init__()
        self._seed = seed
        self.train: dict[str, list[dict[str, Any]]] = {}
        self.eval: dict[str, list[dict[str, Any]]] = {}
        for index, part in enumerate(recipe.environments):
            try:
                world = _world(recipe, part, index, {one.label for one in self})
                self.train[world.label] = world.tasks("train", recipe.num_train_tasks, seed=seed)
                self.eval[world.label] = world.tasks("eval", recipe.evaluation.num_tasks, seed=seed)
            except PlacedError:
                raise
            except AgentsGymError as error:
                raise PlacedError(("environments", index), f"cannot be used: {sentence_of(error)}") from error
            self.append(world)

    def train_rows(self) -> Dataset:
        """Return the rows to train on: the tasks of one environment, or a mixture of several by weight."""
        if len(self) > 1:
            return self._mixed({one.label: one.named for one in self}, self.train)
        from datasets import Dataset, Features, Json  # noqa: PLC0415  # slow to import

        features: Any = {"task_data": Json()}
        rows = [{"task_data": task} for task in self.train[self[0].label]]
        return Dataset.from_list(rows, features=Features(features))  # pyright: ignore[reportUnknownMemberType]

    def eval_rows(self) -> Dataset:
        """Return the rows to evaluate on: all tasks of all environments."""
        sizes = {name: len(tasks) for name, tasks in self.eval.items()}
        named = {one.label: one.eval_named for one in self}
        return self._mixed(named, self.eval, weights=sizes, size=sum(sizes.values()))

    def _mixed(
        self,
        named: Mapping[str, NamedEnv],
        tasks: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        size: int | None = None,
    ) -> Dataset:
        sources = {label: (one.env_class, one.env_config, tasks[label]) for label, one in named.items()}
        return mix(sources, weights=weights or {one.label: one.weight for one in self}, seed=self._seed, size=size)


def _world(recipe: Recipe, part: EnvironmentPart, index: int, taken: set[str]) -> World:
    if isinstance(part.class_, type):
        env_class: type[Any] = part.class_
        if not issubclass(env_class, MultistepEnv):
            problem = f"must be the name of an environment, or a subclass of MultistepEnv, got {shown(env_class)}"
            raise PlacedError(("environments", index, "class"), problem)
        named = NamedEnv(name=env_class.__name__, env_class=env_class, env_config=part.env_config)
    else:
        name: str = part.class_
        # an absolute path stays unchanged
        named = find_env(str(recipe.folder / name) if ".py" in name else name, part.env_config)
    label = part.label or named.name.rpartition("/")[2] or f"environment {index}"
    if label in taken:
        if part.label:
            raise PlacedError(("environments", index, "label"), f"must be unique: {label!r} is used twice")
        label = f"{label} {index}"
    env = named.build()
    eval_named, eval_env = named, env
    if recipe.evaluation.env_config:
        try:
            changed = named.settings("env_config", recipe.evaluation.env_config)
            eval_named = replace(named, env_config={**named.env_config, **changed})
            eval_env = eval_named.build()
        except AgentsGymError as error:
            problem = f"cannot be used for {label!r}: {sentence_of(error)}"
            raise PlacedError(("evaluation", "env_config"), problem) from error
    return World(
        label=label,
        weight=part.weight,
        named=named,
        env=env,
        eval_named=eval_named,
        eval_env=eval_env,
        dataset={**named.dataset_options, **named.settings("dataset", part.dataset)},
    )
