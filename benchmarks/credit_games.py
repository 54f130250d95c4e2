"""Two text games whose best and random play are known exactly, for the benchmark of credit.

::

    guess_values ─┬─▶ what best and random play are worth ─▶ info["optimal_reward"], info["random_reward"]
    maze_values  ─┘

In both, observations are text, a task is just a seed, and ``reward_scheme`` decides whether each turn is rewarded, or
only a win.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agentsgym import Agent, MultistepEnv
from agentsgym.envs.TwentyQuestions.env import information_fraction
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, choice_field, is_int
from agentsgym.seeding import derive_seed
from agentsgym.types import Message

State = dict[str, Any]
Step = tuple[State, float, bool, dict[str, Any]]

HIGHER, LOWER, RIGHT = "Higher.", "Lower.", "Right!"


class BlindPlayer(Agent):
    """Says one of the actions that an observation allows, all alike; the random play that scores are measured from.

    Args:
        actions_of: The last observation → the actions.
        seed: Of its draws.
    """

    def __init__(self, actions_of: Callable[[str], Sequence[str]], seed: int = 0) -> None:
        self._actions_of = actions_of
        self._generator = random.Random(derive_seed("random player", seed))

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Draw an action."""
        return self._generator.choice(self._actions_of(messages[-1]["content"])), None


class GuessTheNumber(MultistepEnv):
    """Find a number from 1 to ``size`` in ``guesses`` guesses, ``rounds`` times over, each time another one.

    A wrong guess is answered "Higher." or "Lower."; a round ends with the right guess or with the last one. An episode
    is won when all numbers are found. ``reward_scheme="win_plus_information"`` gives 1 for a right guess and for every
    other one the fraction of information that it brought
    (:func:`~agentsgym.envs.TwentyQuestions.env.information_fraction`), ``"find"`` rewards right guesses alone,
    ``"win"`` gives 1 for the episode that is won. Random play draws every guess from all numbers.
    """

    config_fields: ClassVar = {
        "size": Field(default=12, expected="an int >= 2", valid=is_int(2)),
        "guesses": Field(default=4, expected="an int >= 1", valid=is_int(1)),
        "rounds": Field(default=1, expected="an int >= 1", valid=is_int(1)),
        "reward_scheme": choice_field("win_plus_information", "find", "win"),
    }

    def _check_config(self, config: dict[str, Any]) -> None:
        if config["max_steps_per_episode"] < config["rounds"] * config["guesses"]:
            raise ConfigError(
                "env_config['max_steps_per_episode'] must leave room for rounds * guesses turns, got "
                f"{config['max_steps_per_episode']} for {config['rounds']} * {config['guesses']}"
            )
        self._reward_scheme = config["reward_scheme"]
        self._worth = guess_values(
            config["size"], config["guesses"], rounds=config["rounds"], reward_scheme=self._reward_scheme
        )

    def actions_of(self, observation: str) -> list[str]:
        """Return every number, whatever the observation."""
        return [str(number) for number in range(1, self.env_config["size"] + 1)]

    def vocabulary_texts(self) -> list[str]:
        """Every text of the game."""
        endings = (f"{answer} {self._invitation()}" for answer in (HIGHER, LOWER, RIGHT, self._invitation()))
        return [self._invitation(), HIGHER, LOWER, *endings, *self.actions_of("")]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        generator, config = self.rng(session_id), self.env_config
        drawn = [generator.randint(1, config["size"]) for _ in range(config["rounds"])]
        secrets = task_data.get("secrets", drawn)
        state = {"done": False, "secrets": secrets, "round": 0, "found": 0, "observation": self._invitation()}
        return state | self._new_round()

    def _format_prompt(self, state: State, step: int) -> str:
        return state["observation"]

    def _step_episode(self, session_id: str, state: State, action: str) -> Step:
        answer = action.strip()
        is_valid = answer in self.actions_of("")
        state = {**state, "guesses_left": state["guesses_left"] - 1}
        state, reward = (
            self._judge(state, int(answer)) if is_valid else (state | {"observation": self._invitation()}, 0.0)
        )
        if not state["guesses_left"]:
            state |= {"round": state["round"] + 1, **self._new_round()}
            state["observation"] += f" {self._invitation()}"
        is_over = state["round"] == self.env_config["rounds"]
        score = state["found"] / self.env_config["rounds"]
        if self._reward_scheme == "win":
            reward = float(is_over and score == 1)
        info = {"success": score == 1, "score": score, "invalid": not is_valid, **self._worth}
        return state, reward, is_over, info

    def _state_key(self, state: State) -> Hashable:
        """The round, and what its number may still be."""
        return state["round"], state["low"], state["high"]

    def _potential(self, state: State) -> float:
        """Minus the information that this round still lacks, as a fraction of all of it."""
        return -information_fraction(state["high"] - state["low"] + 1, 1, self.env_config["size"])

    def _new_round(self) -> State:
        return {"low": 1, "high": self.env_config["size"], "guesses_left": self.env_config["guesses"]}

    def _fraction_of_information(self, before: int, after: int) -> float:
        is_rewarded = self._reward_scheme == "win_plus_information"
        return information_fraction(before, after, self.env_config["size"]) if is_rewarded else 0.0

    def _invitation(self) -> str:
        return f"Guess a number from 1 to {self.env_config['size']}."

    def _judge(self, state: State, guess: int) -> tuple[State, float]:
        """What a guess leads to, and its reward unless the win alone is rewarded."""
        secret: int = state["secrets"][state["round"]]
        before: int = state["high"] - state["low"] + 1
        if guess == secret:
            return {**state, "guesses_left": 0, "found": state["found"] + 1, "observation": RIGHT}, 1.0
        low: int = max(state["low"], guess + 1) if guess < secret else state["low"]
        high: int = min(state["high"], guess - 1) if guess > secret else state["high"]
        state = {**state, "low": low, "high": high, "observation": HIGHER if guess < secret else LOWER}
        return state, self._fraction_of_information(before, high - low + 1)


