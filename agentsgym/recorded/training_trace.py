"""Convert OpenEnv's ``TrainingTrace`` (schema 1), which contains the tokens of every model call, to a trajectory.

If a prompt extends the recorded tokens, its remainder is appended to them. Any other prompt, such as a rewritten
history or a parallel conversation, begins a new segment::

    prompt 0 ▏ completion 0 ▏ rest of prompt 1 ▏ completion 1 ║ prompt 2 ▏ completion 2
    mask 0   ▏ its loss mask ▏ 0               ▏ …            ║ 0        ▏ …
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Unpack, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check
from agentsgym.recorded.chat_shapes import display_message, display_messages
from agentsgym.recorded.metadata import (
    RecordingMetadata,
    Rewards,
    build_trajectory,
    check_metadata,
    check_tokenizer,
    plain_rewards,
    turn_rewards,
)
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Message, Trajectory, Turn

SCHEMA_VERSION: Final = 1
_TRACE_FIELDS: Final = ("schema_version", "turns")
_LISTS: Final = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
_DICTS: Final = ("request", "response", "metadata")
_TURN_FIELDS: Final = ("node_id", *_LISTS, *_DICTS)


class _Call(NamedTuple):
    """A validated model call.

    Attributes:
        prompt: The prompt tokens, (P,).
        completion: The sampled tokens, (C,).
        logprobs: The log-probabilities of the completion, (C,).
        trained: The contiguous part of the completion that is trained on; empty if none is.
        prompt_messages: The messages of the prompt; None if the trace has none.
        answer: The message of the completion; None if the trace has none.
    """

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    trained: range
    prompt_messages: list[Message] | None
    answer: Message | None


def trajectory_from_training_trace(
    trace: str | Path | Mapping[str, Any],
    rewards: Rewards,
    *,
    tokenizer: Any = None,
    **metadata: Unpack[RecordingMetadata],
) -> Trajectory:
    """Convert an OpenEnv training trace with exactly its tokens; all turns are exact.

    A turn is the contiguous part of a completion where the loss mask is 1. A call whose mask is 0 throughout is not a
    turn, but context for the calls whose prompts contain it.

    Args:
        trace: The trace, the result of its ``model_dump()``, or the path to a JSON file of it. ``openenv`` need not be
            installed.
        rewards: A single number, which becomes the reward of the last turn that is trained on, or one number for each
            turn of the trace, 0 for turns that are not trained on. A trace contains no rewards.
        tokenizer: The model's tokenizer, which validates the token ids, and decodes messages if the trace has no
            ``request`` and ``response``.
        **metadata: The rollout's metadata: ``stop_reason``, ``session_id``, ``task_index``, ``rollout_index``,
            ``task_data`` and ``info``, see :class:`~agentsgym.recorded.metadata.RecordingMetadata`.

    Raises:
        ConfigError: The trace is invalid or has another schema version, a field is unknown, missing or invalid, lengths
            do not match, a node is duplicated, a mask has gaps, no token is trained on, or messages are missing and
            there is no tokenizer.
    """
    checked_metadata = check_metadata(cast("Mapping[str, Any]", metadata))
    check_tokenizer(tokenizer)
    turns = _turns_of(trace)
    vocabulary_size = math.inf if tokenizer is None else len(tokenizer)
    calls = [_parse_call(turn, f"turns[{index}]", vocabulary_size) for index, turn in enumerate(turns)]
    nodes: dict[str, int] = {}
    for index, turn in enumerate(turns):
        if (first := nodes.setdefault(turn["node_id"], index)) != index:
            raise ConfigError(
                f"turns[{index}] must have a unique node_id, but turns[{first}] has the same one, "
                f"{shown(turn['node_id'])}: a call shared by several branches must occur only once in a trace"
            )
    if not any(call.trained for call in calls):
        raise ConfigError("a training trace must have a loss mask of 1 for at least one token")
    last = max(index for index, call in enumerate(calls) if call.trained)
    is_list = isinstance(plain_rewards(rewards), Sequence)
    per_turn = turn_rewards(rewards, len(calls) if is_list else last + 1, "turn of the trace")
    record = _Record(tokenizer)
    for index, (call, reward) in enumerate(zip(calls, per_turn, strict=False)):
        if call.trained:
            record.add(call, reward, f"turns[{index}]")
        elif reward:
            raise ConfigError(f"rewards must be 0 for turns that are not trained on, got {reward} for turns[{index}]")
    stop = record.turns[-1].stop  # a row ends with an agent token
    tokens, logprobs = record.token_ids[:stop], record.logprobs[:stop]
    return build_trajectory(tokens, record.turns, record.messages, logprobs, checked_metadata)


class _Record:
    """Tokens, turns and messages of the calls added so far."""

    def __init__(self, tokenizer: Any) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._tokenizer = tokenizer
        self._segment = 0

    def add(self, call: _Call, reward: float, where: str) -> None:
        """Append a call that is trained on."""
        current = self.token_ids[self._segment :]
        is_continued = call.prompt[: len(current)] == current
        if is_continued:
            new = call.prompt[len(current) :]
        else:
            self._segment, new = len(self.token_ids), call.prompt
        begin = len(self.token_ids) + len(new)
        self.token_ids += [*new, *call.completion]
        logprobs = [value if index in call.trained else 0.0 for index, value in enumerate(call.logprobs)]
        self.logprobs += [*[0.0] * len(new), *logprobs]
        prompt_messages = self._add_messages(call, new, where, is_continued=is_continued)
        self.turns.append(
            Turn(
                start=begin + call.trained.start,
                stop=begin + call.trained.stop,
                reward=reward,
                message_index=len(self.messages) - 1,
                prompt_start=self._segment,
                prompt_messages=prompt_messages,
            )
        )

    def _add_messages(self, call: _Call, new: list[int], where: str, *, is_continued: bool) -> list[Message] | None:
        """Append the new messages, and return the call's prompt messages if they do not extend the recorded ones."""
        recorded: list[Message] = self.messages
        before = call.prompt_messages
        if before is None:
            prompt: Message = {"role": "user", "content": self._decoded(new, where)}
            before = [*recorded, prompt] if is_continued else [prompt]
        answer: Message = call.answer or {"role": "assistant", "content": self._decoded(call.completion, where)}
        if len(before) > 1 and before[-1]["role"] == "assistant":  # the answer continues a prefilled message
            answer = {**answer, "content": before[-1]["content"] + answer["content"]}
            before = before[:-1]
        is_extended = [*map(_core, before[: len(recorded)])] == [*map(_core, recorded)]
        known = len(recorded)
        if not is_extended:  # only the messages after the last answer are new
            known = max((index + 1 for index, one in enumerate(before) if one["role"] == "assistant"), default=0)
        self.messages = [*recorded, *before[known:], answer]
        return None if is_extended else before

    def _decoded(self, ids: list[int], where: str) -> str:
        if self._tokenizer is None:
            raise ConfigError(
                f"{where} has no messages in request or response: pass tokenizer=… to decode them from the tokens"
            )
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _core(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that agent frameworks resend unchanged, unlike e.g. call ids."""
    calls = [call.get("function") for call in message.get("tool_calls", ())]
    return message["role"], message["content"], calls


def _turns_of(trace: Any) -> list[Mapping[str, Any]]:
    """Return the turns of a trace, after checking its version and fields."""
    value = trace
    if isinstance(trace, str | Path):
        path = Path(trace)
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            # The full text of an OSError repeats the path.
            reason = error.strerror if isinstance(error, OSError) else sentence_of(error)
            raise ConfigError(f"{shown(str(path), 300)} cannot be read as JSON: {reason}") from error
    value = value.model_dump() if callable(getattr(value, "model_dump", None)) else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"a training trace must be a dict with 'schema_version' and 'turns', got {shown(value)}")
    fields = cast("Mapping[str, Any]", value)
    version = fields.get("schema_version", SCHEMA_VERSION)  # the schema's default
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ConfigError(f"a training trace must have schema_version {SCHEMA_VERSION}, got {shown(version)}")
    _check_fields(fields, _TRACE_FIELDS, ("turns",), "a training trace")
    turns: Any = fields["turns"]
    if not isinstance(turns, list | tuple) or not turns:
        raise ConfigError(f"the turns of a training trace must be a non-empty list, got {shown(fields['turns'])}")
    return [*cast("Sequence[Mapping[str, Any]]", turns)]


def _check_fields(fields: Mapping[str, Any], known: Sequence[str], required: Sequence[str], where: str) -> None:
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"{where} has the field {name!r}, which schema {SCHEMA_VERSION} does not have"
                f"{did_you_mean(str(name), known)}"
            )
    for name in required:
        if name not in fields:
            raise ConfigError(
                f"{where} must have the field {name!r}, got only {', '.join(map(repr, fields)) or 'none'}"
            )


def _parse_call(turn: Any, where: str, vocabulary_size: float) -> _Call:
    if not isinstance(turn, Mapping):
        raise ConfigError(f"{where} must be a dict, got {shown(turn)}")
    fields = cast("Mapping[str, Any]", turn)
    _check_fields(fields, _TURN_FIELDS, ("node_id", *_LISTS), where)
    if not isinstance(fields["node_id"], str) or not fields["node_id"]:
        raise ConfigError(f"{where}['node_id'] must be a non-empty string, got {shown(fields['node_id'])}")
    for name in _LISTS:
        if not isinstance(fields[name], list | tuple):
            raise ConfigError(f"{where}[{name!r}] must be a list, got {shown(fields[name])}")
    for name in _DICTS:
        if not isinstance(fields.get(name, {}), Mapping):
            raise ConfigError(f"{where}[{name!r}] must be a dict, got {shown(fields[name])}")
    _check_tokens(fields, where, vocabulary_size)
    prompt, completion, logprobs, mask = ([*fields[name]] for name in _LISTS)
    marked = [index for index, flag in enumerate(mask[len(prompt) :]) if flag]
    if any(after != before + 1 for before, after in pairwise(marked)):
        raise ConfigError(
            f"{where}['loss_mask'] must be 1 on one contiguous span of tokens, got gaps: {shown(mask[len(prompt) :])}"
        )
    trained = range(marked[0], marked[-1] + 1) if marked else range(0)
    return _Call(prompt, completion, logprobs, trained, *_messages_of(fields, where))


def _check_tokens(fields: Mapping[str, Any], where: str, vocabulary_size: float) -> None:
    of_ids: tuple[Check, str] = (
        lambda value: type(value) is int and 0 <= value < vocabulary_size,
        f"ints in [0, {vocabulary_size})",
    )
    checks: dict[str, tuple[Check, str]] = {
        "prompt_token_ids": of_ids,
        "completion_token_ids": of_ids,
        "per_token_logps": (
            lambda value: type(value) in {int, float} and -sys.float_info.max <= value <= 0,
            "finite log-probabilities, at most 0",
        ),
        "loss_mask": (lambda value: type(value) is int and value in {0, 1}, "0 or 1"),
    }
    for name, (is_valid, expected) in checks.items():
        for index, value in enumerate(fields[name]):
            if not is_valid(value):
                raise ConfigError(
                    f"{where}[{name!r}] must contain only {expected}, got {shown(value)} at index {index}"
                )
    prompt, completion, logprobs, mask = (cast("Sequence[Any]", fields[name]) for name in _LISTS)
    if not prompt:
        raise ConfigError(f"{where}['prompt_token_ids'] must not be empty")
    if len(logprobs) != len(completion):
        raise ConfigError(
            f"{where}['per_token_logps'] must have one value per completion token ({len(completion)}), got "
            f"{len(logprobs)}"
        )
    if len(mask) != len(prompt) + len(completion):
        raise ConfigError(
            f"{where}['loss_mask'] must cover the prompt and completion ({len(prompt)} + {len(completion)} tokens), "
            f"got {len(mask)} values"
        )
    if any(mask[: len(prompt)]):
        raise ConfigError(f"{where}['loss_mask'] must be 0 on the prompt, got 1 at index {list(mask).index(1)}")


def _messages_of(fields: Mapping[str, Any], where: str) -> tuple[list[Message] | None, Message | None]:
    """Return the prompt's messages and the response message, each None if the trace has none."""
    request: Any = fields.get("request", {}).get("messages")
    choices: Any = fields.get("response", {}).get("choices")
    first = cast("list[Any]", choices)[0] if isinstance(choices, list | tuple) and choices else None
    message = cast("Mapping[str, Any]", first).get("message") if isinstance(first, Mapping) else None
    prompt_messages = display_messages(request, f"{where}['request']['messages']") if request else None
    if message is None:
        return prompt_messages, None
    what = f"{where}['response']['choices'][0]['message']"
    if not isinstance(message, Mapping):
        raise ConfigError(f"{what} must be a dict, got {shown(message)}")
    return prompt_messages, display_message({**message, "role": "assistant"}, what)
