"""Call users' code and check what it returns before use: foreign code may raise and return anything.

An exception in an environment's hook fails its own episode and no other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from agentsgym.errors import EnvError
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.types import MAX_LOGPROB, MIN_LOGPROB, Action, Message

_LARGEST = 3.4e38


def call_environment(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook of the environment; whatever it raises becomes an :class:`EnvError`, the cause attached."""
    try:
        return hook(*arguments)
    except BaseException as error:
        raise failure_of_hook(hook, error) from error


def failure_of_hook(hook: Callable[..., Any], error: BaseException) -> EnvError:
    """Make the failure of an episode from a hook's exception; an interruption is raised again."""
    if is_interruption(error):
        raise error
    return failure_of(EnvError, getattr(hook, "__qualname__", None) or shown(hook), error, hook)


def failure_of_value(name: str, error: BaseException) -> EnvError:
    """Make the failure of an episode from what a returned value raised when it was inspected.

    Args:
        name: Name of the returned value, as in ``"_step_episode"``.
        error: The caught error. One that is not a failure of the value, or already names it, is raised again.
    """
    if isinstance(error, EnvError) or is_interruption(error):
        raise error
    return failure_of(EnvError, f"what {name} returned", error)


def _as_conversation(messages: Any) -> list[Message] | None:
    """Return chat messages without subclasses, whose methods are foreign code; None for anything else."""
    # Every turn of every episode comes through here: no copy as long as all is well.
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
    """Convert a str that may be of a subclass to a plain str."""
    return text if type(text) is str else str.__str__(text)


