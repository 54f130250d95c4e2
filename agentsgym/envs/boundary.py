"""Call user code and check what it returns before use: it may raise or return anything.

An exception in an environment's hook fails only the episode in which it was raised.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import CoroutineType
from typing import Any, NamedTuple, cast

from agentsgym.credit.components import GivenReward
from agentsgym.envs.contract import PlayableEnv
from agentsgym.errors import EnvError
from agentsgym.event_loop import awaited
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.types import MAX_LOGPROB, MIN_LOGPROB, Action, Message, ToolCall, Trajectory

logger = logging.getLogger(__name__)
warn_once = functools.lru_cache(logger.warning)

# pyright: reportPrivateUsage=false
# The hooks are private for users of an environment; they are called here.

_LARGEST = 3.4e38
_TEXT = str | bytes | bytearray  # float() parses all of these


def call_environment(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook of the environment, and wait for it if it is async.

    Any exception but an interruption becomes an :class:`EnvError` with the original as its cause.
    """
    try:
        returned = hook(*arguments)
        return awaited(returned) if type(returned) is CoroutineType else returned
    except BaseException as error:
        raise failure_of_hook(hook, error) from error


def failure_of_hook(hook: Callable[..., Any], error: BaseException) -> EnvError:
    """Convert a hook's exception to the :class:`EnvError` that fails its episode; interruptions are re-raised."""
    if is_interruption(error):
        raise error
    return failure_of(EnvError, getattr(hook, "__qualname__", None) or shown(hook), error, hook)


def failure_of_value(name: str, error: BaseException) -> EnvError:
    """Convert an exception that a returned value raised when it was inspected to the episode's :class:`EnvError`.

    Args:
        name: Name of the hook that returned the value, as in ``"_step_episode"``.
        error: The caught exception. An interruption, or an :class:`EnvError`, is re-raised.
    """
    if isinstance(error, EnvError) or is_interruption(error):
        raise error
    return failure_of(EnvError, f"what {name} returned", error)


def _as_conversation(messages: Any) -> list[Message] | None:
    """Return chat messages as plain dicts and strings, since subclasses may run user code; None for anything else."""
    # On the hot path of every turn, so valid input is returned without a copy.
    if (
        type(messages) is list
        and messages
        and all(
            type(one) is dict and type(one.get("role")) is str and type(one.get("content")) is str
            for one in cast("list[dict[str, Any]]", messages)
        )
    ):
        return cast("list[Message]", messages)
    given = cast("list[Any]", messages) if isinstance(messages, list) else []
    fields = [cast("dict[str, Any]", one) if isinstance(one, dict) else {} for one in given]
    if not fields or not all(isinstance(one.get(key), str) for one in fields for key in ("role", "content")):
        return None
    valid = cast("list[Message]", given)
    return [{**one, "role": plain_str(one["role"]), "content": plain_str(one["content"])} for one in valid]


def plain_str(text: str) -> str:
    """Convert an instance of a str subclass to a plain str."""
    return text if type(text) is str else str.__str__(text)


def with_plain_text(action: Action) -> Action:
    """Convert the texts of an action that are instances of a str subclass to plain strs."""
    texts = {"text": action.text, "written": action.written}
    return replace(action, **{key: plain_str(text) for key, text in texts.items() if isinstance(text, str)})  # pyright: ignore[reportUnnecessaryIsInstance]


