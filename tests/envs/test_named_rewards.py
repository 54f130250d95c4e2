"""Named rewards, from what an environment returns to the trajectory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from agentsgym import check_env
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.Tools import ToolEnv
from agentsgym.envs.Tools.results import ToolResult
from agentsgym.types import Action, ToolCall, Trajectory


class Script(MultistepEnv):
    """Plays what the task lists: whose move, the reward, and ``info["rewards"]``, one entry a step."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "steps": task_data["steps"], "played": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "Go."

    def _role(self, state: dict[str, Any]) -> Any:
        return state["steps"][state["played"]][0]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        _, reward, rewards = state["steps"][state["played"]]
        played = state["played"] + 1
        return {**state, "played": played}, reward, played == len(state["steps"]), {"rewards": rewards}


class Judged(Script):
    """Gives a final reward of its own."""

    final: Any = 1.0

    def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> Any:
        return self.final


def play(*rewards: Any, env: type[Script] = Script, **config: Any) -> Trajectory:
    steps: list[Any] = [one if isinstance(one, list) else [None, one, None] for one in rewards]
    [trajectory] = env(env_config=config).rollout([{"steps": steps}], ScriptedAgent(["a"] * 20))
    return trajectory


def components_of(trajectory: Trajectory) -> list[Mapping[str, float] | None]:
    return [turn.components for turn in trajectory.turns]


def test_the_reward_is_the_sum_of_its_components() -> None:
    trajectory = play({"correct": 0, "format": 0.5}, 0.25, {"correct": True, "format": 0.5}, {})
    assert trajectory.turn_rewards == [0.5, 0.25, 1.5, 0.0]
    assert components_of(trajectory) == [{"correct": 0.0, "format": 0.5}, None, {"correct": 1.0, "format": 0.5}, None]
    assert trajectory.final_reward == 2.25
    assert trajectory.final_components == {"correct": 1.0, "format": 1.0, "reward": 0.25}
    assert {type(one) for turn in trajectory.turns for one in (turn.components or {}).values()} == {float}


def test_a_plain_number_has_no_components() -> None:
    trajectory = play(0.5, 1)
    assert components_of(trajectory) == [None, None]
    assert trajectory.final_components is None


@pytest.mark.parametrize(
    ("final", "reward", "components"),
    [(1.0, 1.0, None), ({"won": 2, "brief": -0.5}, 1.5, {"won": 2.0, "brief": -0.5}), (0, 0.0, None)],
)
def test_a_final_reward_of_its_own_is_not_split(final: Any, reward: float, components: Any) -> None:
    class Own(Judged):
        pass

    Own.final = final
    trajectory = play({"format": 0.5}, env=Own)
    assert trajectory.final_reward == reward
    assert trajectory.final_components == components


def test_practice_counts_as_zero_under_the_same_names() -> None:
    trajectory = play({"a": 1.0}, episodes_per_trial=2, free_shots=1, keep_history=True)
    assert components_of(trajectory) == [{"a": 0.0}, {"a": 1.0}]
    assert trajectory.final_components == {"a": 1.0}


def test_episodes_of_a_trial_add_up() -> None:
    trajectory = play({"a": 1.0, "b": 2.0}, 3.0, episodes_per_trial=2, keep_history=True)
    assert trajectory.final_reward == 12.0
    assert trajectory.final_components == {"a": 2.0, "b": 4.0, "reward": 6.0}


def test_each_role_has_its_own_components() -> None:
    trajectory = play(
        ["X", 0.0, {}],
        ["O", 9.0, {"X": {"taken": -0.5}, "O": {"taken": 0.25, "neat": 1}}],
        ["X", 0.0, {"X": {"won": 1.0}, "O": -1.0}],
    )
    assert trajectory.turn_rewards == [-0.5, 0.25, 1.0]
    assert components_of(trajectory) == [{"taken": -0.5}, {"taken": 0.25, "neat": 1.0, "reward": -1.0}, {"won": 1.0}]
    assert trajectory.turns[1].role_rewards == {"X": -0.5, "O": 1.25}
    assert trajectory.turns[1].role_components == {"X": {"taken": -0.5}, "O": {"taken": 0.25, "neat": 1.0}}
    assert trajectory.turns[2].role_components == {"X": {"won": 1.0}}
    assert trajectory.final_rewards == {"X": 0.5, "O": 0.25}
    assert trajectory.final_components == {"taken": -0.5, "won": 1.0}


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ({"correct": math.nan}, r"_step_episode's reward\['correct'\] must be a finite number, got nan"),
        ({"correct": "1"}, r"_step_episode's reward\['correct'\] must be a finite number, got '1'"),
        ({"": 1.0}, "_step_episode's reward must be a number, or a dict of numbers by non-empty name, got {'': 1.0}"),
        ({1: 1.0}, "_step_episode's reward must be a number, or a dict of numbers by non-empty name"),
        ({"a": 3e38, "b": 3e38}, "the sum of _step_episode's reward must lie within"),
        ([None, [1.0], None], "_step_episode's reward must be a finite number"),
        (["X", 0.0, {"X": {"won": math.inf}}], r"info\['rewards'\]\['X'\]\['won'\] must be a finite number, got inf"),
    ],
)
def test_a_reward_that_is_not_a_number_fails_its_episode(reward: Any, sentence: str) -> None:
    trajectory = play({"a": 1.0}, reward)
    assert trajectory.failed
    assert re.search(sentence, str(trajectory.error))
    assert trajectory.final_components is None


def test_a_tool_call_may_have_a_named_reward() -> None:
    class Shop(ToolEnv):
        def _reward_call(self, state: dict[str, Any], call: ToolCall, result: ToolResult) -> Any:
            return {"lookup": 0.25}

        def _reward_answer(self, state: dict[str, Any], text: str) -> Any:
            return {"correct": 1.0}

    def price(item: str) -> int:
        """Return a price.

        Args:
            item: What to buy.
        """
        return len(item)

    calls = Action(text="", tool_calls=[ToolCall(name="price", arguments={"item": one}) for one in ("pen", "cup")])
    [trajectory] = Shop(tools=[price]).rollout([{"question": "?", "answer": "3"}], ScriptedAgent([calls, "3"]))
    assert [turn.components for turn in trajectory.turns] == [{"lookup": 0.5}, {"correct": 1.0}]


def test_check_env_accepts_named_rewards_and_names_those_that_are_not_finite() -> None:
    class Named(Script):
        amount: Any = 1.0

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            reward = {"a": self.amount, "b": 0.5}
            return {**state}, reward, True, {"rewards": {"X": reward, "O": -1.0}}

        def _role(self, state: dict[str, Any]) -> Any:
            return "X"

    tasks = [{"seed": 0, "steps": []}]
    report = check_env(Named, tasks, raise_on=None)
    assert not [one for one in report.findings if one.check == "finite-rewards"]
    Named.amount = math.nan
    found = [one for one in check_env(Named, tasks, raise_on=None).findings if one.check == "finite-rewards"]
    assert found
    assert "{'a': nan, 'b': 0.5}" in found[0].text
