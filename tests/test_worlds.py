"""An environment plugs in by one record: the package's own are known by theirs alone, and a user's get the same."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import ran
from guess_game import GuessEnv

from agentsgym.cli.catalogue import entries
from agentsgym.cli.console import UsageError
from agentsgym.cli.options import find_env
from agentsgym.envs import PACKAGED, EnvSpec, MultistepEnv, TextArenaEnv, TwentyQuestionsEnv, make, register
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.naming import completions, known_names, name_of_env, packaged_specs
from agentsgym.envs.players import anchors_of, has_random_player, imitation_player, random_player, reference_player
from agentsgym.envs.spec import imported
from agentsgym.envs.TextArena import LegalAgent
from agentsgym.envs.TwentyQuestions.players import GreedyPlayer, ImitationPlayer, RandomPlayer
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.viewer.index import environment_label

PACKAGE = Path(__file__).parent.parent / "agentsgym"
PLURAL = {"Search", "Tools"}  # words of English too, so that only their classes and paths give them away
OF_OPENENV = {
    *("types.py", "removed.py"),  # name a format of that project
    *("cli/app.py", "cli/commands/serve.py"),  # these and the next speak its protocol
    *(f"serving/{name}.py" for name in ("__init__", "served_env", "server", "session")),
}


def names_in(path: str, text: str) -> set[str]:
    """The packaged environments that a file outside their folders names."""
    found: set[str] = set()
    for name, dotted in PACKAGED.items():
        words = [rf"{dotted.rpartition('.')[2]}", rf"envs[./]{name}", *([name] if name not in PLURAL else [])]
        if re.search(rf"\b(?:{'|'.join(words)})\b", text) and not (name == "OpenEnv" and path in OF_OPENENV):
            found.add(name)
    return found


def test_no_file_outside_its_folder_names_an_environment() -> None:
    kinds = {".py", ".js", ".css", ".html", ".json", ".yaml", ".txt"}
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*") if file.suffix in kinds}
    outside = {path: file for path, file in files.items() if not re.match(r"envs/[A-Z]", path)}
    assert len(outside) > 250
    naming = {path: names_in(path, file.read_text(encoding="utf-8")) for path, file in outside.items()}
    written_for_users = {"cli/commands/new.py": {"Tools"}, "cli/templates/tool_environment.txt": {"Tools"}}
    serving_it = {"serving/policy.py": {"AgentProgram"}}
    expected = {"envs/__init__.py": {*PACKAGED}, **written_for_users, **serving_it}
    assert {path: names for path, names in naming.items() if names} == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('GROUPS = {"TextArena": "game"}', "TextArena"),
        ("from agentsgym.envs.Tools import ToolEnv", "Tools"),
        ("class Mine(SearchEnv): ...", "Search"),
        ('"agentsgym.envs.Search"', "Search"),
    ],
)
def test_a_name_is_found(text: str, name: str) -> None:
    assert names_in("cli/games.py", text) == {name}
    assert names_in("cli/games.py", "# Search the texts; Tools are called as in class TextWorldBase.") == set()


def test_every_folder_is_an_environment_with_its_record() -> None:
    assert {folder.name for folder in (PACKAGE / "envs").iterdir() if folder.name[0].isupper()} == PACKAGED.keys()
    for name, spec in packaged_specs().items():
        assert find_env(name).env_class.spec is spec
        for dotted in (spec.random, spec.reference, spec.imitation, spec.anchors):
            assert not dotted or callable(imported(dotted))


MINE = """
from agentsgym.envs import TextArenaEnv, TwentyQuestionsEnv

class Mine(TwentyQuestionsEnv):
    '''My questions.'''

class Arena(TextArenaEnv):
    '''My arena.'''
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "mine_of_worlds.py"
    path.write_text(MINE)
    sys.modules.pop(path.stem, None)
    yield str(path)
    sys.modules.pop(path.stem, None)


def test_a_subclass_has_the_players_of_its_parent(mine: str) -> None:
    env = find_env(f"{mine}:Mine").build()
    assert type(env) is not TwentyQuestionsEnv
    assert has_random_player(type(env))
    assert type(random_player(env)) is RandomPlayer
    assert type(reference_player(env)) is GreedyPlayer
    assert type(imitation_player(env)) is ImitationPlayer


def test_a_subclass_is_measured_as_its_parent_is(mine: str) -> None:
    own, parent = (ran("eval", name, "-a", "random", "-n", "20", "--json").json for name in (f"{mine}:Mine", PARENT))
    assert [one["agent"] for one in own["agents"]] == [one["agent"] for one in parent["agents"]]
    assert {one["agent"] for one in own["agents"]} == {"random", "reference"}
    rates = [one["results"]["win_rate"] for one in own["agents"]]
    assert rates == [one["results"]["win_rate"] for one in parent["agents"]]
    assert rates[0] > 0.3  # of a player that does not know the game: 0.025


PARENT = "TwentyQuestions"


