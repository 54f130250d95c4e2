"""Prepare a subclass of ``MultistepEnv`` when it is defined, and record the arguments of its instances."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from agentsgym.credit.rewards import check_credit
from agentsgym.envs.config import check_effects, check_trials, validated_config
from agentsgym.envs.dataset_rows import plain_part
from agentsgym.envs.user_checks import MAY_BE_ASYNC, check_class, is_async
from agentsgym.errors import ConfigError

_OWN_ARGUMENTS = ("tokenizer", "env_config", "config")  # some constructors call env_config "config"
DATASET_METHODS = ("get_train_dataset", "get_eval_dataset")
_HOOKS = "evaluate and the trainer play episodes only through the hooks; override"
NEVER_CALLED = {
    "run_trial": f"{_HOOKS} _step_episode, _final_reward or _calculate_rewards for what it returns",
    "_run_complete_episode": f"{_HOOKS} _initialize_episode, _format_prompt, _step_episode or _close_episode",
}

#: Attributes that have no effect unless a hook is defined, too.
_PAIRS = (
    ("_tools", "_step_action", "receives the agent's calls"),
    ("roles", "_role", "returns the role that moves in this turn"),
)


def prepare_class(env_class: type[Any], base: type[Any]) -> None:
    """Check a new class, and let its dataset methods use the configuration of the instance they are called on."""
    check_class(env_class, base)
    owners: Any = [(one, name) for one in env_class.__mro__ for name in vars(one).get("never_called", ())]
    for one, name in owners:
        own = vars(env_class)  # a mixin may be for other environments, too, and a _step_action may call _step_episode
        is_defined = one is not env_class and name in own and (name != "_step_episode" or "_step_action" not in own)
        if is_defined or (one is base and getattr(env_class, name) is not getattr(base, name)):
            raise ConfigError(f"{env_class.__name__}.{name} would never be called: {one.never_called[name]}")
    for name, other, purpose in _PAIRS:
        if getattr(env_class, name) is not getattr(base, name) and getattr(env_class, other) is getattr(base, other):
            raise ConfigError(f"{env_class.__name__} defines {name} but not {other}, which {purpose}")
    for name in DATASET_METHODS:
        method: Any = inspect.getattr_static(env_class, name)
        if type(method) is classmethod:
            setattr(env_class, name, DatasetMethod(method.__func__))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    env_class.overrides_step_action = env_class._step_action is not base._step_action
    env_class.overrides_final_reward = env_class._final_reward is not base._final_reward
    env_class.overrides_score_state = env_class._score_state is not base._score_state
    env_class.has_coroutines = any(is_async(inspect.getattr_static(env_class, name, None)) for name in MAY_BE_ASYNC)


def given_and_valid(
    env_class: type[Any], base: type[Any], env_config: Any, called_config: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration that the user passed to an environment, and the validated configuration.

    Args:
        env_class: The environment's class.
        base: The class whose constructor is running.
        env_config: The configuration passed to that constructor.
        called_config: The configuration passed to ``env_class``, from :func:`called_with`.

    Returns:
        The JSON values of the user's configuration, and the validated configuration, defaults filled in.

    Raises:
        ConfigError: A key is unknown, or a value or a combination of the common keys is not valid.
    """
    handed = plain_part(env_config) or {}
    added_keys = () if env_class.__init__ is base.__init__ else handed.keys() - (called_config or {}).keys()
    config = validated_config(env_class, env_config, added_keys=added_keys)
    check_trials(config)
    given = handed if called_config is None else called_config
    check_effects(env_class, base, given, config)
    check_credit(config["turn_credit"], config["token_credit"])
    return given, config


def called_with(
    env_class: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Find the configuration that is passed to a class, and the arguments that a dataset row cannot store.

    If a constructor forwards ``*args``, ``env_config`` is its second positional argument, as in the base class.

    Returns:
        The JSON values of the configuration, None if no configuration was passed; and the names of additional
        arguments, and of values of the configuration that are not JSON.
    """
    signature = inspect.signature(env_class.__init__)
    try:
        given = dict(signature.bind_partial(None, *args, **kwargs).arguments)
    except TypeError:
        return None, []  # the constructor will raise the same error
    given.pop(next(iter(signature.parameters)), None)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            given |= zip(("tokenizer", "env_config", *map(str, range(len(args)))), given.pop(name, ()), strict=False)
        elif name not in _OWN_ARGUMENTS and name in given and given[name] is parameter.default:
            del given[name]
    passed: Any = given.get("env_config", given.get("config"))
    config = plain_part(passed)
    not_json = [] if config is None else sorted(passed.keys() - config.keys(), key=str)
    others = [name for name in given if name not in _OWN_ARGUMENTS]
    return config, [*(f"env_config[{name!r}]" for name in not_json), *others]


def build(env_class: type[Any], *args: Any) -> Any:
    """Build an environment from a tokenizer and a configuration, which every class of environments must allow.

    Raises:
        ConfigError: The constructor of the class does not accept these arguments.
    """
    try:
        inspect.signature(env_class).bind(*args)
    except TypeError as error:
        raise ConfigError(
            f"{env_class.__name__}.__init__ must accept (tokenizer, env_config) without other arguments, since checks "
            "and dataset rows build it from these two: list other keys in config_fields, and read them from "
            "self.env_config"
        ) from error
    return env_class(*args)


class DatasetMethod:
    """A class method whose ``env_config`` parameter, if any, defaults to that of the instance it is called on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__func__ = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        """Bind to the class; on an instance, pass its configuration by default."""
        of_class = MethodType(self.__func__, owner)
        if instance is None:
            return of_class

        @functools.wraps(of_class)
        def of_instance(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = inspect.signature(of_class).bind(*args, **kwargs)
            except TypeError:
                return of_class(*args, **kwargs)  # Python's own error describes what is wrong with the call
            if "env_config" in bound.signature.parameters and bound.arguments.get("env_config") is None:
                bound.arguments["env_config"] = copy.deepcopy(instance.given_config)
            return of_class(*bound.args, **bound.kwargs)

        return of_instance
