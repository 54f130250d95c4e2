"""Commands, environments and imports that earlier versions had: each ends with what to use instead."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from command_line import ran

import agentsgym
import agentsgym.envs
from agentsgym import ConfigError, make
from agentsgym.removed import REMOVED

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
