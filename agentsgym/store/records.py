"""A stored rollout: its trajectory, and the metadata that only its producer has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int, is_str, or_none, require
from agentsgym.store.schema import OWN_FLOATS, OWN_INTS, OWN_TEXTS
from agentsgym.texts import as_json, shown
from agentsgym.types import StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One finished rollout of a store. None means that the value was not provided.

    Attributes:
        trajectory: The trajectory.
        source: The origin of the rollout: ``"evaluation"``, ``"training"``, ``"play"`` or a custom word.
        env_class_path: The environment's class, as named in dataset rows.
        env_config: The environment's configuration, with defaults filled in.
        tools: The JSON schemas of the environment's tools, as the chat template shows them; None without tools.
        step: The number of optimizer steps at the time of the rollout, in training.
        generation: The number of its generation batch, from 1, in training.
        group: The index of its task group over all ranks: in its generation batch for training, in that evaluation for
            an evaluation within training.
        advantages: One number per token, (T,), 0.0 on environment tokens, before weights of the loss.
        trainer_logprobs: The trained model's log-probability of each agent token, (T,), 0.0 on environment tokens,
            NaN where the model did not compute it.
        entropies: The entropy of the trained model's distribution before each agent token, in nats, (T,), 0.0 on
            environment tokens, NaN where the model did not compute it.
        tokenizer: The tokenizer of the ids, by the name that ``RolloutWriter.keep_tokenizer`` returns.
        policy_version: The version of the policy's weights: in training, the number of optimizer steps.
        agent: The agent's name.
        run: The name of the run.
        created_at: The time at which it was added to the store.
        extra: Any other values.
        inexact: Sentences on the values that could not be stored exactly, for a rollout that was read.
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
            raise ConfigError(f"a stored rollout must be a Trajectory, got {shown(trajectory)}")
        if trajectory.stop_reason not in set(StopReason):
            raise ConfigError(f"a trajectory's stop_reason must be a StopReason, got {shown(trajectory.stop_reason)}")
        for name in OWN_TEXTS:
            require(name, getattr(self, name), or_none(is_str), "a string or None")
        for name in OWN_INTS:
            require(
                name,
                getattr(self, name),
                or_none(lambda value: is_int(-(2**63))(value) and value < 2**63),
                "an int below 2**63 or None",
            )
        require(
            "created_at",
            self.created_at,
            lambda value: isinstance(value, datetime) and value.tzinfo is not None,
            "a datetime with its time zone",
        )
        for name in ("env_config", "extra"):
            require(name, getattr(self, name), or_none(lambda value: isinstance(value, Mapping)), "a dict")
        require(
            "tools", self.tools, or_none(lambda value: isinstance(value, list | tuple)), "a list of schemas or None"
        )
        for name in OWN_FLOATS:
            values = getattr(self, name)
            if values is not None and len(values) != len(trajectory.token_ids):
                raise ConfigError(
                    f"{name} must have one value per token, got {len(values)} for {len(trajectory.token_ids)} tokens"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the trajectory's ``as_dict`` and all metadata, in one dict of plain JSON values.

        Values that JSON cannot represent are written as in :meth:`~agentsgym.types.Trajectory.as_dict`; ``created_at``
        is in ISO 8601.
        """
        own = {one.name: as_json(getattr(self, one.name)) for one in fields(self) if one.name != "trajectory"}
        return {**self.trajectory.as_dict(), **own, "created_at": self.created_at.isoformat()}


COLUMNS: Final = tuple(one.name for one in fields(StoredRollout) if one.name not in {"trajectory", "inexact"})
"""The columns of a stored rollout other than the trajectory."""


def check_columns(given: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for names that are not columns of a stored rollout."""
    for name in given:
        if name not in COLUMNS:
            raise ConfigError(f"a stored rollout has no {name!r}{did_you_mean(name, COLUMNS)}")
