"""Describe one rollout for the page: its conversation, its turns, its tokens with everything known of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.texts import as_json
from agentsgym.viewer.plain import cut, number, numbers, text_of

if TYPE_CHECKING:
    from agentsgym.store.records import StoredRollout
    from agentsgym.types import Message, Trajectory, Turn

_LONGEST: Final = 200_000  # characters of one message
_LONGEST_VALUE: Final = 100_000

Texts = Callable[["str | None", Sequence[int]], "list[str] | None"]
"""(the name of a tokenizer, token ids) → their texts, None where they are not known."""


def rollout_of(row: int, record: StoredRollout, texts: Texts) -> dict[str, Any]:
    """Describe a rollout.

    Args:
        row: Its place in the folder.
        record: It.
        texts: Writes its tokens.
    """
    trajectory = record.trajectory
    turn_of = {turn.message_index: index for index, turn in enumerate(trajectory.turns)}
    return {
        "row": row,
        "headline": trajectory.headline,
        "outcome": trajectory.outcome,
        "facts": facts(record),
        "env_config": _value(record.env_config),
        "task_data": _value(trajectory.task_data),
        "info": _value(trajectory.info),
        "error": trajectory.error,
        "stop_reason": trajectory.stop_reason.value,
        "final_reward": number(trajectory.final_reward),
        "messages": [_message(one, turn_of.get(index)) for index, one in enumerate(trajectory.messages)],
        "turns": [_turn(turn) for turn in trajectory.turns],
        "tokens": _tokens(record, texts),
    }


def facts(record: StoredRollout) -> list[list[str]]:
    """What is known of a rollout beside what it is made of, as pairs of a name and a text."""
    own = record.trajectory
    known: dict[str, Any] = {
        "environment": record.env_class_path,
        "agent": record.agent,
        "run": record.run,
        "source": record.source,
        "step": record.step,
        "generation": record.generation,
        "task group": record.group,
        "policy version": record.policy_version,
        "task": own.task_index,
        "rollout": own.rollout_index,
        "seed": own.seed,
        "final reward": own.final_reward,
        **{f"reward of role {text_of(role)}": paid for role, paid in own.final_rewards.items()},
        "turns": len(own.turns),
        "tokens": len(own.token_ids) or None,
        "agent tokens": sum(own.agent_token_mask) if len(own.token_ids) else None,
        "played again": own.num_retries or None,
        "errors at the close": own.num_close_errors or None,
        "trained on": {True: "yes", False: "no"}.get(cast("Any", is_trained(record))),
        "session": own.session_id,
        "created": record.created_at.isoformat(timespec="seconds"),
        "tokenizer": record.tokenizer,
        "not kept exactly": "; ".join(record.inexact) or None,
    }
    return [[name, _fact(value)] for name, value in known.items() if value is not None]


def is_trained(record: StoredRollout) -> bool | None:
    """Whether training left a rollout in; None where nobody says."""
    given: Any = record.extra.get("is_trained")
    return given if isinstance(given, bool) else None


def action_text(trajectory: Trajectory, turn: Turn, most: int) -> tuple[str, int]:
    """What an agent said in a turn, calls included, and how many characters of it are left out."""
    message = _at(trajectory.messages, turn.message_index)
    calls = [f"{call['name']}({call['arguments']})" for call in _calls(message)]
    return cut("\n".join(filter(None, [text_of(message.get("content")), *calls])), most)


def _at(messages: Sequence[Message], index: int) -> Mapping[str, Any]:
    return messages[index] if 0 <= index < len(messages) else {}


def _fact(value: Any) -> str:
    return f"{value:zg}" if isinstance(value, float) else _told(text_of(value), 2000)


def _value(value: Any) -> str:
    return _told(json.dumps(as_json(value), ensure_ascii=False, indent=1), _LONGEST_VALUE)


def _told(text: str, most: int) -> str:
    """A text, or its beginning and how much of it is left out."""
    shown, left_out = cut(text, most)
    return f"{shown} … {left_out:,} characters omitted" if left_out else shown


def _message(message: Mapping[str, Any], turn: int | None) -> dict[str, Any]:
    content, left_out = cut(text_of(message.get("content")), _LONGEST)
    reasoning, left_out_thought = cut(text_of(message.get("reasoning_content")), _LONGEST)
    return {
        "role": text_of(message.get("role")),
        "content": content,
        "reasoning": reasoning or None,
        "calls": _calls(message),
        "turn": turn,
        "name": None if message.get("name") is None else text_of(message.get("name")),
        "left_out": left_out + left_out_thought,
    }


def _calls(message: Mapping[str, Any]) -> list[dict[str, str]]:
    given: Any = message.get("tool_calls") or ()
    return [_call(one) for one in cast("Sequence[Any]", given)] if isinstance(given, Sequence) else []


def _call(call: Any) -> dict[str, str]:
    inner: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping):
        return {"name": "", "arguments": _told(text_of(cast("object", call)), _LONGEST)}
    named = cast("Mapping[str, Any]", inner)
    return {"name": text_of(named.get("name")), "arguments": _told(text_of(named.get("arguments")), _LONGEST)}


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "start": turn.start,
        "stop": turn.stop,
        "reward": number(turn.reward),
        "invalid": turn.invalid,
        "exact": turn.exact,
        "episode": turn.episode,
        "role": None if turn.role is None else text_of(turn.role),
        "message": turn.message_index,
        "prompt_start": turn.prompt_start,
        "rewritten": None if turn.prompt_messages is None else len(turn.prompt_messages),
    }


def _tokens(record: StoredRollout, texts: Texts) -> dict[str, Any] | None:
    trajectory = record.trajectory
    if not len(trajectory.token_ids):
        return None
    ids = [*map(int, trajectory.token_ids)]
    return {
        "ids": ids,
        "texts": texts(record.tokenizer, ids),
        "trained": trajectory.agent_token_mask,
        "is_trained": is_trained(record),
        "rewards": numbers(trajectory.per_token_rewards) or None,
        "advantages": numbers(record.advantages),
        "logprobs": numbers(trajectory.logprobs),
        "trainer_logprobs": numbers(record.trainer_logprobs),
        "entropies": numbers(record.entropies),
    }
