"""A game is won by its own outcome: what it gives for progress is no win."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest

from agentsgym import ScriptedAgent
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TextArena.games import GameFactory, PlayedGame
from agentsgym.envs.TextArena.isolation import GameContext

SOLVED = [*range(1, 16), None]


def begin(game: str, *, max_moves: int | None = None, **options: Any) -> PlayedGame:
    context = GameContext(random.Random(0))
    return PlayedGame(GameFactory(game, options)(context), context, num_players=1, seed=1, max_moves=max_moves)


def rows(tiles: list[int | None]) -> list[list[int | None]]:
    return [tiles[start : start + 4] for start in range(0, 16, 4)]


@pytest.mark.parametrize(("target", "limit"), [(128, 1000), (64, 60)])
def test_a_game_of_2048_is_won_by_its_tile_alone(target: int, limit: int) -> None:
    config = {"game": "2048-v0", "game_options": {"target_tile": target}, "max_steps_per_episode": limit}
    env = TextArenaEnv(env_config={**config, "errors_in_a_row": 9})
    agent = ScriptedAgent(["[up]", "[left]", "[right]", "[down]"] * 300)
    rollouts = env.rollout([{"seed": seed} for seed in range(12)], agent)
    assert False in {rollout.success for rollout in rollouts}
    for rollout in rollouts:
        assert rollout.success == rollout.info.get("reason", "").startswith("Congratulations")
        assert rollout.success == (rollout.final_reward == 1.0)


def test_numbers_that_hold_the_target_are_not_yet_a_countdown() -> None:
    lost = begin("Countdown-v0", numbers=[100, 1, 2], target=100)
    for move in ("[1 2 +]", "[0 1 -]"):
        lost.move(move)
    assert (lost.done, lost.rewards(), lost.is_won(0)) == (True, {0: 0.999}, False)
    idle = begin("Countdown-v0", numbers=[1, 2, 100], target=100)
    assert idle.progress() == 0.999
    for _ in range(2):
        idle.move("[nothing]")
    assert (idle.done, idle.rewards(), idle.is_won(0)) == (True, {0: 0.999}, False)
    won = begin("Countdown-v0", numbers=[100, 1, 2], target=101)
    won.move("[0 1 +]")
    assert (won.done, won.rewards(), won.is_won(0)) == (True, {0: 1.0}, True)


def test_a_fifteen_puzzle_is_won_when_every_tile_is_in_its_place() -> None:
    lost = begin("FifteenPuzzle-v0", max_moves=1)
    lost._game.initial_board = rows([2, 1, *SOLVED[2:]])
    lost._game.board = rows([1, 2, 4, 5, 3, *SOLVED[5:]])  # 3 tiles are wrong that were right in the beginning
    lost.move("[down]")
    assert (lost.done, lost.rewards(), lost.is_won(0)) == (True, {0: 1 - 1 / 16}, False)
    won = begin("FifteenPuzzle-v0")
    won._game.board = rows([*SOLVED[:14], None, 15])
    won.move("[left]")
    assert (won.done, won.rewards(), won.is_won(0)) == (True, {0: 1.0}, True)
    assert "Congratulations" in won.info_of(0)["reason"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the game's source is none for older versions of Python")
def test_a_player_without_a_legal_move_has_lost_at_checkers() -> None:
    context = GameContext(random.Random(0))
    game = PlayedGame(GameFactory("Checkers-v0", {})(context), context, num_players=2, seed=1, max_moves=None)
    board = [["."] * 8 for _ in range(8)]
    board[2][1], board[0][1] = "r", "b"
    game._game.state.game_state["board"] = board
    game.move("[2 1 1 0]")
    assert (game.done, game.is_won(0), game.is_won(1)) == (True, False, True)


def test_a_slitherlink_is_won_by_a_loop_and_not_by_its_clues() -> None:
    for edges, is_won in ([("h", 1, 0), ("v", 0, 0), ("v", 0, 1)], True), ([("h", 1, 0), ("v", 0, 0)], False):
        game = begin("Slitherlink-v0", max_moves=1)
        game._game.clues = [[None] * game._game.C for _ in range(game._game.R)]
        game._game.clues[0][0] = len(edges) + 1
        for edge in edges:
            game._game._toggle_edge(*edge)
        game.move("[h 0 0]")
        assert (game.done, game.rewards(), game.is_won(0)) == (True, {0: 1.0 if is_won else 1 - 1 / 16}, is_won)


@pytest.mark.parametrize("game", ["Countdown-v0", "FifteenPuzzle-v0", "Slitherlink-v0"])
def test_what_is_not_won_gives_less_than_a_win(game: str) -> None:
    env = TextArenaEnv(env_config={"game": game, "max_steps_per_episode": 20})
    for rollout in env.rollout([{"seed": seed} for seed in range(12)], LegalAgent(env)):
        assert rollout.success == (rollout.final_reward == 1.0)
        assert 0 <= rollout.final_reward <= 1


@pytest.mark.parametrize(("found", "is_won"), [(0, False), (19, True)])
def test_one_set_is_no_won_game_of_set(found: int, is_won: bool) -> None:
    game = begin("Set-v0")
    table = game.state.game_state
    table.update(num_turns=19, score=found)
    cards = itertools.combinations(range(len(table["board"])), 3)
    one = next(three for three in cards if all(len({table["board"][i][k] for i in three}) != 2 for k in range(4)))
    game.move(str([index + 1 for index in one]))
    assert (game.done, game.rewards(), game.is_won(0)) == (True, {0: found + 1.0}, is_won)


def test_chains_of_words_begin_with_a_word_of_a_list_in_order() -> None:
    words = begin_chains()._game.word_list
    assert words == sorted(words)


def begin_chains() -> PlayedGame:
    context = GameContext(random.Random(0))
    return PlayedGame(GameFactory("WordChains-v0")(context), context, num_players=2, seed=1)
