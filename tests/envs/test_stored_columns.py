"""What a store keeps of an environment: also where its tools cannot be read in this process."""

from __future__ import annotations

from typing import Any

import pytest
from guess_game import GuessEnv
from tool_functions import add

from agentsgym.envs.datasets.environments import stored_columns
from agentsgym.envs.Tools import ToolEnv
from agentsgym.types import StopReason, Trajectory


def ended(reason: StopReason = StopReason.DONE) -> Trajectory:
    error = "no" if reason == StopReason.FAILED else None
    return Trajectory(token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=reason, error=error)


def test_the_schemas_are_those_of_the_environment() -> None:
    env = ToolEnv(tools=[add])
    found = stored_columns(env, ended())
    assert found["env_class_path"] == "agentsgym.envs.Tools.ToolEnv"
    assert found["env_config"] is env.env_config
    assert [one["function"]["name"] for one in found["tools"]] == ["add"]
    assert stored_columns(env, ended(StopReason.FAILED))["tools"] is None
    assert stored_columns(GuessEnv(), ended())["tools"] is None


def test_tools_that_cannot_be_read_are_logged_and_cost_no_rollout(caplog: pytest.LogCaptureFixture) -> None:
    class Unreachable(GuessEnv):
        def _tools(self) -> Any:
            raise OSError("the server is gone")

        def _step_action(self, session_id: str, state: Any, action: Any) -> Any:
            raise AssertionError

    env = Unreachable()
    assert stored_columns(env, ended(StopReason.FAILED))["tools"] is None
    assert caplog.text == ""
    assert stored_columns(env, ended())["tools"] is None
    assert "rollouts of Unreachable are stored without tool schemas" in caplog.text
