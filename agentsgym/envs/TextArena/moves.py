"""Find candidate moves: in a game's text, in common formats, and by the rules of games for which neither works."""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentsgym.envs.TextArena.observations import folder_of

_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_LISTED = re.compile(r"(?:available|legal|valid|possible)[^\n]*", re.IGNORECASE)
_TRIED_NUMBERS = range(26)  # in place of a placeholder, or as a complete move
Square = tuple[int, int]
_ANSWERS = ("[Accept]", "[Reject]")
_STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))
_DIRECTIONS = [step for step in itertools.product((-1, 0, 1), repeat=2) if step != (0, 0)]


def listed_moves(text: str) -> list[str]:
    """Return the moves that a text lists as available, in order.

    >>> listed_moves("Available Moves: '[0]', '[4]'")
    ['[0]', '[4]']
    """
    return list(dict.fromkeys(move for line in _LISTED.findall(text) for move in _BRACKETS.findall(line)))


def example_moves(text: str) -> list[str]:
    """Return all bracketed texts, in order."""
    return list(dict.fromkeys(_BRACKETS.findall(text)))


def filled_moves(examples: list[str]) -> list[str]:
    """Replace the placeholders of examples, one or two per move, with numbers.

    >>> filled_moves(["[play X]"])[:2]
    ['[play 0]', '[play 1]']
    """
    found: list[str] = []
    for example in examples:
        verb, *places = example.strip("[]").split()
        if verb.isalpha() and len(verb) > 1 and len(places) == 1:
            found += [f"[{verb} {number}]" for number in _TRIED_NUMBERS]
        elif verb.isalpha() and len(verb) > 1 and len(places) == 2:
            found += [f"[{verb} {one} {other}]" for one in range(6) for other in range(6)]
    return list(dict.fromkeys(found))


def usual_moves() -> Iterator[str]:
    """Yield numbers, pairs of numbers and squares in brackets, the common formats of board games."""
    yield from (f"[{number}]" for number in _TRIED_NUMBERS)
    yield from (f"[{row} {column}]" for row in range(10) for column in range(10))
    yield from (f"[{row},{column}]" for row in range(8) for column in range(8))
    yield from (f"[{column}{row}]" for column in "abcdefgh" for row in range(1, 9))


def moves_by_rules(game: Any, rng: random.Random) -> list[str]:
    """Return candidate moves of the player to move; empty for games whose moves are found in other ways.

    Some may be illegal, such as a path through a wall, since moves are tried before they are played. If there are too
    many to try, one of each kind is drawn: one allocation of all units, or one proposal in addition to accepting and
    rejecting the current one.
    """
    find = _RULES.get(folder_of(game))
    return [] if find is None else find(game, rng)


def parts_of(total: int, count: int, rng: random.Random) -> list[int]:
    """Divide an integer into ``count`` parts >= 0, with each division equally likely.

    >>> sum(parts_of(20, 3, random.Random(0)))
    20
    """
    bars = sorted(rng.sample(range(total + count - 1), count - 1))
    edges = [-1, *bars, total + count - 1]
    return [right - left - 1 for left, right in itertools.pairwise(edges)]


def _allocations(game: Any, rng: random.Random) -> list[str]:
    units = parts_of(game.num_total_units, game.num_fields, rng)
    return [f"[{' '.join(f'{field}{number}' for field, number in zip(game.field_names, units, strict=True))}]"]


def _contracts(game: Any, rng: random.Random) -> list[str]:
    letters = [rng.choice([*choices]) for choices in game.choice_letters.values()]
    answers = _ANSWERS if game.state.game_state["current_proposal"] else ()
    return [*answers, f"[Propose] {''.join(letters)}"]


def _splits(game: Any, rng: random.Random) -> list[str]:
    """Return the responses to the other player's proposal, and a proposal that the player's role allows."""
    player, proposal = game.state.current_player_id, game.current_proposal
    every = (f"[Propose] ${cents / 100:.2f}" for cents in range(int(100 * game.total_amount + 1e-6) + 1))
    allowed = [move for move in every if game._validate_role_specific_action(player, move)[0]]
    can_answer = proposal["amount"] is not None and proposal["proposer"] != player
    return [*(_ANSWERS if can_answer else ()), *([rng.choice(allowed)] if allowed else [])]


def _codes(game: Any, rng: random.Random) -> list[str]:
    numbers = range(1, game.num_numbers + 1)
    draw = rng.choices if game.duplicate_numbers else rng.sample
    return [f"[{' '.join(map(str, draw(numbers, k=game.code_length)))}]"]


def _placements_and_stack_moves(game: Any, _: random.Random) -> list[str]:
    """Return the placements of every piece on every empty square of Tak, and the moves of every stack."""
    player, squares = game.state.current_player_id, range(game.board_size)
    left = game.players[player]
    kinds = ("F", "W") * (left["stones"] > 0) + ("C",) * (left["capstones"] > 0)
    moves: list[str] = []
    for row, column in itertools.product(squares, squares):
        stack: Sequence[str] = game.board[row][column]
        if not stack:
            moves += [f"[place () {{({row},{column}): [{kind}{player}]}}]" for kind in kinds]
        elif stack[-1].endswith(str(player)):
            moves += _stack_moves(stack, (row, column), game.board_size)
    return moves


