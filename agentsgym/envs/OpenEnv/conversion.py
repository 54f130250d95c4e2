"""Convert the agent's answers to a server's actions, and a server's observations to text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from agentsgym.envs.Tools.results import cut
from agentsgym.errors import ConfigError, EnvError, did_you_mean
from agentsgym.texts import shown

Format = Literal["text", "json", "tools"]
ReadAction = Callable[[str], Mapping[str, Any]]
WriteObservation = Callable[[Mapping[str, Any]], str]

NOT_SHOWN = frozenset({"metadata", "done", "reward"})  # fields of every action and observation
_PLACE = re.compile(r"\{(\w+)\}")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class UnreadableActionError(Exception):
    """The agent's answer is not a valid action; the message is for the agent."""


def as_fields(value: Any) -> dict[str, Any]:
    """Return a JSON object unchanged, and an empty one for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def fields_of(schema: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the schemas of the fields that the environment defines, by name."""
    properties = as_fields((schema or {}).get("properties"))
    return {name: one for name, one in properties.items() if name not in NOT_SHOWN and isinstance(one, dict)}


def text_field(schema: Mapping[str, Any] | None) -> str | None:
    """Return the field for a plain-text answer: the only field, or the only required one; None if there is none."""
    fields = fields_of(schema)
    required = [name for name in (schema or {}).get("required") or () if name in fields]
    names = [*fields] if len(fields) == 1 else required
    if len(names) != 1 or fields[names[0]].get("type") in {"object", "array"}:
        return None
    return names[0]


def action_reader(given: Any, schema: Mapping[str, Any] | None, server: str, chosen: Format) -> ReadAction:
    """Return a function that converts a text answer to an action.

    Args:
        given: ``env_config["action"]``: a field's name, a template, a function, or None to use the schema.
        schema: The schema of an action; None if unknown.
        server: The name of the server in error messages.
        chosen: The format of answers, unless ``given`` determines it.
    """
    if callable(given):
        return lambda text: _checked_action(given(text))
    if isinstance(given, Mapping):
        template = cast("Mapping[str, Any]", given)
        return lambda text: {name: _filled(value, text) for name, value in template.items()}
    fields = fields_of(schema)
    if isinstance(given, str) and fields and given not in fields:
        hint = did_you_mean(given, fields)
        raise ConfigError(f"env_config['action'] must be a field of the actions of {server}, got {given!r}{hint}")
    name = given if isinstance(given, str) else None if chosen == "json" else text_field(schema)
    if name is None and chosen == "text":
        raise ConfigError(
            f"env_config['format'] is 'text', but actions of {server} have the fields {', '.join(fields) or 'none'}: "
            "set env_config['action'] to the field for the text"
        )
    if name is None:
        return lambda text: object_in(text, fields)
    is_number = fields.get(name, {}).get("type") in {"integer", "number"}
    return lambda text: {name: _number(text) if is_number else text}


def object_in(text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the JSON object in an answer: in its first code fence, if any, and from the first brace.

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


def observation_writer(given: Any, schema: Mapping[str, Any] | None, most: int | None) -> WriteObservation:
    """Return a function that converts an observation to text.

    Args:
        given: ``env_config["observation"]``: a field's name, a template such as ``"{board} {score}"``, a function, or
            None for the schema's only field, if it is a text, and otherwise the entire observation as JSON.
        schema: The schema of the observation; None if unknown.
        most: The maximum number of characters; longer texts are truncated.
    """
    fields = fields_of(schema)
    name = next(iter(fields)) if len(fields) == 1 else None

    def written(observation: Mapping[str, Any]) -> str:
        if callable(given):
            text: Any = given(observation)
            if not isinstance(text, str):
                raise EnvError(f"env_config['observation'] must return a str, got {shown(text)}")
            return text
        if isinstance(given, str) and _PLACE.search(given):
            return _PLACE.sub(lambda place: _field(observation, place[1]), given)
        if isinstance(given, str):
            return _field(observation, given)
        if name is not None and isinstance(observation.get(name), str):
            return observation[name]
        kept = {key: value for key, value in observation.items() if key not in NOT_SHOWN and value is not None}
        return json.dumps(kept or observation.get("metadata") or {}, ensure_ascii=False)

    return lambda observation: cut(written(observation), most)


def _field(observation: Mapping[str, Any], name: str) -> str:
    known = {**as_fields(observation.get("metadata")), **observation}
    if name not in known:
        hint = did_you_mean(name, known)
        raise EnvError(f"env_config['observation'] must be a field of the observation, got {name!r}{hint}")
    value = known[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _filled(value: Any, text: str) -> Any:
    """Fill the agent's text into a template."""
    if isinstance(value, str):
        return value.replace("{text}", text)
    if isinstance(value, Mapping):
        return {name: _filled(one, text) for name, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_filled(one, text) for one in cast("list[Any]", value)]
    return value


def _number(text: str) -> Any:
    """Convert a text to a number; other texts are returned for the server to reject."""
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
