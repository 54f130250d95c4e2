"""What engines answered is remembered: the same transcripts, fewer questions."""

import random
from collections.abc import Iterator

import pytest

from agentsgym.envs.shared.engines import CachedProcesses
from agentsgym.errors import EnvError

ENGINE = "toy_engine:ToyEngine"


@pytest.fixture(params=[True, False], ids=["named states", "no names"])
def game(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"from": 5, "names_states": request.param}


@pytest.fixture
def engines() -> Iterator[CachedProcesses]:
    processes = CachedProcesses(ENGINE, step_timeout_s=5.0, max_mb=10)
    yield processes
    processes.close()


def test_sessions_see_what_they_would_without_memory(engines: CachedProcesses, game: dict[str, object]) -> None:
    """Random walks of many sessions, taking turns, against sums made here."""
    draws, totals = random.Random(0), dict[str, int]()
    for name in map(str, range(30)):
        totals[name] = engines.begin(name, game)["total"]
    assert set(totals.values()) == {5}
    for _ in range(400):
        name, number = draws.choice([*totals]), draws.choice([-1, 0, 1])
        totals[name] += number
        assert engines.step(name, str(number))["total"] == totals[name]
    assert engines.num_computed + engines.num_cached == 429  # and the very first start
    assert engines.num_cached > (300 if game["names_states"] else 60)


def test_a_second_play_sends_nothing(engines: CachedProcesses, game: dict[str, object]) -> None:
    answers = []
    for name in "ab":
        answers.append([engines.begin(name, game), *(engines.step(name, str(n)) for n in range(5))])
        engines.end(name)
    assert answers[0] == answers[1]
    assert engines.num_computed == 5


def test_an_unknown_command_after_known_ones(engines: CachedProcesses, game: dict[str, object]) -> None:
    for name, command in (("a", "7"), ("b", "9"), ("c", "7")):
        engines.begin(name, game)
        engines.step(name, "1")
        engines.step(name, "2")
        assert engines.step(name, command)["total"] == 8 + int(command)
    assert engines.step("c", "1")["total"] == 16


def test_faults_are_not_remembered_and_end_their_session(engines: CachedProcesses, game: dict[str, object]) -> None:
    for name in "abc":
        engines.begin(name, game)
    for name in "ab":
        with pytest.raises(EnvError, match="SIGSEGV"):
            engines.step(name, "crash")
        with pytest.raises(EnvError, match="has no game in the engine"):
            engines.step(name, "1")
    assert engines.step("c", "1")["total"] == 6


def test_an_answer_belongs_to_who_got_it(engines: CachedProcesses, game: dict[str, object]) -> None:
    engines.begin("a", game)["total"] = "changed"
    assert engines.begin("b", game)["total"] == 5


def test_games_that_were_not_begun_for_long_are_forgotten() -> None:
    engines = CachedProcesses(ENGINE, step_timeout_s=5.0, max_mb=0.001)
    try:
        for start in range(30):
            engines.begin("a", {"from": start})
            assert engines.step("a", "1")["total"] == start + 1
        assert engines.num_cached == 0
        engines.begin("b", {"from": 29})
        engines.begin("c", {"from": 0})
        assert engines.num_cached == 1
        assert len(engines._games) < 20
    finally:
        engines.close()


def test_one_game_that_is_played_for_ever_is_forgotten_too() -> None:
    engines = CachedProcesses(ENGINE, step_timeout_s=5.0, max_mb=0.001)
    try:
        for number in range(100):
            assert engines.begin("a", {})["total"] == 0
            assert engines.step("a", str(number))["total"] == number
            assert sum(game.num_bytes for game in engines._games.values()) < 1500
    finally:
        engines.close()


def test_what_sessions_of_forgotten_games_learn_takes_no_room_from_others() -> None:
    """They play on in what they know; it is theirs alone, and is no reason to forget more."""
    engines = CachedProcesses(ENGINE, step_timeout_s=5.0, max_mb=0.001)
    try:
        engines.begin("old", {"from": -1})
        for number in range(30):
            engines.begin("new", {"from": number})
        for number in range(100):
            engines.step("old", str(number))
        for name in "ab":
            for start in (50, 51):
                engines.begin(name, {"from": start})
        assert engines.num_cached == 2
    finally:
        engines.close()
