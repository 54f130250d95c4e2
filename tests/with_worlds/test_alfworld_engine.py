"""The engine of households: mended, it names what it states stock; and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentsgym.envs.ALFWorld.engine import HouseholdEngine
from agentsgym.errors import EnvError
from tools.households import generate_households

TRANSCRIPT = Path(__file__).parent / "alfworld_transcript.py"
ROOT = TRANSCRIPT.parent.parent.parent


@pytest.fixture(scope="module")
def engine() -> Iterator[HouseholdEngine]:
    made = HouseholdEngine()
    yield made
    made.close()


def games_of(folder: Path, split: str = "train") -> list[Path]:
    return sorted(folder.rglob(f"{split}/**/game.tw-pddl"))


def transcripts(kind: str, games: list[Path], hash_seed: str) -> str:
    command = [sys.executable, str(TRANSCRIPT), kind, *map(str, games)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


def test_the_patched_engine_returns_the_same_to_the_byte(households: Path, tmp_path: Path) -> None:
    [medium] = generate_households(tmp_path, {"train": 1}, size="medium").games["train"]
    games = [*games_of(households), medium]
    mended = transcripts("mended", games, "1")
    assert len(mended.splitlines()) == 2 * len(games)
    assert mended == transcripts("stock", games, "0")


def test_progress_is_full_exactly_when_the_game_is_won(engine: HouseholdEngine, households: Path) -> None:
    for game in games_of(households):
        output = engine.start({"file": str(game)})
        progress = [output["progress"]]
        for command in json.loads(game.read_text())["walkthrough"]:
            assert command in output["admissible"]
            output = engine.step(command)
            progress.append(output["progress"])
            assert output["understood"]
            assert (output["progress"] == 1.0) == output["won"]
        assert output["won"], game
        assert 0 <= progress[0] < 1


def test_equal_state_keys_are_followed_by_equal_answers(engine: HouseholdEngine, households: Path) -> None:
    """Walks meet again, on other ways; what the environment remembers of one must hold for the other."""
    num_met = 0
    for game in games_of(households)[:3]:
        known: dict[tuple[str, str], dict[str, Any]] = {}
        worlds: dict[str, str] = {}
        for walk in range(6):
            stream = random.Random(walk)
            output = engine.start({"file": str(game)})
            for _ in range(40):
                key, command = output["state_key"], stream.choice(output["admissible"])
                assert worlds.setdefault(key, output["key"]) == output["key"]
                output = engine.step(command)
                num_met += (key, command) in known
                assert known.setdefault((key, command), output) == output
    assert num_met > 100


def test_what_is_only_noted_is_no_other_position(engine: HouseholdEngine, households: Path) -> None:
    begun = engine.start({"file": str(games_of(households)[0])})
    for command in ("look", "inventory", "help", "fly away"):
        output = engine.step(command)
        assert output["state_key"] == begun["state_key"], command
        assert output["understood"] == (command != "fly away")
    assert output["text"] == "Nothing happens."


def test_a_moved_thing_that_is_put_back_is_where_it_was(engine: HouseholdEngine, households: Path) -> None:
    [game] = [one for one in games_of(households) if "pick_and_place" in str(one)]
    engine.start({"file": str(game)})
    output: dict[str, Any] = {"key": ""}
    for command in json.loads(game.read_text())["walkthrough"]:
        before, output = output, engine.step(command)
        if command.startswith("take "):
            thing, place = command.removeprefix("take ").split(" from ")
            assert engine.step(f"move {thing} to {place}")["key"] == before["key"]
            return
    pytest.fail("the walkthrough takes nothing")


def test_what_is_no_game_is_reported_in_a_sentence(engine: HouseholdEngine, households: Path, tmp_path: Path) -> None:
    good = json.loads(games_of(households)[0].read_text())
    broken, lacking, nosy = (tmp_path / name for name in ("broken", "lacking", "nosy"))
    broken.write_text("{")
    lacking.write_text(json.dumps({"grammar": "", "walkthrough": []}))
    grammar = good["grammar"].replace("{r.name}.", "{open('/etc/hosts').read()}.")
    nosy.write_text(json.dumps({**good, "grammar": grammar}))
    unknown = tmp_path / "unknown"  # the planner's translator exits for it
    unknown.write_text(
        json.dumps({**good, "pddl_problem": good["pddl_problem"].replace("(inReceptacle ?", "(inBox ?")})
    )
    for file, sentence in (
        (broken, "cannot be read"),
        (lacking, "lacks pddl_domain, pddl_problem"),
        (tmp_path / "missing", "cannot be read"),
        (nosy, "that is not allowed"),
        (unknown, f"cannot load the game {unknown}: SystemExit: Undeclared predicate: inbox"),
    ):
        with pytest.raises((ValueError, EnvError), match=sentence):
            play_through(engine, file)
    assert engine.start({"file": str(games_of(households)[0])})["admissible"]  # and it goes on with the next game


def play_through(engine: HouseholdEngine, file: Path) -> None:
    output = engine.start({"file": str(file)})
    for command in [one for one in output["admissible"] if one.startswith("go to")]:
        engine.step(command)


def test_games_leave_no_file_and_one_library(households: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = mapped()
    engine = HouseholdEngine()
    sizes = set[int]()
    for game in games_of(households)[:4]:
        engine.start({"file": str(game)})
        sizes.add(mapped() - before)
    assert len(sizes) == 1
    assert 0 < sizes.pop() < 3_000_000  # not the 34 MB with the debug symbols
    engine.close()
    engine.close()  # does nothing more
    assert mapped() == before
    assert list(tmp_path.iterdir()) == []


def mapped() -> int:
    """Bytes of the planner's library that this process has mapped."""
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "libdown" in line
    ]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)