def test_a_subclass_has_the_games_and_exact_values_of_its_parent(mine: str) -> None:
    named = find_env(f"{mine}:Arena:GuessTheNumber-v0", {"max_steps_per_episode": 4})
    assert (named.env_class.__name__, named.env_config["game"]) == ("Arena", "GuessTheNumber-v0")
    env = named.build()
    parent = TextArenaEnv(env_config=named.env_config)
    exact, known = anchors_of(env), anchors_of(parent)
    assert exact is not None
    assert known is not None
    assert exact({}) == known({})
    assert type(random_player(env)) is LegalAgent
    with pytest.raises(UsageError, match="has no variant 'clock': it has v1, "):
        find_env(f"{mine}:Mine:clock")
    assert find_env(f"{mine}:Mine:v1").env_config == find_env("TwentyQuestions:v1").env_config


class Arcade(GuessEnv):
    """Two games."""

    spec = EnvSpec(
        packages=("agentsgym_arcade_that_is_not_there",),
        extra="arcade",
        game_key="system_prompt",
        games=f"{__name__}:arcade_games",
        random=f"{__name__}:arcade_player",
        reference=f"{__name__}:arcade_player",
        imitation=f"{__name__}:arcade_player",
        anchors=f"{__name__}:arcade_anchors",
    )


class Renovated(Arcade):
    """An arcade whose own player goes before that of its record."""

    def reference_player(self, seed: int) -> Any:
        return ("its own", seed)


def arcade_games() -> Mapping[str, Mapping[str, Any]]:
    return {"pong": {"note": "A ball.", "min_players": 2, "max_players": 2}, "snake": {}}


def arcade_player(env: MultistepEnv, seed: int = 0) -> Any:
    return (type(env).__name__, seed)


def arcade_anchors(env: MultistepEnv) -> Any:
    return lambda task: (type(env).__name__, task)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})
    register(Arcade, "mine")


@pytest.mark.usefixtures("registered")
def test_a_registered_class_has_its_games_in_names_completion_and_catalogue() -> None:
    named = find_env("mine:pong")
    assert (named.env_class, named.env_config) == (Arcade, {"system_prompt": "pong"})
    assert (
        name_of_env("mine", named.env_config) == environment_label("mine", '{"system_prompt": "pong"}') == "mine:pong"
    )
    assert {"mine", "mine:pong", "mine:snake"} <= {*known_names()}
    assert completions("mi") == ["mine"]
    assert completions("mine:p") == ["mine:pong"]
    with pytest.raises(UsageError, match="did you mean mine"):
        find_env("mime:pong")
    listed = {one.name: one for one in entries() if one.name.startswith("mine")}
    assert listed["mine"].text == "Two games. List its 2 variants: agentsgym envs --text mine:"
    assert (listed["mine"].status, listed["mine"].extra, listed["mine"].max_players) == ("missing", "arcade", 2)
    assert (listed["mine:pong"].text, listed["mine:pong"].players) == ("A ball.", "2")
    assert listed["mine:snake"].is_variant
    assert ran("envs", "mine:pong", "--json").json["game"]["note"] == "A ball."
    assert ran("envs", "mine:tetris", "--json").json["game"] == {}  # its list need not be complete


def test_a_record_of_ones_own_names_the_players() -> None:
    env, changed = Arcade(), Renovated()
    assert random_player(env, 3) == reference_player(env, 3) == imitation_player(env, 3) == ("Arcade", 3)
    exact = anchors_of(env)
    assert exact is not None
    assert exact({"seed": 1}) == ("Arcade", {"seed": 1})
    assert (random_player(changed, 2), reference_player(changed, 2)) == (("Renovated", 2), ("its own", 2))
    with pytest.raises(MissingDependencyError, match=r"pip install 'agentsgym\[arcade\]'$"):
        env.spec.check_installed()


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose environment is an entry point, and that nobody has imported."""
    source = f"""
    from agentsgym.envs import EnvSpec
    from guess_game import GuessEnv

    class Far(GuessEnv):
        spec = EnvSpec(game_key="system_prompt", games="far_of_worlds:GAMES", random="{__name__}:arcade_player")

    GAMES = ("near", "wide")
    """
    (tmp_path / "far_of_worlds.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [
        importlib.metadata.EntryPoint("far", "far_of_worlds:Far", "agentsgym.envs"),
        importlib.metadata.EntryPoint("broken", "no_such_module_of_worlds:Far", "agentsgym.envs"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: found)
    yield "far_of_worlds"
    sys.modules.pop("far_of_worlds", None)


def test_an_entry_point_plugs_in_and_is_imported_only_when_its_games_are_requested(entry_point: str) -> None:
    assert {"far", "broken"} <= {*known_names()} & {one.name for one in entries()}
    assert completions("fa") == ["far"]
    assert entry_point not in sys.modules
    assert completions("far:w") == ["far:wide"]
    assert completions("broken:") == []
    named = find_env("far:near")
    assert named.env_config == {"system_prompt": "near"}
    assert random_player(named.build(), 1) == ("Far", 1)
    row = {"env_class_path": class_path(named.env_class), "env_config": named.env_config, "task_data": {}}
    assert row["env_class_path"] == "far_of_worlds.Far"
    assert type(make(row)) is named.env_class


def test_a_record_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"EnvSpec.random must be written 'package.module:attribute', got 'mine.Play"):
        EnvSpec(random="mine.Player")
    with pytest.raises(ConfigError, match="either game_key or dataset_key"):
        EnvSpec(game_key="game", dataset_key="task")
    with pytest.raises(ConfigError, match=r"Other.spec must be an EnvSpec, got 'arcade'"):
        type("Other", (GuessEnv,), {"spec": "arcade"})
