"""Convert rollouts to the conversational formats of TRL's trainers, as plain JSON values.

If the environment has tools, an example has their schemas in ``tools``, as JSON text, which TRL's trainers accept: in
an arrow table, dicts of several tools would be padded with each other's keys as nulls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentsgym.errors import StoreError
from agentsgym.store.records import StoredRollout
from agentsgym.store.values import to_json
from agentsgym.texts import as_json, shown
from agentsgym.tokens.tool_messages import as_written
from agentsgym.types import Message, Trajectory, Turn

Example = dict[str, Any]


def sft_examples(records: Iterable[StoredRollout], min_reward: float | None = None) -> Iterator[Example]:
    """Yield the successful conversations, up to the last answer: ``{"messages": …}``, for ``SFTTrainer``.

    If a history was rewritten, the agent never received the final conversation: each answer is then a separate example,
    after the conversation that it answered. In self-play, a conversation has the answers of winner and loser, so it is
    an example only if every role that acted has won.

    Args:
        records: Rollouts.
        min_reward: Minimum final reward at which a rollout counts as won; None to use the environment's ``success``, in
            which case rollouts without it are skipped.
    """
    for record in records:
        trajectory = record.trajectory
        if not trajectory.turns or not all(_is_won(trajectory, turn, min_reward) for turn in trajectory.turns):
            continue
        is_rewritten = any(turn.prompt_messages is not None for turn in trajectory.turns)
        for turn in trajectory.turns if is_rewritten else trajectory.turns[-1:]:
            yield {"messages": as_json([*_prompt(trajectory, turn), _answer(trajectory, turn)]), **_tools(record)}


def kto_examples(records: Iterable[StoredRollout], min_reward: float | None = None) -> Iterator[Example]:
    """Yield every answer, labeled by whether its role won: ``{"prompt": …, "completion": …, "label": …}``.

    Each answer is a separate example, because everything in a completion is trained on, and observations must not be.
    """
    for record in records:
        trajectory = record.trajectory
        for turn in trajectory.turns:
            label = _is_won(trajectory, turn, min_reward)
            if label is not None:
                yield as_json({
                    "prompt": _prompt(trajectory, turn),
                    "completion": [_answer(trajectory, turn)],
                    "label": label,
                    **_tools(record),
                })  # fmt: skip


def dpo_examples(records: Iterable[StoredRollout]) -> Iterator[Example]:
    """Yield pairs of answers by task: ``{"prompt": …, "chosen": …, "rejected": …}``, for ``DPOTrainer``.

    Within a task the best rollout is paired with the worst, the second best with the second worst, and so on as long as
    the rewards differ. A pair consists of the answers in the first turn where they differ, after the conversation that
    both share: everything in a completion is trained on, and observations must not be. The chosen answer is the one
    whose role had the higher return, which in self-play may be in the other rollout. Two rollouts whose observations
    diverge first, by chance, yield no pair; differences in call ids are ignored.
    """
    tasks: dict[tuple[Any, ...], list[Trajectory]] = {}
    tools: dict[tuple[Any, ...], Example] = {}
    for record in records:
        if not record.trajectory.failed:
            tasks.setdefault(_task(record), []).append(record.trajectory)
            tools.setdefault(_task(record), _tools(record))
    for task, rollouts in tasks.items():
        ranked = sorted(rollouts, key=lambda one: -one.final_reward)
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if better.final_reward > worse.final_reward:
                yield from ({**pair, **tools[task]} for pair in _first_difference(better, worse))


def _tools(record: StoredRollout) -> Example:
    """Return the field with the schemas of a rollout's tools; empty if there are none, or none are stored."""
    return {"tools": json.dumps(as_json(record.tools), ensure_ascii=False)} if record.tools else {}


def _is_won(trajectory: Trajectory, turn: Turn, min_reward: float | None) -> bool | None:
    """Return whether the role of a turn won; None if that is unknown, or the rollout failed."""
    if trajectory.failed:
        return None
    earned = _earned(trajectory, turn)
    if min_reward is not None:
        return earned >= min_reward
    return trajectory.success if earned == trajectory.final_reward else None


def _earned(trajectory: Trajectory, turn: Turn) -> float:
    """Return the final reward of a turn's role."""
    return trajectory.final_rewards.get(turn.role, trajectory.final_reward)


def _first_difference(better: Trajectory, worse: Trajectory) -> Iterator[Example]:
    for one, other in zip(better.turns, worse.turns, strict=False):
        prompt = _prompt(better, one)
        if [*map(_without_call_ids, prompt)] != [*map(_without_call_ids, _prompt(worse, other))]:
            return
        answers = [(_earned(better, one), _answer(better, one)), (_earned(worse, other), _answer(worse, other))]
        (most, chosen), (least, rejected) = sorted(answers, key=lambda answer: -answer[0])
        if _without_call_ids(chosen) != _without_call_ids(rejected):
            if most > least:
                yield as_json({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
            return


def _without_call_ids(message: Message) -> Mapping[str, Any]:
    """Return a message without the ids of its calls, which servers generate anew each time."""
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls, "tool_call_id": None}


def _task(record: StoredRollout) -> tuple[Any, ...]:
    """Return a key that rollouts of one task share; without stored task data, it has the index in the run."""
    own = record.trajectory
    task = (to_json(own.task_data),) if own.task_data else (record.run, own.task_index)
    return (record.env_class_path, to_json(record.env_config), to_json(record.tools), *task)


def _prompt(trajectory: Trajectory, turn: Turn) -> Sequence[Message]:
    if turn.prompt_messages is not None:
        return [*map(as_written, turn.prompt_messages)]
    return [*map(as_written, trajectory.messages[: turn.message_index])]


def _answer(trajectory: Trajectory, turn: Turn) -> Message:
    if not 0 <= turn.message_index < len(trajectory.messages):
        raise StoreError(
            f"the rollout of session {shown(trajectory.session_id)} cannot be exported: the message_index of a turn is "
            f"{turn.message_index}, but it has {len(trajectory.messages)} messages"
        )
    return as_written(trajectory.messages[turn.message_index])
