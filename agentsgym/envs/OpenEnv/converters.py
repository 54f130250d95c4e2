"""Conversion of one environment's actions, observations and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from agentsgym.envs.OpenEnv.conversion import ReadAction, WriteObservation, action_reader, observation_writer
from agentsgym.envs.OpenEnv.interface import Format, ServerInterface
from agentsgym.envs.Tools.results import cut

Outcome = tuple[float, bool, dict[str, Any]]  # reward, done, info


class Converters(NamedTuple):
    """The conversions of an environment, from its configuration and the server's schemas.

    Attributes:
        format: Format of the agent's actions.
        read: Converts a text to an action.
        shown_after_reset: Converts the observation of a reset to text.
        shown_after_step: Converts the observation of a step to text.
    """

    format: Format
    read: ReadAction
    shown_after_reset: WriteObservation
    shown_after_step: WriteObservation


def make_converters(interface: ServerInterface, config: Mapping[str, Any], server: str) -> Converters:
    """Choose the conversions.

    Args:
        interface: Interface of the server.
        config: The environment's configuration.
        server: Name of the server in error messages.

    Raises:
        ConfigError: ``config["action"]`` does not suit the server.
    """
    most: int | None = config["max_result_length"]

    def writer(schema: Mapping[str, Any] | None) -> WriteObservation:
        write = observation_writer(config["observation"], schema)
        return lambda observation: cut(write(observation), most)

    chosen = interface.format(config["format"])
    is_json, is_text = chosen == "json", chosen == "text"
    return Converters(
        format=chosen,
        read=action_reader(config["action"], interface.action, server, is_json=is_json, is_text=is_text),
        shown_after_reset=writer(interface.reset_observation),
        shown_after_step=writer(interface.observation),
    )


def outcome_of(answer: Mapping[str, Any], success: str | None) -> Outcome:
    """Convert the server's answer to a step.

    Args:
        answer: The answer, with ``observation``, ``reward``, ``done`` and optionally ``metadata``.
        success: ``env_config["success"]``.
    """
    reward, done = float(answer["reward"] or 0.0), bool(answer["done"])
    metadata = answer.get("metadata")
    known = {**(cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}), **answer["observation"]}
    info: dict[str, Any] = {}
    if success is not None:
        info["success"] = (done and reward > 0) if success == "reward" else bool(known.get(success, False))
    if done and known.get("truncated") is True:
        info["truncated"] = True
    return reward, done, info