def action_error(action: Any, max_tokens: int | None, vocabulary_size: float, prompt: Sequence[int] = ()) -> str:
    """Describe why an agent's answer to a prompt cannot be recorded; empty if it can."""
    if not (isinstance(action, Action) and isinstance(action.text, str) and isinstance(action.written, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"an agent must return an Action, got {shown(action)}"
    version, token_ids = action.policy_version, action.token_ids
    if version is not None and type(version) is not int:
        return f"an Action's policy_version must be an int or None, got {_described(version)}"
    if (action.tool_calls or action.reasoning is not None) and (error := _calls_error(action)):
        return error
    if token_ids is None:
        return "" if is_unicode(action.text) else f"an Action's text must be valid Unicode, got {shown(action.text)}"
    error = _ids_error(token_ids, max_tokens, vocabulary_size, prompt)
    return error if error or action.logprobs is None else _logprobs_error(action.logprobs)


def _calls_error(action: Action) -> str:
    """Describe what is wrong with the tool calls or the reasoning of an action; empty if nothing is."""
    if not isinstance(action.reasoning, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"an Action's reasoning must be a str or None, got {_described(action.reasoning)}"
    calls: Any = action.tool_calls
    if not isinstance(calls, list | tuple):
        return f"an Action's tool_calls must be a list of ToolCalls, got {_described(calls)}"
    for index, call in enumerate(cast("Sequence[Any]", calls)):
        is_call = isinstance(call, ToolCall) and isinstance(call.name, str) and isinstance(call.arguments, Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_call or not all(isinstance(text, str | None) for text in (call.id, call.error)):
            expected = "a ToolCall with a str as name, a dict as arguments, and strs or None as id and error"
            return f"an Action's tool_calls[{index}] must be {expected}, got {_described(call)}"
    return ""


def is_unicode(text: str) -> bool:
    """Whether a tokenizer can encode a text: unpaired surrogates, which JSON escapes can produce, cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids_error(ids: Any, max_tokens: int | None, vocabulary_size: float, prompt: Sequence[int]) -> str:
    values: Any = ids
    if type(ids) is not list and not isinstance(ids, Sequence):  # checking the exact type is much faster
        return f"an Action's token_ids must be a list of ints (use tolist() for a tensor), got {_described(ids)}"
    size = len(values)
    # On the hot path of every turn, so valid input is checked without a Python loop; sorting is faster than min, max.
    ordered = sorted(values) if [*map(type, values)].count(int) == size else [-1]
    if ordered and (ordered[0] < 0 or ordered[-1] >= vocabulary_size):
        return _wrong_id(values, vocabulary_size)
    # an answer may begin with a shorter prompt by chance
    if len(prompt) >= 8 and size and values[0] == prompt[0] and [*values[: len(prompt)]] == prompt:
        return "an Action's token_ids must be those of the answer alone, but they begin with the prompt"
    if max_tokens is not None and size > max_tokens:
        return f"the action has {size} tokens, more than this turn's limit of {max_tokens}"
    return ""


def _wrong_id(values: Sequence[Any], vocabulary_size: float) -> str:
    index, wrong = next((n, i) for n, i in enumerate(values) if type(i) is not int or not 0 <= i < vocabulary_size)
    expected = f"an int in [0, {vocabulary_size}), the tokenizer's vocabulary"
    return f"an Action's token_ids[{index}] must be {expected}, got {_described(wrong)}"


def _logprobs_error(numbers: Any) -> str:
    """Describe why these are not log-probabilities of sampled tokens; NaN stands for an unknown one."""
    try:
        is_sequence = type(numbers) is list or isinstance(numbers, Sequence)
        values = cast("Sequence[Any]", numbers) if is_sequence else [None]
        # On the hot path: no value exceeds MAX_LOGPROB, so if the sum is at least this much, none is below MIN_LOGPROB.
        if not values or (max(values) <= MAX_LOGPROB and sum(values) >= MIN_LOGPROB + len(values) * MAX_LOGPROB):
            return ""
        invalid = (n for n, one in enumerate(values) if not (math.isnan(one) or MIN_LOGPROB <= one <= MAX_LOGPROB))
        index = next(invalid, None)
    except Exception:  # noqa: BLE001  # the values may be of any type, and comparing them may raise anything
        given = _described(cast("object", numbers))
        return f"an Action's logprobs must be a list of floats, finite or NaN (use tolist() for a tensor), got {given}"
    if index is None:
        return ""
    expected = f"NaN if it is unknown, or between {MIN_LOGPROB:.0f} (the smallest probability in float32) and 0"
    return f"an Action's logprobs[{index}] must be {expected}, got {_described(values[index])}"


def _described(value: object) -> str:
    return f"{shown(value)} ({type(value).__name__})"


class Step(NamedTuple):
    """The environment's response to an action.

    Attributes:
        reward: The reward of the action; with rewards by role, the reward of the role that acted.
        done: Whether the episode has ended.
        invalid: Whether the action was invalid.
        role_rewards: The reward of each role; None without rewards by role.
        components: The numbers of the reward by name; None for a plain number.
        role_components: The numbers of each role's reward by name; None if no role's reward is named.
        truncated: Whether the environment's turn limit ended the episode.
    """

    reward: float = 0.0
    done: bool = False
    invalid: bool = False
    role_rewards: Mapping[Hashable, float] | None = None
    truncated: bool = False
    components: Mapping[str, float] | None = None
    role_components: Mapping[Hashable, Mapping[str, float]] | None = None


def as_step(answer: Any, hook: str = "_step_episode") -> tuple[dict[str, Any], Step, dict[str, Any]]:
    """Check what a step's ``hook`` returned, write ``done`` into the next state, and return state, step and info."""
    # On the hot path of every turn, so this is a single function.
    parts = answer
    try:
        is_answer = isinstance(answer, tuple) and len(parts) == 4
        if not (is_answer and isinstance(parts[0], dict) and isinstance(parts[3], dict)):
            raise EnvError(f"{hook} must return (state, reward, done, info), got {shown(parts)}")  # noqa: TRY301
        next_state, reward, done, info = parts
        number, components = reward, None
        if type(number) is not float or not abs(number) <= _LARGEST:
            check_order(hook, reward, done)
            number, components = as_reward(f"{hook}'s reward", reward)
        if type(done) is not bool:
            done = as_bool("done", done, hook)
        step = Step(number, done, components=components) if components else Step(number, done)
        if info:
            step = with_info(step, info, hook)
            if step.truncated and not done:
                sentence = f"{hook} returned info['truncated']=True with done=False, but a truncated episode is over"
                raise EnvError(sentence)  # noqa: TRY301
        # done=True with a state whose "done" is still False is fine: {**state, ...} copies the old False.
        was_done = next_state.get("done")
        if was_done is not False and as_bool("state['done']", was_done, hook) and not done:
            sentence = f"{hook} returned done=False with a state whose 'done' is True: they must agree"
            raise EnvError(sentence)  # noqa: TRY301
        next_state["done"] = done
    except BaseException as error:
        raise failure_of_value(hook, error) from error
    return next_state, step, info


def with_info(step: Step, info: dict[str, Any], hook: str) -> Step:
    """Add to a step what its ``info`` has, after checking it."""
    role_rewards, role_components = (
        (None, None) if info.get("rewards") is None else as_role_rewards(info["rewards"], hook)
    )
    check_info(hook, info)
    return step._replace(
        invalid=as_bool("info['invalid']", info.get("invalid"), hook),
        truncated=as_bool("info['truncated']", info.get("truncated"), hook),
        role_rewards=role_rewards,
        role_components=role_components,
    )


def as_messages(prompt: Any, name: str = "_format_prompt") -> list[Message]:
    """Convert what ``_format_prompt``, or the hook ``name``, returned to messages; a str becomes one user message."""
    if type(prompt) is str:  # the most frequent case
        return [{"role": "user", "content": prompt}]
    try:
        given: Any = [{"role": "user", "content": plain_str(prompt)}] if isinstance(prompt, str) else prompt
        messages = _as_conversation(given)
    except BaseException as error:
        raise failure_of_value(name, error) from error
    if messages is None:
        wanted = "a str or a list of at least one message"
        items = cast("list[Any]", given) if isinstance(given, list) else []
        fields = [cast("dict[str, Any]", one) for one in items if isinstance(one, dict)]
        if any(isinstance(one.get("content"), list) for one in fields):
            wanted += " whose content is a str (lists of content parts are not supported: only text is recorded)"
        raise EnvError(f"{name} must return {wanted}, got {shown(prompt)}")
    if messages[-1]["role"] == "assistant":
        raise EnvError(f"{name} must not end with a message of the role assistant, which the agent writes")
    return messages


def system_messages(env: PlayableEnv) -> list[Message]:
    """Return the system message of a conversation, as a list; empty if there is none."""
    text: Any = env.env_config["system_prompt"]
    if text is None:
        text = call_environment(env._system_prompt)
    try:
        text = plain_str(text) if isinstance(text, str) else text
    except BaseException as error:
        raise failure_of_value("_system_prompt", error) from error
    if not isinstance(text, str | None):
        raise EnvError(f"_system_prompt must return a str or None, got {shown(text)}")
    return [Message(role="system", content=text)] if text else []


def rewritten_history(history: Callable[[list[Message]], Any], messages: list[Message]) -> list[Message]:
    """Call ``env_config["history"]``, and return the messages for the agent to answer, or raise :class:`EnvError`."""
    name, newest = "env_config['history']", messages[-1]["content"]
    rewritten = call_environment(history, messages)
    try:
        plain = _as_conversation(rewritten)
    except BaseException as raised:
        raise failure_of_value(name, raised) from raised
    if plain is None or plain[-1]["role"] == "assistant":
        expected = "a list of messages that ends with the one to answer"
        raise EnvError(f"{name} must return {expected}, got {shown(rewritten)}")
    if not all(is_unicode(message["content"]) for message in plain):
        raise EnvError(f"{name} must return valid Unicode, got {shown(plain)}")
    if newest not in plain[-1]["content"]:
        called = getattr(history, "__qualname__", type(history).__name__)
        warn_once("the history %s leaves out the newest message, which the agent is to answer", called)
    return plain


def token_rewards(env: PlayableEnv, trajectory: Trajectory) -> list[float]:
    """Return the per-token rewards that an environment gives for a rollout, (T,).

    Raises:
        EnvError: ``_calculate_rewards`` raised, or did not return one finite number for each token.
    """
    rewards: Any = call_environment(env._calculate_rewards, trajectory)
    try:
        num_given = len(cast("list[Any]", rewards)) if isinstance(rewards, list) else None
    except BaseException as error:
        raise failure_of_value("_calculate_rewards", error) from error
    num_tokens = len(trajectory.token_ids)
    if num_given != num_tokens:
        given = shown(cast("object", rewards)) if num_given is None else num_given
        raise EnvError(f"_calculate_rewards must return a list of {num_tokens} rewards, one per token, got {given}")
    as_number("the sum of _calculate_rewards", call_environment(sum, rewards))
    return cast("list[float]", rewards)


def as_hashable(name: str, value: Any) -> Hashable:
    """Return a hashable value, or raise :class:`EnvError` with its name."""
    try:
        hash(value)
    except BaseException as error:
        if is_interruption(error):
            raise
        raise EnvError(f"{name} must return something hashable, got {shown(value)}") from error
    return value


def _is_many(value: Any) -> bool:
    """Whether a value is a tensor without exactly one element: torch would raise from C++, which can end a greenlet."""
    return getattr(value, "numel", lambda: 1)() != 1


def as_number(name: str, value: Any) -> float:
    """Return a finite number in the range of single precision, or raise :class:`EnvError` with its name."""
    if type(value) is float and abs(value) <= _LARGEST:
        return value
    try:
        number = math.nan if isinstance(value, _TEXT) or _is_many(value) else float(value)
    except BaseException as error:  # the conversion runs user code
        if is_interruption(error):
            raise
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"{name} must be a finite number, got {shown(value)}")
    if abs(number) > _LARGEST:  # smaller values can be summed and squared in double precision
        raise EnvError(f"{name} must lie within ±{_LARGEST:g}, the range of single precision, got {shown(value)}")
    return number


def as_reward(name: str, value: Any) -> tuple[float, dict[str, float] | None]:
    """Return a reward as a number, and its numbers by name if it is a mapping; raise :class:`EnvError` otherwise.

    An empty mapping is the plain number 0.

    >>> as_reward("the reward", {"correct": 1, "format": 0.5})
    (1.5, {'correct': 1.0, 'format': 0.5})
    """
    if type(value) is not dict and not isinstance(value, Mapping):
        return as_number(name, value), None
    components: dict[str, float] = {}
    given = cast("Mapping[Any, Any]", value)
    for key, number in given.items():
        if type(key) is str and key and type(number) is float and abs(number) <= _LARGEST:  # the most frequent case
            components[key] = number
        elif not isinstance(key, str) or not key:
            raise EnvError(f"{name} must be a number, or a dict of numbers by non-empty name, got {shown(given)}")
        elif key in ("success", "invalid", "truncated") and _is_bool(number):
            sentence = f"{name} has {shown(key)}, which is a flag: return it in info, or as a float if it is a reward"
            raise EnvError(sentence)
        else:
            components[plain_str(key)] = as_number(f"{name}[{shown(key)}]", number)
    total = math.fsum(components.values())
    return total if abs(total) <= _LARGEST else as_number(f"the sum of {name}", total), components or None


def checked_reward(hook: str, reward: Any) -> GivenReward:
    """Return the reward that a hook returned in the library's types, or raise :class:`EnvError`."""
    number, components = as_reward(f"{hook}'s reward", reward)
    return number if components is None else components


def as_grade(hook: str, returned: Any) -> tuple[GivenReward, dict[str, Any]]:
    """Return the reward and the ``info`` of a grade, a reward or a tuple of both; raise :class:`EnvError` otherwise."""
    graded = cast("tuple[Any, ...]", returned if isinstance(returned, tuple) else (returned, {}))
    if len(graded) != 2:
        raise EnvError(f"{hook} must return a reward, or a tuple of a reward and an info, got {shown(graded)}")
    reward, info = graded
    check_info(hook, info)
    return checked_reward(hook, reward), info


def as_answer(hook: str, returned: Any) -> tuple[GivenReward, bool, dict[str, Any]]:
    """Check what a hook returned as the reward, ``done`` and ``info`` of an answer."""
    if not isinstance(returned, tuple) or len(cast("tuple[Any, ...]", returned)) != 3:
        raise EnvError(f"{hook} must return (reward, done, info), got {shown(cast('object', returned))}")
    given, done, info = cast("tuple[Any, Any, Any]", returned)
    check_order(hook, given, done)
    reward, info = as_grade(hook, (given, info))
    return reward, as_bool("done", done, hook), info


def as_role_rewards(
    rewards: Any, hook: str = "_step_episode"
) -> tuple[dict[Hashable, float], dict[Hashable, dict[str, float]] | None]:
    """Return the reward of each role, and the numbers by name of those that are mappings, or raise :class:`EnvError`.

    Args:
        rewards: ``info["rewards"]``.
        hook: Name of the hook that returned it.
    """
    name = f"{hook}'s info['rewards']"
    if not isinstance(rewards, Mapping):
        raise EnvError(f"{name} must be a dict of one reward per role, got {shown(rewards)}")
    by_role = cast("Mapping[Hashable, Any]", rewards)
    pairs = {role: as_reward(f"{name}[{shown(role)}]", reward) for role, reward in by_role.items()}
    named = {role: components for role, (_, components) in pairs.items() if components is not None}
    return {role: number for role, (number, _) in pairs.items()}, named or None


def with_role_reward(role: Hashable, step: Step, rewards: Mapping[Hashable, float]) -> Step:
    """Set a step's reward to that of the role that acted; raise :class:`EnvError` if that role is None.

    A role that differs from a rewarded role only in case would never get its reward, and is rejected as well.
    """
    if rewards and role is None and None not in rewards:
        raise EnvError(
            "_role must return the role that acted if _step_episode returns rewards by role, got None with "
            f"info['rewards'] = {shown(dict(rewards))} (rewards by name are returned as the reward, not in info)"
        )
    if role not in rewards:
        alike = [one for one in rewards if str(one).casefold() == str(role).casefold()]
        if alike:
            raise EnvError(
                f"_role returned {shown(role)}, but _step_episode's info['rewards'] has {shown(alike[0])}: role names "
                "must match exactly"
            )
    return step._replace(reward=rewards.get(role, 0.0), components=(step.role_components or {}).get(role))


def without_rewards(step: Step) -> Step:
    """Set all rewards of a step to 0, as in a practice episode."""
    by_role = step.role_components
    return step._replace(
        reward=0.0,
        role_rewards=step.role_rewards and dict.fromkeys(step.role_rewards, 0.0),
        components=step.components and dict.fromkeys(step.components, 0.0),
        role_components=by_role and {role: dict.fromkeys(named, 0.0) for role, named in by_role.items()},
    )


def as_bool(name: str, value: Any, hook: str = "") -> bool:
    """Return a bool, or a value that equals 0 or 1, as a bool (None is False); raise :class:`EnvError` otherwise."""
    if value is None or type(value) is bool:
        return value is True
    try:
        is_one = not _is_many(value) and bool(value == 1)
        if is_one or (not _is_many(value) and bool(value == 0)):
            return is_one
    except BaseException as error:  # the comparison runs user code
        if is_interruption(error):
            raise
    named = f"{hook}'s {name}" if hook else name
    raise EnvError(f"{named} must be True or False, got {shown(value)}")


def check_order(hook: str, reward: Any, done: Any) -> None:
    """Reject a bool as the reward beside another number as ``done``, which are swapped."""
    if _is_bool(reward) and not (done is None or _is_bool(done)):
        raise EnvError(f"{hook} returned the reward {shown(reward)} and done={shown(done)}: the reward comes first")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in {"bool", "torch.bool"}


#: Keys of ``info`` from which metrics are computed, each with the check of its value.
INFO_KEYS: dict[str, Callable[[str, Any], object]] = {
    "success": as_bool,
    "random_reward": as_number,
    "optimal_reward": as_number,
}


def check_info(hook: str, info: Any) -> None:
    """Check an ``info`` and the values from which metrics are computed, or raise :class:`EnvError` with the hook."""
    if not isinstance(info, dict):
        raise EnvError(f"{hook} must return a dict as info, got {shown(info)}")
    for key, check in INFO_KEYS.items():
        if (value := cast("dict[Any, Any]", info).get(key)) is not None:
            check(f"{hook}'s info[{key!r}]", value)
