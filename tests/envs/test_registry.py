import importlib.metadata
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guess_game import Quiet

from agentsgym import ConfigError, ScriptedAgent, TaskError, make, register
from agentsgym.envs.datasets.environments import class_path, find

SOURCE = """
    import sys

    from agentsgym.envs.base import MultistepEnv

    sys.modules["agentsgym_test_was_imported"] = sys

    class Far(MultistepEnv):
        '''A game in another package.'''

        def _initialize_episode(self, session_id, task_data):
            return {"done": False}

        def _format_prompt(self, state, step):
            return "?"

        def _step_episode(self, session_id, state, action):
            return state, 0.0, True, {}

    not_an_env = 3
"""


class Near(Quiet):
    """A game of the user's own."""


class Other(Near):
    """Another one."""


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The module name of a package that nobody has imported."""
    (tmp_path / "far_games.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "far_games"
    for name in ("far_games", "agentsgym_test_was_imported"):
        sys.modules.pop(name, None)


def test_a_registered_class_is_made_from_its_path_or_a_row() -> None:
    assert register(Near) is Near
    path = f"{Near.__module__}.Near"
    assert class_path(Near) == path
    assert find(path) is Near
    assert type(make(path)) is Near
    row = {"env_class_path": path, "env_config": {"error_allowance": 4}, "task_data": {}}
    assert make(row).env_config["error_allowance"] == 4
    assert make({"env_class_path": path, "env_config": None}).env_config["error_allowance"] == 1


def test_a_row_without_a_task_builds_its_environment_and_cannot_be_played() -> None:
    row = {"env_class_path": f"{register(Near).__module__}.Near", "env_config": {"error_allowance": 4}}
    env = make(row)
    with pytest.raises(
        TaskError, match=r"^task_data_list\[0\] is a dataset row and must have a 'task_data' \(a dict\)"
    ):
        env.rollout([row], ScriptedAgent(["x"]))


def test_what_a_table_fills_a_row_with_is_left_out() -> None:
    """A column of dicts holds every key in every row, None where a row had none."""
    path = f"{register(Near).__module__}.Near"
    filling = {"free_shots": None, "of_another_game": None, "system_prompt": None}
    env = make({"env_class_path": path, "env_config": {"error_allowance": 4, **filling}})
    assert env.env_config == make({"env_class_path": path, "env_config": {"error_allowance": 4}}).env_config
    with pytest.raises(ConfigError, match=r"env_config\['of_another_game'\] is unknown"):
        make({"env_class_path": path, "env_config": {"of_another_game": 1}})


def test_a_class_can_be_registered_under_a_path_of_ones_choice_and_twice() -> None:
    register(Near, "my.game")
    register(Near, "my.game")
    assert class_path(Near) == "my.game"
    assert find("my.game") is Near


def test_register_is_a_decorator() -> None:
    @register
    class Decorated(Near):
        """Registered where it is defined."""

    assert find(class_path(Decorated)) is Decorated


@pytest.mark.parametrize("path", ["my.game", "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv"])
def test_a_path_that_is_taken_is_refused(path: str) -> None:
    register(Near, "my.game")
    with pytest.raises(ConfigError, match=f"'{path}' is already registered for another class"):
        register(Other, path)


@pytest.mark.parametrize("thing", [3, int, Near()])
def test_only_environments_are_registered(thing: Any) -> None:
    with pytest.raises(ConfigError, match="env_class must be a subclass of MultistepEnv, got"):
        register(thing)


def test_an_unknown_path_is_refused_with_a_hint_and_imports_nothing(far: str) -> None:
    register(Near, "far_games.Fat")
    with pytest.raises(ConfigError, match=r"'far_games.Far' is not registered; did you mean 'far_games.Fat'\?"):
        make({"env_class_path": f"{far}.Far", "task_data": {}})
    assert far not in sys.modules
    assert "agentsgym_test_was_imported" not in sys.modules


def test_a_path_is_imported_on_request(far: str) -> None:
    env = make(f"{far}.Far", allow_import=True)
    assert type(env).__name__ == "Far"
    assert class_path(type(env)) == f"{far}.Far"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("far_games.Missing", "cannot be imported"),
        ("no_such_package.Game", "cannot be imported"),
        ("Game", "cannot be imported"),
        ("..relative.Game", "cannot be imported"),
        ("far_games.not_an_env", "must name a subclass of MultistepEnv, got 3"),
    ],
)
def test_what_cannot_be_imported_is_a_config_error(far: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(path, allow_import=True)
    assert str(caught.value).startswith(f"env_class_path {path!r} {message}")


def test_an_entry_point_is_loaded_when_its_path_is_requested(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == "agentsgym.envs"
        return [
            importlib.metadata.EntryPoint("plugin.Far", f"{far}:Far", group),
            importlib.metadata.EntryPoint("plugin.Three", f"{far}:not_an_env", group),
        ]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    with pytest.raises(ConfigError, match=r"did you mean 'plugin.Far'\?"):
        find("plugin.Fat")
    assert far not in sys.modules
    assert type(make("plugin.Far")).__name__ == "Far"
    with pytest.raises(ConfigError, match="must name a subclass of MultistepEnv"):
        find("plugin.Three")


@pytest.mark.parametrize("row", [{}, {"env_class_path": None}, {"env_class_path": 3}, None, Near, ["a"]])
def test_a_row_without_a_path_is_refused(row: Any) -> None:
    with pytest.raises(ConfigError, match="a row must be a dict with an 'env_class_path'"):
        make(row)
