"""An engine with the faults that engines have: it raises, crashes, hangs, prints, and counts what it is used for."""

import os
import signal
import sys
import time
from typing import Any


class ToyEngine:
    """Adds numbers; some commands are faults."""

    def __init__(self) -> None:
        self._total = 0
        self._num_games = 0
        self._names_states = False
        self._padding = ""

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        if "fails" in game:
            raise ValueError("no such game")
        if "hangs" in game:
            time.sleep(60)
        self._total, self._names_states = game.get("from", 0), game.get("names_states", False)
        self._padding = game.get("padding", "")
        self._num_games += 1
        return self._seen()

    def step(self, command: str) -> dict[str, Any]:
        print("a library that prints")
        os.write(1, b'{"answer": "of a library below Python"}\n')
        faults: dict[str, Any] = {
            "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "exit": lambda: os._exit(3),
            "leave": lambda: sys.exit("it cannot be read"),
            "hang": lambda: time.sleep(60),
            "raise": lambda: {}["gone"],
        }
        if command in faults:
            faults[command]()
        time.sleep(0.001)
        self._total += int(command)
        return self._seen()

    def close(self) -> None:
        pass

    def _seen(self) -> dict[str, Any]:
        seen = {"total": self._total, "num_games": self._num_games, "pid": os.getpid(), "padding": self._padding}
        return {**seen, "state_key": str(self._total)} if self._names_states else seen
