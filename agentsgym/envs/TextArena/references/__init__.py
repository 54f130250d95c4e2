"""The exact values of some of TextArena's games, and the players that achieve them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.TextArena.games import base_id
from agentsgym.envs.TextArena.isolation import textarena
from agentsgym.envs.TextArena.references.base import Reference, ReferencePlayer, Rules
from agentsgym.envs.TextArena.references.frozen_lake import FrozenLake
from agentsgym.envs.TextArena.references.guess_the_number import GuessTheNumber
from agentsgym.envs.TextArena.references.kuhn_poker import KuhnPoker
from agentsgym.envs.TextArena.references.tic_tac_toe import TicTacToe
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int, require
from agentsgym.removed import REMOVED
from agentsgym.texts import shown

__all__ = ["REFERENCES", "Reference", "ReferencePlayer", "anchors_of", "optimal_player", "reference_for"]

REFERENCES: Mapping[str, type[Reference]] = {
    "FrozenLake": FrozenLake,
    "GuessTheNumber": GuessTheNumber,
    "KuhnPoker": KuhnPoker,
    "TicTacToe": TicTacToe,
}


def reference_for(
    game: str,
    game_options: Mapping[str, Any] | None = None,
    *,
    max_steps_per_episode: int = 100,
    seat: int | None = None,
) -> Reference:
    """Create the exact reference of one of TextArena's games.

    Args:
        game: The game, as in ``env_config``.
        game_options: The options that differ from the registered ones, as in ``env_config``.
        max_steps_per_episode: The turn limit, as in ``env_config``.
        seat: The agent's seat, as in ``env_config``; a task's seat takes precedence.

    Raises:
        ConfigError: The game or the seat does not exist, the game has no known reference, or it is too large to solve.
        MissingDependencyError: TextArena is not installed.
    """
    require("max_steps_per_episode", max_steps_per_episode, is_int(1), "a positive int")
    base = base_id(game)
    name = base.partition("-v")[0]
    if name not in REFERENCES:
        removed = REMOVED.get(f"reference {name}")
        hint = f": {removed}" if removed else did_you_mean(name, REFERENCES)
        raise ConfigError(f"no exact reference is known for {shown(game)}{hint}")
    options = {**textarena().envs.registration.ENV_REGISTRY[base].kwargs, **(game_options or {})}
    rules = Rules(game=base, options=options, max_steps=max_steps_per_episode, seat=seat)
    return REFERENCES[name](rules)


def optimal_player(env: MultistepEnv, seed: int = 0) -> ReferencePlayer:
    """Create the optimal player of an environment's game.

    Raises:
        ConfigError: The game's exact values are unknown.
    """
    return _reference_of(env.env_config).optimal_player(seed)


def anchors_of(env: MultistepEnv) -> Reference | None:
    """Find the exact values of an environment's game; None if they are unknown."""
    try:
        values = _reference_of(env.env_config)
        values.anchors()
    except ConfigError:  # the values are unknown for this game or these options
        return None
    return values


def _reference_of(config: Mapping[str, Any]) -> Reference:
    if config["opening_moves"] or config["opponent"] != "random":
        raise ConfigError(
            "exact values are known only for games against the opponent 'random' without opening moves, got "
            f"opponent={config['opponent']!r} and opening_moves={config['opening_moves']!r}"
        )
    options = {"max_steps_per_episode": config["max_steps_per_episode"], "seat": config["seat"]}
    return reference_for(config["game"], config["game_options"], **options)
