"""Get an environment's default tasks: rows of its dataset, or bare seeds if it has none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv


def tasks_of(
    env: MultistepEnv, split: Literal["train", "eval"] | str, options: Mapping[str, Any], most: int, *, seed: int = 0
) -> list[Any]:
    """Return rows of the environment's dataset; for a class without one, tasks that contain only a seed.

    Args:
        env: The environment.
        split: ``"train"`` or ``"eval"``.
        options: Options for its dataset.
        most: The maximum number of tasks.
        seed: Random seed of the tasks that contain only a seed.
    """
    make: Any = env.get_train_dataset if split == "train" else env.get_eval_dataset
    try:
        return list(islice(_rows(env, make, options, most), most))  # a generator may raise at its first row
    except NotImplementedError:
        if options:
            raise ConfigError(
                f"{type(env).__name__} has no dataset, hence no options, got {', '.join(options)}"
            ) from None
    return [{"seed": derive_seed("command line", split, seed, index)} for index in range(most)]


def _rows(env: MultistepEnv, make: Any, options: Mapping[str, Any], most: int) -> Any:
    """Create the dataset, of no more rows than needed if it accepts a size."""
    if "size" not in options:
        with suppress(TypeError):  # a user-defined class may not accept size
            return make(**{"size": most, **options})
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"the dataset of {type(env).__name__} cannot be created: {error}") from error
