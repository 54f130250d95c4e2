"""Play the episodes of one connection: each message of OpenEnv's protocol gets a response, errors in one sentence.

::

    {"type": "reset", "data": {"seed": 7}}      ─▶  {"type": "observation", "data": {"observation": {"text": …}, …}}
    {"type": "step", "data": {"message": "a"}}  ─▶  {"type": "observation", "data": {…, "reward": …, "done": …}}
    {"type": "state"}                           ─▶  {"type": "state", "data": {"episode_id": …, "step_count": …}}
    {"type": "close"}                           ─▶  the connection is closed
    anything else                               ─▶  {"type": "error", "data": {"message": …, "code": …}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentsgym.envs.by_hand import EpisodeByHand
from agentsgym.errors import AgentsGymError, ConfigError, TaskError
from agentsgym.failures import headline
from agentsgym.fields import has_str_keys, require
from agentsgym.seeding import fresh_seed
from agentsgym.serving.served_env import ServedEnv, is_text
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Action, Message

logger = logging.getLogger(__name__)

_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would create an encoder for each message
_KINDS = ("reset", "step", "state", "close")


class _InvalidMessageError(Exception):
    """A message is not one of the protocol; the arguments are the error's code and its sentence."""


class Session:
    """The episodes of one connection, one after another; used by one thread at a time."""

    def __init__(self, served: ServedEnv) -> None:
        self._served = served
        self._episode: EpisodeByHand | None = None
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0}

    def respond(self, raw: str | bytes) -> str | None:
        """Return the response to a message; None if the client closes the session."""
        try:
            kind, data = _parsed(raw)
            if kind == "close":
                return None
            if kind == "state":
                return _written("state", self._state)
            return _written("observation", self._reset(data) if kind == "reset" else self._step(data))
        except _InvalidMessageError as error:
            return error_message(*error.args)
        except (ConfigError, TaskError) as error:
            return error_message("VALIDATION_ERROR", sentence_of(error))
        except AgentsGymError as error:
            text = headline(str(error))
            logger.warning("%s", text)
            return error_message("EXECUTION_ERROR", text)

    def close(self) -> None:
        """End the episode, if one is running."""
        if self._episode is not None:
            self._episode.close()
        self._episode = None

    def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        seed = data.get("seed")
        seed = fresh_seed() if seed is None else seed
        trial = self._served.trial({**data, "seed": seed})  # raises before the running episode is closed
        self.close()
        self._state = {"episode_id": data.get("episode_id") or trial.session_id, "step_count": 0}
        self._episode = EpisodeByHand(trial)
        messages = self._episode.observation()
        return _observation({"text": _text_of(messages)}, {"seed": seed, "messages": messages})

    def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if data.get("type") == "list_tools" and self._served.tools:
            return _observation({"tools": self._served.tools}, {})
        action = self._action(data)
        if self._episode is None or self._episode.trajectory is not None:
            sentence = "the episode is over, or there was none yet: send a reset first"
            raise _InvalidMessageError("EXECUTION_ERROR", sentence)
        self._state["step_count"] += 1
        messages, reward, done, info = self._episode.step(action)
        metadata: dict[str, Any] = {key: bool(info[key]) for key in ("success", "invalid") if info.get(key) is not None}
        over = self._episode.trajectory
        if over is not None:
            ending: dict[str, Any] = {"stop_reason": over.stop_reason, "truncated": over.stop_reason.truncated}
            metadata = {**over.metrics, **metadata, **ending, "final_reward": over.final_reward}
        text = _text_of(messages)
        is_call = "tool_name" in data
        fields = {"tool_name": data["tool_name"], "result": text, "error": None} if is_call else {"text": text}
        return _observation(fields, metadata, reward, done=done)

    def _action(self, data: Mapping[str, Any]) -> Action:
        """Convert a step's data to an action: a text or, if there are tools, a call."""
        fields = {key: value for key, value in data.items() if key != "metadata"}  # every action of OpenEnv has it
        message = fields.get("message")
        if isinstance(message, int | float):  # some clients parse the agent's text as JSON
            message = json.dumps(message)
        if fields.keys() == {"message"} and is_text(message):
            return Action(text=str(message))
        call: dict[str, Any] = {"type": "call_tool", "arguments": {}, **fields}
        is_call = call["type"] == "call_tool" and call.keys() == {"type", "tool_name", "arguments"}
        if self._served.tools and is_call and is_text(call["tool_name"]) and isinstance(call["arguments"], dict):
            return self._served.call(call["tool_name"], cast("dict[str, Any]", call["arguments"]))
        form = ' or {"type": "call_tool", "tool_name": NAME, "arguments": {…}}' if self._served.tools else ""
        raise ConfigError(f'the data of a step must be {{"message": TEXT}}{form}, got {shown(dict(data))}')


def error_message(code: str, sentence: str, **details: Any) -> str:
    """Return the response that reports an error."""
    return _written("error", {"message": sentence, "code": code, **details})


def _written(kind: str, data: Mapping[str, Any]) -> str:
    return _encode({"type": kind, "data": data})


def _parsed(raw: str | bytes) -> tuple[str, dict[str, Any]]:
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _InvalidMessageError(
            "INVALID_JSON", f"the message is not valid JSON: {sentence_of(error, 200)}"
        ) from error
    message = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind, data = message.get("type"), message.get("data")
    if kind not in _KINDS:
        expected = "a message must be a JSON object whose 'type' is reset, step, state or close"
        raise _InvalidMessageError("UNKNOWN_TYPE", f"{expected}, got {shown(cast('object', value))}")
    given: Any = {} if data is None and kind != "step" else data
    require(f"the 'data' of a {kind}", given, has_str_keys, "a JSON object")
    return str(kind), given


def _observation(
    fields: Mapping[str, Any], metadata: Mapping[str, Any], reward: float | None = None, *, done: bool = False
) -> dict[str, Any]:
    return {"observation": fields, "reward": reward, "done": done, "metadata": metadata}


def _text_of(messages: Sequence[Message]) -> str:
    return "\n\n".join([message["content"] for message in messages if message["content"]])
