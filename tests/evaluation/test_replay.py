"""Replaying: what has not changed goes as it went, whatever kind of rollout it is, and the first change is found."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym import register
from agentsgym.agents.base import Agent
from agentsgym.agents.scripted import RandomAgent, ScriptedAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import registered_classes
from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.errors import ConfigError
from agentsgym.evaluation.replay import Replay, replay, replay_all
from agentsgym.evaluation.run import evaluate
from agentsgym.fields import Field
from agentsgym.store.reader import RolloutStore
from agentsgym.tiny import tiny_policy
from agentsgym.types import StopReason, Trajectory

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
WORDS = ["up", "down", "bad", "break"]


class Walk(MultistepEnv):
    """Walks up and down from a height that is drawn; ``bad`` is invalid, ``break`` raises; at 3 it is won.

    The key ``fault`` changes one thing from turn 1 on.
    """

    config_fields: ClassVar[Mapping[str, Field]] = {
        "fault": Field(default="", valid=lambda value: isinstance(value, str), expected="a text")
    }

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"height": self.rng(session_id).randrange(2), "turn": 0, "session": session_id, "done": False}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        text = "Height" if self._fault(state) != "observation" else "You are at"
        return f"{text} {state['height']}, a draw: {self.rng(state['session']).random()}"

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        fault = self._fault(state)
        if action == "break" or fault == "raises":
            raise RuntimeError("it broke")
        height = state["height"] + {"up": 1, "down": -1}.get(action, 0)
        done = height == 3 or fault == "stop reason"
        state = {**state, "height": height, "turn": state["turn"] + 1}
        invalid = (action == "bad") != (fault == "invalid")
        info = {"success": (height == 3) != (fault == "success"), "invalid": invalid}
        return state, height + float(fault == "reward"), done, info

    def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
        return sum(turn_rewards) + float(self._fault(state) == "final reward")

    def _fault(self, state: dict[str, Any]) -> str:
        return self.env_config["fault"] if state["turn"] else ""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    register(Walk, "walk")
    yield
    del registered_classes()["walk"]


def played(env: MultistepEnv, agent: Any, tasks: Any, folder: Path, **options: Any) -> list[Replay]:
    """Play, store, read and replay."""
    evaluate(env, agent, tasks, store=folder, agent_name="any", **options)
    return [*replay_all(RolloutStore(folder).records())]


@given(
    seed=st.integers(0, 1000),
    config=st.fixed_dictionaries({
        "max_steps_per_episode": st.integers(1, 4),
        "episodes_per_trial": st.integers(1, 3),
        "keep_history": st.booleans(),
        "error_allowance": st.integers(0, 1),
    }),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_kind_of_rollout_goes_as_it_went(seed: int, config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        agent = RandomAgent([*WORDS[:3] * 3, "break"], seed=seed)
        results = played(Walk(env_config=config), agent, [{"seed": seed + k} for k in range(4)], Path(folder))
    for result in results:
        assert result.difference is None
        if result.impossible is not None:
            assert result.recorded.failed
            assert not result.recorded.turns
        else:
            assert result.played is not None
            assert result.played.turn_rewards == result.recorded.turn_rewards


@pytest.mark.parametrize(
    ("what", "turn"),
    [("observation", 1), ("reward", 1), ("invalid", 1), ("success", 2), ("final reward", 2), ("stop reason", 1)],
)
def test_the_first_change_is_found_where_it_is(what: str, turn: int) -> None:
    [recorded] = Walk(env_config={"max_steps_per_episode": 3, "error_allowance": 3}).rollout(
        [{"seed": 1}], ScriptedAgent(["down", "down", "down"])
    )
    changed = Walk(env_config={"max_steps_per_episode": 3, "error_allowance": 3, "fault": what})
    difference = replay(recorded, changed).difference
    assert difference is not None
    assert (difference.turn, difference.what) == (turn, what)
    assert difference.recorded != difference.played
    if what == "observation":
        assert difference.recorded == recorded.messages[2]["content"]
        assert difference.played == difference.recorded.replace("Height", "You are at")


def test_an_environment_that_raises_now_or_no_longer_differs() -> None:
    env, broken = Walk(), Walk(env_config={"fault": "raises"})
    [recorded] = broken.rollout([{"seed": 1}], ScriptedAgent(["down", "down"]))
    assert replay(recorded, broken).outcome == "same"
    difference = replay(recorded, env).difference
    assert difference is not None
    assert (difference.turn, difference.what, difference.played) == (1, "stop reason", "continues")
    assert difference.recorded.startswith("failed: task 0, rollout 0, turn 1 of Walk")
    [recorded] = env.rollout([{"seed": 1}], ScriptedAgent(["down"] * 3))  # the agent fails at turn 3
    assert recorded.failed
    assert replay(recorded, env).outcome == "same"
    difference = replay(recorded, broken).difference
    assert difference is not None
    assert (difference.turn, difference.what, difference.recorded) == (1, "stop reason", "continues")
    assert "it broke" in difference.played


@pytest.mark.parametrize("opponent", ["random", "self"])
def test_opponents_that_draw_and_games_against_oneself(opponent: str, tmp_path: Path) -> None:
    env = TextArenaEnv(env_config={"game": "TicTacToe-v0", "opponent": opponent})
    agent = RandomAgent([f"[{cell}]" for cell in range(9)], seed=3)
    results = played(env, agent, [{"seed": seed} for seed in range(6)], tmp_path)
    assert {result.outcome for result in results} == {"same"}
    assert {result.recorded.stop_reason for result in results} >= {StopReason.DONE}


@pytest.mark.parametrize("max_turn_tokens", [6, 40])
def test_answers_cut_by_a_limit_and_calls_of_tools(max_turn_tokens: int, tmp_path: Path) -> None:
    _, tokenizer = tiny_policy(PriceListEnv())
    env = PriceListEnv(tokenizer)
    call = '<tool_call>{"name": "price", "arguments": {"good": "egg"}}</tool_call>'
    script = ScriptedAgent([call, "<tool_call>not JSON</tool_call>", "It costs a lot."], repeat_last=True)
    evaluate(env, script, env.get_eval_dataset().select(range(2)), store=tmp_path, max_turn_tokens=max_turn_tokens)
    for given_env in (None, env):
        results = [*replay_all(RolloutStore(tmp_path).records(), given_env)]
        assert [result.outcome for result in results] == ["same", "same"]


def test_a_rollout_that_a_limit_of_tokens_ended_ends_there_again(tmp_path: Path) -> None:
    _, tokenizer = tiny_policy([*WORDS, "Height 0 1 , a draw : ."])
    [recorded] = Walk(tokenizer).rollout([{"seed": 1}], ScriptedAgent(["down"] * 9), max_completion_length=20)
    assert recorded.stop_reason is StopReason.MAX_TOKENS
    assert recorded.turns
    for env in (Walk(), Walk(tokenizer)):
        result = replay(recorded, env)
        assert result.outcome == "same"
        assert result.played is not None
        assert result.played.final_reward == recorded.final_reward
    assert replay(recorded, Walk(env_config={"fault": "stop reason"})).outcome == "differs"


def test_what_cannot_be_replayed_gives_the_reason(tmp_path: Path) -> None:
    [trajectory] = Walk().rollout([{"seed": 1}], ScriptedAgent(["down"], repeat_last=True))
    with pytest.raises(ConfigError, match="does not name its environment"):
        replay(trajectory)
    without_task = dataclasses.replace(trajectory, task_data={})
    with RolloutStore.writer(tmp_path) as writer:
        writer.add(trajectory, env_class_path="os.path.Join")
        writer.add(trajectory)
        writer.add(without_task, env_class_path="walk")
        writer.add(trajectory, env_class_path="walk", env_config={"nothing": 1})
        writer.add(trajectory, env_class_path="walk", env_config={"history": list})
    reasons = [result.impossible or "" for result in replay_all(RolloutStore(tmp_path).records())]
    wanted = ("not registered", "not name its environment", "the task with its seed", "'nothing'", "cannot be stored")
    assert [part in reason for part, reason in zip(wanted, reasons, strict=True)] == [True] * 5


def test_a_record_imports_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_game.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    [trajectory] = Walk().rollout([{"seed": 1}], ScriptedAgent(["down"], repeat_last=True))
    with RolloutStore.writer(tmp_path / "store") as writer:
        writer.add(trajectory, env_class_path="evil_game.Game")
    result = replay(RolloutStore(tmp_path / "store").record(0))
    assert "not registered" in (result.impossible or "")


class Asker(Agent):
    """Answers by its prompt, so that a changed question would change the answer; a replay calls no agent."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        return ("up" if "Height 0" in messages[-1]["content"] else "down"), agent_state


def test_replay_gives_plain_values(tmp_path: Path) -> None:
    [result] = played(Walk(), Asker(), [{"seed": 5}], tmp_path)
    assert result.as_dict()["outcome"] == "same"
    assert isinstance(result.played, Trajectory)


def test_the_snippets_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    env = Walk(env_config={"max_steps_per_episode": 2})
    before = evaluate(env, ScriptedAgent(["up", "up"]), [{"seed": k} for k in range(8)], store="runs/first")
    after = evaluate(env, ScriptedAgent(["up", "down"]), [{"seed": k} for k in range(8)])
    names: dict[str, Any] = {"env": env, "result_before": before, "result_after": after}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for block in blocks:
        if "evaluation.replay" in block or "evaluation.compare" in block:
            exec(compile(block, PAGE.name, "exec"), names)
    assert capsys.readouterr().out.endswith("same None None\n")  # compare prints before it
    assert names["outcomes"] == ["same"] * 8
    assert names["comparison"].changed
