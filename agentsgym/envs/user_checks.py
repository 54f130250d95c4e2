"""Check how an environment is implemented, constructed and started, with a message for each common mistake."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

from agentsgym.envs.boundary import INFO_KEYS, warn_once
from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.envs.dataset_rows import TaskData, check_task_keys
from agentsgym.envs.spec import EnvSpec
from agentsgym.errors import OTHER_NAMES, AgentsGymError, ConfigError, TaskError, misspelled
from agentsgym.fields import Field, is_dict, or_none, require
from agentsgym.interruptions import is_interruption
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Message, Trajectory

logger = logging.getLogger(__name__)

_READ_KEYS = ("invalid", "rewards", "truncated", *INFO_KEYS)
#: Where values belong that constructors of other libraries take.
_PLACES: Mapping[str, str] = {
    "seed": "each task has its own, as in task_data={'seed': 7}, and GRPOEnvConfig(seed=...) sets those of a run",
    "prompt": "_format_prompt returns the first prompt, and env_config['system_prompt'] sets the system message",
    "env_id": "the class is the environment, and 'env_class_path' names it in a dataset row",
    "train_dataset_size": "call get_train_dataset(size=...), whose rows are an argument of the trainer",
}
#: Attributes that the base's constructor sets.
_SET_BY_BASE = (
    *("tokenizer", "env_config", "given_config", "chat_format", "_chat_format", "tool_schemas", "_tool_schemas"),
    *("active_states", "_generators", "_starts", "_by_hand"),
)
_OPTIONAL = frozenset(("default_config", "config_fields", "task_fields", "roles", "role_key", "judges", "spec"))


class _NotGiven:
    """The default of a required argument, so that an unknown keyword is reported before a missing argument."""

    def __repr__(self) -> str:
        return "nothing"


NOT_GIVEN: Any = _NotGiven()


#: The hooks that are awaited; the last line has those of environments with tools.
MAY_BE_ASYNC = (
    *("_initialize_episode", "_system_prompt", "_format_prompt", "_step_episode", "_step_action", "_last_message"),
    *("_final_reward", "_calculate_rewards", "_state_key", "_role", "_potential", "_score_state", "_close_episode"),
    *("_call_tool", "_answer", "_reward_call", "_reward_answer"),
)


def is_async(method: Any) -> bool:
    """Whether a method, as it is defined in its class, is a coroutine function."""
    return inspect.iscoroutinefunction(getattr(method, "__func__", method))  # unwraps a static or a class method


def check_class(env_class: type[Any], base: type[Any]) -> None:
    """Check a class when it is defined."""
    name = env_class.__name__
    _check_coroutines(env_class, base)
    _check_names(env_class, base)
    if isinstance(env_class.task_fields, str):
        wanted = f"must be a tuple of keys, as in ({shown(env_class.task_fields)},), or None"
        raise ConfigError(f"{name}.task_fields {wanted}; got {shown(env_class.task_fields)}")
    require(f"{name}.spec", env_class.spec, lambda spec: isinstance(spec, EnvSpec), "an EnvSpec")
    defaults: Any = env_class.default_config
    require(f"{name}.default_config", defaults, is_dict, "a dict of keys of env_config")
    fields: Any = env_class.config_fields
    require(f"{name}.config_fields", fields, is_dict, "a dict of Fields")
    for key, field in cast("Mapping[Any, Any]", fields).items():
        place = f"{name}.config_fields[{shown(key)}]"
        example = "Field(default=3, expected='a positive int', valid=is_int(1)), from agentsgym.fields"
        require(place, field, _is_field, f"a Field whose valid is a function, as in {example}")
        require(f"{place}.default", field.default, or_none(field.valid), field.expected)  # None: it must be set
        common = COMMON_FIELDS.get(key) or cast("Field", field)
        require(f"{place}.default", field.default, or_none(common.valid), f"{common.expected}, as in any environment")


def _is_field(value: Any) -> bool:
    return isinstance(value, Field) and not isinstance(value.valid, type)


def _check_coroutines(env_class: type[Any], base: type[Any]) -> None:
    for hook in vars(base):
        if not hook.startswith("_") or hook.startswith("__") or not callable(getattr(base, hook)):
            continue
        method = inspect.getattr_static(env_class, hook)
        require(f"{env_class.__name__}.{hook}", getattr(env_class, hook), callable, "a method")
        if is_async(method) and hook not in MAY_BE_ASYNC:
            raise ConfigError(
                f"{env_class.__name__}.{hook} is async, but this hook is not awaited: write a plain def (these may be "
                f"async: {', '.join(MAY_BE_ASYNC)})"
            )
        if inspect.isasyncgenfunction(getattr(method, "__func__", method)):
            raise ConfigError(
                f"{env_class.__name__}.{hook} is an async generator: return the value instead of yielding it"
            )


def _check_names(env_class: type[Any], base: type[Any]) -> None:
    """Warn about attributes whose names differ by a letter from a hook or setting, or are keys of env_config."""
    known = [name for name in vars(base) if name in _OPTIONAL or (name[0] == "_" and name[1] != "_")]
    inherited = {name for one in env_class.__mro__[1:] for name in vars(one)}
    own = {name: value for name, value in vars(env_class).items() if name not in inherited and name[:2] != "__"}
    for name in own:
        if (meant := misspelled(name, known)) is not None:
            logger.warning("%s.%s is not used; did you mean %s?", env_class.__name__, name, meant)
    warn_of_settings(env_class, own)


def warn_of_settings(env_class: type[Any], attributes: Mapping[str, Any]) -> None:
    """Warn, once, about each attribute that is called like a key of env_config, and that no method reads."""
    for name, value in attributes.items():
        key = OTHER_NAMES.get(name, name).removeprefix("env_config['").removesuffix("']")
        if key in COMMON_FIELDS and isinstance(value, str | int | float | list | dict) and not _reads(env_class, name):
            written = f"default_config = {{{key!r}: {shown(cast('object', value))}}}"
            warn_once("%s.%s is not used: write %s, or pass it as env_config", env_class.__name__, name, written)


def _reads(env_class: type[Any], name: str) -> bool:
    """Whether a method other than the constructor contains the name of an attribute."""
    found = (one for kind in env_class.__mro__ for method, one in vars(kind).items() if method != "__init__")
    codes = (getattr(getattr(one, "fget", getattr(one, "__func__", one)), "__code__", None) for one in found)
    return any(name in getattr(code, "co_names", ()) for code in codes)


def check_tokenizer(tokenizer: Any, env_class: type[Any]) -> None:
    """Check the tokenizer argument."""
    name = env_class.__name__
    if isinstance(tokenizer, Mapping):
        raise ConfigError(
            f"env_config is the second argument: write {name}(tokenizer, env_config), or {name}(env_config=...) for "
            f"agents that do not need tokens; got {shown(cast('object', tokenizer))} as the tokenizer"
        )
    if isinstance(tokenizer, str):
        built = f"transformers.AutoTokenizer.from_pretrained({shown(tokenizer)})"
        raise ConfigError(
            f"the tokenizer must be a tokenizer object, not a name: write {name}({built}), got {shown(tokenizer)}"
        )
    if tokenizer is not None and not hasattr(tokenizer, "pad_token_id"):
        given = f"{type(tokenizer).__name__} (if it is a processor, pass processor.tokenizer)"
        raise ConfigError(f"the tokenizer must be a transformers tokenizer or None, got {given}")
    if tokenizer is not None and tokenizer.pad_token_id is None:
        raise ConfigError(
            "the tokenizer has no pad token, which is needed for padding: "
            "set one, for example tokenizer.pad_token = tokenizer.eos_token"
        )


def check_vocabularies(tokenizer: Any, agent: Any) -> None:
    """Check that an agent that uses token ids has the same vocabulary as the environment's tokenizer.

    Args:
        tokenizer: The environment's tokenizer, or None.
        agent: Any agent; it uses token ids if it has ``stop_token_ids`` and a tokenizer.
    """
    own = getattr(agent, "tokenizer", None)
    if tokenizer is None or own is None or own is tokenizer or not hasattr(agent, "stop_token_ids"):
        return
    known = own.get_vocab()
    strange = [name for name, token_id in tokenizer.get_vocab().items() if known.get(name) != token_id]
    if strange:
        raise ConfigError(
            f"{type(agent).__name__} works on token ids, but the environment's tokenizer differs from the agent's: "
            f"{len(strange)} tokens, such as {shown(strange[0])}, have a different id, or none, in the agent's "
            "tokenizer; create the environment with agent.tokenizer"
        )


def check_keywords(env_class: type[Any], given: Mapping[str, Any]) -> None:
    """Check the keyword arguments with which an environment is constructed."""
    parameters = inspect.signature(env_class.__init__).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return  # the constructor decides
    config = {name: value for name, value in given.items() if name not in parameters}
    if config and config.keys() <= {*COMMON_FIELDS, *env_class.config_fields}:
        raise TypeError(
            f"{env_class.__name__} has no argument {shown(next(iter(config)))}, which is a key of env_config: write "
            f"{env_class.__name__}(tokenizer, {shown(config)})"
        )
    for name in config:
        if name in _PLACES:
            raise TypeError(f"{env_class.__name__} has no argument {name!r}: {_PLACES[name]}")


class NotInitializedError(ConfigError, AttributeError):
    """The base class's constructor has not run; also an ``AttributeError``, for ``hasattr``."""