def with_plain_text(action: Any) -> Any:
    """Return an action with its text as a plain str; anything else is returned unchanged."""
    if not isinstance(action, Action) or type(action.text) is str or not isinstance(action.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return cast("Any", action)
    return dataclasses.replace(action, text=plain_str(action.text))


def action_error(action: Any, room: int | None, vocabulary_size: float) -> str:
    """Describe why an agent's answer cannot be recorded; empty if it can."""
    if not isinstance(action, Action) or not isinstance(action.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"an agent must return an Action, got {shown(action)}"
    if type(action.policy_version) is not int and action.policy_version is not None:
        return f"an Action's policy_version must be an int or None, got {_described(action.policy_version)}"
    if action.token_ids is None:
        return "" if is_unicode(action.text) else f"an Action's text must be valid Unicode, got {shown(action.text)}"
    error = _ids_error(action.token_ids, vocabulary_size)
    if not error and room is not None and len(action.token_ids) > room:
        error = f"an action of {len(action.token_ids)} tokens, more than the {room} requested"
    if not error and action.logprobs is not None:
        error = _logprobs_error(action.logprobs)
    return error


def is_unicode(text: str) -> bool:
    """Whether a tokenizer can read it: half of a surrogate pair, as JSON may hold, is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids_error(ids: Any, vocabulary_size: float) -> str:
    if type(ids) is not list and not isinstance(ids, Sequence):  # the first is quicker by far
        return f"an Action's token_ids must be a list of ints, as tolist() gives, got {_described(ids)}"
    values = cast("Sequence[Any]", ids)
    # Every turn of every episode comes through here: no loop in Python as long as all is well.
    if set(map(type, values)) <= {int} and min(values, default=0) >= 0 and max(values, default=0) < vocabulary_size:
        return ""
    index, wrong = next((n, i) for n, i in enumerate(values) if type(i) is not int or not 0 <= i < vocabulary_size)
    expected = f"an int in [0, {vocabulary_size}), the tokenizer's vocabulary"
    return f"an Action's token_ids[{index}] must be {expected}, got {_described(wrong)}"


def _logprobs_error(numbers: Any) -> str:
    """Describe why these are not log-probabilities of sampled tokens; NaN stands for an unknown one."""
    try:
        is_sequence = type(numbers) is list or isinstance(numbers, Sequence)
        values = cast("Sequence[Any]", numbers) if is_sequence else [None]
        # Every turn of every episode comes through here. None is lower than the sum by more than the others may add.
        most = len(values) * MAX_LOGPROB
        if not values or (max(values) <= MAX_LOGPROB and sum(values) >= MIN_LOGPROB + most):
            return ""
        invalid = (n for n, one in enumerate(values) if not (math.isnan(one) or MIN_LOGPROB <= one <= MAX_LOGPROB))
        index = next(invalid, None)
    except Exception:  # noqa: BLE001  # they may be of any type, and compare as they like
        given = _described(cast("object", numbers))
        return f"an Action's logprobs must be a list of floats, none infinite, as tolist() gives, got {given}"
    if index is None:
        return ""
    expected = f"NaN where it is not known, or from {MIN_LOGPROB:.0f} (float32 holds no smaller probability) to 0"
    return f"an Action's logprobs[{index}] must be {expected}, got {_described(values[index])}"


def _described(value: object) -> str:
    return f"{shown(value)} ({type(value).__name__})"


class Step(NamedTuple):
    """The environment's answer to an action.

    Attributes:
        reward: Its reward; with rewards by role, that of the role that acted.
        done: Whether the episode has ended.
        invalid: Whether the action was invalid.
        role_rewards: The reward of each role; None without rewards by role.
    """

    reward: float = 0.0
    done: bool = False
    invalid: bool = False
    role_rewards: Mapping[Hashable, float] | None = None
    truncated: bool = False


def as_step(answer: Any) -> tuple[dict[str, Any], Step, dict[str, Any]]:
    """Read what ``_step_episode`` returned: the next state, the step and its info, or an :class:`EnvError`.

    ``done`` is written into the next state.
    """
    # Every turn of every episode comes through here: no further function between the two.
    try:
        is_answer = isinstance(answer, tuple) and len(cast("tuple[Any, ...]", answer)) == 4
        if not (is_answer and isinstance(answer[0], dict) and isinstance(answer[3], dict)):
            raise EnvError(  # noqa: TRY301
                f"_step_episode must return (state, reward, done, info), got {shown(cast('object', answer))}"
            )
        next_state, reward, done, info = cast("tuple[dict[str, Any], Any, Any, dict[str, Any]]", answer)
        step = Step(
            as_number("_step_episode's reward", reward),
            as_bool("_step_episode's done", done),
            as_bool("_step_episode's info['invalid']", info.get("invalid")),
            None if info.get("rewards") is None else as_role_rewards(info["rewards"]),
            as_bool("_step_episode's info['truncated']", info.get("truncated")),
        )
        for key, check in INFO_KEYS.items():
            if info.get(key) is not None:
                check(f"_step_episode's info[{key!r}]", info[key])
        # The other way round is how a state is mostly made: {**state, ...} copies the False that it held.
        if as_bool("_step_episode's state['done']", next_state.get("done")) and not step.done:
            sentence = "_step_episode returned done=False with a state whose 'done' is True: they must agree"
            raise EnvError(sentence)  # noqa: TRY301
        next_state["done"] = step.done
    except BaseException as error:
        raise failure_of_value("_step_episode", error) from error
    return next_state, step, info


def as_messages(prompt: Any, name: str = "_format_prompt") -> list[Message]:
    """Read what ``_format_prompt``, or the hook of that name, returned: messages, a str being one of the user.

    Raises:
        EnvError: It is neither.
    """
    if type(prompt) is str:  # nearly every turn comes through here
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
            wanted += " whose content is a str (a list of parts is not taken, only text is recorded)"
        raise EnvError(f"{name} must return {wanted}, got {shown(prompt)}")
    return messages


def as_system_prompt(text: Any) -> str | None:
    """Read what ``_system_prompt`` returned, or an :class:`EnvError`."""
    try:
        system = plain_str(text) if isinstance(text, str) else None
    except BaseException as error:
        raise failure_of_value("_system_prompt", error) from error
    if system is None and text is not None:
        raise EnvError(f"_system_prompt must return a str or None, got {shown(text)}")
    return system


def rewritten_history(history: Callable[[list[Message]], Any], messages: list[Message]) -> list[Message]:
    """Call ``env_config["history"]`` and return the messages that the agent answers, or raise an :class:`EnvError`."""
    name = "env_config['history']"
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
    return plain


def as_token_rewards(rewards: Any, num_tokens: int) -> list[float]:
    """Read what ``_calculate_rewards`` returned: one reward a token, or an :class:`EnvError`."""
    try:
        num_given = len(cast("list[Any]", rewards)) if isinstance(rewards, list) else None
    except BaseException as error:
        raise failure_of_value("_calculate_rewards", error) from error
    if num_given == num_tokens:
        return cast("list[float]", rewards)
    given = shown(cast("object", rewards)) if num_given is None else num_given
    raise EnvError(f"_calculate_rewards must return a list of {num_tokens} rewards, one per token, got {given}")


def as_hashable(name: str, value: Any) -> Hashable:
    """Return a hashable value, or raise an :class:`EnvError` that names it."""
    try:
        hash(value)
    except BaseException as error:
        if is_interruption(error):
            raise
        raise EnvError(f"{name} must return something hashable, got {shown(value)}") from error
    return value


def as_number(name: str, value: Any) -> float:
    """Return a finite number within single precision, or raise an :class:`EnvError` that names it."""
    if type(value) is float and abs(value) <= _LARGEST:
        return value
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except BaseException as error:  # the conversion is the foreign object's own
        if is_interruption(error):
            raise
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"{name} must be a finite number, got {shown(value)}")
    if abs(number) > _LARGEST:  # sums and squares of what is smaller are finite doubles
        raise EnvError(f"{name} must lie within ±{_LARGEST:g}, the range of single precision, got {shown(value)}")
    return number


def as_role_rewards(rewards: Any) -> dict[Hashable, float]:
    """Read ``info["rewards"]``: a finite number for each role, or an :class:`EnvError`."""
    name = "_step_episode's info['rewards']"
    if not isinstance(rewards, Mapping):
        raise EnvError(f"{name} must be a dict of one reward per role, got {shown(rewards)}")
    by_role = cast("Mapping[Hashable, Any]", rewards)
    return {role: as_number(f"{name}[{shown(role)}]", reward) for role, reward in by_role.items()}


def with_role_reward(role: Hashable, step: Step) -> Step:
    """Set a step's reward to that of the role that acted; raises :class:`EnvError` if that role is None.

    A role whose spelling differs from a rewarded one would never get its reward, and is rejected as well.
    """
    rewards = step.role_rewards
    if rewards is None:
        return step
    if rewards and role is None and None not in rewards:
        raise EnvError(
            "_role must return the role that acted when _step_episode gives rewards by role, got None with "
            f"info['rewards'] = {shown(dict(rewards))}"
        )
    if role not in rewards:
        alike = [one for one in rewards if str(one).casefold() == str(role).casefold()]
        if alike:
            raise EnvError(f"_role returned {shown(role)}, but _step_episode's info['rewards'] has {shown(alike[0])}")
    return step._replace(reward=rewards.get(role, 0.0))


def as_bool(name: str, value: Any) -> bool:
    """Return True or False, or raise an :class:`EnvError` that names it."""
    if value is None or type(value) is bool:
        return value is True
    try:
        return _bool(value)
    except BaseException as error:
        if is_interruption(error):
            raise
        raise EnvError(f"{name} must be True or False, got {shown(value)}") from error


def _bool(value: Any) -> bool:
    if isinstance(value, str) or value != value:  # noqa: PLR0124  # "no" and NaN are true to Python
        raise ValueError
    return bool(value)


#: Keys of ``info`` from which metrics are computed, each with the check of its value.
INFO_KEYS: dict[str, Callable[[str, Any], object]] = {
    "success": as_bool,
    "random_reward": as_number,
    "optimal_reward": as_number,
}
