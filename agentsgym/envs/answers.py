"""What games and agents answer, checked before it is used: foreign code may answer anything."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from agentsgym.errors import EnvironmentFault
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


def complaint_about(action: Any, room: int | None, vocabulary_size: float) -> str:
    """What keeps an agent's answer from being recorded; empty if nothing does."""
    if not isinstance(action, Action) or not isinstance(action.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"an agent must answer with an Action, got {action!r}"
    if action.token_ids is None:
        return "" if is_unicode(action.text) else f"an Action's text must be valid Unicode, got {action.text!r}"
    complaint = _ids_complaint(action.token_ids, vocabulary_size)
    if not complaint and room is not None and len(action.token_ids) > room:
        complaint = f"an action of {len(action.token_ids)} tokens, at most {room} were asked for"
    if not complaint and action.logprobs is not None and not _are_logprobs(action.logprobs):
        given = _described(action.logprobs)
        complaint = f"an Action's logprobs must be a list of floats, none infinite, as tolist() gives, got {given}"
    return complaint


def is_unicode(text: str) -> bool:
    """Whether a tokenizer can read it: half of a surrogate pair, as JSON may hold, is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids_complaint(ids: Any, vocabulary_size: float) -> str:
    if not isinstance(ids, Sequence):
        return f"an Action's token_ids must be a list of ints, as tolist() gives, got {_described(ids)}"
    values = cast("Sequence[Any]", ids)
    # Every turn of every episode comes through here: no loop in Python as long as all is well.
    if set(map(type, values)) <= {int} and min(values, default=0) >= 0 and max(values, default=0) < vocabulary_size:
        return ""
    index, wrong = next((n, i) for n, i in enumerate(values) if type(i) is not int or not 0 <= i < vocabulary_size)
    wanted = f"an int in [0, {vocabulary_size}), the tokenizer's vocabulary"
    return f"an Action's token_ids[{index}] must be {wanted}, got {_described(wrong)}"


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


def is_step(answer: Any) -> TypeGuard[tuple[dict[str, Any], Any, Any, dict[str, Any]]]:
    """Whether it is (state, reward, done, info)."""
    if not (isinstance(answer, tuple) and len(cast("tuple[Any, ...]", answer)) == 4):
        return False
    return isinstance(answer[0], dict) and isinstance(answer[3], dict)


def as_number(name: str, value: Any) -> float:
    """A finite number, or an :class:`EnvironmentFault` that names it."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # noqa: BLE001  # the conversion is the foreign object's own
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentFault(f"{name} must be a finite number, got {value!r}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """True or False, or an :class:`EnvironmentFault` that names it."""
    try:
        return _bool(value)
    except Exception as error:
        raise EnvironmentFault(f"{name} must be True or False, got {value!r}") from error


def _bool(value: Any) -> bool:
    if isinstance(value, str) or value != value:  # noqa: PLR0124  # "no" and NaN are true to Python
        raise ValueError
    return bool(value)


def check_told(info: Mapping[str, Any]) -> None:
    """Refuse what metrics could not be made of, with an :class:`EnvironmentFault` that names it."""
    if info.get("success") is not None:
        as_flag("_step_episode's info['success']", info["success"])
    for name in ("random_reward", "optimal_reward"):
        if info.get(name) is not None:
            as_number(f"_step_episode's info[{name!r}]", info[name])
