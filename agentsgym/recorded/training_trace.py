"""Read OpenEnv's ``TrainingTrace`` (schema 1), which contains the tokens of every model call, as a trajectory.

A prompt that extends the recorded tokens is appended to them; any other, from a rewritten history or a parallel
conversation, begins a new segment::

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
from agentsgym.recorded.chat_shapes import shown_message, shown_messages
from agentsgym.recorded.metadata import (
    About,
    Rewards,
    check_tokenizer,
    checked_about,
    finished,
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
    """One validated call of the model.

    Attributes:
        prompt: The prompt tokens, (P,).
        completion: The sampled tokens, (C,).
        logprobs: The log-probabilities of the completion, (C,).
        trained: The part of the completion that is trained on, one run of its mask; empty if none is.
        shown: The messages of its prompt; None if the trace has none.
        answer: The message of its completion.
    """

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    trained: range
    shown: list[Message] | None
    answer: Message | None


def trajectory_from_training_trace(
    trace: str | Path | Mapping[str, Any], rewards: Rewards, *, tokenizer: Any = None, **about: Unpack[About]
) -> Trajectory:
    """Read an OpenEnv training trace, token for token; its turns are exact.

    A turn is the part of a completion that the loss mask marks, 1 in one run. A call that the mask leaves out is
    context for the calls whose prompts contain it, and not a turn.

    Args:
        trace: The result of ``TrainingTrace.model_dump()``, the trace itself, or a JSON file of it. ``openenv`` need
            not be installed.
        rewards: One number in total, for the last turn, or one for each turn of the trace, 0 for those that are not
            trained on; the trace itself has none.
        tokenizer: The model's tokenizer; validates the ids, and decodes the messages of a trace without ``request`` and
            ``response``.
        **about: The rollout's metadata: ``stop_reason``, ``session_id``, ``task_index``, ``rollout_index``,
            ``task_data`` and ``info``, see :class:`~agentsgym.recorded.metadata.About`.

    Raises:
        ConfigError: The trace is invalid or of another version, a field is unknown, missing or invalid, lengths do not
            match, a node is duplicated, a mask has gaps, nothing is trained on, or messages are missing without a
            tokenizer.
    """
    facts = checked_about(cast("Mapping[str, Any]", about))
    check_tokenizer(tokenizer)
    given = _turns_of(trace)
    size = math.inf if tokenizer is None else len(tokenizer)
    calls = [_checked(turn, f"turns[{index}]", size) for index, turn in enumerate(given)]
    nodes: dict[str, int] = {}
    for index, turn in enumerate(given):
        if (first := nodes.setdefault(turn["node_id"], index)) != index:
            raise ConfigError(
                f"turns[{index}] must have a unique node_id, got that of turns[{first}], {shown(turn['node_id'])}: "
                f"a call shared by several branches must occur once in a trace"
            )
    if not any(call.trained for call in calls):
        raise ConfigError("the loss masks of a training trace must be 1 for at least one token")
    last = max(index for index, call in enumerate(calls) if call.trained)
    is_list = isinstance(plain_rewards(rewards), Sequence)
    per_turn = turn_rewards(rewards, len(calls) if is_list else last + 1, "turn of the trace")
    record = _Record(tokenizer)
    for index, (call, reward) in enumerate(zip(calls, per_turn, strict=False)):
        if call.trained:
            record.add(call, reward, f"turns[{index}]")
        elif reward:
            raise ConfigError(f"rewards must be 0 for a turn that is not trained on, got {reward} for turns[{index}]")
    stop = record.turns[-1].stop  # a row ends on an agent token
    return finished(record.token_ids[:stop], record.turns, record.messages, record.logprobs[:stop], facts)


class _Record:
    """The record of the calls added so far."""

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
        known = [one if index in call.trained else 0.0 for index, one in enumerate(call.logprobs)]
        self.logprobs += [*[0.0] * len(new), *known]
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
        """Append the new messages; returns the call's prompt messages if they differ from the record so far."""
        recorded: list[Message] = self.messages
        before = call.shown
        if before is None:
            prompt: Message = {"role": "user", "content": self._decoded(new, where)}
            before = [*recorded, prompt] if is_continued else [prompt]
        answer: Message = call.answer or {"role": "assistant", "content": self._decoded(call.completion, where)}
        if len(before) > 1 and before[-1]["role"] == "assistant":  # the answer continues a prefilled one
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
                f"{where} has no messages in request and response: pass tokenizer=… to decode them from the tokens"
            )
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _core(message: Message) -> tuple[Any, ...]:
    """The parts of a message that harnesses preserve when they resend an answer, unlike call ids and thoughts."""
    calls = [call.get("function") for call in message.get("tool_calls", ())]
    return message["role"], message["content"], calls


