"""TicTacToe: every position is solved, against random play and against the best."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from agentsgym.envs.anchors import Anchors
from agentsgym.envs.TextArena.references.base import Reference, said_by_game
from agentsgym.errors import AgentError
from agentsgym.types import Message

Kind = Literal["random", "optimal", "safe"]
#: Nine cells, row by row: ``"."`` is empty, ``"1"`` is the player who began, ``"2"`` the other.
Board = str

EMPTY = "." * 9
NEVER = 9  # marks at which a game is cut; a full board is no cut
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def winner(board: Board) -> str | None:
    """Give who has three in a row; None for nobody."""
    return next((board[a] for a, b, c in _LINES if board[a] != "." and board[a] == board[b] == board[c]), None)


def moves(board: Board) -> list[int]:
    """Give the empty cells."""
    return [cell for cell, mark in enumerate(board) if mark == "."]


def to_move(board: Board) -> str:
    """Give whose turn it is."""
    return "1" if board.count("1") == board.count("2") else "2"


def play(board: Board, cell: int) -> Board:
    """Put the mark of whoever's turn it is in a cell."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


@functools.cache
def outcome(board: Board, first: Kind, second: Kind, cut: int = NEVER) -> tuple[Fraction, Fraction, Fraction]:
    """Give the exact probabilities that the first player wins, that nobody does, and that the second player wins.

    Args:
        board: Where to start.
        first: How the player who began plays: ``"random"``; ``"optimal"``, the best reply to random play; or
            ``"safe"``, which never loses, and among such moves takes the best reply to random play.
        second: How the other one plays.
        cut: Marks on the board with which the game is cut, and nobody wins; best play knows of it.
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
    """Give what the first player is paid on average: 1 for a win, 0 for a draw or a cut, -1 for a loss."""
    win, _, loss = outcome(board, first, second, cut)
    return win - loss


@functools.cache
def minimax(board: Board, cut: int = NEVER) -> int:
    """Give what the first player is paid if both play their best."""
    won = winner(board)
    if won or _num_marks(board) >= cut:
        return (won == "1") - (won == "2")
    results = [minimax(play(board, cell), cut) for cell in moves(board)]
    return max(results) if to_move(board) == "1" else min(results)


@functools.cache
def best_cell(board: Board, kind: Kind, cut: int = NEVER) -> int:
    """Give the first of the best cells."""
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
    """Best replies to random play.

    The anchors are against a random player in the other seat; the player of seat 0 begins. A game that is cut by the
    limit of turns pays 0.
    """

    opening = "in Tic Tac Toe."
    num_seats = 2
    kind: Kind = "optimal"

    def anchors(self, seat: int | None = None) -> Anchors:
        """Give the mean final rewards against random play, in a seat; where it is drawn, the mean over both."""
        seat = self._seat(seat)
        seats = [0, 1] if seat is None else [seat]
        optimal, blind = (
            sum((self._value(kind, seat) for seat in seats), Fraction(0)) / len(seats) for kind in ("optimal", "random")
        )
        return Anchors(random=float(blind), optimal=float(optimal))

    def _value(self, kind: Kind, seat: int) -> Fraction:
        """What a player earns in a seat against random play."""
        if seat == 0:
            return value(EMPTY, kind, "random", self._cut(0))
        return -value(EMPTY, "random", kind, self._cut(1))

    def _cut(self, seat: int) -> int:
        """The marks on the board when the player of a seat has had all its turns, and was answered."""
        return min(NEVER, 2 * self.rules.max_steps + seat)

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Take the best cell."""
        board = board_of(messages)
        return f"[{best_cell(board, self.kind, self._cut(_num_marks(board) % 2))}]"

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Take any empty cell."""
        return f"[{rng.choice(moves(board_of(messages)))}]"


class SafeTicTacToe(TicTacToe):
    """Play that never loses, whoever the other is; against random play it earns a little less."""

    kind = "safe"


def board_of(messages: Sequence[Message]) -> Board:
    """Read the last board that the game showed.

    Raises:
        AgentError: It showed none.
    """
    boards = re.findall(r"Current Board:\n\n(.*?)\n\nAvailable", said_by_game(messages), re.DOTALL)
    cells: list[str] = re.findall(r"[XO\d]", boards[-1]) if boards else []
    if len(cells) != 9:
        raise AgentError("the observation of TextArena's TicTacToe must contain 'Current Board:' with nine cells")
    return "".join({"O": "1", "X": "2"}.get(cell, ".") for cell in cells)  # player 0 is O and begins
