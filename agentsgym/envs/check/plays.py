"""Play episodes with an agent, and replay the same actions alone, concurrently, or in a copy of the environment."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from agentsgym.agents.base import Agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.differences import first_difference
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


def difference_of(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> tuple[str, Sequence[str]] | None:
    """Return the first difference between two plays of the same tasks; None if they are equal.

    Returns:
        The difference, as the end of a sentence, and the names of the tools that were called immediately before it.
    """
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        found = first_difference(one, other, continues=len(other.turns) > len(one.turns))
        if found is not None:
            acted = one.turns[: found.turn + (found.what != "observation")][-1:]
            calls = [call for turn in acted for call in one.messages[turn.message_index].get("tool_calls", ())]
            tools = [str(call["function"]["name"]) for call in calls]
            what = f"{found.what} after the call of {tools[0]!r}" if tools else found.what
            values = f"{shown(found.recorded, 120)} and then {shown(found.played, 120)}"
            return f"task {index}, turn {found.turn}: the {what} was {values}", tools
        if [turn.state_key for turn in one.turns] != [turn.state_key for turn in other.turns]:
            return f"task {index}: the state keys of its turns were not the same", ()
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
