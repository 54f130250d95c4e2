"""Play episodes with an agent, and replay the same actions alone, concurrently, or in a copy of the environment."""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from agentsgym.agents.base import Agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.rollouts.driver import drive
from agentsgym.texts import shown
from agentsgym.types import Action, Message, Trajectory, TurnRequest

Task = Mapping[str, Any]
Script = Sequence[Action]


class _Recorder(Agent):
    """Passes requests to another agent and records its actions by session."""

    def __init__(self, inner: Agent) -> None:
        self.actions: dict[str, list[Action]] = {}
        self._inner = inner

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Any]:
        """Forward the requests."""
        answers = self._inner.act(requests)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Action):
                self.actions.setdefault(request.session_id, []).append(answer)
        return answers

    def finish(self) -> None:
        """Forward the call."""
        self._inner.finish()


class _Replay(Agent):
    """Replays recorded actions by session, followed by empty texts."""

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        self._left = {session_id: iter(script) for session_id, script in scripts.items()}

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Return each session's next action."""
        return [next(self._left[request.session_id], Action(text="")) for request in requests]


class Difference(NamedTuple):
    """The first difference between two plays of the same tasks.

    Attributes:
        text: The difference, as the end of a sentence.
        tools: The names of the tools that were called immediately before it.
    """

    text: str
    tools: Sequence[str] = ()


def record(
    env: MultistepEnv, tasks: Sequence[Task], agent: Agent, *, max_concurrent: int = 1
) -> tuple[list[Trajectory], list[Script]]:
    """Play each task once, one after the other or several concurrently.

    Returns:
        The trajectories, and the agent's actions in each, both in the order of the tasks.
    """
    trials = env.trials(tasks)
    recorder = _Recorder(agent)
    trajectories = drive(trials, recorder, max_concurrent=max_concurrent)
    return trajectories, [recorder.actions.get(trial.session_id, []) for trial in trials]


def replay(
    env: MultistepEnv, tasks: Sequence[Task], scripts: Sequence[Script], *, together: bool = False
) -> list[Trajectory]:
    """Play the tasks with given actions, one after the other or all concurrently, turn by turn."""
    trials = env.trials(tasks)
    agent = _Replay({trial.session_id: script for trial, script in zip(trials, scripts, strict=True)})
    return drive(trials, agent, max_concurrent=None if together else 1)


@contextmanager
def global_seed(seed: int) -> Generator[None]:
    """Inside the block, use seeded global generators of Python and NumPy; restore them afterwards."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state: Any = None if numpy is None else numpy.random.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def first_difference(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Difference | None:
    """Return the first difference between two plays of the same tasks; None if they are equal."""
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        difference = _difference(one, other)
        if difference is not None:
            return difference._replace(text=f"task {index}, {difference.text}")
    return None


def observations(trajectory: Trajectory) -> list[list[Message]]:
    """Return the new messages before each turn of the last episode, (K,)."""
    turns = trajectory.turns
    episode = turns[-1].episode if turns else 0
    start, found = 0, list[list[Message]]()
    for turn in turns:
        if turn.episode == episode:
            found.append([*trajectory.messages[start : turn.message_index]])
        start = turn.message_index + 1
    return found


def _difference(one: Trajectory, other: Trajectory) -> Difference | None:
    num_seen = 0  # messages that are equal in both
    for k, (old, new) in enumerate(zip(one.turns, other.turns, strict=False)):
        seen = one.messages[num_seen : old.message_index], other.messages[num_seen : new.message_index]
        if seen[0] != seen[1]:
            return _prompt_difference(f"turn {k}", *seen)
        num_seen = old.message_index
        if not _are_equal(old.reward, new.reward):
            names = [str(call["function"]["name"]) for call in one.messages[old.message_index].get("tool_calls", ())]
            return Difference(f"turn {k}: the reward was {old.reward:g} and then {new.reward:g}", names)
        if (old.invalid, old.role, old.state_key) != (new.invalid, new.role, new.state_key):
            return Difference(f"turn {k}: whether it is valid, its role or its state key was not the same")
    ends = [(len(each.turns), each.stop_reason.value, each.success) for each in (one, other)]
    if ends[0] != ends[1]:
        return Difference("the end: (turns, stop reason, success) was {} and then {}".format(*ends))
    if not _are_equal(one.final_reward, other.final_reward):
        return Difference(f"the end: the final reward was {one.final_reward:g} and then {other.final_reward:g}")
    last = one.messages[num_seen:], other.messages[num_seen:]
    text = f"the end: the last message was {_last(last[0])} and then {_last(last[1])}"
    return None if last[0] == last[1] else Difference(text)


def _prompt_difference(turn: str, old: Sequence[Message], new: Sequence[Message]) -> Difference:
    pairs = zip(old, new, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if first is None or first[0]["role"] != "tool":
        return Difference(f"{turn}: the prompt was first {_last(old)} and then {_last(new)}")
    name = str(first[0].get("name", ""))
    text = f"{turn}: the tool {name!r} returned {_last(first[:1])} and then {_last(first[1:])}"
    return Difference(text, [name])


def _last(messages: Sequence[Message]) -> str:
    return shown(messages[-1]["content"], 120) if messages else "nothing"


def _are_equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


_MAX_PARTS = 2000  # compared values per state; the deepest ones are skipped
_PLAIN = (bool, int, float, str, bytes, type(None))


Start = Mapping[str, Any]
"""The plain values in the initial state of an episode, by the path to them."""


def start_of(session_id: str, state: Any) -> Start:
    """Copy the comparable parts of a state: plain values and generators, in containers and objects.

    Agents are skipped, since sessions share them.
    """
    parts: dict[str, Any] = {}
    seen = set[int]()  # ids of visited objects, since references may be circular
    waiting = deque([("state", state)])
    while waiting and len(parts) < _MAX_PARTS:
        place, value = waiting.popleft()
        if isinstance(value, str):
            parts[place] = value.replace(session_id, "")
        elif isinstance(value, _PLAIN):
            parts[place] = value
        elif isinstance(value, random.Random):
            parts[f"the generator {place}"] = hash(value.getstate())
        elif isinstance(value, set | frozenset):
            parts[place] = sorted(repr(one) for one in cast("set[Any]", value) if isinstance(one, _PLAIN))
        elif id(value) not in seen and not isinstance(value, Agent | type):
            seen.add(id(value))
            waiting.extend(_inside(place, value))
    return parts


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in cast("Mapping[Any, Any]", value).items():
            if isinstance(key, _PLAIN):
                yield f"{place}[{shown(key)}]", one
    elif isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        yield f"the length of {place}", len(items)
        for index, one in enumerate(items[:_MAX_PARTS]):
            yield f"{place}[{index}]", one
    elif hasattr(value, "__dict__"):
        for name, one in cast("dict[str, Any]", vars(value)).items():
            yield f"{place}.{name}", one


def first_changed_value(before: Sequence[Start], after: Sequence[Start]) -> str | None:
    """Describe the first difference between the initial states of two plays; None if there is none."""
    for one, other in zip(before, after, strict=False):
        for place, value in one.items():
            now = other.get(place, value)
            are_nan = value != value and now != now  # noqa: PLR0124
            if now != value and not are_nan:
                return f"{place} was {shown(value, 60)} and then {shown(now, 60)}"
    return None
