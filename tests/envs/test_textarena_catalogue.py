"""The catalogue describes games as playing shows them: of a few games here, of all with make test-textarena."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import os
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import textarena

from agentsgym import ScriptedAgent
from agentsgym.envs.TextArena import TextArenaEnv, catalogue
from agentsgym.envs.TextArena.patches import PATCHED_STATES, patched_state
from tools.textarena_catalogue import base_ids, entry_of, measure, transcripts, world_of

SAMPLE = (
    "2048-v0", "Bandit-v0", "Countdown-v0", "Debate-v0", "FrozenLake-v0", "GuessTheNumber-v0", "Klondike-v0",
    "KuhnPoker-v0", "LiarsDice-v0", "Mastermind-v0-extreme", "Othello-v0", "TicTacToe-v0", "UsedCarNegotiation-v0",
    "Wordle-v0",
)  # fmt: skip
IS_WHOLE = "AGENTSGYM_WHOLE_CATALOGUE" in os.environ
SLOW = "Sokoban-v0-medium"  # makes its levels in minutes
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def played() -> list[str]:
    return [game for game in catalogue() if game != SLOW] if IS_WHOLE else list(SAMPLE)


def test_the_catalogue_has_every_game_and_no_other() -> None:
    assert list(catalogue()) == base_ids()


def test_most_games_run_and_those_that_do_not_give_the_reason() -> None:
    counts = Counter(entry.status for entry in catalogue().values())
    assert counts["ok"] > 180
    assert all(entry.reason for entry in catalogue().values() if entry.status == "broken")
    assert all(entry.reproducible for entry in catalogue().values())


def test_what_it_claims_is_what_playing_shows() -> None:
    games = [game for game in played() if not (catalogue()[game].min_python > PYTHON)]
    found = measure(games, 2) if IS_WHOLE else {game: dataclasses.asdict(entry_of(game)) for game in games}
    wrong = []
    for game in games:
        entry = catalogue()[game]
        for name in ("min_players", "max_players", "status", "reproducible", "seeds_matter", "hidden"):
            if found[game][name] != getattr(entry, name):
                wrong.append(f"{game}: {name} is {found[game][name]}, and the catalogue says {getattr(entry, name)}")
        if (found[game]["step_us"] is None) != (entry.step_us is None):
            wrong.append(f"{game}: step_us is {found[game]['step_us']}")
    assert not wrong, "\n".join(wrong)


def test_a_game_that_takes_too_long_is_called_so() -> None:
    entry = measure([SLOW], 1, time_limit_s=2.0)[SLOW]
    assert (entry["status"], entry["reason"]) == ("broken", "it did not finish 24 moves in 2 s")


def test_games_are_alike_in_processes_that_hash_otherwise() -> None:
    games = [game for game in (*played(), "WordChains-v0") if catalogue()[game].status != "broken"]
    games = [game for game in games if not catalogue()[game].min_python > PYTHON]
    one, other = transcripts(games, 1), transcripts(games, 2)
    assert [game for game in games if one[game] != other[game]] == []


def calls_of_state(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls ``self.state.name(…)`` in a game's source, but for those that hand on arguments unseen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            is_seen = not any(isinstance(one, ast.Starred) for one in node.args) and all(k.arg for k in node.keywords)
            if isinstance(owner, ast.Attribute) and owner.attr == "state" and is_seen:
                yield node.func.attr, node


def fits(state: type[Any], name: str, call: ast.Call) -> bool:
    method = getattr(state, name, None)
    try:
        names = {str(keyword.arg): None for keyword in call.keywords}
        inspect.signature(method).bind(None, *call.args, **names)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def readable_worlds() -> dict[str, str]:
    """The source of each game that runs on this Python, by its folder."""
    worlds = {world_of(game) for game, entry in catalogue().items() if not (entry.min_python > PYTHON)}
    worlds -= {world_of(game) for game, entry in catalogue().items() if entry.status == "broken"}
    sources = {world: importlib.util.find_spec(f"textarena.envs.{world}.env") for world in sorted(worlds)}
    return {world: Path(str(spec.origin)).read_text("utf-8") for world, spec in sources.items() if spec is not None}


def test_games_call_their_state_as_it_wants_to_be_called() -> None:
    wrong = []
    for world, source in readable_worlds().items():
        names = set(re.findall(r"\b(\w+PlayerState)\(", source))
        states = [
            patched_state(name) if world in PATCHED_STATES else getattr(textarena, name) for name in sorted(names)
        ]
        for name, call in calls_of_state(ast.parse(source)):
            if states and not any(fits(state, name, call) for state in states):
                wrong.append(f"{world}, line {call.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def test_open_games_are_not_called_hidden() -> None:
    for world in ("Alquerque", "Breakthrough", "Othello", "SantoriniBaseFixed", "ThreePlayerTicTacToe"):
        env = TextArenaEnv(env_config={"game": f"{world}-v0", "opponent": "self", "shared_conversation": True})
        assert env.shares_conversation


@pytest.mark.parametrize("game", [game for game in played() if catalogue()[game].status in ("ok", "words")])
def test_any_game_is_played_as_an_environment(game: str) -> None:
    entry = catalogue()[game]
    if entry.min_python > PYTHON or game == SLOW:
        pytest.skip("not on this Python, or takes minutes to begin")
    config = {"game": game, "max_steps_per_episode": 3, "errors_in_a_row": 5}
    env = TextArenaEnv(env_config=config | ({"opponent": "self"} if entry.max_players > 1 else {}))
    agent = ScriptedAgent(["[0]", "[a b]", "[1 1]"], repeat_last=True)
    rollouts = env.rollout([{"seed": seed} for seed in (1, 1)], agent)
    assert [rollout.error for rollout in rollouts] == [None, None]
    assert rollouts[0].messages == rollouts[1].messages


def test_256_sessions_of_a_game_of_words_are_small() -> None:
    env = TextArenaEnv(env_config={"game": "Wordle-v0"})
    env.start_session("first", {}, seed=0)
    tracemalloc.start()
    try:
        for number in range(256):
            env.start_session(f"session {number}", {}, seed=number)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 64 * 2**20
