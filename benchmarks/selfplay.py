"""Measure self-play at tic-tac-toe: a table of logits plays both seats against itself, and learns by REINFORCE.

Each arm is an estimator, with rewards by seat (1 for the winner, -1 for the loser) or, for comparison, with one reward
for both seats (1 for the winning move), which is what an estimator sees that does not separate the roles. Policies are
rated exactly, by walking the whole game: the chance to win against random play, as X and as O, and
the chance to hold perfect play to a draw.

``python benchmarks/selfplay.py`` prints the table of ``docs/credit.md``: five seeds of each arm, minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from agentsgym.credit.advantages import ScoredRollout, get_estimator
from agentsgym.seeding import derive_seed

LINES: Final = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY: Final = "." * 9
NUM_ROLLOUTS: Final = 8  # of a task group; every task is the empty board

Policy = Callable[[str], Mapping[int, float]]
"""A board → the probability of each move."""


@cache
def moves(board: str) -> tuple[int, ...]:
    """The empty squares of a board; none where the game is over."""
    return () if winner(board) else tuple(square for square, mark in enumerate(board) if mark == ".")


@cache
def winner(board: str) -> str:
    """Who has three in a row; empty for nobody."""
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), "")


def seat(board: str) -> str:
    """Whose move it is."""
    return "X" if board.count("X") == board.count("O") else "O"


def after(board: str, move: int) -> str:
    """The board after a move."""
    return board[:move] + seat(board) + board[move + 1 :]


def play_randomly(board: str) -> Mapping[int, float]:
    """Every move alike."""
    return dict.fromkeys(moves(board), 1 / len(moves(board)))


@cache
def worth(board: str) -> int:
    """What X gets if both play perfectly: 1, 0 or -1."""
    if not moves(board):
        return {"X": 1, "O": -1, "": 0}[winner(board)]
    best = max if seat(board) == "X" else min
    return best(worth(after(board, move)) for move in moves(board))


@cache
def play_perfectly(board: str) -> Mapping[int, float]:
    """The moves that keep what the board is worth, each alike."""
    good = [move for move in moves(board) if worth(after(board, move)) == worth(board)]
    return dict.fromkeys(good, 1 / len(good))


@dataclass(slots=True)
class Table:
    """A softmax policy with separate logits for every board."""

    logits: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 9))

    def __call__(self, board: str) -> Mapping[int, float]:
        """The probability of each move."""
        own = self.logits[board]
        weights = {move: math.exp(own[move]) for move in moves(board)}
        total = sum(weights.values())
        return {move: weight / total for move, weight in weights.items()}


class Game(NamedTuple):
    """A game that was played: the board before each move, and the moves; and who won."""

    turns: Sequence[tuple[str, int]]
    winner: str


def play(policy: Policy, generator: random.Random) -> Game:
    """Let a policy play against itself."""
    board, turns = EMPTY, list[tuple[str, int]]()
    while moves(board):
        chances = policy(board)
        [move] = generator.choices(list(chances), list(chances.values()))
        turns.append((board, move))
        board = after(board, move)
    return Game(turns, winner(board))


def scored(game: Game, group: int, *, by_seat: bool) -> ScoredRollout:
    """Return a game as estimators see it; without ``by_seat``, both seats share the reward of the winning move."""
    roles = [seat(board) for board, _ in game.turns]
    rewards_of_roles: dict[Hashable, float] = {
        role: 0.0 if not game.winner else 1.0 if role == game.winner else -1.0 for role in "XO"
    }
    rewards = [0.0] * len(roles)
    rewards[-1] = 1.0 if game.winner else 0.0
    if by_seat:
        rewards[-2:] = [rewards_of_roles[role] for role in roles[-2:]]  # the last moves of the two
    return ScoredRollout(
        turn_rewards=rewards,
        final_reward=rewards_of_roles["X"] if by_seat else rewards[-1],
        group=group,
        state_keys=[board for board, _ in game.turns],
        environment="tic-tac-toe",
        roles=roles if by_seat else (),
        final_rewards=rewards_of_roles if by_seat else {},
    )


class Arm(NamedTuple):
    """An estimator as it is run."""

    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    scale: Any = "none"
    by_seat: bool = True

    @property
    def title(self) -> str:
        """What the table calls it."""
        options = "".join(f", {key} `{value}`" for key, value in self.options.items() if key != "decay")
        return f"`{self.name}`{options}, scale `{self.scale}`"


def learn(arm: Arm, *, seed: int, num_games: int, batch_size: int = 64, learning_rate: float = 8.0) -> Table:
    """Learn from self-play: a gradient step of ``Σ A ∇log π / batch_size`` for each batch of games."""
    table, generator = Table(), random.Random(derive_seed("self-play", seed))
    estimator = get_estimator(arm.name, **arm.options)
    for _ in range(num_games // batch_size):
        games = [play(table, generator) for _ in range(batch_size)]
        rollouts = [scored(game, index // NUM_ROLLOUTS, by_seat=arm.by_seat) for index, game in enumerate(games)]
        advantages = estimator(rollouts, discount=1.0, scale=arm.scale)
        steps: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 9)
        for game, numbers in zip(games, advantages, strict=True):
            for (board, chosen), advantage in zip(game.turns, numbers, strict=True):
                assert isinstance(advantage, float)
                for move, chance in table(board).items():
                    steps[board][move] += advantage * ((move == chosen) - chance)
        for board, step in steps.items():
            own = table.logits[board]
            table.logits[board] = [a + learning_rate * b / batch_size for a, b in zip(own, step, strict=True)]
    return table


class Outcome(NamedTuple):
    """The chances of a seat: exact."""

    won: float
    drawn: float


def rate(policy: Policy, role: str, other: Policy) -> Outcome:
    """How a policy does in one seat against another policy in the other."""

    @cache
    def outcome(board: str) -> Outcome:
        if not moves(board):
            return Outcome(float(winner(board) == role), float(not winner(board)))
        chances = (policy if seat(board) == role else other)(board)
        ends = [(chance, outcome(after(board, move))) for move, chance in chances.items()]
        return Outcome(sum(chance * end.won for chance, end in ends), sum(chance * end.drawn for chance, end in ends))

    return outcome(EMPTY)


ARMS: Final = (
    Arm("rae"),
    Arm("return_to_go", {"baseline": "role_ema"}),
    Arm("return_to_go"),
    Arm("return_to_go", scale="group"),
    Arm("rloo"),
    Arm("grpo", scale="group"),
    Arm("gigpo", scale="group"),
    Arm("rebn", scale="group"),
)


def row(arm: Arm, seeds: Sequence[int], num_games: int) -> list[float]:
    """The medians over seeds: won as X and as O against random play, and drawn as X and as O against perfect play."""
    found: list[list[float]] = []
    for seed in seeds:
        table = learn(arm, seed=seed, num_games=num_games)
        won = [rate(table, role, play_randomly).won for role in "XO"]
        found.append([*won, *(rate(table, role, play_perfectly).drawn for role in "XO")])
    return [median(column) for column in zip(*found, strict=True)]


def cells(numbers: Sequence[float]) -> str:
    """Two cells of the table, each with the numbers as X and as O."""
    pairs = [numbers[start : start + 2] for start in (0, 2)]
    return " | ".join(" / ".join(f"{100 * number:.1f}" for number in pair) + " %" for pair in pairs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    print("| estimator | won, by seat | drawn, by seat | won, shared | drawn, shared |")
    print("| --- |" + " --- |" * 4)
    start = [rate(play_randomly, role, play_randomly).won for role in "XO"]
    start += [rate(play_randomly, role, play_perfectly).drawn for role in "XO"]
    print("| random play |", cells(start), "|  |  |")
    for arm in ARMS:
        separate, shared = (row(arm._replace(by_seat=one), range(given.seeds), given.games) for one in (True, False))
        print(f"| {arm.title} |", cells(separate), "|", cells(shared), "|", flush=True)


if __name__ == "__main__":
    main()