def _stack_moves(stack: Sequence[str], source: Square, size: int) -> Iterator[str]:
    """Yield the moves of the top of a stack along a line, which drop pieces on each of its squares."""
    for (down, right), carried in itertools.product(_STEPS, range(1, min(len(stack), size) + 1)):
        line = [(source[0] + down * k, source[1] + right * k) for k in range(1, size)]
        line = [square for square in line if 0 <= min(square) <= max(square) < size]
        for cuts in itertools.product((False, True), repeat=carried - 1):
            edges = [0, *(place for place, is_cut in enumerate(cuts, 1) if is_cut), carried]
            if len(edges) - 1 <= len(line):
                top = stack[-carried:]
                drops = [", ".join(top[start:stop]) for start, stop in itertools.pairwise(edges)]
                placed = (f"({row},{column}): [{drop}]" for (row, column), drop in zip(line, drops, strict=False))
                yield f"[move ({source[0]},{source[1]}) {{{', '.join(placed)}}}]"


def _alquerque(game: Any, _: random.Random) -> list[str]:
    """Return steps and jumps onto empty points."""
    board, size = game.state.game_state["board"], game.BOARD_N
    ways = [(down * length, right * length) for (down, right), length in itertools.product(_DIRECTIONS, (1, 2))]
    pairs = _pairs(board, "RB"[game.state.current_player_id], lambda _: ways)
    return [f"[{_chess(start, size)} {_chess(end, size)}]" for start, end in pairs if board[end[0]][end[1]] == ""]


def _breakthrough(game: Any, _: random.Random) -> list[str]:
    player, board = game.state.current_player_id, game.state.game_state["board"]
    ways = [(1 - 2 * player, right) for right in (-1, 0, 1)]
    return [
        f"[{_file(start[1])}{start[0] + 1}{_file(end[1])}{end[0] + 1}]"
        for start, end in _pairs(board, "WB"[player], lambda _: ways)
        if game._is_valid_move(player, *start, *end)
    ]


def _lines_of_action(game: Any, _: random.Random) -> list[str]:
    """Return moves in each direction, by as many squares as there are pieces on that line."""

    def ways(start: Square) -> list[Square]:
        lengths = [(step, game._count_pieces_on_line(*start, *step)) for step in _DIRECTIONS]
        return [(down * length, right * length) for (down, right), length in lengths]

    pairs = _pairs(game.state.game_state["board"], "OX"[game.state.current_player_id], ways)
    return [f"[{_chess(start, game.BOARD_N)}{_chess(end, game.BOARD_N)}]" for start, end in pairs]


def _pairs(
    board: Sequence[Sequence[str]], piece: str, ways: Callable[[Square], Sequence[Square]]
) -> Iterator[tuple[Square, Square]]:
    """Yield each square of a player's pieces with each square that the piece can reach."""
    size = len(board)
    for row, column in itertools.product(range(size), repeat=2):
        if board[row][column] == piece:
            ends = ((row + down, column + right) for down, right in ways((row, column)))
            yield from (((row, column), end) for end in ends if 0 <= min(end) <= max(end) < size)


def _chess(square: Square, size: int) -> str:
    """Return the chess name of a square whose row is counted from the top; rank 1 is at the bottom."""
    return f"{_file(square[1])}{size - square[0]}"


def _file(column: int) -> str:
    return string.ascii_lowercase[column]


def _shots(game: Any, _: random.Random) -> list[str]:
    """Return the squares of Battleship that have not been fired upon."""
    tracked = game.state.game_state["tracking_board"][game.state.current_player_id]
    squares = itertools.product(range(game.grid_size), repeat=2)
    return [f"[{_file(row).upper()}{column}]" for row, column in squares if tracked[row][column] == "~"]


def _marks(game: Any, _: random.Random) -> list[str]:
    """Return both marks for every cell of LogicPuzzle."""
    fields = [(row, column) for grid in game.game_board.values() for row, marks in grid.items() for column in marks]
    return [f"[{row} {column} {mark}]" for row, column in fields for mark in "XO"]


def _edges(game: Any, _: random.Random) -> list[str]:
    across = itertools.product("h", range(game.R + 1), range(game.C))
    upright = itertools.product("v", range(game.R), range(game.C + 1))
    return [f"[{kind} {row} {column}]" for kind, row, column in (*across, *upright)]


_RULES: Mapping[str, Callable[[Any, random.Random], list[str]]] = {
    "Alquerque": _alquerque,
    "Bandit": lambda game, _: [f"[{button}]" for button in game.buttons],
    "Battleship": _shots,
    "Breakthrough": _breakthrough,
    "ColonelBlotto": _allocations,
    "Countdown": lambda game, _: [
        f"[{one} {other} {sign}]"
        for one, other in itertools.permutations(range(len(game.numbers)), 2)
        for sign in "+-*/"
    ],
    "Cryptarithm": lambda game, _: [f"[{letter} {digit}]" for letter in sorted(game.letters) for digit in range(10)],
    "LinesOfAction": _lines_of_action,
    "LogicPuzzle": _marks,
    "Mastermind": _codes,
    "NewRecruit": _contracts,
    "PegJump": lambda game, _: [f"[{start} {end}]" for start, _, end in game.ALLOWED_MOVES],
    "RushHour": lambda game, _: [f"[{car}{way}]" for car in game.state.game_state["vehicles"] for way in "+-"],
    "Santorini": lambda game, _: re.findall(r"\[\w+\]", game._get_valid_moves(game.state.current_player_id)),
    "Slitherlink": _edges,
    "Tak": _placements_and_stack_moves,
    "TowerOfHanoi": lambda game, _: [
        f"[{start} {end}]" for start, end in itertools.permutations(game.state.game_state["towers"], 2)
    ],
    "TwoDollar": _splits,
}
