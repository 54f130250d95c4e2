"""Commands, environments and imports that earlier versions had: each ends with what to use instead."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from command_line import ROOT, ran

import agentsgym
import agentsgym.envs
from agentsgym import ConfigError, RolloutStore, ScriptedAgent, make
from agentsgym.envs.players import reference_player
from agentsgym.removed import REMOVED
from agentsgym.store.records import StoredRollout
from examples.waiter import WaiterEnv

WAITER = "use examples/waiter.py:WaiterEnv"


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["push"], "hf upload USER/NAME FOLDER"),
        (["push", "guess.py", "alice/game", "--private"], "hf upload USER/NAME FOLDER"),
        (["pull", "alice/game", "--revision", "v1"], "hf download USER/NAME --local-dir FOLDER"),
        (["audit", "--help"], "agentsgym check STORE"),
        (["audit", "runs/first", "--where", "success=true", "--json"], "agentsgym check STORE"),
    ],
)
def test_a_removed_command_names_its_successor(arguments: list[str], remedy: str) -> None:
    done = ran(*arguments)
    assert (done.code, done.out) == (2, "")
    assert remedy in done.err
    assert len(done.err.splitlines()) == 1


def test_removed_commands_are_not_listed() -> None:
    listed = {line.split()[0] for line in ran("--help").out.splitlines() if line.startswith("  ")}
    assert "check" in listed
    assert not listed & {name.partition(" ")[2] for name in REMOVED}


def test_an_option_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    done = ran("check", tmp_path, "--max-tasks", "3")
    assert (done.code, done.words) == (2, f"error: --max-tasks applies to environments, but {tmp_path} is a store")
    done = ran("check", "TwentyQuestions", "--where", "success=true")
    assert (done.code, done.words) == (2, "error: --where applies to stores, but TwentyQuestions is no folder")


@pytest.mark.parametrize("command", [("eval", "Waiter", "-a", "random"), ("envs", "WaiterEnv"), ("check", "Waiter:x")])
def test_a_removed_environment_names_its_place_on_the_command_line(command: tuple[str, ...]) -> None:
    done = ran(*command)
    assert done.code == 2
    assert WAITER in done.words


def test_a_row_of_a_removed_environment_names_its_place() -> None:
    with pytest.raises(ConfigError, match=WAITER):
        make({"env_class_path": "agentsgym.envs.Waiter.WaiterEnv"})


def test_imports_of_what_was_removed_name_its_place() -> None:
    with pytest.raises(ImportError, match=WAITER):
        _ = agentsgym.envs.WaiterEnv
    with pytest.raises(ImportError, match=WAITER):
        from agentsgym.envs import WaiterEnv  # noqa: F401, PLC0415
    with pytest.raises(ModuleNotFoundError, match=WAITER):
        importlib.import_module("agentsgym.envs.Waiter")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'agentsgym.envs.Writer'$"):
        importlib.import_module("agentsgym.envs.Writer")
    with pytest.raises(AttributeError, match="has no attribute 'WriterEnv'"):
        _ = agentsgym.WriterEnv


def test_a_store_of_a_removed_environment_is_read_and_only_replay_needs_its_class(tmp_path: Path) -> None:
    env, store = WaiterEnv(), tmp_path / "store"
    tasks = env.tasks(2)
    played = {
        "reference": env.rollout(tasks, reference_player(env)),
        "tea": env.rollout(tasks, ScriptedAgent(["tea"], repeat_last=True)),
    }
    with RolloutStore.writer(store) as writer:
        for agent, trajectories in played.items():
            for trajectory in trajectories:
                path = "agentsgym.envs.Waiter.WaiterEnv"
                record = StoredRollout(
                    trajectory=trajectory, agent=agent, env_class_path=path, env_config=dict(env.env_config)
                )
                writer.add_record(record)
    assert len(RolloutStore(store).filter(agent="tea")) == 2
    checked = ran("check", store, "--where", "agent=reference")
    assert (checked.code, "WaiterEnv is not a known environment" in checked.words) == (0, True)
    compared = ran("compare", store, "--where-a", "agent=tea", "--where-b", "agent=reference")
    assert (compared.code, "2 shared tasks" in compared.words) == (0, True)
    assert ran("view", store, "--out", tmp_path / "page.html").code == 0
    assert "Anna orders" in str(RolloutStore(store).record(0).trajectory._repr_html_())
    replayed = ran("replay", store)
    assert (replayed.code, WAITER in replayed.words) == (1, True)
    again = ran("replay", store, "--env", f"{ROOT / 'examples' / 'waiter.py'}:WaiterEnv")
    assert (again.code, "4 same, 0 different" in again.words) == (0, True)
