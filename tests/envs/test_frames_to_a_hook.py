"""How many calls lie between a user's call and a hook: each costs time in every turn, and a line in every trace."""

from __future__ import annotations

import traceback
from typing import Any

from guess_game import Counting, GuessEnv, tasks


def test_at_most_eleven_frames_lie_between_run_trial_and_a_hook() -> None:
    stacks: list[list[str]] = []

    class Looking(GuessEnv):
        """Notes how it was called."""

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            stacks.append([frame.name for frame in traceback.extract_stack()])
            return super()._step_episode(session_id, state, action)

    Looking().run_trial(tasks(1), Counting())
    assert stacks
    for stack in stacks:
        between = stack[stack.index("run_trial") : -1]
        assert len(between) <= 11, between
