"""A stored rollout: its trajectory, metadata that only its producer can supply, and its line of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from numbers import Integral, Real
from typing import Any, Final, cast

import numpy as np

from agentsgym.errors import ConfigError, StoreError, did_you_mean
from agentsgym.fields import Check, are_numbers, is_dict, is_hashable, is_int, is_list, is_str, or_none, require
from agentsgym.store.schema import (
    FLOATS,
    INTS,
    METADATA_FLOATS,
    METADATA_INTS,
    METADATA_TEXTS,
    TURN_COLUMNS,
    TURN_FLAGS,
    TURN_INTS,
)
from agentsgym.store.values import from_json, is_utf8, to_json
from agentsgym.texts import as_json, shown
from agentsgym.types import StopReason, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A finished rollout in a store. None means that a value was not provided.

    Attributes:
        trajectory: The trajectory.
        source: The origin of the rollout: ``"evaluation"``, ``"training"``, ``"play"`` or a custom label.
        env_class_path: The path of the environment's class, as in dataset rows.
        env_config: The environment's configuration, including defaults.
        tools: The JSON schemas of the environment's tools, as the chat template shows them; None without tools.
        step: The number of optimizer steps at the time of the rollout, in training.
        generation: The number of the rollout's generation batch, from 1, in training.
        group: The index of the rollout's task group over all ranks: within its generation batch in training, or within
            the evaluation for an evaluation during training.
        advantages: One number per token, (T,), 0.0 on environment tokens, before they are weighted for the loss.
        trainer_logprobs: The trained model's log-probability of each agent token, (T,), 0.0 on environment tokens,
            NaN where the model did not compute it.
        entropies: The entropy of the trained model's distribution before each agent token, in nats, (T,), 0.0 on
            environment tokens, NaN where the model did not compute it.
        tokenizer: The name of the tokenizer of the ids, as returned by ``RolloutWriter.keep_tokenizer``.
        policy_version: The version of the policy's weights: in training, the number of optimizer steps.
        agent: The agent's name.
        run: The name of the run.
        created_at: The time at which the rollout was added to the store.
        extra: Any other values.
        inexact: For a rollout that was read from a store, descriptions of the values that could not be stored exactly.
    """

    trajectory: Trajectory
    source: str = "rollout"
    env_class_path: str | None = None
    env_config: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    step: int | None = None
    generation: int | None = None
    group: int | None = None
    advantages: Sequence[float] | None = None
    trainer_logprobs: Sequence[float] | None = None
    entropies: Sequence[float] | None = None
    tokenizer: str | None = None
    policy_version: int | None = None
    agent: str | None = None
    run: str | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    inexact: Sequence[str] = ()

    def __post_init__(self) -> None:
        trajectory = self.trajectory
        if not isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"trajectory must be a Trajectory, got {shown(trajectory)}")
        check_trajectory(trajectory)
        for name in METADATA_TEXTS:
            require(name, getattr(self, name), or_none(is_str), "a string or None")
        for name in METADATA_INTS:
            require(name, getattr(self, name), or_none(_is_int64), "a 64-bit int or None")
        require(
            "created_at",
            self.created_at,
            lambda value: isinstance(value, datetime) and value.tzinfo is not None,
            "a timezone-aware datetime",
        )
        require("env_config", self.env_config, or_none(is_dict), "a dict or None")
        require("extra", self.extra, is_dict, "a dict")
        require("inexact", self.inexact, _are_texts, "a list of strings")
        require(
            "tools",
            self.tools,
            or_none(lambda value: isinstance(value, list | tuple)),
            "a list of JSON schemas or None",
        )
        for name in METADATA_FLOATS:
            values = getattr(self, name)
            require(name, values, or_none(is_list), "a list of numbers or None")
            if values is not None and len(values) != len(trajectory.token_ids):
                raise ConfigError(
                    f"{name} must have one value per token, got {len(values)} for {len(trajectory.token_ids)} tokens"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the items of the trajectory's ``as_dict`` and all metadata, in one dict of plain JSON values.

        Values that JSON cannot represent are written as in :meth:`~agentsgym.types.Trajectory.as_dict`; ``created_at``
        is in ISO 8601.
        """
        metadata = {item.name: as_json(getattr(self, item.name)) for item in fields(self) if item.name != "trajectory"}
        return {**self.trajectory.as_dict(), **metadata, "created_at": self.created_at.isoformat()}


def _is_int64(value: Any) -> bool:
    return is_int()(value)


def _are_texts(value: Any) -> bool:
    return is_list(value) and all(isinstance(text, str) and is_utf8(text) for text in value)


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    message = cast("Mapping[str, Any]", value)
    calls = message.get("tool_calls") or ()
    are_calls = is_list(calls) and all(isinstance(call, Mapping) for call in calls)
    return is_str(message.get("role")) and is_str(message.get("content")) and are_calls


def _is_integer(value: Any) -> bool:
    return type(value) is int or isinstance(value, Integral)  # the first is faster


def _is_real(value: Any) -> bool:
    return type(value) is float or isinstance(value, Real)


def _are_messages(value: Any) -> bool:
    return is_list(value) and all(map(_is_message, value))


def _are_totals(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_real, cast("Mapping[Any, Any]", value).values()))


_MESSAGES: Final = "messages, dicts with the strings 'role' and 'content'"
_TRAJECTORY_SHAPES: Final[Mapping[str, tuple[Check, str]]] = {
    "messages": (_are_messages, f"a list of {_MESSAGES}"),
    **dict.fromkeys(("token_ids", "per_token_rewards", "turns"), (is_list, "a list")),
    "logprobs": (or_none(is_list), "a list or None"),
    "final_reward": (_is_real, "a number"),
    "stop_reason": (lambda value: isinstance(value, str) and value in set(StopReason), "a StopReason"),
    "session_id": (is_str, "a string"),
    "error": (or_none(is_str), "a string or None"),
    "final_rewards": (_are_totals, "a dict of numbers"),
    "final_components": (or_none(_are_totals), "a dict of numbers or None"),
    **dict.fromkeys(("info", "task_data"), (is_dict, "a dict")),
    **dict.fromkeys(INTS, (_is_integer, "an int")),
}
_TURN_SHAPES: Final[Mapping[str, tuple[Check, str]]] = {
    **dict.fromkeys(TURN_INTS, (_is_integer, "an int")),
    **dict.fromkeys(TURN_FLAGS, (lambda value: isinstance(value, bool | np.bool_ | Integral), "True or False")),
    **dict.fromkeys(("state_key", "role"), (is_hashable, "hashable")),
    **dict.fromkeys(TURN_COLUMNS, (or_none(_is_int64), "a 64-bit int or None")),
    "reward": (_is_real, "a number"),
    "potential": (or_none(_is_real), "a number or None"),
    **dict.fromkeys(("role_rewards", "components"), (or_none(_are_totals), "a dict of numbers or None")),
    "role_components": (
        or_none(lambda value: isinstance(value, Mapping) and all(map(_are_totals, cast("Any", value).values()))),
        "a dict of dicts of numbers, or None",
    ),
    "prompt_messages": (or_none(_are_messages), f"a list of {_MESSAGES}, or None"),
}


def check_trajectory(trajectory: Trajectory) -> None:
    """Reject a trajectory with a field that nothing could read, such as a message that is not a dict.

    Raises:
        ConfigError: A field has the wrong type; the message names it.
    """
    for name, (valid, expected) in _TRAJECTORY_SHAPES.items():
        require(f"the trajectory's {name}", getattr(trajectory, name), valid, expected)
    for k, turn in enumerate(trajectory.turns):
        for name, (valid, expected) in _TURN_SHAPES.items():
            require(f"turns[{k}].{name}", getattr(turn, name), valid, expected)


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Reject a field with one number per token that is not a list, or an array, of numbers.

    Raises:
        ConfigError: A field has the wrong type; the message names it.
    """
    for name in ("token_ids", *FLOATS, *METADATA_FLOATS):
        require(name, fields.get(name), or_none(are_numbers), "a list of numbers")


COLUMNS: Final = tuple(item.name for item in fields(StoredRollout) if item.name not in {"trajectory", "inexact"})
"""The metadata fields of a stored rollout that a writer accepts."""


def check_columns(given: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` if a name is not one of :data:`COLUMNS`."""
    for name in given:
        if name not in COLUMNS:
            raise ConfigError(f"{name!r} is not a field of a stored rollout{did_you_mean(name, COLUMNS)}")


def record_to_line(record: StoredRollout) -> str:
    """Serialize a rollout as a line of JSON: its fields by name, its trajectory and turns as nested objects."""
    plain = _fields(record)
    plain["created_at"] = record.created_at.isoformat()
    plain["trajectory"] = trajectory = _fields(record.trajectory)
    trajectory["stop_reason"] = StopReason(record.trajectory.stop_reason).value
    turns = record.trajectory.turns
    trajectory["turns"] = (tuple if isinstance(turns, tuple) else list)(map(_fields, turns))
    not_exact: list[str] = []  # descriptions of the values that JSON cannot represent exactly
    line = to_json(plain, not_exact)
    if new := [one for one in not_exact if not any(one in known for known in record.inexact)]:
        line = to_json(plain | {"inexact": [*record.inexact, *new]})
    return line


def record_from_line(line: str) -> StoredRollout:
    """Parse a line written by :func:`record_to_line`."""
    plain = from_json(line)
    if not isinstance(plain, Mapping) or "trajectory" not in plain:
        raise StoreError("each line must be a JSON object with the key 'trajectory'")
    values: dict[str, Any] = {**plain}
    trajectory: dict[str, Any] = {**values["trajectory"]}
    check_numbers(trajectory)
    check_numbers(values)
    turns = trajectory["turns"]
    trajectory["turns"] = (tuple if isinstance(turns, tuple) else list)(Turn(**turn) for turn in turns)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    trajectory["stop_reason"] = StopReason(trajectory["stop_reason"])
    values["trajectory"] = Trajectory(**trajectory)
    values["created_at"] = datetime.fromisoformat(values["created_at"])
    return StoredRollout(**values)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
