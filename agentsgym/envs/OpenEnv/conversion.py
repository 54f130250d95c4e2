"""Convert the agent's answers to a server's actions, and a server's observations to text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from agentsgym.errors import ConfigError, EnvError, did_you_mean
from agentsgym.texts import shown

ReadAction = Callable[[str], Mapping[str, Any]]
WriteObservation = Callable[[Mapping[str, Any]], str]

NOT_SHOWN = frozenset({"metadata", "done", "reward"})  # of every action and observation; nothing of the game
_PLACE = re.compile(r"\{(\w+)\}")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class UnreadableActionError(Exception):
    """The agent's answer is not a valid action; the message is for the agent."""


def fields_of(schema: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the schemas of the environment's fields, by name."""
    properties: Any = (schema or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    given = cast("Mapping[str, Any]", properties)
    return {name: one for name, one in given.items() if name not in NOT_SHOWN and isinstance(one, dict)}


def text_field(schema: Mapping[str, Any] | None) -> str | None:
    """Return the field for an answer in plain text: the only one, or the only required one."""
    fields = fields_of(schema)
    required = [name for name in (schema or {}).get("required") or () if name in fields]
    names = [*fields] if len(fields) == 1 else required
    if len(names) != 1 or fields[names[0]].get("type") in {"object", "array"}:
        return None
    return names[0]


def action_reader(
    given: Any, schema: Mapping[str, Any] | None, server: str, *, is_json: bool = False, is_text: bool = False
) -> ReadAction:
    """Return a function that converts an answer in text to an action.

    Args:
        given: ``env_config["action"]``: a field's name, a template, a function, or None to use the schema.
        schema: Schema of an action; None if unknown.
        server: Name of the server in error messages.
        is_json: Whether an answer is a JSON object unless ``given`` says otherwise.
        is_text: Whether an answer is one field; if neither is set, the schema decides.

    Raises:
        ConfigError: The schema has no such field, or no field for plain text.
    """
    if callable(given):
        return lambda text: _checked_action(given(text))
    if isinstance(given, Mapping):
        template = cast("Mapping[str, Any]", given)
        return lambda text: {name: _filled(value, text) for name, value in template.items()}
    fields = fields_of(schema)
    if isinstance(given, str) and fields and given not in fields:
        hint = did_you_mean(given, fields)
        raise ConfigError(f"env_config['action'] names {given!r}, which is not a field of an action of {server}{hint}")
    name = given if isinstance(given, str) else None if is_json else text_field(schema)
    if name is None and is_text:
        raise ConfigError(
            f"env_config['format'] is 'text', but an action of {server} has the fields {', '.join(fields) or 'none'}: "
            "name the field for the text in env_config['action']"
        )
    if name is None:
        return lambda text: object_in(text, fields)
    kind = fields.get(name, {}).get("type")
    return lambda text: {name: _number(text) if kind in {"integer", "number"} else text}


def object_in(text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the JSON object of an answer: the whole answer, a code fence, or from its first brace on.

    Raises:
        UnreadableActionError: The answer contains no JSON object.

    >>> object_in('I go up. {"move": "up"}', {})
    {'move': 'up'}
    """
    fence = _FENCE.search(text)
    candidate = (fence[1] if fence else text).strip()
    try:
        value: Any = json.JSONDecoder().raw_decode(candidate, max(candidate.find("{"), 0))[0]
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        names = f" with the fields {', '.join(fields)}" if fields else ""
        raise UnreadableActionError(f"Invalid action. Answer with one JSON object{names}.")
    return cast("dict[str, Any]", value)


def observation_writer(given: Any, schema: Mapping[str, Any] | None) -> WriteObservation:
    """Return a function that converts an observation to text.

    Args:
        given: ``env_config["observation"]``: a field's name, a template such as ``"{board} {score}"``, a function, or
            None for the only field of the schema, if it is a text, else all as JSON.
        schema: Schema of the observation; None if unknown.
    """
    if callable(given):
        return lambda observation: _checked_text(given(observation))
    if isinstance(given, str) and _PLACE.search(given):
        return lambda observation: _PLACE.sub(lambda place: _field(observation, place[1]), given)
    if isinstance(given, str):
        return lambda observation: _field(observation, given)
    fields = fields_of(schema)
    name = next(iter(fields)) if len(fields) == 1 else None
    return lambda observation: _whole(observation, name)


def _whole(observation: Mapping[str, Any], name: str | None) -> str:
    text = observation.get(name) if name is not None else None
    if isinstance(text, str):
        return text
    shown_fields = {key: value for key, value in observation.items() if key not in NOT_SHOWN and value is not None}
    return json.dumps(shown_fields or observation.get("metadata") or {}, ensure_ascii=False)


def _field(observation: Mapping[str, Any], name: str) -> str:
    metadata: Any = observation.get("metadata")
    known = {**(cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}), **observation}
    if name not in known:
        hint = did_you_mean(name, known)
        raise EnvError(f"env_config['observation'] names {name!r}, which the observation does not have{hint}")
    value = known[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _filled(value: Any, text: str) -> Any:
    """Insert the agent's text into a template."""
    if isinstance(value, str):
        return value.replace("{text}", text)
    if isinstance(value, Mapping):
        return {name: _filled(one, text) for name, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_filled(one, text) for one in cast("list[Any]", value)]
    return value


def _number(text: str) -> Any:
    """Convert a number; other texts are left for the server to reject."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _checked_action(action: Any) -> Mapping[str, Any]:
    if action is None:
        raise UnreadableActionError("Invalid action.")
    if not isinstance(action, Mapping):
        raise EnvError(f"env_config['action'] must return a dict, or None for an invalid action, got {shown(action)}")
    return cast("Mapping[str, Any]", action)


def _checked_text(text: Any) -> str:
    if not isinstance(text, str):
        raise EnvError(f"env_config['observation'] must return a str, got {shown(text)}")
    return text
