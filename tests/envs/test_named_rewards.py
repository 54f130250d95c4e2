"""Rewards by name and by role, from what an environment returns to the trajectory."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from agentsgym import EnvProcessPool, EnvThreadPool, check_env
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.Tools import ToolEnv
from agentsgym.envs.Tools.results import ToolResult
from agentsgym.record_audit import audit
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, StopReason, ToolCall, Trajectory


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


def play_alone(*rewards: Any, env: type[Script] = Script, **config: Any) -> Trajectory:
    steps: list[Any] = [one if isinstance(one, list) else [None, one, None] for one in rewards]
    [trajectory] = env(env_config=config).rollout([{"steps": steps}], ScriptedAgent(["a"] * 20))
    return trajectory


def components_of(trajectory: Trajectory) -> list[Mapping[str, float] | None]:
    return [turn.components for turn in trajectory.turns]


def test_the_reward_is_the_sum_of_its_components() -> None:
    trajectory = play_alone({"correct": 0, "format": 0.5}, 0.25, {"correct": True, "format": 0.5}, {})
    assert trajectory.turn_rewards == [0.5, 0.25, 1.5, 0.0]
    assert components_of(trajectory) == [{"correct": 0.0, "format": 0.5}, None, {"correct": 1.0, "format": 0.5}, None]
    assert trajectory.final_reward == 2.25
    assert trajectory.final_components == {"correct": 1.0, "format": 1.0, "reward": 0.25}
    assert {type(one) for turn in trajectory.turns for one in (turn.components or {}).values()} == {float}


def test_a_plain_number_has_no_components() -> None:
    trajectory = play_alone(0.5, 1)
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
    trajectory = play_alone({"format": 0.5}, env=Own)
    assert trajectory.final_reward == reward
    assert trajectory.final_components == components


def test_practice_counts_as_zero_under_the_same_names() -> None:
    trajectory = play_alone({"a": 1.0}, episodes_per_trial=2, free_shots=1, keep_history=True)
    assert components_of(trajectory) == [{"a": 0.0}, {"a": 1.0}]
    assert trajectory.final_components == {"a": 1.0}


def test_episodes_of_a_trial_add_up() -> None:
    trajectory = play_alone({"a": 1.0, "b": 2.0}, 3.0, episodes_per_trial=2, keep_history=True)
    assert trajectory.final_reward == 12.0
    assert trajectory.final_components == {"a": 2.0, "b": 4.0, "reward": 6.0}


def test_each_role_has_its_own_components() -> None:
    trajectory = play_alone(
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
    trajectory = play_alone({"a": 1.0}, reward)
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


TOKENIZER = chat_tokenizer("chatml")
WON: dict[str, Any] = {"steps": [["X", 0.0, {}], ["O", 0.5, {"X": 0.25}], ["X", 9.0, {"X": 1.0, "O": -1.0}]]}


class Duel(Script):
    """The prompt names whose move it is, and the final reward is far from every role's."""

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"{state['steps'][step][0]}, it is your move."

    def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
        return 100.0 + sum(turn_rewards)


def play(task: Mapping[str, Any], **config: Any) -> Trajectory:
    [trajectory] = Duel(TOKENIZER, config).rollout([task], ScriptedAgent(["a b"] * 20))
    return trajectory


def test_each_turn_bears_what_its_own_role_earns() -> None:
    trajectory = play(WON)
    assert trajectory.turn_rewards == [0.25, -1.0, 1.0]
    assert trajectory.final_rewards == {"X": 1.25, "O": -1.0}
    assert trajectory.final_reward == 1.25  # of the role that moved first; the returned 0.5 and 9.0 are not read
    assert [turn.role_rewards for turn in trajectory.turns] == [{}, {"X": 0.25}, {"X": 1.0, "O": -1.0}]
    assert sum(trajectory.per_token_rewards) == pytest.approx(0.25)
    assert audit([trajectory]).ok
    scored = ScoredRollout.from_trajectory(trajectory, group=0, turn_credit="final")
    assert scored.turn_rewards == [0.0, -1.0, 1.25]


def test_a_game_that_rewards_no_roles_is_as_it_was() -> None:
    trajectory = play({"steps": [["X", 1.0, None], ["O", 2.0, None]]})
    assert trajectory.turn_rewards == [1.0, 2.0]
    assert trajectory.final_reward == 103.0
    assert trajectory.final_rewards == {}
    assert [turn.role_rewards for turn in trajectory.turns] == [None, None]


