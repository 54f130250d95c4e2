"""Find an environment's own tasks: a dataset of any signature, or seeds for a class without one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv


def tasks_of(
    env: MultistepEnv, split: Literal["train", "eval"] | str, options: Mapping[str, Any], most: int, *, seed: int = 0
) -> list[Any]:
    """Return dataset rows of the environment; for a class without a dataset, tasks that are only a seed.

    Args:
        env: The environment.
        split: ``"train"`` or ``"eval"``.
        options: Options of its dataset.
        most: The maximum number of tasks.
        seed: Random seed of the tasks that are only a seed.

    Raises:
        ConfigError: The dataset cannot be made with these options, or there are options and no dataset.
    """
    make: Any = env.get_train_dataset if split == "train" else env.get_eval_dataset
    try:
        return list(islice(_rows(env, make, options, most), most))
    except NotImplementedError:
        if options:
            raise ConfigError(f"{type(env).__name__} has no dataset with options, got {', '.join(options)}") from None
    return [{"seed": derive_seed("command line", split, seed, index)} for index in range(most)]


def _rows(env: MultistepEnv, make: Any, options: Mapping[str, Any], most: int) -> Any:
    """Request as many rows as are needed, if the dataset has an option for it."""
    if "size" not in options:
        try:
            return make(**{"size": most, **options})
        except TypeError:
            pass  # a class of a user's own may have no such option
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"the dataset of {type(env).__name__}: {error}") from error
