"""Games whose moves are drawn by their own rules, and won by their own outcome: what progress gives is no win."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ScriptedAgent, Trajectory
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TextArena.games import GameFactory, PlayedGame
from agentsgym.envs.TextArena.isolation import GameContext
from agentsgym.envs.TextArena.moves import moves_by_rules, parts_of
from agentsgym.envs.TextArena.players import LegalPlayer


def begin(game: str, **options: Any) -> PlayedGame:
    context = GameContext(random.Random(0))
    return PlayedGame(GameFactory(game, options)(context), context, num_players=2, seed=1)


def play(game: str, num_games: int, **config: Any) -> list[Trajectory]:
    env = TextArenaEnv(env_config={"game": game, **config})
    return env.rollout([{"seed": seed} for seed in range(num_games)], LegalAgent(env), failures=None)


@given(st.integers(0, 30), st.integers(1, 8), st.randoms(use_true_random=False))
def test_parts_are_a_sum(total: int, count: int, rng: random.Random) -> None:
    parts = parts_of(total, count, rng)
    assert (len(parts), sum(parts), min(parts) >= 0) == (count, total, True)


def test_every_way_to_divide_is_drawn_about_as_often() -> None:
    rng = random.Random(0)
    drawn = Counter(tuple(parts_of(3, 3, rng)) for _ in range(10_000))
    assert set(drawn) == {parts for parts in itertools.product(range(4), repeat=3) if sum(parts) == 3}
    assert max(abs(count - 1000) for count in drawn.values()) < 150  # five standard deviations


@pytest.mark.parametrize("opponent", ["random", "first"])
@pytest.mark.parametrize(
    "game",
    [
        "Alquerque-v0", "Battleship-v0", "Breakthrough-v0", "ColonelBlotto-v0-extreme", "LinesOfAction-v0",
        "NewRecruit-v0", "SantoriniBaseFixed-v0", "Tak-v0", "TwoDollar-v0",
    ],
)  # fmt: skip
def test_random_play_against_others_is_legal_to_the_end(game: str, opponent: str) -> None:
    rollouts = play(game, 5, opponent=opponent, max_steps_per_episode=100)
    assert not any(turn.invalid for rollout in rollouts for turn in rollout.turns)
    results = [rollout for rollout in rollouts if rollout.info.get("reason")]
    assert len(results) >= 2  # games without a limit may outlast this one
    assert all("nvalid" not in rollout.info["reason"] for rollout in results)
    assert any(rollout.final_reward for rollout in results)


@pytest.mark.parametrize(
    "game",
    [
        "Bandit-v0", "Countdown-v0", "Cryptarithm-v0", "LogicPuzzle-v0", "Mastermind-v0-extreme", "PegJump-v0",
        "RushHour-v0", "Slitherlink-v0", "TowerOfHanoi-v0",
    ],
)  # fmt: skip
def test_random_play_alone_is_legal_to_the_end(game: str) -> None:
    rollouts = play(game, 4, max_steps_per_episode=30)
    assert not any(turn.invalid for rollout in rollouts for turn in rollout.turns)
    assert all(rollout.num_turns >= 4 for rollout in rollouts)  # none of them is over sooner


@pytest.mark.parametrize(
    ("name", "size", "form", "num_positions"),
    [("Alquerque-v0", 5, "[{} {}]", 5), ("Breakthrough-v0-tiny", 5, "[{}{}]", 5), ("LinesOfAction-v0", 8, "[{}{}]", 2)],
)
def test_the_moves_of_a_board_are_all_that_are_legal(name: str, size: int, form: str, num_positions: int) -> None:
    squares = [f"{column}{row}" for column in "abcdefgh"[:size] for row in range(1, size + 1)]
    every = [form.format(*pair) for pair in itertools.permutations(squares, 2)]
    game, rng = begin(name), random.Random(0)
    for _ in range(num_positions):
        found = [move for move in game.moves_by_rules(rng) if game.is_legal(move)]
        assert sorted(found) == sorted(move for move in every if game.is_legal(move))
        for _ in range(4):
            game.move(LegalPlayer(rng).answer(game.observe(), game))


@pytest.mark.parametrize(
    ("square", "num_moves"),
    [
        ((2, 2), 4 * (1 + 2 + 3)),  # two squares in each direction: one piece, two together or apart, three in no three
        ((0, 0), 2 * (1 + 2 + 4)),  # four squares in each of two directions
    ],
)
def test_a_stack_of_tak_walks_every_straight_way(square: tuple[int, int], num_moves: int) -> None:
    game = begin("Tak-v0-medium")
    row, column = square
    game._game.board[row][column] = ["F1", "F0", "F0"]
    moves = [move for move in game.moves_by_rules(random.Random(0)) if move.startswith("[move")]
    assert len(moves) == len(set(moves)) == num_moves
    assert all(game.is_legal(move) for move in moves)


def test_pieces_of_tak_are_put_on_every_empty_square() -> None:
    game = begin("Tak-v0")
    assert len(game.moves_by_rules(random.Random(0))) == 16 * 3
    game._game.players[0] = {"stones": 0, "capstones": 1}
    game._game.board[1][2] = ["F1"]
    assert sorted(game.moves_by_rules(random.Random(0))) == sorted(
        f"[place () {{({row},{column}): [C0]}}]" for row in range(4) for column in range(4) if (row, column) != (1, 2)
    )


def test_a_road_of_tak_wins() -> None:
    game = begin("Tak-v0")
    for step in range(4):
        game.move(f"[place () {{(0,{step}): [F0]}}]")
        if step < 3:
            game.move(f"[place () {{(3,{step}): [W1]}}]")
    assert (game.done, game.rewards(), game.is_won(0)) == (True, {0: 1.0, 1: -1.0}, True)
    assert game.info_of(0)["reason"] == "Player 0 has connected two opposite edges of the board."


def test_a_walk_of_tak_is_described() -> None:
    game = begin("Tak-v0")
    game.move("[place () {(0,0): [F0]}]")
    game.move("[place () {(3,3): [F1]}]")
    game.observe()
    game.move("[move (0,0) {(0,1): [F0]}]")
    assert "Player 0 moved pieces from (0, 0) to [(0, 1)]." in game.observe()


@pytest.mark.parametrize(
    "move", ["[place () {(1,1): []}]", "[place () {(1): [F0]}]", "[move (0,0) {(1): [F0]}]", "[move (0,0) {}]"]
)
def test_a_move_of_tak_that_lacks_a_part_is_invalid(move: str) -> None:
    game = begin("Tak-v0")
    game._game.board[0][0] = ["F0"]
    assert not game.move(move, error_allowance=1)
    assert not game.done


def test_a_player_who_must_be_tough_concedes_a_cent_at_a_time() -> None:
    options = {"player_roles": ["high_tension", "vanilla"]}
    rollouts = play("TwoDollar-v0", 8, seat=0, game_options=options)
    found = 0
    for rollout in rollouts:
        output = [re.fullmatch(r"\[Propose\] \$(.*)", one["content"]) for one in rollout.messages]
        amounts = [round(100 * float(one[1])) for one in output if one]
        assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(amounts))
        found += len(amounts) > 1
    assert found


def test_one_answers_what_the_other_proposed_and_nothing_else() -> None:
    game = begin("TwoDollar-v0")
    assert [move[:9] for move in game.moves_by_rules(random.Random(0))] == ["[Propose]"]
    game.move("[Propose] $1.50")
    assert game.moves_by_rules(random.Random(0))[:2] == ["[Accept]", "[Reject]"]
    game.move("[Reject]")
    assert [move[:9] for move in game.moves_by_rules(random.Random(0))] == ["[Propose]"]


def test_who_only_speaks_nonsense_loses_at_santorini() -> None:
    game = begin("SantoriniBaseFixed-v0")
    for _ in range(2):
        game.move("nonsense", error_allowance=1)
    assert (game.done, game.rewards(), game.is_won(1)) == (True, {0: -1.0, 1: 1.0}, True)


def test_two_go_on_where_a_third_is_out_of_santorini() -> None:
    context = GameContext(random.Random(0))
    game = PlayedGame(GameFactory("SantoriniBaseFixed-v0")(context), context, num_players=3, seed=1)
    game.move("nonsense", error_allowance=0)
    assert (game.done, game.player) == (False, 1)
    player = LegalPlayer(random.Random(0))
    seats: list[int] = []
    while not game.done:
        seats.append(game.player)
        game.move(player.answer(game.observe(), game))
    assert set(seats) == {1, 2}
    assert game.rewards()[0] == -1.0


def test_the_roles_do_not_hang_on_the_order_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: Callable[[Any], list[str]] = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listed(path), reverse=True))
    roles = begin("TwoDollar-v0", max_rounds=19)._game.available_roles  # options of its own, so that it is built here
    assert list(roles) == sorted(roles)
    assert len(roles) == 17


def test_other_games_have_no_moves_of_this_kind() -> None:
    assert moves_by_rules(begin("TicTacToe-v0")._game, random.Random(0)) == []


def test_each_player_of_kuhns_poker_is_shown_its_card_once() -> None:
    game = begin("KuhnPoker-v0")
    for _ in range(2):  # rounds
        for waiting in game.state.observations.values():
            reported = [message for _, message, _ in waiting if "Your card is" in message]
            assert len(reported) == 1
            waiting.clear()
        game.move("[bet]")
        game.move("[fold]")


SOLVED = [*range(1, 16), None]


def begin_game(game: str, *, max_moves: int | None = None, **options: Any) -> PlayedGame:
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
    lost = begin_game("Countdown-v0", numbers=[100, 1, 2], target=100)
    for move in ("[1 2 +]", "[0 1 -]"):
        lost.move(move)
    assert (lost.done, lost.rewards(), lost.is_won(0)) == (True, {0: 0.999}, False)
    idle = begin_game("Countdown-v0", numbers=[1, 2, 100], target=100)
    assert idle.progress() == 0.999
    for _ in range(2):
        idle.move("[nothing]")
    assert (idle.done, idle.rewards(), idle.is_won(0)) == (True, {0: 0.999}, False)
    won = begin_game("Countdown-v0", numbers=[100, 1, 2], target=101)
    won.move("[0 1 +]")
    assert (won.done, won.rewards(), won.is_won(0)) == (True, {0: 1.0}, True)


def test_a_fifteen_puzzle_is_won_when_every_tile_is_in_its_place() -> None:
    lost = begin_game("FifteenPuzzle-v0", max_moves=1)
    lost._game.initial_board = rows([2, 1, *SOLVED[2:]])
    lost._game.board = rows([1, 2, 4, 5, 3, *SOLVED[5:]])  # 3 tiles are wrong that were right in the beginning
    lost.move("[down]")
    assert (lost.done, lost.rewards(), lost.is_won(0)) == (True, {0: 1 - 1 / 16}, False)
    won = begin_game("FifteenPuzzle-v0")
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
        game = begin_game("Slitherlink-v0", max_moves=1)
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
    game = begin_game("Set-v0")
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
