"""One stored rollout as a sample of an Inspect log; imported only where logs are written, for it needs inspect_ai."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentsgym.errors import MissingDependencyError
from agentsgym.store.records import StoredRollout
from agentsgym.texts import as_json, visible
from agentsgym.types import StopReason, Trajectory, Turn

try:
    from inspect_ai.log import EvalError, EvalSample, EvalSampleLimit
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        Content,
        ContentReasoning,
        ContentText,
        ModelOutput,
        ModelUsage,
    )
    from inspect_ai.scorer import CORRECT, INCORRECT, NOANSWER, Score
    from inspect_ai.tool import ToolCall
except ImportError as missing:
    raise MissingDependencyError("inspect_ai", "inspect") from missing

UNKNOWN_MODEL = "unknown"
_RECORDED = ("source", "run", "agent", "step", "generation", "group", "policy_version")


def sample_of(record: StoredRollout, *, identity: int | str, epoch: int) -> EvalSample:
    """Convert a rollout to a sample: its conversation, scores, usage, and metadata.

    Args:
        record: The rollout.
        identity: The name of its task in the log.
        epoch: The index among the rollouts of that task, from 1; unique together with ``identity``.
    """
    trajectory = record.trajectory
    messages = _messages(record)
    first = trajectory.turns[0].message_index if trajectory.turns else len(messages)
    usage = usage_of(trajectory)
    model = text_of(record.agent or UNKNOWN_MODEL)
    return EvalSample(
        id=identity,
        epoch=epoch,
        input=messages[:first] or str(clean(trajectory.task_data)),
        target="",
        messages=messages,
        output=_output(messages, trajectory, model, usage),
        scores=None if trajectory.failed else scores_of(trajectory),
        metadata=_metadata(record),
        model_usage={} if usage is None else {model: usage},
        completed_at=record.created_at.isoformat(),
        error=_error(trajectory),
        limit=_limit(trajectory),
        turn_count=trajectory.num_turns,
    )


def scores_of(trajectory: Trajectory) -> dict[str, Score]:
    """Return the scores of a rollout: ``success`` if the environment defines it, ``reward`` and ``turns``."""
    scores = {} if trajectory.success is None else {"success": _success(trajectory.success)}
    rewards = ", ".join(f"{reward:zg}" for reward in trajectory.turn_rewards)
    return scores | {
        "reward": Score(value=float(trajectory.final_reward), explanation=f"rewards of the turns: {rewards}"),
        "turns": Score(value=trajectory.num_turns, explanation=f"ended by: {trajectory.stop_reason}"),
    }


def unknown_success() -> Score:
    """Return the score of a rollout with unknown success, in a log in which others have it."""
    return Score(value=NOANSWER, explanation="the environment does not say whether it was won, which counts as not won")


def usage_of(trajectory: Trajectory) -> ModelUsage | None:
    """Count tokens as a server would, every turn with its whole prompt; None for a rollout without tokens."""
    if not len(trajectory.token_ids):
        return None
    read = sum(turn.start - turn.prompt_start for turn in trajectory.turns)
    written = sum(turn.stop - turn.start for turn in trajectory.turns)
    return ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


def clean(value: object) -> Any:
    """Convert a value to JSON that is also valid UTF-8: lone surrogates are escaped."""
    return _clean(as_json(value))


def text_of(value: object) -> str:
    """Convert foreign text to valid UTF-8."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {text_of(key): _clean(item) for key, item in items}
    if isinstance(value, list):
        return [_clean(item) for item in cast("list[Any]", value)]
    return text_of(value) if isinstance(value, str) else value


def _success(success: bool) -> Score:
    return Score(value=CORRECT if success else INCORRECT)


def _messages(record: StoredRollout) -> list[ChatMessage]:
    turns = {turn.message_index: (index, turn) for index, turn in enumerate(record.trajectory.turns)}
    return [_message(one, _notes(record, *turns[at]) if at in turns else None) for at, one in enumerate(_said(record))]


def _said(record: StoredRollout) -> Sequence[Mapping[str, Any]]:
    return cast("Sequence[Mapping[str, Any]]", record.trajectory.messages)


