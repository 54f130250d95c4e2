"""Make a Gymnasium environment from its id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentsgym.envs.Gymnasium import SPEC
from agentsgym.errors import ConfigError, MissingDependencyError, did_you_mean
from agentsgym.texts import sentence_of, shown

#: Environments without further dependencies whose exact values are known.
GAMES = {
    name: {"note": "Random and optimal play are known."}
    for name in ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "Taxi-v4")
}


def spec_of(game_id: str) -> Any:
    """Look up the specification that is registered under an id.

    Raises:
        ConfigError: The id is not registered, or names a module: a dataset must not cause an import.
    """
    gymnasium = SPEC.load("gymnasium")
    if ":" in game_id:
        raise ConfigError(
            f"env_config['id'] must be an id without a module, got {shown(game_id)}: import the module, which "
            "registers its environments, and leave it out of the id"
        )
    if game_id not in gymnasium.registry:
        raise ConfigError(
            "env_config['id'] must be an environment registered with Gymnasium, got "
            f"{shown(game_id)}{did_you_mean(game_id, gymnasium.registry)}"
        )
    return gymnasium.registry[game_id]


def render_modes(spec: Any) -> tuple[str, ...]:
    """Return the render modes of a registered environment.

    Raises:
        ConfigError: The environment's class cannot be imported.
        MissingDependencyError: The environment needs a package that is not installed.
    """
    from gymnasium.envs.registration import load_env_creator  # noqa: PLC0415  # optional dependency

    creator: Any = spec.entry_point
    if isinstance(creator, str):
        try:
            creator = load_env_creator(creator)
        except ImportError as error:
            raise ConfigError(f"env_config['id'] = {spec.id!r} cannot be imported: {sentence_of(error)}") from error
        except SPEC.load("gymnasium").error.DependencyNotInstalled as error:
            raise _missing(error) from error
    metadata: Any = getattr(creator, "metadata", None)
    return tuple(metadata.get("render_modes") or ()) if isinstance(metadata, Mapping) else ()  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def make_game(game_id: Any, kwargs: Mapping[str, Any]) -> Any:
    """Make an environment.

    Args:
        game_id: A registered id, or a callable that makes the environment.
        kwargs: Arguments of its constructor.

    Raises:
        ConfigError: The environment cannot be made.
        MissingDependencyError: The environment needs a package that is not installed.
    """
    gymnasium = SPEC.load("gymnasium")
    name = game_id if isinstance(game_id, str) else getattr(game_id, "__name__", "the callable")
    try:
        # The issues that Gymnasium's checker would warn about are checked on reading.
        is_named = isinstance(game_id, str)
        game = gymnasium.make(game_id, disable_env_checker=True, **kwargs) if is_named else game_id(**kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise _missing(error) from error
    except Exception as error:  # foreign code: an unknown argument, a missing package
        raise ConfigError(
            f"env_config['id'] = {shown(name)} cannot be created with {shown(dict(kwargs))}: {sentence_of(error)}"
        ) from error
    if not all(hasattr(game, one) for one in ("reset", "step", "action_space", "unwrapped")):
        raise ConfigError(f"env_config['id'] must make a gymnasium.Env, got {shown(game)}")
    return game


def _missing(error: Exception) -> MissingDependencyError:
    """Make the error for an environment's missing dependency, with the install commands that Gymnasium gives."""
    sentence = sentence_of(error)
    package = getattr(error.__cause__, "name", None) or sentence.partition(" ")[0]
    commands = re.findall(r"`(pip install [^`]+)`", sentence)
    return MissingDependencyError(str(package), command=" && ".join(commands) or sentence)


_KNOWN_WRAPPERS = {"OrderEnforcing", "PassiveEnvChecker", "TimeLimit"}


def is_bare(game: Any) -> bool:
    """Whether no wrapper changes observations, actions or rewards."""
    while game is not game.unwrapped:
        if type(game).__name__ not in _KNOWN_WRAPPERS:
            return False
        game = game.env
    return True