def _turns_of(trace: Any) -> list[Mapping[str, Any]]:
    """The turns of a trace, dicts with the fields of the schema alone."""
    value = trace
    if isinstance(trace, str | Path):
        path = Path(trace)
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else sentence_of(error)  # with the path once
            raise ConfigError(f"{shown(str(path), 300)} cannot be read as JSON: {reason}") from error
    value = value.model_dump() if callable(getattr(value, "model_dump", None)) else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"a training trace must be a dict with 'schema_version' and 'turns', got {shown(value)}")
    fields = cast("Mapping[str, Any]", value)
    version = fields.get("schema_version", SCHEMA_VERSION)  # the schema's own default
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ConfigError(f"a training trace must have schema_version {SCHEMA_VERSION}, got {shown(version)}")
    _check_fields(fields, _TRACE_FIELDS, ("turns",), "a training trace")
    turns: Any = fields["turns"]
    if not isinstance(turns, list | tuple) or not turns:
        raise ConfigError(f"the turns of a training trace must be a list of at least one, got {shown(fields['turns'])}")
    return [*cast("Sequence[Mapping[str, Any]]", turns)]


def _check_fields(fields: Mapping[str, Any], known: Sequence[str], needed: Sequence[str], where: str) -> None:
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"{where} has no field {name!r} in schema {SCHEMA_VERSION}{did_you_mean(str(name), known)}"
            )
    for name in needed:
        if name not in fields:
            raise ConfigError(f"{where} must have {name!r}, got only {', '.join(map(repr, fields)) or 'nothing'}")


def _checked(turn: Any, where: str, vocabulary_size: float) -> _Call:
    if not isinstance(turn, Mapping):
        raise ConfigError(f"{where} must be a dict, got {shown(turn)}")
    fields = cast("Mapping[str, Any]", turn)
    _check_fields(fields, _TURN_FIELDS, ("node_id", *_LISTS), where)
    if not isinstance(fields["node_id"], str) or not fields["node_id"]:
        raise ConfigError(f"{where}['node_id'] must be a string, got {shown(fields['node_id'])}")
    for name in _LISTS:
        if not isinstance(fields[name], list | tuple):
            raise ConfigError(f"{where}[{name!r}] must be a list, got {shown(fields[name])}")
    for name in _DICTS:
        if not isinstance(fields.get(name, {}), Mapping):
            raise ConfigError(f"{where}[{name!r}] must be a dict, got {shown(fields[name])}")
    _check_tokens(fields, where, vocabulary_size)
    prompt, completion, logprobs, mask = ([*fields[name]] for name in _LISTS)
    marked = [index for index, one in enumerate(mask[len(prompt) :]) if one]
    if any(after != before + 1 for before, after in pairwise(marked)):
        raise ConfigError(
            f"{where}['loss_mask'] must mark one contiguous run of tokens, got gaps: {shown(mask[len(prompt) :])}"
        )
    trained = range(marked[0], marked[-1] + 1) if marked else range(0)
    return _Call(prompt, completion, logprobs, trained, *_messages_of(fields, where))


def _check_tokens(fields: Mapping[str, Any], where: str, vocabulary_size: float) -> None:
    checks: dict[str, tuple[Check, str]] = {
        "prompt_token_ids": (_is_id(vocabulary_size), f"ints in [0, {vocabulary_size})"),
        "completion_token_ids": (_is_id(vocabulary_size), f"ints in [0, {vocabulary_size})"),
        "per_token_logps": (
            lambda one: type(one) in {int, float} and -sys.float_info.max <= one <= 0,
            "finite log-probabilities, at most 0",
        ),
        "loss_mask": (lambda one: type(one) is int and one in {0, 1}, "0 or 1"),
    }
    for name, (is_valid, expected) in checks.items():
        for index, one in enumerate(fields[name]):
            if not is_valid(one):
                raise ConfigError(f"{where}[{name!r}] must be {expected}, got {shown(one)} at {index}")
    prompt, completion, logprobs, mask = (cast("Sequence[Any]", fields[name]) for name in _LISTS)
    if not prompt:
        raise ConfigError(f"{where}['prompt_token_ids'] must not be empty")
    if len(logprobs) != len(completion):
        raise ConfigError(
            f"{where}['per_token_logps'] must have one value for each of {len(completion)} completion_token_ids, got "
            f"{len(logprobs)}"
        )
    if len(mask) != len(prompt) + len(completion):
        raise ConfigError(
            f"{where}['loss_mask'] must cover prompt and completion, {len(prompt)} + {len(completion)} tokens, got "
            f"{len(mask)}"
        )
    if any(mask[: len(prompt)]):
        raise ConfigError(f"{where}['loss_mask'] must be 0 on the prompt, got 1 at {list(mask).index(1)}")


def _is_id(vocabulary_size: float) -> Check:
    return lambda value: type(value) is int and 0 <= value < vocabulary_size


def _messages_of(fields: Mapping[str, Any], where: str) -> tuple[list[Message] | None, Message | None]:
    """The messages of the prompt and of the answer, each None if the trace has none."""
    request: Any = fields.get("request", {}).get("messages")
    choices: Any = fields.get("response", {}).get("choices")
    first = cast("list[Any]", choices)[0] if isinstance(choices, list | tuple) and choices else None
    message = cast("Mapping[str, Any]", first).get("message") if isinstance(first, Mapping) else None
    shown_before = shown_messages(request, f"{where}['request']['messages']") if request else None
    if message is None:
        return shown_before, None
    what = f"{where}['response']['choices'][0]['message']"
    if not isinstance(message, Mapping):
        raise ConfigError(f"{what} must be a dict, got {shown(message)}")
    return shown_before, shown_message({**message, "role": "assistant"}, what)
