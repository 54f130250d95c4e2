"""Run one TextWorld game; used in an engine's process."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

from agentsgym.envs.TextWorld.feedback import opening_text, said_text
from agentsgym.envs.TextWorld.making import made_game

_VERSION = 8  # of the Z-machine: the first byte of a story file


class TextWorldEngine:
    """One active game; see :class:`agentsgym.envs.shared.engines.Engine`.

    ``start`` takes ``{"file": path}``, or ``kind``, ``options``, ``seed`` and ``cache_dir`` of a game to generate.
    """

    def __init__(self) -> None:
        self._textworld: Any = importlib.import_module("textworld")
        self._path: Path | None = None
        self._env: Any = None
        self._game: Any = None  # TextWorld's state of the game
        self._num_moves = 0
        self._first_length = 0
        self._progress = 0.0

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Generate or find the game, and start it.

        Raises:
            ValueError: The file is not a TextWorld game.
        """
        if "file" in game:
            self._begin(Path(game["file"]))
        else:
            with made_game(game["kind"], game["options"], game["seed"], game["cache_dir"]) as path:
                self._begin(path, is_made=True)
        self._num_moves = self._game["moves"]
        self._first_length = len(self._game["policy_commands"] or ())
        self._progress = 0.0
        state = self._game
        return {
            "text": opening_text(state["feedback"]),
            "verbs": state["verbs"],
            "walkthrough": list(state.get("extra.walkthrough") or ()),
            "max_score": state["max_score"],
            **self._seen(),
        }

    def step(self, command: str) -> dict[str, Any]:
        """Run one command."""
        self._game, _, _ = self._env.step(command)
        state, before = self._game, self._num_moves
        self._num_moves = state["moves"]
        ended = bool(state["won"] or state["lost"])
        return {
            "text": said_text(state["feedback"]),
            "understood": ended or self._num_moves != before,
            **self._seen(),
        }

    def close(self) -> None:
        """Close the game's interpreter."""
        if self._env is not None:
            self._env.close()
        self._env = self._path = None

    def _begin(self, path: Path, *, is_made: bool = False) -> None:
        """Open the game, unless it is the previous one, and start it; the file is not needed afterwards."""
        if not is_made or path != self._path:
            self._open(path)
        self._game = self._env.reset()

    def _open(self, path: Path) -> None:
        self.close()
        _check_file(path)
        infos = self._textworld.EnvInfos(
            admissible_commands=True, policy_commands=True, facts=True, won=True, lost=True, score=True, max_score=True,
            extras=["walkthrough"],
        )  # fmt: skip
        self._env = self._textworld.start(str(path), request_infos=infos)
        self._env.seed(0)  # otherwise a random game is seeded by the clock
        self._path = path

    def _seen(self) -> dict[str, Any]:
        state = self._game
        won, lost = bool(state["won"]), bool(state["lost"])
        most = state["max_score"] or 1
        score = 1.0 if won else min(1.0, (state["score"] or 0) / most)
        return {
            "admissible": [] if won or lost else state["admissible_commands"],
            "policy": list(state["policy_commands"] or ()),
            "won": won,
            "lost": lost,
            "score": score,
            "progress": self._progressed(score),
            "key": self._key(),
        }

    def _progressed(self, score: float) -> float:
        """Return the completed share of the shortest known solution: 1 at the end, negative on a wrong path.

        Without a known solution the score is used instead; a game that can no longer be won has progress 0.
        """
        state = self._game
        if state["won"] or not self._first_length:
            return score
        if state["lost"] or state["_game_progression"].failed:
            self._progress = 0.0
        elif state["policy_commands"]:
            self._progress = 1 - len(state["policy_commands"]) / self._first_length
        return self._progress  # of the last state with a known solution

    def _key(self) -> str:
        """Hash the facts and the score, which determine what remains to be done."""
        facts = sorted(map(str, self._game["_facts"]))
        return hashlib.blake2b("\n".join([*facts, str(self._game["score"])]).encode(), digest_size=12).hexdigest()


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"the game {path} does not exist")
    with path.open("rb") as file:
        first = file.read(1)
    if first != bytes([_VERSION]):
        raise ValueError(
            f"{path} is not a game for version {_VERSION} of the Z-machine (a .z8 file, as written by tw-make)"
        )
    if not path.with_suffix(".json").is_file():
        raise ValueError(f"{path} must have tw-make's description {path.with_suffix('.json').name} next to it")
