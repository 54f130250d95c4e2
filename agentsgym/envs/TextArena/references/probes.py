"""Ask the games what they pay, mended or not, so that exact values are of what is played."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

from agentsgym.envs.TextArena.games import GameMaker, PlayedGame
from agentsgym.envs.TextArena.isolation import GameContext


@functools.cache
def chips_of_bet() -> int:
    """Play a round of KuhnPoker to see how many chips a called bet adds: 1 by its rules."""
    game = _begin("KuhnPoker-v0", {"max_rounds": 1}, num_players=2)
    for move in ("[bet]", "[call]"):
        game.move(move)
    # The pot is paid out, and each player has put in the next round's chip.
    return max(game.state.game_state["player_chips"].values())


@functools.cache
def pay_for_best_button() -> float:
    """Play a Bandit to see what the best button pays."""
    return _pay_of_button(is_best=True)[0]


@functools.cache
def pay_of_regret() -> float:
    """Play a Bandit to see what a button pays that is not the best, as a multiple of its regret."""
    pay, regret = _pay_of_button(is_best=False)
    return round(pay / regret, 9)


def _pay_of_button(*, is_best: bool) -> tuple[float, float]:
    """Press a button and choose it: what it pays, and its regret."""
    game = _begin("Bandit-v0", {"num_turns": 1}, num_players=1)
    chances: dict[str, float] = game.state.game_state["ground_truth"]
    chosen = sorted(chances, key=lambda name: chances[name])[-1 if is_best else 0]
    for _ in range(2):
        game.move(f"[{chosen}]")
    return game.rewards()[0], max(chances.values()) - chances[chosen]


def _begin(game: str, options: Mapping[str, Any], *, num_players: int) -> PlayedGame:
    context = GameContext(random.Random(0))
    return PlayedGame(GameMaker(game, options)(context), context, num_players=num_players, seed=0)
