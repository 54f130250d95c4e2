"""Find an environment's own players: one that plays at random, one to measure against, and what both earn.

A class of your own offers them by defining ``random_player(self, seed)``, ``reference_player(self, seed)``,
``imitation_player(self, seed)`` and ``anchors_of(self, task_data)``, of which each may be missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentsgym.agents.exploring import ExploringAgent
from agentsgym.envs.anchors import Anchors
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import class_path
from agentsgym.errors import ConfigError

_RANDOM, _REFERENCE, _IMITATION = "random_player", "reference_player", "imitation_player"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Players:
    """The players of a packaged environment: where their classes stand; empty where there is none."""

    module: str
    random: str
    reference: str = ""


_PACKAGED = {
    f"agentsgym.envs.{module.partition('.')[0]}.{name}": _Players(
        module=f"agentsgym.envs.{module}", random=random, reference=reference
    )
    for module, name, random, reference in (
        ("ALFWorld.players", "ALFWorldEnv", "RandomPlayer", "ReferencePlayer"),
        ("TwentyQuestions.players", "TwentyQuestionsEnv", "RandomPlayer", "GreedyPlayer"),
        ("PriceList.players", "PriceListEnv", "RandomPlayer", "ReferencePlayer"),
        ("Search.players", "SearchEnv", "RandomPlayer", "ReferencePlayer"),
        ("Gymnasium.players", "GymnasiumEnv", "RandomPlayer", "OptimalPlayer"),
        ("TextArena.players", "TextArenaEnv", "LegalAgent", ""),
    )
}
_DEMONSTRATED = (
    "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv",
    "agentsgym.envs.PriceList.PriceListEnv",
    "agentsgym.envs.ALFWorld.ALFWorldEnv",
)
_TEXT_ARENA = "agentsgym.envs.TextArena.TextArenaEnv"


def has_random_player(env_class: type[MultistepEnv]) -> bool:
    """Whether a class has a random player of its own, which knows its actions."""
    return class_path(env_class) in _PACKAGED or callable(getattr(env_class, _RANDOM, None))


def random_player(env: MultistepEnv, seed: int = 0) -> Any:
    """Make the player that takes actions of this environment at random.

    One that knows the actions, where the environment has one; else an
    :class:`~agentsgym.agents.exploring.ExploringAgent`, which says what the prompts show.
    """
    own: Callable[[int], Any] | None = getattr(env, _RANDOM, None)
    if own is not None:
        return own(seed)
    packaged = _PACKAGED.get(class_path(type(env)))
    if packaged is None:
        return ExploringAgent(seed=seed)
    return getattr(importlib.import_module(packaged.module), packaged.random)(env, seed=seed)


def reference_player(env: MultistepEnv, seed: int = 0) -> Any:
    """Make the best player that the environment brings along.

    Raises:
        ConfigError: It brings none, or none for this configuration.
    """
    own: Callable[[int], Any] | None = getattr(env, _REFERENCE, None)
    if own is not None:
        return own(seed)
    path = class_path(type(env))
    if path == _TEXT_ARENA:
        return _exact_values(env.env_config).optimal_player(seed)
    packaged = _PACKAGED.get(path)
    if packaged is None:
        known = ", ".join(sorted(one.rpartition(".")[2] for one in _PACKAGED))
        raise ConfigError(
            f"{type(env).__name__} brings no reference player (those that do: {known}); a class of yours offers one by "
            f"defining {_REFERENCE}(self, seed)"
        )
    player = getattr(importlib.import_module(packaged.module), packaged.reference)
    return player(env) if packaged.reference == "OptimalPlayer" else player(env, seed=seed)


def imitation_player(env: MultistepEnv, seed: int = 0) -> Any:
    """Make the demonstrator of a warm start: it shows much of what can be done, the best and other things.

    Raises:
        ConfigError: The environment brings none.
    """
    own: Callable[[int], Any] | None = getattr(env, _IMITATION, None)
    if own is not None:
        return own(seed)
    path = class_path(type(env))
    if path not in _DEMONSTRATED:
        known = ", ".join(sorted(one.rpartition(".")[2] for one in _DEMONSTRATED))
        raise ConfigError(
            f"{type(env).__name__} brings no demonstrator (those that do: {known}); a class of yours offers one by "
            f"defining {_IMITATION}(self, seed)"
        )
    return importlib.import_module(_PACKAGED[path].module).ImitationPlayer(env, seed=seed)


def anchors_of(env: MultistepEnv) -> Callable[[Mapping[str, Any]], Anchors | None] | None:
    """Find what random and optimal play earn, as a function of a task; None where only ``info`` may say it.

    To be handed to :func:`agentsgym.evaluate` as ``references``.
    """
    own: Callable[[Mapping[str, Any]], Anchors | None] | None = getattr(env, "anchors_of", None)
    if own is not None:
        return own
    if class_path(type(env)) != _TEXT_ARENA:
        return None
    try:
        values = _exact_values(env.env_config)
        values.anchors()
    except ConfigError:  # no exact values are known of this game, or not under these options
        return None
    return values


def _exact_values(config: Mapping[str, Any]) -> Any:
    references = importlib.import_module("agentsgym.envs.TextArena.references")
    if config["opening_moves"] or config["opponent"] != "random":
        raise ConfigError(
            "exact values are known of games against the opponent 'random' from their first move on, got "
            f"opponent {config['opponent']!r} and opening_moves {config['opening_moves']!r}"
        )
    options = {"max_steps_per_episode": config["max_steps_per_episode"], "seat": config["seat"]}
    return references.reference_for(config["game"], config["game_options"], **options)
