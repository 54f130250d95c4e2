"""Find the first difference between an episode and its record, whose actions were played again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentsgym.failures import headline
from agentsgym.texts import shown
from agentsgym.types import Message, StopReason, Trajectory, Turn

_CONTINUES = "continues"
_REL, _ABS = 1e-9, 1e-12  # tolerances of rewards, for rounding differences between machines


class Difference(NamedTuple):
    """The first difference between an episode that is played again and its record.

    Attributes:
        turn: The turn, from 0; observations are compared before its action, everything else after it.
        what: The item that differs: ``"observation"``, ``"role"``, ``"invalid"``, ``"reward"``, ``"rewards by role"``,
            ``"stop reason"``, ``"success"`` or ``"final reward"``.
        recorded: The recorded value.
        played: The value in the other episode.
    """

    turn: int
    what: str
    recorded: str
    played: str

    def __str__(self) -> str:
        return f"turn {self.turn}: the {self.what} was {self.recorded!r} and is {self.played!r}"


def first_difference(recorded: Trajectory, played: Trajectory, *, continues: bool) -> Difference | None:
    """Return the first difference between an episode that is played again and its record; None if there is none.

    Args:
        recorded: The record.
        played: The other episode, with the recorded actions.
        continues: Whether the environment requests more actions than were recorded.
    """
    return next(_differences(recorded, played, continues), None)


def _differences(recorded: Trajectory, now: Trajectory, continues: bool) -> Iterator[Difference]:
    """Yield the differences in order; what follows the first may only be a consequence of it."""
    num_common, num_seen = min(len(recorded.turns), len(now.turns)), (0, 0)
    for k, (before, after) in enumerate(zip(recorded.turns, now.turns, strict=False)):
        seen = recorded.messages[num_seen[0] : before.message_index], now.messages[num_seen[1] : after.message_index]
        yield from _compare_observations(k, *seen)
        if (recorded.failed or now.failed) and k == num_common - 1:
            yield from _compare_ends(recorded, now, continues)  # a step that raised has no reward, so compare the ends
        yield from _compare_turns(k, before, after)
        num_seen = before.message_index + 1, after.message_index + 1
    if not recorded.turns and recorded.messages and now.messages:
        yield from _compare_observations(0, recorded.messages, now.messages)
    yield from _compare_ends(recorded, now, continues)
    last = recorded.messages[num_seen[0] :], now.messages[num_seen[1] :]
    # Records may lack the last message if the environment added it only in a later version.
    if recorded.turns and not recorded.failed and last[0]:
        yield from _compare_observations(len(recorded.turns), *last)


def _compare_observations(turn: int, before: Sequence[Message], after: Sequence[Message]) -> Iterator[Difference]:
    pair = next((pair for pair in zip(before, after, strict=False) if _content(pair[0]) != _content(pair[1])), None)
    if pair is not None:
        texts = [one["content"] for one in pair]
        if texts[0] == texts[1]:
            texts = [f"{one['role']} {one.get('name', '')}: {one['content']}" for one in pair]
        yield Difference(turn, "observation", *texts)
    elif len(before) != len(after):
        yield Difference(
            turn, "observation", *("\n\n".join(one["content"] for one in each) for each in (before, after))
        )


def _content(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that the environment determines; the agent determines call ids."""
    return message["role"], message["content"], message.get("name")


def _compare_turns(k: int, before: Turn, after: Turn) -> Iterator[Difference]:
    if before.role != after.role:
        yield Difference(k, "role", shown(before.role), shown(after.role))
    if before.invalid != after.invalid:
        yield Difference(k, "invalid", str(before.invalid), str(after.invalid))
    if not _are_equal_maps(before.role_rewards or {}, after.role_rewards or {}):
        yield Difference(k, "rewards by role", shown(before.role_rewards), shown(after.role_rewards))
    if before.role_rewards is not None or after.role_rewards is not None:
        return  # then a turn's reward depends on later turns, so the rewards of each step are compared above
    if not _are_equal(before.reward, after.reward):
        yield Difference(k, "reward", f"{before.reward!r}", f"{after.reward!r}")
    if not _are_equal_maps(before.components or {}, after.components or {}):
        yield Difference(k, "named rewards", shown(before.components), shown(after.components))


def _compare_ends(recorded: Trajectory, now: Trajectory, continues: bool) -> Iterator[Difference]:
    turn = max(0, len(now.turns) - 1)
    # The agent failed after the environment had requested an action.
    is_agents = any(line.startswith("AgentError:") for line in (recorded.error or "").splitlines()[:2])
    has_requested = len(now.turns) < len(recorded.turns) or (recorded.failed and is_agents)
    before, after = _CONTINUES if has_requested else _end(recorded), _CONTINUES if continues else _end(now)
    # If the environment failed in both, the errors may differ only in memory addresses and times.
    both_failed = recorded.failed and now.failed and not (has_requested or continues)
    if before != after and not both_failed:
        yield Difference(turn, "stop reason", before, after)
    if has_requested or both_failed:
        return
    if recorded.success != now.success:
        yield Difference(turn, "success", str(recorded.success), str(now.success))
    if not _are_equal(recorded.final_reward, now.final_reward):
        yield Difference(turn, "final reward", f"{recorded.final_reward!r}", f"{now.final_reward!r}")
    for before, after in (
        (recorded.final_rewards, now.final_rewards),
        (recorded.final_components or {}, now.final_components or {}),
    ):
        if not _are_equal_maps(before, after):
            yield Difference(turn, "final reward", shown(before), shown(after))


def _end(trajectory: Trajectory) -> str:
    reason = trajectory.stop_reason
    return f"{reason}: {headline(trajectory.error or '')}" if reason is StopReason.FAILED else reason.value


def _are_equal_maps(before: Mapping[Any, float], after: Mapping[Any, float]) -> bool:
    return before.keys() == after.keys() and all(_are_equal(value, after[key]) for key, value in before.items())


def _are_equal(before: float, after: float) -> bool:
    return (math.isnan(before) and math.isnan(after)) or math.isclose(before, after, rel_tol=_REL, abs_tol=_ABS)
