"""Describe rollouts for the page: one with its conversation, turns and tokens, or a task group side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.texts import as_json
from agentsgym.viewer.plain import cut, mean_of, number, numbers, text_of

if TYPE_CHECKING:
    from agentsgym.store.records import StoredRollout
    from agentsgym.types import Trajectory

_LONGEST: Final = 200_000  # characters of one message
_LONGEST_VALUE: Final = 100_000
_LONGEST_FACT: Final = 2000
_LONGEST_ACTION: Final = 4000  # in a group
_LONGEST_SEEN: Final = 1000  # characters read before an action of a group; the conversation has all of them

Texts = Callable[["str | None", Sequence[int]], "list[str] | None"]
"""(the name of a tokenizer, token ids) → their texts, or None if the tokenizer is unknown."""


def rollout_of(row: int, record: StoredRollout, texts: Texts) -> dict[str, Any]:
    """Describe a rollout.

    Args:
        row: Its index in the folder.
        record: The rollout.
        texts: Decodes its tokens.
    """
    trajectory = record.trajectory
    turn_of = {turn.message_index: index for index, turn in enumerate(trajectory.turns)}
    turns = [
        {
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
        for turn in trajectory.turns
    ]
    return {
        "row": row,
        "headline": trajectory.headline,
        "outcome": trajectory.outcome,
        "facts": _facts(record),
        "env_config": _value(record.env_config),
        "task_data": _value(trajectory.task_data),
        "info": _value(trajectory.info),
        "error": trajectory.error,
        "stop_reason": trajectory.stop_reason.value,
        "final_reward": number(trajectory.final_reward),
        "messages": [_message(one, turn_of.get(index)) for index, one in enumerate(trajectory.messages)],
        "turns": turns,
        "tokens": _tokens(record, texts) if len(trajectory.token_ids) else None,
    }


def group_of(key: int, label: str, rows: Sequence[int], records: Sequence[StoredRollout]) -> dict[str, Any]:
    """Describe a task group.

    Args:
        key: Its key.
        label: Its name.
        rows: The indices of its rollouts in the folder, (G,).
        records: The rollouts, (G,).
    """
    first = records[0].trajectory
    diverges = [None, *(first_difference(first, one.trajectory) for one in records[1:])]
    members = [
        {
            "row": row,
            "headline": record.trajectory.headline,
            "outcome": record.trajectory.outcome,
            "final_reward": number(record.trajectory.final_reward),
            "stop_reason": record.trajectory.stop_reason.value,
            "is_trained": _is_trained(record),
            "turns": _actions(record),
        }
        for row, record in zip(rows, records, strict=True)
    ]
    return {
        "key": key,
        "label": label,
        "members": members,
        "common_turns": min((turn for turn in diverges if turn is not None), default=len(first.turns)),
        "diverges": diverges,
    }


def first_difference(one: Trajectory, other: Trajectory) -> int | None:
    """The first turn in which two rollouts read or did something different; None if there is none.

    If one continues after the other has ended, that is its first additional turn.
    """
    start_one = start_other = 0
    for k, (own, its) in enumerate(zip(one.turns, other.turns, strict=False)):
        stop_one, stop_other = own.message_index + 1, its.message_index + 1
        # A rewritten history may differ too.
        prompts = [None if turn.prompt_messages is None else [*turn.prompt_messages] for turn in (own, its)]
        if one.messages[start_one:stop_one] != other.messages[start_other:stop_other] or prompts[0] != prompts[1]:
            return k
        start_one, start_other = stop_one, stop_other
    shorter, longer = sorted((len(one.turns), len(other.turns)))
    return None if shorter == longer else shorter


def _facts(record: StoredRollout) -> list[list[str]]:
    """The metadata of a rollout, as pairs of a name and a text."""
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
        **{f"reward of role {text_of(role)}": reward for role, reward in own.final_rewards.items()},
        "turns": len(own.turns),
        "tokens": len(own.token_ids) or None,
        "agent tokens": sum(own.agent_token_mask) if len(own.token_ids) else None,
        "retries": own.num_retries or None,
        "errors while closing": own.num_close_errors or None,
        "trained on": {True: "yes", False: "no"}.get(cast("Any", _is_trained(record))),
        "session": own.session_id,
        "created": record.created_at.isoformat(timespec="seconds"),
        "tokenizer": record.tokenizer,
        "not stored exactly": "; ".join(record.inexact) or None,
    }
    return [
        [name, f"{value:zg}" if isinstance(value, float) else _shortened(text_of(value), _LONGEST_FACT)]
        for name, value in known.items()
        if value is not None
    ]


def _is_trained(record: StoredRollout) -> bool | None:
    """Whether training used a rollout; None if unknown."""
    given: Any = record.extra.get("is_trained")
    return given if isinstance(given, bool) else None


def _actions(record: StoredRollout) -> list[dict[str, Any]]:
    """The turns of a rollout of a group: the agent's text, calls included, and what it read since its last action."""
    messages = record.trajectory.messages
    actions: list[dict[str, Any]] = []
    begin = 0
    for turn in record.trajectory.turns:
        seen = "\n".join(text_of(one.get("content")) for one in messages[begin : turn.message_index])
        begin = turn.message_index + 1
        message = messages[turn.message_index] if 0 <= turn.message_index < len(messages) else dict[str, Any]()
        calls = [f"{call['name']}({call['arguments']})" for call in _calls(message)]
        text, left_out = cut("\n".join(filter(None, [text_of(message.get("content")), *calls])), _LONGEST_ACTION)
        advantages = record.advantages[turn.start : turn.stop] if record.advantages is not None else ()
        actions.append(
            {
                "seen": cut(seen, _LONGEST_SEEN)[0],
                "text": text,
                "left_out": left_out,
                "reward": number(turn.reward),
                "advantage": number(mean_of(advantages)),
                "invalid": turn.invalid,
            }
        )
    return actions


def _value(value: Any) -> str:
    return _shortened(json.dumps(as_json(value), ensure_ascii=False, indent=1), _LONGEST_VALUE)


def _shortened(text: str, most: int) -> str:
    """The text, or its beginning and the number of characters omitted."""
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
    calls: list[dict[str, str]] = []
    for call in cast("Sequence[Any]", given) if isinstance(given, Sequence) else ():
        function: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
        is_usual = isinstance(function, Mapping)
        name, arguments = (
            (text_of(function.get(field)) for field in ("name", "arguments")) if is_usual else ("", text_of(call))
        )
        calls.append({"name": name, "arguments": _shortened(arguments, _LONGEST)})
    return calls


def _tokens(record: StoredRollout, texts: Texts) -> dict[str, Any]:
    trajectory = record.trajectory
    ids = [*map(int, trajectory.token_ids)]
    return {
        "ids": ids,
        "texts": texts(record.tokenizer, ids),
        "trained": trajectory.agent_token_mask,
        "is_trained": _is_trained(record),
        "rewards": numbers(trajectory.per_token_rewards) or None,
        "advantages": numbers(record.advantages),
        "logprobs": numbers(trajectory.logprobs),
        "trainer_logprobs": numbers(record.trainer_logprobs),
        "entropies": numbers(record.entropies),
    }
