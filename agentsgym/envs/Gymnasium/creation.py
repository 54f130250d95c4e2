"""Create a Gymnasium environment from its id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentsgym.envs.Gymnasium import SPEC
from agentsgym.errors import ConfigError, MissingDependencyError, did_you_mean
from agentsgym.texts import sentence_of, shown

#: Environments that need no further packages and whose exact values are known.
GAMES = {
    name: {"note": "Random and optimal play are known."}
    for name in ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "Taxi-v4")
}


def spec_of(env_id: str) -> Any:
    """Look up the specification that is registered under an id."""
    gymnasium = SPEC.load("gymnasium")
    if ":" in env_id:
        raise ConfigError(
            f"env_config['id'] must be an id without a module, got {shown(env_id)}: import the module yourself, so "
            "that it registers its environments, and omit it from the id"
        )
    if env_id not in gymnasium.registry:
        raise ConfigError(
            "env_config['id'] must be the id of an environment registered with Gymnasium, got "
            f"{shown(env_id)}{did_you_mean(env_id, gymnasium.registry)}"
        )
    return gymnasium.registry[env_id]


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
            raise ConfigError(
                f"the environment env_config['id'] = {spec.id!r} cannot be imported: {sentence_of(error)}"
            ) from error
        except SPEC.load("gymnasium").error.DependencyNotInstalled as error:
            raise _missing(error) from error
    metadata: Any = getattr(creator, "metadata", None)
    return tuple(metadata.get("render_modes") or ()) if isinstance(metadata, Mapping) else ()  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def make_env(env_id: Any, kwargs: Mapping[str, Any]) -> Any:
    """Create an environment.

    Raises:
        ConfigError: The environment cannot be created.
        MissingDependencyError: The environment needs a package that is not installed.
    """
    gymnasium = SPEC.load("gymnasium")
    name = env_id if isinstance(env_id, str) else getattr(env_id, "__name__", "the callable")
    try:
        # Gymnasium's checker is disabled, since this package checks what it receives from the environment.
        is_named = isinstance(env_id, str)
        env = gymnasium.make(env_id, disable_env_checker=True, **kwargs) if is_named else env_id(**kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise _missing(error) from error
    except Exception as error:  # third-party code may raise anything, such as for an unknown argument
        raise ConfigError(
            f"the environment env_config['id'] = {shown(name)} cannot be created with the arguments "
            f"{shown(dict(kwargs))}: {sentence_of(error)}"
        ) from error
    if not all(hasattr(env, name) for name in ("reset", "step", "action_space", "unwrapped")):
        raise ConfigError(f"the callable env_config['id'] must return a gymnasium.Env, got {shown(env)}")
    return env


def _missing(error: Exception) -> MissingDependencyError:
    """Create the error for an environment's missing dependency, with the install commands in Gymnasium's message."""
    sentence = sentence_of(error)
    package = getattr(error.__cause__, "name", None) or sentence.partition(" ")[0]
    commands = re.findall(r"`(pip install [^`]+)`", sentence)
    return MissingDependencyError(str(package), command=" && ".join(commands) or sentence)


_KNOWN_WRAPPERS = {"OrderEnforcing", "PassiveEnvChecker", "TimeLimit"}


def is_bare(env: Any) -> bool:
    """Whether no wrapper changes observations, actions or rewards."""
    while env is not env.unwrapped:
        if type(env).__name__ not in _KNOWN_WRAPPERS:
            return False
        env = env.env
    return True
