"""TicTacToe: the solution of every position, against random and against optimal play."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from statistics import mean
from typing import Literal

from agentsgym.envs.spec import Anchors
from agentsgym.envs.TextArena.references.base import Reference, game_text
from agentsgym.errors import AgentError
from agentsgym.types import Message

Kind = Literal["random", "optimal", "safe"]
#: Nine cells, row by row: ``"."`` is empty, ``"1"`` is the mark of the player who began, ``"2"`` the other mark.
Board = str

EMPTY = "." * 9
NEVER = 9  # a number of marks at which no game is truncated, since a full board ends the game
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def winner(board: Board) -> str | None:
    """Return the player with three in a row; None if there is none."""
    return next((board[a] for a, b, c in _LINES if board[a] != "." and board[a] == board[b] == board[c]), None)


def moves(board: Board) -> list[int]:
    """Return the empty cells."""
    return [cell for cell, mark in enumerate(board) if mark == "."]


def to_move(board: Board) -> str:
    """Return the player to move."""
    return "1" if board.count("1") == board.count("2") else "2"


def play(board: Board, cell: int) -> Board:
    """Put the mark of the player to move in a cell."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


@functools.cache
def outcome(board: Board, first: Kind, second: Kind, cut: int = NEVER) -> tuple[Fraction, Fraction, Fraction]:
    """Return the exact probabilities that the first player wins, that nobody does, and that the second player wins.

    Args:
        board: The position to start from.
        first: The strategy of the player who began: ``"random"``; ``"optimal"``, the best reply to random play; or
            ``"safe"``, the best reply to random play among the moves that never lose.
        second: The strategy of the other player.
        cut: The number of marks at which the game is truncated without a winner; optimal play takes it into account.
    """
    won = winner(board)
    if won or _num_marks(board) >= cut:
        return (Fraction(won == "1"), Fraction(won is None), Fraction(won == "2"))
    kind = first if to_move(board) == "1" else second
    cells = moves(board) if kind == "random" else [best_cell(board, kind, cut)]
    results = [outcome(play(board, cell), first, second, cut) for cell in cells]
    win, draw, loss = (sum(column, Fraction(0)) / len(cells) for column in zip(*results, strict=True))
    return win, draw, loss


def value(board: Board, first: Kind, second: Kind, cut: int = NEVER) -> Fraction:
    """Return the first player's expected reward: 1 for a win, 0 for a draw or a truncated game, -1 for a loss."""
    win, _, loss = outcome(board, first, second, cut)
    return win - loss


@functools.cache
def minimax(board: Board, cut: int = NEVER) -> int:
    """Return the first player's reward if both play optimally."""
    won = winner(board)
    if won or _num_marks(board) >= cut:
        return (won == "1") - (won == "2")
    results = [minimax(play(board, cell), cut) for cell in moves(board)]
    return max(results) if to_move(board) == "1" else min(results)


@functools.cache
def best_cell(board: Board, kind: Kind, cut: int = NEVER) -> int:
    """Return the first of the best cells."""
    mark = to_move(board)
    sign = 1 if mark == "1" else -1
    cells = moves(board)
    if kind == "safe":
        worth = {cell: sign * minimax(play(board, cell), cut) for cell in cells}
        cells = [cell for cell in cells if worth[cell] == max(worth.values())]
    first, second = (kind, "random") if mark == "1" else ("random", kind)
    return max(cells, key=lambda cell: sign * value(play(board, cell), first, second, cut))


def _num_marks(board: Board) -> int:
    return 9 - board.count(".")


class TicTacToe(Reference):
    """The best reply to random play.

    The anchors are rewards against a random player in the other seat; the player in seat 0 begins. A game that the turn
    limit truncates is rewarded with 0.
    """

    opening = "in Tic Tac Toe."
    num_seats = 2
    kind: Kind = "optimal"

    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the mean final rewards against random play in a seat; if it is drawn, the mean over both seats."""
        seat = self._seat(seat)
        rewards: dict[Kind, list[Fraction]] = {"random": [], "optimal": []}
        for kind, by_seat in rewards.items():
            if seat != 1:
                by_seat.append(value(EMPTY, kind, "random", self._cut(0)))
            if seat != 0:
                by_seat.append(-value(EMPTY, "random", kind, self._cut(1)))
        return Anchors(random=float(mean(rewards["random"])), optimal=float(mean(rewards["optimal"])))

    def _cut(self, seat: int) -> int:
        """Return the number of marks after the last turn of the player in a seat and the opponent's reply to it."""
        return min(NEVER, 2 * self.rules.max_steps + seat)

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose the best cell."""
        board = board_of(messages)
        return f"[{best_cell(board, self.kind, self._cut(_num_marks(board) % 2))}]"

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose a random empty cell."""
        return f"[{rng.choice(moves(board_of(messages)))}]"


class SafeTicTacToe(TicTacToe):
    """A strategy that never loses against any opponent; its reward against random play is slightly lower."""

    kind = "safe"


def board_of(messages: Sequence[Message]) -> Board:
    """Parse the last board that the game showed.

    Raises:
        AgentError: No board was shown.
    """
    boards = re.findall(r"Current Board:\n\n(.*?)\n\nAvailable", game_text(messages), re.DOTALL)
    cells: list[str] = re.findall(r"[XO\d]", boards[-1]) if boards else []
    if len(cells) != 9:
        raise AgentError("the observation of TextArena's TicTacToe must contain 'Current Board:' with nine cells")
    return "".join({"O": "1", "X": "2"}.get(cell, ".") for cell in cells)  # player 0 is O and begins
