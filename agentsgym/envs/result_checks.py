"""Check what environments and agents return before it is used: foreign code may return anything."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

from agentsgym.errors import EnvError
from agentsgym.types import Action, Message


def is_conversation(messages: Any) -> TypeGuard[list[Message]]:
    """Whether it is a list of at least one chat message."""
    if not isinstance(messages, list):
        return False
    items = cast("list[Any]", messages)
    return bool(items) and all(map(_is_message, items))


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    fields = cast("dict[str, Any]", message)
    return isinstance(fields.get("role"), str) and isinstance(fields.get("content"), str)


def action_error(action: Any, room: int | None, vocabulary_size: float) -> str:
    """Say why an agent's answer cannot be recorded; empty if it can."""
    if not isinstance(action, Action) or not isinstance(action.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"an agent must answer with an Action, got {action!r}"
    if action.token_ids is None:
        return "" if is_unicode(action.text) else f"an Action's text must be valid Unicode, got {action.text!r}"
    error = _ids_error(action.token_ids, vocabulary_size)
    if not error and room is not None and len(action.token_ids) > room:
        error = f"an action of {len(action.token_ids)} tokens, at most {room} were asked for"
    if not error and action.logprobs is not None and not _are_logprobs(action.logprobs):
        given = _described(action.logprobs)
        error = f"an Action's logprobs must be a list of floats, none infinite, as tolist() gives, got {given}"
    return error


def is_unicode(text: str) -> bool:
    """Whether a tokenizer can read it: half of a surrogate pair, as JSON may hold, is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids_error(ids: Any, vocabulary_size: float) -> str:
    if not isinstance(ids, Sequence):
        return f"an Action's token_ids must be a list of ints, as tolist() gives, got {_described(ids)}"
    values = cast("Sequence[Any]", ids)
    # Every turn of every episode comes through here: no loop in Python as long as all is well.
    if set(map(type, values)) <= {int} and min(values, default=0) >= 0 and max(values, default=0) < vocabulary_size:
        return ""
    index, wrong = next((n, i) for n, i in enumerate(values) if type(i) is not int or not 0 <= i < vocabulary_size)
    expected = f"an int in [0, {vocabulary_size}), the tokenizer's vocabulary"
    return f"an Action's token_ids[{index}] must be {expected}, got {_described(wrong)}"


def _are_logprobs(numbers: Any) -> bool:
    """Whether they are floats, none of them infinite; NaN says that one is not known."""
    try:
        values = cast("Sequence[Any]", numbers) if isinstance(numbers, Sequence) else [math.inf]
        total = math.fsum(values)
        return math.isfinite(total) or (math.isnan(total) and not any(map(math.isinf, values)))
    except (TypeError, ValueError, OverflowError):  # not numbers; -inf beside inf; more than a float holds
        return False


def _described(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


class Step(NamedTuple):
    """The environment's answer to an action."""

    reward: float = 0.0
    done: bool = False
    invalid: bool = False


def as_step(answer: Any) -> tuple[dict[str, Any], Step, dict[str, Any]]:
    """Read what ``_step_episode`` returned: the next state, the step and its info, or an :class:`EnvError`."""
    if not _is_step(answer):
        raise EnvError(f"_step_episode must return (state, reward, done, info), got {answer!r}")
    next_state, reward, done, info = answer
    step = Step(
        as_number("_step_episode's reward", reward),
        as_flag("_step_episode's done", done),
        as_flag("_step_episode's info['invalid']", info.get("invalid")),
    )
    check_info(info)
    # The other way round is how a state is mostly made: {**state, ...} copies the False that it held.
    if as_flag("_step_episode's state['done']", next_state.get("done")) and not step.done:
        raise EnvError("_step_episode returned done=False with a state whose 'done' is True: they must agree")
    return next_state, step, info


def _is_step(answer: Any) -> TypeGuard[tuple[dict[str, Any], Any, Any, dict[str, Any]]]:
    if not (isinstance(answer, tuple) and len(cast("tuple[Any, ...]", answer)) == 4):
        return False
    return isinstance(answer[0], dict) and isinstance(answer[3], dict)


def as_messages(prompt: Any) -> list[Message]:
    """Read what ``_format_prompt`` returned: messages, a str being one of the user, or an :class:`EnvError`."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not is_conversation(messages):
        raise EnvError(f"_format_prompt must return a str or a list of at least one message, got {prompt!r}")
    return messages


def as_shown_messages(shown: Any) -> list[Message]:
    """Read what ``env_config["history"]`` returned: messages for the agent to answer, or an :class:`EnvError`."""
    if not is_conversation(shown) or shown[-1]["role"] == "assistant":
        raise EnvError(
            "env_config['history'] must return a list of messages that ends with what the agent is to answer, "
            f"got {shown!r}"
        )
    if not all(is_unicode(message["content"]) for message in shown):
        raise EnvError(f"env_config['history'] must return valid Unicode, got {shown!r}")
    return shown


def as_token_rewards(rewards: Any, num_tokens: int) -> list[float]:
    """Read what ``_calculate_rewards`` returned: one reward a token, or an :class:`EnvError`."""
    if isinstance(rewards, list) and len(cast("list[Any]", rewards)) == num_tokens:
        return cast("list[float]", rewards)
    given = len(cast("list[Any]", rewards)) if isinstance(rewards, list) else repr(rewards)
    raise EnvError(f"_calculate_rewards must return a list of {num_tokens} rewards, one a token, got {given}")


def as_hashable(name: str, value: Any) -> Hashable:
    """Something hashable, or an :class:`EnvError` that names it."""
    try:
        hash(value)
    except TypeError as error:
        raise EnvError(f"{name} must return something hashable, got {value!r}") from error
    return value


def as_number(name: str, value: Any) -> float:
    """A finite number, or an :class:`EnvError` that names it."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # noqa: BLE001  # the conversion is the foreign object's own
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"{name} must be a finite number, got {value!r}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """True or False, or an :class:`EnvError` that names it."""
    try:
        return _bool(value)
    except Exception as error:
        raise EnvError(f"{name} must be True or False, got {value!r}") from error


def _bool(value: Any) -> bool:
    if isinstance(value, str) or value != value:  # noqa: PLR0124  # "no" and NaN are true to Python
        raise ValueError
    return bool(value)


def check_info(info: Mapping[str, Any]) -> None:
    """Refuse what metrics could not be made of, with an :class:`EnvError` that names it."""
    for name, check in INFO_KEYS.items():
        if info.get(name) is not None:
            check(f"_step_episode's info[{name!r}]", info[name])


#: The keys of ``info`` that the library reads in the end, and how their values are checked.
INFO_KEYS: dict[str, Callable[[str, Any], object]] = {
    "success": as_flag,
    "random_reward": as_number,
    "optimal_reward": as_number,
}
