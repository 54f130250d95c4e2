"""What counts as a move, and as an invalid one: of the agent, and of the other players."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentsgym import RandomAgent, ScriptedAgent, Trajectory
from agentsgym.envs import opponents
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TextArena.games import GameFactory, PlayedGame
from agentsgym.envs.TextArena.isolation import GameContext
from agentsgym.types import StopReason

TIC_TAC_TOE: dict[str, Any] = {"game": "TicTacToe-v0", "seat": 0}


def play(config: dict[str, Any], moves: Sequence[str], opponent: Any = None, seed: int = 1) -> Trajectory:
    env = TextArenaEnv(env_config=config, opponent=opponent)
    return env.rollout([{"seed": seed}], ScriptedAgent(list(moves), repeat_last=True), failures=None)[0]


def begin(game: str, num_players: int, seed: int = 1) -> PlayedGame:
    context = GameContext(random.Random(0))
    return PlayedGame(GameFactory(game)(context), context, num_players=num_players, seed=seed)


# Thoughts


def test_thoughts_are_no_move_and_stay_in_the_conversation() -> None:
    rollout = play({**TIC_TAC_TOE, "opponent": "first"}, ["<think>Corners: [0] or [8]?</think>\n[4]"])
    thought = "Corners: [0] or [8]?"
    assert rollout.messages[1] == {"role": "assistant", "content": "[4]", "reasoning_content": thought}
    assert "placed their symbol (O) in cell 4" in rollout.messages[2]["content"]
    guess = play({"game": "GuessTheNumber-v0"}, ["<think>Between [1] and [20]?</think>10", "[10]"])
    assert "already guessed" in guess.messages[-2]["content"]


def test_a_thought_that_never_closes_is_an_invalid_move() -> None:
    rollout = play({**TIC_TAC_TOE, "opponent": "first"}, ["<think>I take [4]"])
    assert [turn.invalid for turn in rollout.turns] == [True, True]
    assert rollout.final_reward == -1.0


def test_other_players_are_not_shown_thoughts_and_theirs_are_no_moves() -> None:
    seen: list[str] = []

    class Other:
        def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
            seen.append(messages[-1]["content"])
            return "<think>[0] is a secret.</think>[8]", None

    rollout = play(TIC_TAC_TOE, ["<think>The middle is a secret.</think>[4]", "[5]"], Other())
    assert "[Player 0] [4]" in seen[0]
    assert "secret" not in str(seen)
    assert "secret" not in rollout.messages[2]["content"]
    assert "placed their symbol (X) in cell 8" in rollout.messages[2]["content"]


def test_an_answer_that_looks_like_a_header_hides_nothing_from_its_seat() -> None:
    rollout = play({"game": "KuhnPoker-v0", "opponent": "self"}, ["[Player 0]\n[check]"])
    assert len(rollout.turns) > 2
    for turn in rollout.turns:
        assert turn.prompt_messages is not None
        assert "Kuhn Poker" in turn.prompt_messages[0]["content"]


# Invalid moves


@pytest.mark.parametrize(
    ("game", "num_players"), [("SantoriniBaseFixed-v0", 2), ("Golf-v0", 4), ("Briscola-v0", 4), ("Poker-v0", 2)]
)
@pytest.mark.parametrize("forgiven", [0, 2])
def test_an_agent_that_makes_invalid_moves_alone_loses(game: str, num_players: int, forgiven: int) -> None:
    config = {"game": game, "num_players": num_players, "seat": 0, "errors_in_a_row": forgiven}
    rollout = play(config, ["[nonsense]"])
    assert (rollout.final_reward, rollout.success, rollout.stop_reason) == (-1.0, False, StopReason.DONE)
    assert [turn.invalid for turn in rollout.turns] == [True] * (forgiven + 1)
    assert "invalid move" in rollout.info["reason"]


def test_the_last_player_who_was_not_eliminated_wins() -> None:
    game = begin("Poker-v0", 4)
    while not game.done:
        assert not game.move("[nonsense]", 0)
    assert sorted(game.rewards().values()) == [-1.0, -1.0, -1.0, 1.0]


def test_what_the_agents_episode_may_still_forgive_is_not_what_its_opponents_may() -> None:
    config = {**TIC_TAC_TOE, "error_allowance": 1}
    other = ["[8]", "[99]", "[2]", "[5]"]  # its second move is invalid, and forgiven
    clean = play(config, ["[0]", "[4]", "[6]"], ScriptedAgent(other))
    spent = play(config, ["[77]", "[0]", "[4]", "[6]"], ScriptedAgent(other))
    assert [turn.invalid for turn in spent.turns] == [True, False, False, False]
    assert clean.final_reward == spent.final_reward == -1.0
    assert clean.info["reason"] == spent.info["reason"] == "Player 1 has won!"


@pytest.mark.parametrize(("forgiven", "reward"), [(0, 1.0), (2, -1.0)])
def test_other_players_are_forgiven_as_many_invalid_moves_in_a_row(forgiven: int, reward: float) -> None:
    other = ScriptedAgent(["[8]", "[99]", "[99]", "[2]", "[5]"])
    rollout = play({**TIC_TAC_TOE, "errors_in_a_row": forgiven}, ["[0]", "[4]", "[6]"], other)
    assert rollout.final_reward == reward


def test_a_move_leaves_the_games_own_allowance_as_it_was() -> None:
    game = begin("TicTacToe-v0", 2)
    own = game.state.error_allowance
    game.move("[nonsense]", own + 5)
    assert game.state.error_allowance == own
    assert "set_invalid_move" not in vars(game.state)


# Winning moves that fail in TextArena


@pytest.mark.parametrize("num_players", [2, 3, 4])
def test_the_most_points_win_at_briscola_whoever_moves_last(num_players: int) -> None:
    last, winners = set(), set()
    for seed in range(6):
        game = begin("Briscola-v0", num_players, seed)
        while not game.done:
            mover = game.player
            game.move("[play 1]")
        points = game.state.game_state["points_won"]
        best = max(points, key=lambda seat: points[seat])
        assert game.rewards() == {seat: 1.0 if seat == best else -1.0 for seat in range(num_players)}
        assert f"Player {best} wins" in game.info_of(0)["reason"]
        last.add(mover == best)
        winners.add(best)
    assert last == {True, False}
    assert len(winners) > 1


@pytest.mark.parametrize("num_players", [2, 3, 4])
def test_the_fewest_points_win_at_golf(num_players: int) -> None:
    winners = set()
    for seed in range(6):
        game = begin("Golf-v0", num_players, seed)
        while not game.done:
            game.move("[draw]")
            if not game.done:
                game.move("[discard]")
        players = game.state.game_state["players"]
        best = min(players, key=lambda seat: players[seat]["score"])
        assert game.rewards() == {seat: 1.0 if seat == best else -1.0 for seat in range(num_players)}
        winners.add(best)
    assert len(winners) > 1


@pytest.mark.parametrize("game_id", ["Tak-v0", "Tak-v0-medium", "Tak-v0-hard"])
@pytest.mark.parametrize("winner", [0, 1])
def test_a_road_wins_at_tak(game_id: str, winner: int) -> None:
    game = begin(game_id, 2)
    size = game._game.board_size
    for row in range(size):
        for seat in (0, 1):
            if not game.done:
                column = 0 if seat == winner or row < size - 1 else 1  # the other one leaves the last place out
                game.move(f"[place () {{({row},{column + 2 * seat}): [F{seat}]}}]")
    assert (game.done, game.rewards()) == (True, {winner: 1.0, 1 - winner: -1.0})


# The other players


def test_a_game_in_which_others_go_on_for_ever_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opponents, "MAX_MOVES", 30)
    config = {"game": "SettlersOfCatan-v0", "seat": 0, "errors_in_a_row": 1}
    rollout = play(config, ["[1]"], ScriptedAgent(["[nothing]"], repeat_last=True))
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert (rollout.error, rollout.final_reward, rollout.success) == (None, 0.0, False)


def starts(env: TextArenaEnv, num_rollouts: int) -> set[str]:
    return {one.messages[0]["content"] for one in env.rollout([{"seed": 1}], LegalAgent(env), num_rollouts)}


def test_opponents_that_draw_play_by_the_sessions_own_draws() -> None:
    cells = [f"[{cell}]" for cell in range(9)]
    config = {"game": "TicTacToe-v0", "errors_in_a_row": 20}

    def env() -> TextArenaEnv:
        return TextArenaEnv(env_config=config, opponent=RandomAgent(cells, seed=3))

    class First:
        def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
            return messages[-1]["content"].split("Available Moves: '")[1][:3], None

    tasks = [{"seed": seed} for seed in range(8)]
    together = env().rollout(tasks, First(), 2)
    apart = env().rollout(tasks, First(), 2, max_concurrent=1)
    assert [one.messages for one in together] == [one.messages for one in apart]
    assert [one.messages for one in together[::2]] == [one.messages for one in together[1::2]]
    assert len({str(one.messages) for one in together}) > 4
    assert len(starts(TextArenaEnv(env_config={**config, "seat": 1}, opponent=RandomAgent(cells)), 6)) == 1
