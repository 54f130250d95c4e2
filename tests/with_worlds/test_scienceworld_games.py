"""ScienceWorldEnv with the real simulator in Java."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("scienceworld")

from agentsgym import Agent, ConfigError, MissingDependencyError, ScriptedAgent, check_env
from agentsgym.envs import ScienceWorldEnv
from agentsgym.envs.players import imitation_player, random_player, reference_player
from agentsgym.envs.ScienceWorld.engine import find_java, java_machine
from agentsgym.envs.ScienceWorld.env import TASKS
from agentsgym.envs.shared.engines import close_shared

if shutil.which("java") is None:
    pytest.skip("there is no Java here", allow_module_level=True)

PLANT = {"task": "find-plant", "variation": 1, "seed": 1}
EASY = {"simplifications": ["easy"]}


def env_of(**config: Any) -> ScienceWorldEnv:
    return ScienceWorldEnv(env_config={"num_processes": 1, "memory_mb": 512, **config})


def test_the_table_of_tasks_is_the_simulators() -> None:
    game = java_machine("", 512).new_game()
    assert sorted(game.getTaskNames()) == sorted(TASKS)
    for name in ("boil", "identify-life-stages-2", "lifespan-longest-lived", "inclined-plane-friction-named-surfaces"):
        game.load(name, 0, "", False)
        shares = {"train": game.getVariationsTrain(), "dev": game.getVariationsDev(), "test": game.getVariationsTest()}
        assert {split: [*numbers] for split, numbers in shares.items()} == {
            split: [*TASKS[name].indices(split)] for split in shares
        }
    assert {name: game.getTaskMaxVariations(name) for name in TASKS} == {name: one.num for name, one in TASKS.items()}


def test_the_gold_path_solves_tasks_and_is_rewarded_1() -> None:
    env = env_of(gold_path=True, **EASY)
    tasks = [PLANT, {"task": "identify-life-stages-2", "variation": 0}, {"task": "test-conductivity", "variation": 2}]
    for played in env.rollout(tasks, reference_player(env)):
        assert (played.error, played.success, str(played.stop_reason)) == (None, True, "done")
        assert played.final_reward == pytest.approx(1.0)
        assert all(reward >= 0 for reward in played.turn_rewards)
    [shown] = env.rollout([PLANT], imitation_player(env))
    assert shown.success


def test_without_a_gold_path_its_players_name_how_to_get_one() -> None:
    for player in (reference_player, imitation_player):
        with pytest.raises(ConfigError, match=r"create the environment with env_config=\{'gold_path': True\}"):
            player(env_of())


@pytest.mark.parametrize(("failure_score", "final"), [(0.0, 0.0), (-1.0, -1.0)])
def test_a_wrong_focus_fails_the_task(failure_score: float, final: float) -> None:
    env = env_of(failure_score=failure_score, **EASY)
    [played] = env.rollout([PLANT], ScriptedAgent(["frobnicate", "reset task", "go to hallway", "focus on hallway"]))
    assert (played.error, played.success, str(played.stop_reason)) == (None, False, "done")
    assert [turn.invalid for turn in played.turns] == [True, True, False, False]
    assert played.turn_rewards[2] > 0
    assert played.final_reward == pytest.approx(final)
    assert played.info["score"] == -1.0


def test_commands_are_listed_if_requested() -> None:
    env = env_of(admissible_commands=True, max_steps_per_episode=2, simplifications=["openDoors"])
    [played] = env.rollout([PLANT], random_player(env, 1))
    listed = played.messages[1]["content"].rpartition("Possible commands: ")[2].split(", ")
    assert len(listed) > 100
    assert played.messages[2]["content"] in listed
    assert "reset task" not in listed


def test_games_in_one_jvm_do_not_disturb_each_other() -> None:
    env = env_of(**EASY)
    way = ["go to hallway", "go to kitchen", "open fridge", "look around", "inventory", "wait1", "look around"]
    tasks = [{"task": task, "variation": 1, "seed": 1} for task in ("find-plant", "boil", "find-plant", "melt")]

    def messages(some: list[dict[str, Any]]) -> list[Any]:
        return [one.messages for one in env.rollout(some, Cut(way))]

    alone = [message for task in tasks for message in messages([task])]
    assert messages(tasks) == alone


class Cut(Agent):
    """Answers the lines of a script, and waits when it is at its end."""

    def __init__(self, way: list[str]) -> None:
        self.player = ScriptedAgent([*way, *["wait1"] * 200])

    def act(self, requests: Any) -> Any:
        return self.player.act(requests)


def test_java_that_dies_fails_its_episodes_and_the_next_plays() -> None:
    env = env_of(step_timeout_s=41.0, **EASY)  # processes of its own

    class Killer(Agent):
        """Ends Java in the second turn."""

        def __init__(self) -> None:
            self.num = 0

        def act(self, requests: Any) -> Any:
            self.num += 1
            if self.num == 2:
                machines = [
                    child
                    for pid in env._processes().pids
                    for child in psutil.Process(pid).children()
                    if "java" in child.name()
                ]
                assert len(machines) == 1
                machines[0].kill()
                machines[0].wait(10)
            return ScriptedAgent(["look around"], repeat_last=True).act(requests)

    played = env.rollout([PLANT, {**PLANT, "variation": 2}], Killer())
    assert [one.failed for one in played] == [True, True]
    assert all("the engine failed while running the command 'look around'" in (one.error or "") for one in played)
    [after] = env.rollout([PLANT], ScriptedAgent(["go to hallway", "focus on hallway"]))
    assert (after.error, str(after.stop_reason)) == (None, "done")


def test_more_games_than_a_heap_holds_are_played_in_another_jvm() -> None:
    env = env_of(memory_mb=256, max_steps_per_episode=1, step_timeout_s=42.0, **EASY)  # processes of its own
    tasks = [{**PLANT, "seed": number} for number in range(256 // 16 + 1)]
    assert not any(one.failed for one in env.rollout(tasks, ScriptedAgent(["look around"])))
    assert len(env._processes().pids) == 2
    close_shared()


def test_java_that_does_not_start_gives_the_reason() -> None:
    [played] = env_of(memory_mb=10**9).rollout([PLANT], ScriptedAgent(["look around"]))
    assert played.failed
    assert "Java could not be started: " in (played.error or "")
    assert "heap" in (played.error or "")


def test_java_is_found_in_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(shutil.which("java") or "").resolve().parents[1]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java() == str(home / "bin" / "java")
    [played] = env_of(max_steps_per_episode=1, step_timeout_s=43.0).rollout([PLANT], ScriptedAgent(["look around"]))
    assert played.error is None


def test_it_keeps_the_contract() -> None:
    env = env_of(max_steps_per_episode=4, **EASY)
    agent = ScriptedAgent(["go to hallway", "look around", "go to kitchen", "inventory"])
    report = check_env(env, [PLANT, {"task": "boil", "variation": 0, "seed": 2}], agent, max_tasks=2)
    assert not report.findings


def test_without_java_the_error_names_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(MissingDependencyError, match=r"'java' is not installed.* apt-get install default-jre-headless"):
        ScienceWorldEnv()
