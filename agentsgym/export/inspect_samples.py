"""Convert a stored rollout to a sample of an Inspect log; imported only to write logs, since it needs inspect_ai."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

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

from agentsgym.store.records import StoredRollout
from agentsgym.texts import as_json, visible
from agentsgym.types import StopReason, Trajectory, Turn

UNKNOWN_MODEL = "unknown"
_RECORDED = ("source", "run", "agent", "step", "generation", "group", "policy_version")


def sample_of(record: StoredRollout, *, sample_id: int | str, epoch: int) -> EvalSample:
    """Convert a rollout to a sample: its conversation, scores, usage, and metadata.

    A task has one ``sample_id``; the epoch is the index among its rollouts, from 1.
    """
    trajectory = record.trajectory
    turns = {turn.message_index: (index, turn) for index, turn in enumerate(trajectory.turns)}
    messages = [
        _message(one, _notes(record, *turns[at]) if at in turns else None)
        for at, one in enumerate(cast("Sequence[Mapping[str, Any]]", trajectory.messages))
    ]
    first = trajectory.turns[0].message_index if trajectory.turns else len(messages)
    usage = usage_of(trajectory)
    model = text_of(record.agent or UNKNOWN_MODEL)
    answers = [one for one in messages if isinstance(one, ChatMessageAssistant)]
    why = "max_tokens" if trajectory.stop_reason is StopReason.MAX_TOKENS else "stop"
    choices = [ChatCompletionChoice(message=one, stop_reason=why) for one in answers[-1:]]
    limits = {
        StopReason.MAX_TURNS: EvalSampleLimit(type="turn", limit=trajectory.num_turns),
        StopReason.MAX_TOKENS: EvalSampleLimit(type="token", limit=len(trajectory.token_ids)),
    }
    return EvalSample(
        id=sample_id,
        epoch=epoch,
        input=messages[:first] or str(clean(trajectory.task_data)),
        target="",
        messages=messages,
        output=ModelOutput(model=model, choices=choices, usage=usage),
        scores=None if trajectory.failed else scores_of(trajectory),
        metadata=_metadata(record),
        model_usage={} if usage is None else {model: usage},
        completed_at=record.created_at.isoformat(),
        error=_error(trajectory),
        limit=limits.get(trajectory.stop_reason),
        turn_count=trajectory.num_turns,
    )


def scores_of(trajectory: Trajectory) -> dict[str, Score]:
    """Return the scores of a rollout: ``success`` if the environment defines it, ``reward`` and ``turns``."""
    known = {True: CORRECT, False: INCORRECT}
    scores = {} if trajectory.success is None else {"success": Score(value=known[trajectory.success])}
    rewards = ", ".join(f"{reward:zg}" for reward in trajectory.turn_rewards)
    return scores | {
        "reward": Score(value=float(trajectory.final_reward), explanation=f"rewards of the turns: {rewards}"),
        "turns": Score(value=trajectory.num_turns, explanation=f"ended by: {trajectory.stop_reason}"),
        **{f"rewards/{name}": Score(value=amount) for name, amount in (trajectory.final_components or {}).items()},
    }


def unknown_success() -> Score:
    """Return the score of a rollout with unknown success, for a log in which the success of others is known."""
    return Score(value=NOANSWER, explanation="the environment does not report success, so this counts as not won")


def usage_of(trajectory: Trajectory) -> ModelUsage | None:
    """Count tokens as a server would: each turn counts its full prompt. None for a rollout without tokens."""
    if not len(trajectory.token_ids):
        return None
    read = sum(turn.start - turn.prompt_start for turn in trajectory.turns)
    written = sum(turn.stop - turn.start for turn in trajectory.turns)
    return ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


def clean(value: object) -> Any:
    """Convert a value to JSON that is also valid UTF-8: lone surrogates are escaped."""
    return _clean(as_json(value))


def text_of(value: object) -> str:
    """Convert unchecked text to valid UTF-8."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {text_of(key): _clean(item) for key, item in items}
    if isinstance(value, list):
        return [_clean(item) for item in cast("list[Any]", value)]
    return text_of(value) if isinstance(value, str) else value


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
    calls: list[ToolCall] = []
    for number, call in enumerate(cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())):
        function: Mapping[str, Any] = call.get("function") or {}
        arguments: Any = clean(function.get("arguments"))
        calls.append(
            ToolCall(
                id=text_of(call.get("id") or f"call{number}"),
                function=text_of(function.get("name") or ""),
                arguments=arguments if isinstance(arguments, dict) else {"arguments": arguments},
            )
        )
    return ChatMessageAssistant(content=parts or content, tool_calls=calls or None, metadata=notes)


def _notes(record: StoredRollout, index: int, turn: Turn) -> dict[str, Any]:
    """Return the metadata of an answer."""
    span = () if record.advantages is None else record.advantages[turn.start : turn.stop]
    notes: dict[str, Any] = {
        "turn": index,
        "reward": turn.reward,
        "rewards": turn.components,
        "parent": turn.parent,
        "invalid": turn.invalid or None,
        "role": turn.role,
        "prompt": turn.prompt_messages,
        "advantage": sum(span) / len(span) if len(span) else None,
    }
    return clean({name: value for name, value in notes.items() if value is not None})


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


def _error(trajectory: Trajectory) -> EvalError | None:
    if not trajectory.failed:
        return None
    error = text_of(trajectory.error or "the rollout failed for an unknown reason")
    lines = error.strip().splitlines() or [""]
    message = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    # the ANSI traceback is rendered with its escape sequences
    return EvalError(message=message, traceback=error, traceback_ansi=visible(error))
