"""The kinds of games that TextWorld generates, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Field, choice_field, is_bool, is_int, one_of, or_none
from agentsgym.texts import shown

FILES = "files"
_MAX_ROOMS = 100  # the Z-machine's limit for the rooms of a coin collector


def _between(low: int, high: int) -> Field:
    return Field(
        default=low, expected=f"an int from {low} to {high}", valid=lambda value: is_int(low)(value) and value <= high
    )


_FLAG = Field(default=False, expected="True or False", valid=is_bool)

#: The options of each kind, by name; ``files`` are existing games.
KINDS: Mapping[str, Mapping[str, Field]] = {
    "custom": {
        "rooms": Field(default=3, expected="a positive int", valid=is_int(1)),
        "objects": Field(default=6, expected="a positive int", valid=is_int(1)),
        "quest_length": Field(default=3, expected="a positive int", valid=is_int(1)),
        "parallel_quests": Field(default=1, expected="a positive int", valid=is_int(1)),
    },
    "coin_collector": {"level": _between(1, 300)},
    "treasure_hunter": {"level": _between(1, 30)},
    "cooking": {
        "recipe": _between(1, 5),
        "take": Field(default=0, expected="an int from 0 to recipe", valid=is_int(0)),
        "go": Field(
            default=1, expected="1, 6, 9 or 12", valid=lambda value: is_int(1)(value) and value in (1, 6, 9, 12)
        ),
        "open": _FLAG,
        "cook": _FLAG,
        "cut": _FLAG,
        "drop": _FLAG,
        "recipe_seed": Field(default=0, expected="a non-negative int", valid=is_int(0)),
        "split": Field(
            default=None, expected="'train', 'valid', 'test' or None", valid=or_none(one_of("train", "valid", "test"))
        ),
    },
    "simple": {
        "rewards": choice_field("dense", "balanced", "sparse"),
        "goal": choice_field("detailed", "brief", "none"),
        "test": _FLAG,
    },
    FILES: {},
}


def games() -> dict[str, dict[str, str]]:
    """Return the kinds that are generated rather than read from files, for ``agentsgym envs``."""
    return {kind: {"note": "Made from a seed."} for kind in KINDS if kind != FILES}


def checked_game_options(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a kind and fill in the defaults.

    >>> checked_game_options("coin_collector", {"level": 5})
    {'level': 5}
    >>> checked_game_options("simple", {"goals": "brief"})
    Traceback (most recent call last):
    agentsgym.errors.ConfigError: env_config['options']['goals'] is unknown for kind 'simple'; did you mean 'goal'?
    """
    fields = KINDS[kind]
    options = {name: field.default for name, field in fields.items()}
    for name, value in given.items():
        if name not in fields:
            raise ConfigError(
                f"env_config['options'][{shown(name)}] is unknown for kind {kind!r}{did_you_mean(str(name), fields)}"
            )
        if not fields[name].valid(value):
            raise ConfigError(f"env_config['options'][{name!r}] must be {fields[name].expected}, got {shown(value)}")
        options[name] = value
    if kind == "cooking":
        _check_cooking(options)
    elif kind == "coin_collector":
        level = options["level"]
        num_rooms = ((level - 1) // 100 + 1) * ((level - 1) % 100 + 1)
        if num_rooms > _MAX_ROOMS:
            raise ConfigError(
                f"env_config['options']['level'] = {level} has {num_rooms} rooms, but TextWorld supports at most "
                f"{_MAX_ROOMS}: use a level from 1 to 150 or from 201 to 233"
            )
    return options


def _check_cooking(options: Mapping[str, Any]) -> None:
    if options["take"] > options["recipe"]:
        raise ConfigError(
            "env_config['options']['take'], the number of ingredients that must be found, must be at most "
            f"env_config['options']['recipe'] = {options['recipe']}, got {options['take']}"
        )
    if options["recipe_seed"] and not options["take"]:
        raise ConfigError(
            "env_config['options']['recipe_seed'] only selects which ingredients must be found, so it requires "
            "env_config['options']['take'] to be at least 1"
        )
