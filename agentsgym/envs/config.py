"""Define the common keys of ``env_config``, and check a configuration against their valid values."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from typing import Any

from agentsgym.credit.rewards import TOKEN_CREDITS, TURN_CREDITS
from agentsgym.envs.conversation import DEFAULT_PROMPT, LAST, SUMMARIZE
from agentsgym.envs.opponents import is_player_name
from agentsgym.envs.state_scores import CREDITS, DISCOUNT
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Field, choice_field, has_str_keys, is_bool, is_int, is_str, is_strings, one_of, or_none
from agentsgym.texts import shown

logger = logging.getLogger(__name__)

_SET_BY_RECORD = frozenset(  # arguments of apply_chat_template that this package sets
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
        "tokenize", "tokenizer_kwargs", "tools", "truncation",
    )
)  # fmt: skip


COMMON_FIELDS: dict[str, Field] = {
    "max_steps_per_episode": Field(default=20, expected="a positive int", valid=is_int(1)),
    "episodes_per_trial": Field(default=1, expected="a positive int", valid=is_int(1)),
    "free_shots": Field(default=0, expected="a non-negative int", valid=is_int(0)),
    "error_allowance": Field(default=1, expected="a non-negative int", valid=is_int(0)),
    "system_prompt": Field(default=None, expected="a str ('' for none) or None", valid=or_none(is_str)),
    "max_trajectory_tokens": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "turn_credit": choice_field(*TURN_CREDITS),
    "token_credit": choice_field(*TOKEN_CREDITS),
    "state_scores": choice_field(*CREDITS),
    "score_discount": DISCOUNT,
    "keep_history": Field(default=False, expected="True or False", valid=is_bool),
    "chat_template_kwargs": Field(
        default={},
        expected="a dict of options of the chat template",
        valid=lambda value: has_str_keys(value) and _SET_BY_RECORD.isdisjoint(value),
    ),
    "guard_added_tokens": Field(default=False, expected="True or False", valid=is_bool),
    "unguarded_tokens": Field(default=[], expected="a list of added tokens of the tokenizer", valid=is_strings),
    "history": Field(
        default="append",
        expected="'append', 'rerender', 'last', 'summarize' or a function from messages to messages",
        valid=lambda value: callable(value) or one_of("append", "rerender", LAST, SUMMARIZE)(value),
    ),
    "history_turns": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "summarize_over_tokens": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "summary_prompt": Field(
        default=DEFAULT_PROMPT, expected="a non-empty str", valid=lambda value: is_str(value) and value != ""
    ),
    "tool_calls": choice_field("tolerant", "strict"),
    "opponent": Field(
        default=None, expected="a registered name, 'self', names by role, or None", valid=or_none(is_player_name)
    ),
}


def validated_config(
    env_class: Any, given: Mapping[str, Any] | None, *, added_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Check the given keys and fill in the rest.

    Args:
        env_class: The environment's class, whose ``config_fields`` and ``default_config`` apply.
        given: The user's configuration, or None.
        added_keys: Keys that were added by a constructor rather than by the user.
    """
    if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"env_config must be a dict or None, got {shown(given)}")
    fields: dict[str, Field] = {**COMMON_FIELDS, **env_class.config_fields}
    config = {key: field.default for key, field in fields.items()}
    for name, values in (("default_config", env_class.default_config), ("env_config", given or {})):
        for key, value in values.items():
            if key not in fields:
                hint = did_you_mean(key, fields)
                if key in added_keys or not hint.startswith("; did you mean"):
                    hint += "; a class declares additional keys in config_fields"
                raise ConfigError(f"{name}[{shown(key)}] is unknown{hint}")
            if not fields[key].valid(value):
                raise ConfigError(f"{name}[{shown(key)}] must be {fields[key].expected}, got {shown(value)}")
            config[key] = value
    try:  # A callable may refer to a client or a lock, so it is shared; other values are copied.
        return {key: value if callable(value) else copy.deepcopy(value) for key, value in config.items()}
    except RecursionError as error:
        raise ConfigError(
            "env_config must not contain itself or be nested more than a few hundred levels deep"
        ) from error


def check_effects(env_class: Any, base: Any, given: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Reject values that the user gave and that have no effect; only warn of those that spoil nothing.

    A class may prepare values for the settings of its users, so its defaults are not checked, also if they are given.
    """
    is_noted, is_potential = config["history"] == SUMMARIZE, config["state_scores"] == "potential"
    if is_noted and config["summarize_over_tokens"] is None:
        raise ConfigError("env_config['history'] = 'summarize' requires env_config['summarize_over_tokens']")
    has_tools = env_class._tools is not base._tools or env_class.exchange_class is not base.exchange_class
    for key, is_used, needed in (
        ("history_turns", config["history"] == LAST, "env_config['history'] = 'last'"),
        ("summarize_over_tokens", is_noted, "env_config['history'] = 'summarize'"),
        ("summary_prompt", is_noted, "env_config['history'] = 'summarize'"),
        ("score_discount", is_potential, "env_config['state_scores'] = 'potential'"),
        ("state_scores", env_class._score_state is not base._score_state, "a method _score_state"),
        ("keep_history", config["episodes_per_trial"] > 1, "env_config['episodes_per_trial'] above 1"),
        ("free_shots", config["keep_history"], "env_config['keep_history'] = True, which shows the practice episodes"),
        ("unguarded_tokens", has_tools or config["guard_added_tokens"], "env_config['guard_added_tokens'] = True"),
    ):
        default = env_class.default_config.get(key, COMMON_FIELDS[key].default)
        if not is_used and (value := given.get(key)) not in (None, default):
            sentence = f"env_config[{key!r}] = {shown(value)} has no effect without {needed}"
            if key not in ("keep_history", "free_shots", "unguarded_tokens"):
                raise ConfigError(sentence)
            logger.warning(sentence)


def check_trials(config: Mapping[str, Any]) -> None:
    """Reject trials that consist only of practice, and warn of episodes that are dropped."""
    if config["free_shots"] >= config["episodes_per_trial"]:
        raise ConfigError(
            "env_config['free_shots'] must be smaller than env_config['episodes_per_trial'], "
            f"got {config['free_shots']} of {config['episodes_per_trial']}"
        )
    if config["episodes_per_trial"] - config["free_shots"] > 1 and not config["keep_history"]:
        logger.warning(
            "env_config['episodes_per_trial'] = %d with env_config['keep_history'] = False records only the last "
            "episode of a trial: the turns and rewards of the others are dropped",
            config["episodes_per_trial"],
        )
