"""Episodes that start wrongly are warned of, once."""

import gc
import logging
import random
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
from guess_game import Counting, GuessEnv, tasks

from agentsgym.agents.scripted import ScriptedAgent


class Global(GuessEnv):
    """Draws its first prompt from Python's global generator."""

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return super()._format_prompt(state, step) if step else f"Hint: {random.random()}"  # type: ignore[return-value]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_rollouts_of_one_task_with_different_first_prompts_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    env = Global()
    env.rollout(tasks(2, 2), Counting())
    assert warnings_of(caplog) == []
    env.rollout(tasks(2), Counting(), 2)
    [warning] = warnings_of(caplog)
    assert warning.startswith("rollouts of one task started with different prompts, 'Hint: 0.")
    assert warning.endswith(
        "all draws of an environment must come from self.rng(session_id); otherwise, a task group compares rollouts of "
        "different problems"
    )
    env.rollout(tasks(2), Counting(), 2)
    assert len(warnings_of(caplog)) == 1


def test_groups_may_be_named_by_who_lines_rollouts_up(caplog: pytest.LogCaptureFixture) -> None:
    env = GuessEnv()
    played = env.rollout([{"seed": seed} for seed in range(3)], ScriptedAgent(["1"], repeat_last=True))
    for trajectory in played:
        trajectory.messages[0]["content"] += str(trajectory.task_index)
    env.check_starts(played)
    assert warnings_of(caplog) == []
    env.check_starts(played, lambda trajectory: trajectory.task_index // 2)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("keep_history", [False, True])
def test_equal_starts_are_not_warned_of(keep_history: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Random(GuessEnv):
        """Draws as it should; each episode of a trial has its own start."""

        def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
            return f"{state['solution']}: {super()._format_prompt(state, step)}"

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            if action == "break":
                raise OSError("in the first of two episodes")
            return super()._step_episode(session_id, state, action)

    config = {"episodes_per_trial": 2, "keep_history": keep_history, "highest": 1000, "max_steps_per_episode": 1}
    agent = ScriptedAgent(["1"], repeat_last=True)
    Random(env_config=config).rollout([{}, {"seed": 1}], agent, 3)

    class Breaking(Counting):
        """Breaks the first rollout in its first episode, where the others are recorded from their second."""

        num_answers = 0

        def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
            self.num_answers += 1
            return ("break" if self.num_answers == 1 else "1"), agent_state

    failed, *_ = Random(env_config=config).rollout([{"seed": 1}], Breaking(), 3)
    assert failed.failed
    assert [text for text in warnings_of(caplog) if "started with different" in text] == []


class Shared(GuessEnv):
    """Keeps one start state for all sessions."""

    start: Any = None

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        if self.start is None:
            type(self).start = super()._initialize_episode(session_id, task_data)
        return self.start


def test_a_start_state_that_sessions_share_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    env = Shared()
    first, second = env.rollout(tasks(2, 2), Counting())
    [warning] = warnings_of(caplog)
    assert warning == (
        f"_initialize_episode returned the same dict for the sessions {first.session_id} and {second.session_id}, "
        "so they change each other's state: it must return a new dict for each session"
    )
    env.rollout(tasks(2, 2, 2), Counting())
    assert len(warnings_of(caplog)) == 1


def test_a_session_may_start_its_episodes_from_one_dict(caplog: pytest.LogCaptureFixture) -> None:
    class Own(GuessEnv):
        """Keeps one start state a session."""

        def __init__(self, env_config: Any) -> None:
            super().__init__(None, env_config)
            self.starts: dict[str, Any] = {}

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            state = super()._initialize_episode(session_id, task_data)
            return self.starts.setdefault(session_id, state)

    env = Own({"episodes_per_trial": 3})
    caplog.clear()  # of the warning of episodes that are not recorded
    env.rollout(tasks(2, 3), Counting(), 2)
    assert warnings_of(caplog) == []


def test_sessions_that_play_one_after_the_other_may_use_one_dict(caplog: pytest.LogCaptureFixture) -> None:
    class Reusing(GuessEnv):
        """Has one board."""

        board: ClassVar[dict[str, Any]] = {}

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            self.board.update(super()._initialize_episode(session_id, task_data))
            return self.board

    Reusing().rollout(tasks(2, 2, 3), Counting(), max_concurrent=1)
    assert warnings_of(caplog) == []


def test_a_start_state_lives_no_longer_than_its_session() -> None:
    class Handle:
        """Stands for a sandbox."""

    handles: list[weakref.ref[Handle]] = []

    class Holding(GuessEnv):
        """Holds a handle a session."""

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            handle = Handle()
            handles.append(weakref.ref(handle))
            return {**super()._initialize_episode(session_id, task_data), "handle": handle}

    env = Holding()
    env.rollout(tasks(1, 2), Counting())
    gc.collect()
    assert [handle() for handle in handles] == [None, None]


@pytest.mark.parametrize(
    ("at_start", "after_a_step", "problem"),
    [
        (
            np.array([False, False]),  # one flag a player
            False,
            "_initialize_episode's state['done'] must be True or False, got array([False, False])",
        ),
        (False, "no", "_step_episode's state['done'] must be True or False, got 'no'"),
        (False, True, "_step_episode returned done=False with a state whose 'done' is True: they must agree"),
        (False, 1, "_step_episode returned done=False with a state whose 'done' is True: they must agree"),
    ],
)
def test_a_done_that_is_no_flag_or_not_the_steps_fails_the_episode(
    at_start: Any, after_a_step: Any, problem: str
) -> None:
    class Flagged(GuessEnv):
        """Writes flags of its own into its states."""

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            return {**super()._initialize_episode(session_id, task_data), "done": at_start}

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state, reward, done, info = super()._step_episode(session_id, state, action)
            return {**state, "done": after_a_step}, reward, done, info

    [trajectory] = Flagged().rollout(tasks(2), Counting())
    assert str(trajectory.error).splitlines()[-1] == f"EnvError: {problem}"
    assert len(trajectory.turns) == (at_start is False)


@pytest.mark.parametrize("written", [{}, {"done": False}, {"done": None}, {"done": True}])
def test_done_decides_where_the_state_was_copied_or_agrees(written: Any) -> None:
    seen: list[Any] = []

    class Copying(GuessEnv):
        """Writes its state as most do."""

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state, reward, done, info = super()._step_episode(session_id, state, action)
            rest = {key: value for key, value in state.items() if key != "done"}
            return {**rest, **(written if done else {})}, reward, done, info

        def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
            seen.append(state["done"])
            return 0.0

    [trajectory] = Copying().rollout(tasks(2), Counting())
    assert (trajectory.stop_reason, seen) == ("done", [True])