def check_initialized(env: Any, name: str = "_starts") -> None:
    """Check that the base class's constructor has run, if it sets the attribute ``name``."""
    if name in _SET_BY_BASE and "_starts" not in vars(env):
        read = "" if name.startswith("_") else f" before anything reads self.{name}"
        raise NotInitializedError(
            f"{type(env).__name__}.__init__ must call super().__init__(tokenizer, env_config){read}, but did not"
        )


def check_single_stream(env: Any, caller: str) -> None:
    """Check that each rollout is a single row of tokens."""
    check_initialized(env)
    if env.tokenizer is not None and env.env_config["history"] != "append":
        raise ConfigError(
            f"{caller} returns one row of tokens per rollout, but env_config['history']={env.env_config['history']!r} "
            "starts a new row each time it rewrites the history: use generate(..., return_all_steps=True), which "
            "returns each turn with its prompt"
        )


def check_info_keys(env_class: type[Any], info: dict[Any, Any]) -> None:
    """Warn, once per class, about misspelled keys of ``info``, and about other libraries' names of success."""
    for key, value in dict[Any, Any].items(info):  # runs no code of a subclass of dict or str
        if type(key) is str and key not in _READ_KEYS:
            _warn_of_key(env_class, key, type(value) is float and not math.isfinite(value))


