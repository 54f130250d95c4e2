"""The players in TextArena's real games earn what their references state."""

from __future__ import annotations

import numpy as np
import pytest

from agentsgym import AgentError, ConfigError, ScriptedAgent, evaluate
from agentsgym.envs import TextArenaEnv
from agentsgym.envs.players import reference_player
from agentsgym.envs.TextArena.references import Reference, ReferencePlayer, reference_for
from agentsgym.envs.TextArena.references.tic_tac_toe import SafeTicTacToe

GAMES = [
    ("GuessTheNumber-v0", 100, None),
    ("GuessTheNumber-v0", 3, None),
    ("TicTacToe-v0", 100, 0),
    ("TicTacToe-v0", 100, 1),
    ("TicTacToe-v0", 3, 1),
    ("KuhnPoker-v0", 100, 0),
    ("KuhnPoker-v0-short", 100, 1),
    ("FrozenLake-v0", 8, None),
    ("FrozenLake-v0-random", 5, None),
]


def played(reference: Reference, player: ReferencePlayer, num: int) -> list[float]:
    rules = reference.rules
    config = {
        "game": rules.game,
        "max_steps_per_episode": rules.max_steps,
        "num_players": 1 if rules.seat is None else 2,
        "seat": rules.seat,
    }
    trajectories = TextArenaEnv(None, config).rollout([{"seed": seed} for seed in range(num)], player)
    assert not [one.error for one in trajectories if one.failed]
    assert not any(turn.invalid for one in trajectories for turn in one.turns)
    return [one.final_reward for one in trajectories]


@pytest.mark.parametrize(("game", "max_steps", "seat"), GAMES)
def test_players_earn_what_the_reference_states(game: str, max_steps: int, seat: int | None) -> None:
    reference = reference_for(game, max_steps_per_episode=max_steps, seat=seat)
    anchors = reference.anchors()
    for player, expected in (
        (reference.optimal_player(), anchors.optimal),
        (reference.random_player(), anchors.random),
    ):
        rewards = played(reference, player, 60)
        # A mean of 60 lies within four of its standard errors; a game that is nearly always won shows too few losses.
        assert np.mean(rewards) == pytest.approx(expected, abs=4 * float(np.std(rewards)) / 60**0.5 + 0.03)


def test_safe_tic_tac_toe_does_not_lose_to_anyone() -> None:
    safe = SafeTicTacToe(reference_for("TicTacToe-v0").rules)
    config = {"game": "TicTacToe-v0", "num_players": 2, "seat": 1}
    env = TextArenaEnv(None, config, opponent=reference_for("TicTacToe-v0").optimal_player())
    assert [one.final_reward for one in env.rollout([{"seed": 0}] * 3, safe.optimal_player())] == [0.0] * 3


def test_evaluation_places_players_by_a_reference() -> None:
    reference = reference_for("TicTacToe-v0", seat=0)
    env = TextArenaEnv(None, {"game": "TicTacToe-v0", "num_players": 2, "seat": 0})
    tasks = [{"seed": seed} for seed in range(60)]
    best = evaluate(env, reference.optimal_player(), tasks, references=reference).fraction_of_optimal
    assert best is not None
    assert best.mean == pytest.approx(1.0, abs=0.02)
    blind = evaluate(env, reference.random_player(), tasks, references=reference).fraction_of_optimal
    assert blind is not None
    assert blind.high < 0.6


def test_equal_seeds_play_equal_games() -> None:
    reference = reference_for("GuessTheNumber-v0")
    one, other = (played(reference, reference.random_player(seed=5), 10) for _ in range(2))
    assert one == other


def test_a_player_of_another_game_reports_that_it_cannot_read_this_one() -> None:
    player = reference_for("TicTacToe-v0").optimal_player()
    with pytest.raises(AgentError, match=r"requires a prompt that contains 'in Tic Tac Toe\.'"):
        player.get_action([{"role": "user", "content": "Guess!"}], None)


@pytest.mark.parametrize("game", ["Bandit-v0", "Mastermind-v0", "TowerOfHanoi-v0"])
def test_a_removed_player_names_what_to_use(game: str) -> None:
    with pytest.raises(ConfigError, match=r"was removed in 0\.3\.0: compare with the agent 'random'"):
        reference_player(TextArenaEnv(None, {"game": game}))


def test_the_best_button_of_a_bandit_gives_most_and_the_worst_least() -> None:
    env = TextArenaEnv(None, {"game": "Bandit-v0", "game_options": {"num_turns": 1}})
    chances = env.start_session("probe", {}, seed=3)["game"].state.game_state["ground_truth"]
    ranked = sorted(chances, key=lambda name: chances[name])
    games = [env.rollout([{"seed": 3}], ScriptedAgent([f"[{name}]"] * 2))[0] for name in ranked]
    assert games[-1].info["success"] is True
    assert "correct button" in games[-1].info["reason"]
    assert not any(game.info["success"] for game in games[:-1])
    assert [game.final_reward for game in games] == pytest.approx(
        [*(chances[name] - chances[ranked[-1]] for name in ranked[:-1]), 1.0]
    )


@pytest.mark.parametrize(
    ("moves", "pot"), [(["[check]", "[check]"], 1), (["[bet]", "[fold]"], 1), (["[BET]", "i [call]"], 2)]
)
def test_a_bet_that_is_called_is_worth_two_chips(moves: list[str], pot: int) -> None:
    env = TextArenaEnv(None, {"game": "KuhnPoker-v0", "opponent": "self", "game_options": {"max_rounds": 2}})
    game = env.start_session("a", {}, seed=1)["game"]
    for move in ["[call]", *moves]:  # a call without a bet is invalid and puts nothing in
        game.move(move)
    chips = game.state.game_state["player_chips"]
    assert sorted(chips.values()) == [-pot - 1, pot - 1]  # the next round's chip is in too


def test_textarenas_own_classes_stay_as_they_are() -> None:
    import textarena  # noqa: PLC0415  # as a user of TextArena's own would

    TextArenaEnv(None, {"game": "Bandit-v0"})
    assert "Patched" not in type(textarena.make("Bandit-v0-raw")).__name__
