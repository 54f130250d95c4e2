"""Find the players that an environment provides (random, reference, imitation) and the mean rewards of the first two.

The class's :class:`~agentsgym.envs.spec.EnvSpec` names them. A class may also define ``random_player(self, seed)``,
``reference_player(self, seed)``, ``imitation_player(self, seed)`` and ``anchors_of(self, task_data)``, which take
precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentsgym.agents.exploring import ExploringAgent
from agentsgym.envs import PACKAGED
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.datasets.naming import packaged_specs
from agentsgym.envs.spec import Anchors, imported
from agentsgym.errors import ConfigError


def has_random_player(env_class: type[MultistepEnv]) -> bool:
    """Whether a class provides a random player, which chooses among its legal actions."""
    return bool(env_class.spec.random) or callable(getattr(env_class, "random_player", None))


def random_player(env: MultistepEnv, seed: int = 0) -> Any:
    """Create the environment's random player, which chooses among the legal actions.

    Without one, return an :class:`~agentsgym.agents.exploring.ExploringAgent`, which repeats words of the prompts.
    """
    player = own_player(env, "random", seed)
    return ExploringAgent(seed=seed) if player is None else player


def reference_player(env: MultistepEnv, seed: int = 0) -> Any:
    """Create the best player that the environment provides.

    Raises:
        ConfigError: The environment provides none, or none for this configuration.
    """
    return _required_player(env, "reference", seed, "reference player")


def imitation_player(env: MultistepEnv, seed: int = 0) -> Any:
    """Create the demonstrator for a warm start, which plays well but also visits many other states.

    Raises:
        ConfigError: The environment provides none.
    """
    return _required_player(env, "imitation", seed, "demonstrator")


def anchors_of(env: MultistepEnv) -> Callable[[Mapping[str, Any]], Anchors | None] | None:
    """Return a function from a task to the mean rewards of random and optimal play; None if there is none.

    :func:`agentsgym.evaluate` accepts it as ``references``. (Environments may also report them in ``info``.)
    """
    own: Callable[[Mapping[str, Any]], Anchors | None] | None = getattr(env, "anchors_of", None)
    name = type(env).spec.anchors
    return own or (imported(name)(env) if name else None)


def own_player(env: MultistepEnv, kind: str, seed: int) -> Any:
    """Create a player that the class defines or its spec names; None if there is none of this kind."""
    own: Callable[[int], Any] | None = getattr(env, f"{kind}_player", None)
    if own is not None:
        return own(seed)
    name = getattr(type(env).spec, kind)
    return imported(name)(env, seed=seed) if name else None


def _required_player(env: MultistepEnv, kind: str, seed: int, title: str) -> Any:
    player = own_player(env, kind, seed)
    if player is not None:
        return player
    known = [PACKAGED[name].rpartition(".")[2] for name, spec in packaged_specs().items() if getattr(spec, kind)]
    raise ConfigError(
        f"{type(env).__name__} has no {title} (environments with one: {', '.join(known)}); define "
        f"{kind}_player(self, seed) in your class to add one"
    )