def place_of_hook(env_class: type[Any], sentence: str) -> str:
    """Find the definition of the hook whose name begins an error sentence.

    Returns:
        File and line, as in ``"guess.py:31"``; empty if the sentence does not begin with a hook, or if only
        ``MultistepEnv`` itself defines the hook.
    """
    name = re.match(r"\w*", sentence)
    hook = getattr(env_class, name[0] if name else "", None)
    code = None if getattr(hook, "__module__", None) == "agentsgym.envs.base" else getattr(hook, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


@functools.lru_cache(maxsize=1024)
def _warn_of_key(env_class: type[Any], key: str, is_lost: bool) -> None:
    if is_lost:
        logger.warning("info[%r] of %s is NaN or infinite, and so not among the metrics", key, env_class.__name__)
    meant = "success" if key in {"is_success", "is_solved", "succeeded"} else misspelled(key, _READ_KEYS)
    if meant is not None:
        logger.warning("info[%r] of %s is not used; did you mean info[%r]?", key, env_class.__name__, meant)


_PLAIN = frozenset((str, int, float, bool, type(None)))


def check_task(
    task_data: Any, name: str, task_fields: Collection[str] | None, hook: Callable[[dict[str, Any]], None]
) -> None:
    """Check the requirements of every environment on a task, then call the environment's check.

    Args:
        task_data: The task, unchecked user data.
        name: The task's name in errors.
        task_fields: The valid keys in addition to ``seed``; None for any.
        hook: The environment's ``_check_task``.
    """
    try:
        check_task_keys(task_data, name, task_fields)
        _check_plainly(task_data, name)
        call_check(hook, task_data, "TaskError for a task that cannot be played")  # user code
    except AgentsGymError:
        raise
    except BaseException as error:
        if is_interruption(error):
            raise
        given = f"{type(error).__name__}: {sentence_of(error)}".removesuffix(": ")
        raise TaskError(f"checking {name} with {hook.__qualname__} raised {given}") from error


def call_check(hook: Callable[[Any], Any], value: Any, error: str) -> None:
    """Call a hook that raises an error if a value is not valid, and reject one that returns its finding instead."""
    returned = hook(value)
    if returned is not None:
        raise ConfigError(f"{hook.__qualname__} must raise {error}, and return nothing; it returned {shown(returned)}")


def _check_plainly(task_data: TaskData, name: str) -> None:
    """Check a task's seed, and that its values can be copied, as they are for every episode."""
    seed = task_data.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TaskError(f"{name}['seed'] must be an int or None, got {shown(seed)}")
    for key, value in task_data.items():
        if type(value) not in _PLAIN:
            try:
                copy.deepcopy(value)
            except BaseException as error:
                if is_interruption(error):
                    raise
                sentence = f"{type(error).__name__}: {sentence_of(error)}"
                raise TaskError(
                    f"{name}[{shown(key)}] must support copy.deepcopy, since every episode gets a copy; it "
                    f"raised {sentence}"
                ) from error


class StartChecks:
    """The checks of how an environment's episodes start; each check warns once."""

    def __init__(self) -> None:
        self._last: tuple[str, dict[str, Any]] | None = None
        self._has_shared = self._has_unequal = False

    def check_state(self, session_id: str, state: dict[str, Any]) -> None:
        """Warn if two sessions started from the same dict object, so that they would change each other's state.

        Each start is compared only with the previous one: a single comparison, which finds a state that is stored on
        the environment or in its module.
        """
        last, self._last = self._last, (session_id, state)
        if last is not None and last[1] is state and last[0] != session_id and not self._has_shared:
            self._has_shared = True
            logger.warning(
                "_initialize_episode returned the same dict for the sessions %s and %s, so they change each other's "
                "state: it must return a new dict for each session",
                last[0],
                session_id,
            )

    def forget(self, session_id: str) -> None:
        """Release a session that is over: its state may refer to resources, and may be reused from now on."""
        if self._last is not None and self._last[0] == session_id:
            self._last = None

    def check_rollouts(self, trajectories: Iterable[Trajectory], group_of: Callable[[Trajectory], Hashable]) -> None:
        """Warn if rollouts of one task group started with different prompts."""
        if self._has_unequal:
            return
        prompts: dict[Hashable, Sequence[Message]] = {}
        for trajectory in trajectories:
            if not trajectory.turns:
                continue
            first = trajectory.turns[0]
            # Without keep_history, only the last episode is recorded, and each episode starts differently.
            # A retry may have another seed.
            group = (group_of(trajectory), first.episode, trajectory.num_retries)
            prompt = trajectory.messages[: first.message_index]
            if prompts.setdefault(group, prompt) != prompt:
                self._has_unequal = True
                logger.warning(
                    "rollouts of one task started with different prompts, %s and %s: all draws of an environment must "
                    "come from self.rng(session_id); otherwise, a task group compares rollouts of different problems",
                    shown(prompts[group][-1]["content"]),
                    shown(prompt[-1]["content"]),
                )
                return