class CarelessGuesser(Agent):
    """Draws each guess from the numbers that fit all answers of the round, or, half of the time, from all numbers.

    What it shows a policy is how the game is spoken, and that answers matter.

    Args:
        env: The game.
        seed: Of its draws.
    """

    def __init__(self, env: GuessTheNumber, seed: int = 0) -> None:
        self._size: int = env.env_config["size"]
        self._generator = random.Random(derive_seed("careless guesser", seed))

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Take in the answer, and draw; the state is (lowest, highest, last guess)."""
        low, high, guess = agent_state or (1, self._size, 0)
        heard = messages[-1]["content"]
        if heard == HIGHER:
            low = max(low, guess + 1)
        elif heard == LOWER:
            high = min(high, guess - 1)
        else:  # an invitation: the next round
            low, high = 1, self._size
        is_careful = self._generator.random() < 0.5
        guess = self._generator.randint(low, high) if is_careful else self._generator.randint(1, self._size)
        return str(guess), (low, high, guess)


@cache
def guess_values(size: int, guesses: int, *, rounds: int, reward_scheme: str) -> dict[str, float]:
    """What an episode of :class:`GuessTheNumber` is worth, by dynamic programming over the numbers left in play.

    With n numbers left the j-th of them is right with chance 1/n and leaves j − 1 or n − j otherwise. Best play takes
    the best j; random play takes any of ``size`` numbers, of which those out of play change nothing. Rounds are
    independent: their worths add up, or, where the win of all is rewarded, multiply.

    Args:
        size: How many numbers there are.
        guesses: Guesses of a round.
        rounds: How often the game is played.
        reward_scheme: The ``reward_scheme`` of the environment.

    Returns:
        ``optimal_reward`` and ``random_reward``.

    >>> guess_values(3, 2, rounds=1, reward_scheme="find")
    {'optimal_reward': 1.0, 'random_reward': 0.5555555555555556}
    """

    def worth_of(n: int, after: Sequence[float]) -> list[float]:
        """The worth of each of n guesses; ``after[m]`` is that of m numbers left with a guess less."""

        def fraction(m: int) -> float:
            gain = information_fraction(n, m, size) if reward_scheme == "win_plus_information" and m else 0.0
            return m / n * (gain + after[m])

        return [1 / n + fraction(j) + fraction(n - 1 - j) for j in range(n)]

    best = blind = [0.0] * (size + 1)
    for _ in range(guesses):
        best = [0.0, *(max(worth_of(n, best)) for n in range(1, size + 1))]
        blind = [0.0, *((sum(worth_of(n, blind)) + (size - n) * blind[n]) / size for n in range(1, size + 1))]
    optimal, random_ = (
        worth**rounds if reward_scheme == "win" else worth * rounds for worth in (best[size], blind[size])
    )
    return {"optimal_reward": optimal, "random_reward": random_}


#: Letters are columns, rows count from below; a line joins two rooms.
MAZE = """
o-o-o-o
|   | |
o-o o-o
| | |
o-o-o-o
|   |
o-o o-o
"""
DIRECTIONS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}


class CoinMaze(MultistepEnv):
    """Walk through a maze with loops and dead ends, and take the coin that lies in every other room.

    A task may name its ``start``, else the episode draws it. The agent sees the room it is in, the ways out, and behind
    which of them a coin lies: ``"b3: north coin, east."``; it answers with a direction. A wall costs a turn. The
    game is won, and over, when no coin is left.

    ``reward_scheme="coins"`` rewards each coin as it is taken, 1 in all; ``"win"`` gives 1 with the last coin alone.
    Random play draws from the ways out.
    """

    config_fields: ClassVar = {
        "maze": Field(default=MAZE, expected="a drawing of rooms and ways", valid=lambda text: "o" in str(text)),
        "reward_scheme": choice_field("coins", "win"),
    }
    default_config: ClassVar = {"max_steps_per_episode": 20}

    def _check_config(self, config: dict[str, Any]) -> None:
        self.exits = read_maze(config["maze"])
        if any(not ways for ways in self.exits.values()):
            raise ConfigError(f"env_config['maze'] must have a way out of every room, got {config['maze']!r}")

    @staticmethod
    def actions_of(observation: str) -> list[str]:
        """The ways out that an observation names."""
        return [word for word in observation.replace(",", " ").replace(".", " ").split() if word in DIRECTIONS]

    def vocabulary_texts(self) -> list[str]:
        """Every text of the game."""
        seen = (self._describe(room, found=found) for room in self.exits for found in (False, True))
        return [*seen, *DIRECTIONS]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        start = task_data.get("start", self.rng(session_id).choice(list(self.exits)))
        return {"done": False, "start": start, "room": start, "coins": frozenset(self.exits) - {start}, "found": False}

    def _format_prompt(self, state: State, step: int) -> str:
        return self._describe(state["room"], found=state["found"])

    def _step_episode(self, session_id: str, state: State, action: str) -> Step:
        direction = action.strip()
        room = self.exits[state["room"]].get(direction, state["room"])
        coins = state["coins"] - {room}
        won = not coins
        reward = float(won)
        if self.env_config["reward_scheme"] == "coins":
            reward = (len(state["coins"]) - len(coins)) / (len(self.exits) - 1)
        info = {
            "success": won,
            "score": 1 - len(coins) / (len(self.exits) - 1),
            "invalid": direction not in DIRECTIONS,
            **self._worth(state["start"]),
        }
        return {**state, "room": room, "coins": coins, "found": coins != state["coins"]}, reward, won, info

    def _state_key(self, state: State) -> Hashable:
        """The room and the coins that are left; how many turns are left is not part of it."""
        return state["room"], state["coins"]

    def _describe(self, room: str, *, found: bool) -> str:
        ways = ", ".join(self.exits[room])
        return f"A coin! {room}: {ways}." if found else f"{room}: {ways}."

    def _worth(self, start: str) -> dict[str, float]:
        config = self.env_config
        return maze_values(config["maze"], config["max_steps_per_episode"], reward_scheme=config["reward_scheme"])[
            start
        ]


def read_maze(drawing: str) -> dict[str, dict[str, str]]:
    """Read a drawing: each room's ways out and where they lead.

    >>> read_maze("o-o")
    {'a1': {'east': 'b1'}, 'b1': {'west': 'a1'}}
    """
    lines = drawing.strip("\n").split("\n")
    marks = {(y, x): mark for y, line in enumerate(lines) for x, mark in enumerate(line) if mark != " "}
    names = {place: f"{'abcdefghij'[place[1] // 2]}{(len(lines) - place[0] + 1) // 2}" for place in marks}
    return {
        names[y, x]: {
            way: names[y + 2 * dy, x + 2 * dx] for way, (dy, dx) in DIRECTIONS.items() if marks.get((y + dy, x + dx))
        }
        for (y, x), mark in marks.items()
        if mark == "o"
    }


@cache
def maze_values(drawing: str, moves: int, *, reward_scheme: str) -> dict[str, dict[str, float]]:
    """What an episode of :class:`CoinMaze` is worth, by dynamic programming over (room, coins that are left).

    ``V_t(room, coins) = max over the ways out of (pay + V_{t-1}(next room, coins left there))`` for best play, which
    knows the maze and remembers where it was; the mean in place of the max for random play.

    Args:
        drawing: The maze.
        moves: Turns of an episode.
        reward_scheme: The ``reward_scheme`` of the environment.

    Returns:
        ``optimal_reward`` and ``random_reward`` by the room of the start.
    """
    exits = read_maze(drawing)
    rooms = list(exits)
    coins = np.arange(1 << len(rooms))  # every set of coins as a mask, room i as bit i
    taken = coins[None] & ~(1 << np.arange(len(rooms)))[:, None]  # what entering a room leaves, (rooms, sets)
    is_rewarded = (taken != coins) & ((reward_scheme == "coins") | (taken == 0))

    def after(values: NDArray[np.float64], room: str) -> Iterator[NDArray[np.float64]]:
        for there in map(rooms.index, exits[room].values()):
            yield is_rewarded[there] + values[there][taken[there]]

    best, blind = np.zeros((2, len(rooms), len(coins)))
    for _ in range(moves):
        best = np.stack([np.max([*after(best, room)], axis=0) for room in rooms])
        blind = np.stack([np.mean([*after(blind, room)], axis=0) for room in rooms])
        best[:, 0] = blind[:, 0] = 0.0  # without coins the game is over
    total = len(rooms) - 1 if reward_scheme == "coins" else 1
    at_start = [len(coins) - 1 - (1 << i) for i in range(len(rooms))]
    return {
        room: {"optimal_reward": float(best[i, start]) / total, "random_reward": float(blind[i, start]) / total}
        for i, (room, start) in enumerate(zip(rooms, at_start, strict=True))
    }
