"""Make examples of rollouts in the conversational formats of TRL's trainers, as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentsgym.store.records import StoredRollout
from agentsgym.store.values import to_json
from agentsgym.texts import as_json
from agentsgym.types import Message, Trajectory, Turn

Example = dict[str, Any]


def sft_examples(trajectories: Iterable[Trajectory], min_reward: float | None = None) -> Iterator[Example]:
    """Give the conversations that were won, up to the last answer: ``{"messages": …}``, for ``SFTTrainer``.

    Where a history was rewritten, the agent never saw the conversation as it stands in the end: each answer is then an
    example of its own, behind the conversation that it answered.

    Args:
        trajectories: Rollouts.
        min_reward: The final reward from which on a rollout is won; None for what the environment says, and then a
            rollout of which it says nothing is left out.
    """
    for trajectory in trajectories:
        if not _is_won(trajectory, min_reward) or not trajectory.turns:
            continue
        is_rewritten = any(turn.prompt_messages is not None for turn in trajectory.turns)
        for turn in trajectory.turns if is_rewritten else trajectory.turns[-1:]:
            yield {"messages": as_json([*_prompt(trajectory, turn), _answer(trajectory, turn)])}


def kto_examples(trajectories: Iterable[Trajectory], min_reward: float | None = None) -> Iterator[Example]:
    """Give every answer with whether its rollout was won: ``{"prompt": …, "completion": …, "label": …}``.

    An answer by itself, because everything in a completion is trained on, and what the environment says is not to be.

    Args:
        trajectories: Rollouts.
        min_reward: As for :func:`sft_examples`.
    """
    for trajectory in trajectories:
        label = _is_won(trajectory, min_reward)
        if label is not None:
            for turn in trajectory.turns:
                yield as_json({
                    "prompt": _prompt(trajectory, turn),
                    "completion": [_answer(trajectory, turn)],
                    "label": label,
                })  # fmt: skip


def dpo_examples(records: Iterable[StoredRollout]) -> Iterator[Example]:
    """Give pairs of answers by task: ``{"prompt": …, "chosen": …, "rejected": …}``, for ``DPOTrainer``.

    Of the rollouts of one task the best is paired with the worst, the second best with the second worst, and so on as
    long as the rewards differ. A pair is the first turn in which the answers differ, behind the conversation that both
    have in common: everything in a completion is trained on, and what the environment says is not to be. Two rollouts
    that the environment led apart, by chance, give no pair.
    """
    tasks: dict[tuple[Any, ...], list[Trajectory]] = {}
    for record in records:
        if not record.trajectory.failed:
            tasks.setdefault(_task(record), []).append(record.trajectory)
    for rollouts in tasks.values():
        ranked = sorted(rollouts, key=lambda one: -one.final_reward)
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if better.final_reward > worse.final_reward:
                yield from _first_difference(better, worse)


def _is_won(trajectory: Trajectory, min_reward: float | None) -> bool | None:
    """Whether a rollout was won; None where that is not known, or it failed."""
    if trajectory.failed:
        return None
    return trajectory.success if min_reward is None else trajectory.final_reward >= min_reward


def _first_difference(better: Trajectory, worse: Trajectory) -> Iterator[Example]:
    for one, other in zip(better.turns, worse.turns, strict=False):
        prompt = _prompt(better, one)
        if [*prompt] != [*_prompt(worse, other)]:
            return
        chosen, rejected = _answer(better, one), _answer(worse, other)
        if chosen != rejected:
            yield as_json({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
            return


def _task(record: StoredRollout) -> tuple[Any, ...]:
    """What rollouts of one task have in common; of a record without its task, the index in its run."""
    own = record.trajectory
    task = (to_json(own.task_data),) if own.task_data else (record.run, own.task_index)
    return (record.env_class_path, to_json(record.env_config), *task)


def _prompt(trajectory: Trajectory, turn: Turn) -> Sequence[Message]:
    if turn.prompt_messages is not None:
        return turn.prompt_messages
    return trajectory.messages[: turn.message_index]


def _answer(trajectory: Trajectory, turn: Turn) -> Message:
    return trajectory.messages[turn.message_index]
