"""Games that the real OpenEnv package serves, for the tests of `OpenEnvEnv`; run by the interpreter that has it.

python openenv_games.py GAME --port PORT [--sessions 8]
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any, Literal

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    message: str = Field(description="your guess")


class Said(Observation):
    text: str = ""


class GuessGame(Environment):
    """A number to guess; it is made from the seed. `raise` raises, `sleep` takes long."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    goes_by_seed = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 9, **_: Any) -> Said:
        self._number = random.Random(seed if self.goes_by_seed else None).randrange(most + 1)
        self._state = State(episode_id=episode_id, step_count=0)
        return Said(text=f"A number from 0 to {most}; its remainder by 1000003 is {self._number % 1000003}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Said:
        self._state.step_count += 1
        if action.message == "raise":
            raise RuntimeError("the game broke")
        if action.message == "sleep":
            time.sleep(3)
        if not action.message.isdigit():
            return Said(text="That is no number.", reward=-0.5)
        won = int(action.message) == self._number
        lower = "lower" if self._number < int(action.message) else "higher"
        return Said(text="Right!" if won else lower, reward=1.0 if won else 0.0, done=won, metadata={"won": won})

    @property
    def state(self) -> State:
        return self._state


class SeedlessGame(GuessGame):
    """Draws its number from nowhere."""

    goes_by_seed = False


class Move(Action):
    """Move a piece."""

    piece: Literal["king", "rook"] = Field(description="which piece")
    steps: int = Field(description="how far", ge=1, le=8)
    note: str | None = None


class Board(Observation):
    board: str = ""
    moves_left: int = 3


class BoardGame(Environment):
    """Two pieces on a line; the rook wins at 5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._at = {"king": 0, "rook": 0}
        self._left = 3

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Board:
        self._at, self._left = {"king": 0, "rook": 0}, 3
        return self._board()

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Board:
        self._at[action.piece] += action.steps
        self._left -= 1
        board = self._board()
        board.done = self._at["rook"] == 5 or not self._left
        board.reward = float(self._at["rook"] == 5)
        return board

    def _board(self) -> Board:
        return Board(board=f"king {self._at['king']}, rook {self._at['rook']}", moves_left=self._left)

    @property
    def state(self) -> State:
        return State(step_count=3 - self._left)


class ShopGame(MCPEnvironment):
    """A shop with tools; buying the pear ends the game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self.bought: list[str] = []

        @server.tool()
        def price(good: str) -> int:
            """Look a price up.

            Args:
                good: What.
            """
            return {"pear": 3, "plum": 4}[good]

        @server.tool()
        def buy(good: str, count: int = 1) -> str:
            """Buy a good."""
            self.bought += [good] * count
            return f"You have {len(self.bought)}."

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.bought.clear()
        return Observation(metadata={"task": "Buy a pear."})

    async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Any:
        observation = await super().step_async(action, timeout_s, **options)
        if isinstance(action, CallToolAction):
            observation.done = "pear" in self.bought
            observation.reward = float(observation.done)
        return observation

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State()


GAMES = {
    "guess": (GuessGame, Guess, Said),
    "seedless": (SeedlessGame, Guess, Said),
    "board": (BoardGame, Move, Board),
    "shop": (ShopGame, CallToolAction, CallToolObservation),
}


def main() -> None:
    """Serve a game."""
    parser = argparse.ArgumentParser()
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sessions", type=int, default=8)
    given = parser.parse_args()
    game, action, observation = GAMES[given.game]
    app = create_fastapi_app(game, action, observation, max_concurrent_envs=given.sessions)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