def _message(message: Mapping[str, Any], notes: dict[str, Any] | None) -> ChatMessage:
    role, content = text_of(message.get("role")), text_of(message.get("content") or "")
    if role == "assistant":
        return _answer(message, content, notes)
    if role == "system":
        return ChatMessageSystem(content=content)
    if role == "tool":
        call, name = (message.get(key) for key in ("tool_call_id", "name"))
        return ChatMessageTool(
            content=content,
            tool_call_id=None if call is None else text_of(call),
            function=None if name is None else text_of(name),
        )
    return ChatMessageUser(content=content, metadata=None if role == "user" else {"role": role})


def _answer(message: Mapping[str, Any], content: str, notes: dict[str, Any] | None) -> ChatMessageAssistant:
    thought = message.get("reasoning_content")
    parts: list[Content] = [ContentReasoning(reasoning=text_of(thought)), ContentText(text=content)] if thought else []
    calls = cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())
    return ChatMessageAssistant(
        content=parts or content,
        tool_calls=[_call(one, number) for number, one in enumerate(calls)] or None,
        metadata=notes,
    )


def _call(call: Mapping[str, Any], number: int) -> ToolCall:
    function: Mapping[str, Any] = call.get("function") or {}
    arguments: Any = clean(function.get("arguments"))
    return ToolCall(
        id=text_of(call.get("id") or f"call{number}"),
        function=text_of(function.get("name") or ""),
        arguments=cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {"arguments": arguments},
    )


def _notes(record: StoredRollout, index: int, turn: Turn) -> dict[str, Any]:
    """The metadata of an answer besides its text."""
    notes: dict[str, Any] = {"turn": index, "reward": turn.reward}
    if turn.invalid:
        notes["invalid"] = True
    if turn.role is not None:
        notes["role"] = turn.role
    if turn.prompt_messages is not None:
        notes["prompt"] = turn.prompt_messages
    if record.advantages is not None and turn.stop > turn.start:
        span = record.advantages[turn.start : turn.stop]
        notes["advantage"] = sum(span) / len(span)
    return clean(notes)


def _metadata(record: StoredRollout) -> dict[str, Any]:
    trajectory = record.trajectory
    known = {name: getattr(record, name) for name in _RECORDED if getattr(record, name) is not None}
    return clean(
        {
            "task_data": trajectory.task_data,
            "seed": trajectory.seed,
            "stop_reason": trajectory.stop_reason,
            "final_reward": trajectory.final_reward,
            "turn_rewards": trajectory.turn_rewards,
            "num_turns": trajectory.num_turns,
            "num_invalid_turns": sum(turn.invalid for turn in trajectory.turns),
            "num_retries": trajectory.num_retries,
            "session_id": trajectory.session_id,
            "info": trajectory.info,
            **({"final_rewards": trajectory.final_rewards} if trajectory.final_rewards else {}),
            **known,
            **({"extra": record.extra} if record.extra else {}),
        }
    )


def _output(messages: list[ChatMessage], trajectory: Trajectory, model: str, usage: ModelUsage | None) -> ModelOutput:
    """The last answer."""
    answers = [one for one in messages if isinstance(one, ChatMessageAssistant)]
    cut = trajectory.stop_reason is StopReason.MAX_TOKENS
    choices = [ChatCompletionChoice(message=one, stop_reason="max_tokens" if cut else "stop") for one in answers[-1:]]
    return ModelOutput(model=model, choices=choices, usage=usage)


def _error(trajectory: Trajectory) -> EvalError | None:
    if not trajectory.failed:
        return None
    told = text_of(trajectory.error or "the rollout failed, and nobody said why")
    lines = told.strip().splitlines() or [""]
    message = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return EvalError(message=message, traceback=told, traceback_ansi=visible(told))  # which is drawn as a terminal does


def _limit(trajectory: Trajectory) -> EvalSampleLimit | None:
    if trajectory.stop_reason is StopReason.MAX_TURNS:
        return EvalSampleLimit(type="turn", limit=trajectory.num_turns)
    if trajectory.stop_reason is StopReason.MAX_TOKENS:
        return EvalSampleLimit(type="token", limit=len(trajectory.token_ids))
    return None