def test_a_step_without_rewards_is_for_who_moved() -> None:
    trajectory = play({"steps": [["X", 0.5, None], ["O", 0.25, None], ["X", 0.0, {"O": -1.0}]]})
    assert trajectory.turn_rewards == [0.5, -0.75, 0.0]
    assert trajectory.final_rewards == {"X": 0.5, "O": -0.75}


def test_a_seat_that_others_play_is_rewarded_too() -> None:
    trajectory = play({"steps": [["O", 0.0, {"X": 0.5}], ["O", 0.0, {"X": -1.0, "O": 1.0}]]})
    assert trajectory.turn_rewards == [0.0, 1.0]
    assert trajectory.final_reward == 1.0
    assert trajectory.final_rewards == {"O": 1.0, "X": -0.5}


@pytest.mark.parametrize("turn_credit", ["step", "final", "repeat_final", "spread_final"])
def test_the_record_is_sound_under_every_turn_credit(turn_credit: str) -> None:
    trajectory = play(WON, turn_credit=turn_credit)
    report = audit([trajectory], turn_credit=turn_credit)
    assert report.ok, report


def test_practice_rewards_nobody_and_episodes_are_settled_apart() -> None:
    trajectory = play(WON, episodes_per_trial=3, free_shots=1, keep_history=True)
    assert trajectory.turn_rewards == [0.0, 0.0, 0.0, *[0.25, -1.0, 1.0] * 2]
    assert trajectory.final_rewards == {"X": 2.5, "O": -2.0}
    assert trajectory.turns[2].role_rewards == {"X": 0.0, "O": 0.0}


def test_a_budget_leaves_what_was_rewarded_until_then() -> None:
    trajectory = play(WON, max_steps_per_episode=2)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.final_rewards == {"X": 0.25, "O": 0.0}


BAD: list[tuple[str, Any, str]] = [
    ("X", [1.0, -1.0], r"info\['rewards'\] must be a dict of one reward per role, got \[1\.0, -1\.0\]"),
    ("X", {"X": math.nan}, r"info\['rewards'\]\['X'\] must be a finite number, got nan"),
    ("X", {"X": "1"}, r"info\['rewards'\]\['X'\] must be a finite number, got '1'"),
    (None, {"X": 1.0}, r"_role must return the role that acted if _step_episode returns rewards by role, got None"),
    ("x", {"X": 1.0, "O": -1.0}, r"_role returned 'x', but _step_episode's info\['rewards'\] has 'X'"),
    ("1", {0: 1.0, 1: -1.0}, r"_role returned '1', but _step_episode's info\['rewards'\] has 1"),
]


@pytest.mark.parametrize(("role", "rewards", "sentence"), BAD)
def test_rewards_that_cannot_be_read_fail_their_own_episode(role: Any, rewards: Any, sentence: str) -> None:
    broken = {"steps": [["X", 0.0, {}], [role, 0.0, rewards], ["X", 0.0, {}]]}
    failed, sound = Duel(TOKENIZER).rollout([broken, WON], ScriptedAgent(["a"] * 20))
    assert failed.failed
    assert failed.error is not None
    assert re.search(sentence, failed.error)
    assert (failed.final_reward, failed.final_rewards, failed.num_turns) == (0.0, {}, 2)
    assert sound.turn_rewards == [0.25, -1.0, 1.0]


def test_a_key_that_is_almost_rewards_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Misspelled(Duel):
        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state, reward, done, info = super()._step_episode(session_id, state, action)
            return state, reward, done, {"reward": info["rewards"]}

    with caplog.at_level(logging.WARNING):
        Misspelled(TOKENIZER).rollout([WON], ScriptedAgent(["a"] * 20))
    assert "info['reward'] of Misspelled is not used" in caplog.text


@pytest.mark.parametrize("pool_class", [EnvThreadPool, EnvProcessPool])
def test_pools_bring_the_same_trajectories(pool_class: Any) -> None:
    with pool_class(2) as pool:
        there = Duel(TOKENIZER).rollout([WON] * 3, ScriptedAgent(["a b"] * 20), pool=pool)
    assert [one.turns for one in there] == [play(WON).turns] * 3
    assert [one.final_rewards for one in there] == [{"X": 1.25, "O": -1.0}] * 3
