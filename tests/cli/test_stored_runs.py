"""``agentsgym replay`` and ``agentsgym compare``: what they print, and their exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import GAME, ran

from agentsgym import RandomAgent, ScriptedAgent, evaluate
from agentsgym.cli.options import find_env


@pytest.fixture
def game(tmp_path: Path) -> str:
    (tmp_path / "guess_stored.py").write_text(GAME)
    sys.modules.pop("guess_stored", None)
    return f"{tmp_path / 'guess_stored.py'}:Guess"


@pytest.fixture
def store(game: str, tmp_path: Path) -> Path:
    env = find_env(game, {"max_steps_per_episode": 2}).build()
    tasks = [{"secret": 1 + seed % 4, "seed": seed} for seed in range(8)]
    evaluate(env, ScriptedAgent(["1", "2"]), tasks, store=tmp_path / "runs", agent_name="script")
    evaluate(env, RandomAgent(["3"]), tasks[:6], store=tmp_path / "runs", agent_name="threes")
    return tmp_path / "runs"


def test_replay_of_what_has_not_changed(game: str, store: Path) -> None:
    done = ran("replay", store, "--env", game)
    assert (done.code, done.out) == (0, "14 rollouts: 14 same, 0 different, 0 not replayed\n")
    few = ran("replay", store, "--env", game, "--where", "agent=threes", "--limit", "4", "--json")
    assert few.json["counts"] == {"same": 4, "differs": 0, "impossible": 0}
    assert {one["agent"] for one in few.json["rollouts"]} == {"threes"}


def test_replay_of_a_changed_environment(game: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "guess_changed.py").write_text(GAME.replace('"No."', '"No, not \\x1b[31mthat."'))
    sys.modules.pop("guess_changed", None)
    changed = f"{tmp_path / 'guess_changed.py'}:Guess"
    done = ran("replay", store, "--env", changed, "--where", "agent=script")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].startswith("script, task 1, rollout 0, turn 1: the observation was 'No.' and is 'No, not ")
    assert "\x1b" not in done.out
    assert lines[-1] == "8 rollouts: 2 same, 6 different, 0 not replayed"
    assert "6 of 8 rollouts differ" in done.err
    found = ran("replay", store, "--env", changed, "--where", "agent=script", "--json")
    assert found.code == 1
    differences = [one["difference"] for one in found.json["rollouts"] if one["difference"]]
    assert {(one["turn"], one["what"]) for one in differences} == {(1, "observation")}


def test_replay_runs_no_code_that_a_store_names(store: Path) -> None:
    done = ran("replay", store)
    assert done.code == 1
    assert "14 cannot be replayed: env_class_path 'guess_stored.Guess' is not registered" in done.words
    assert "pass it with --env ENV" in done.words


def test_compare_two_agents_of_a_store(store: Path) -> None:
    options = ("--where-a", "agent=script", "--where-b", "agent=threes")
    done = ran("compare", store, *options, columns=100)
    assert done.code == 0
    assert done.out.startswith("6 shared tasks\n")
    assert 'tasks whose results differ: 4 worse, 1 better\nworse 1/1 -> 0/1, reward 1.00 -> 0.00: Guess {"s' in done.out
    assert "tasks only in A: 2, only in B: 0" in done.out
    found = ran("compare", store, store, *options, "--json").json
    assert found["win_rate"]["difference"] == pytest.approx(-0.5)
    assert [task["change"] for task in found["tasks"]] == [-1, -1, -1, -1, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compare", "STORE"), "a run cannot be compared with itself"),
        (("compare", "STORE", "nowhere"), "nowhere"),
        (("compare", "STORE", "--where-a", "agent=nobody"), "none of the"),
        (("compare", "STORE", "--where-a", "agnet=script"), "did you mean 'agent'"),
        (("replay", "nowhere"), "nowhere"),
        (("replay", "STORE", "--where", "agent"), "must be COLUMN=VALUE"),
    ],
)
def test_what_there_is_not(store: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = ran(*(str(store) if one == "STORE" else one for one in arguments))
    assert done.code == 2
    assert sentence in done.words


def test_runs_without_a_shared_task_fail(store: Path) -> None:
    done = ran("compare", store, "--where-a", "seed=1", "--where-b", "seed=2")
    assert done.code == 1
    assert "share no task" in done.words
