"""Make ``catalogue.json`` by playing every game: ``python -m tools.textarena_catalogue``.

Each game is played with legal random moves where they can be found, alone and turn by turn with other games, in a
process of its own that has a limit of processor time, so that a busy machine makes no game slow. What cannot be found
by playing stands in the tables of this file: which sources need a newer Python, and how many players a game is meant
for that accepts any number. Games that need a newer Python are played by that one, as
``python3.12 -m tools.textarena_catalogue Chess-v0``, which leaves the entries of all others as they are.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentsgym.envs.TextArena.catalogue import CATALOGUE_FILE, GameEntry, Status
from agentsgym.envs.TextArena.games import GameMaker, PlayedGame
from agentsgym.envs.TextArena.isolation import GameContext, textarena
from agentsgym.envs.TextArena.patches import GAMEMASTER_GAMES, JURY_GAMES, PATCHED_GAMES, PATCHED_STATES
from agentsgym.envs.TextArena.players import LegalPlayer
from agentsgym.errors import ConfigError
from agentsgym.texts import sentence_of

MOST_PLAYERS = 15
NUM_MOVES = 24
TIME_LIMIT_S = 60.0  # of processor time
WAIT_S = 900.0  # for a game that waits for something else
LEAST_PYTHON = "3.12"  # reads quotes of the same kind inside of f-strings
WORD_GAMES = (
    "Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee", "WordChains", "WordLadder", "WordSearch",
    "Wordle",
)  # fmt: skip
#: Numbers of players that a game accepts and cannot play with, or that no reset refuses.
PLAYERS = {
    "Hanabi": (2, 5),
    "MarketEntryGame": (2, 15),
    "PublicGoodsGame": (2, 15),
    "QuantumTicTacToe": (2, 2),
    "SecretMafia": (6, 15),
    "SpiteAndMalice": (2, 2),
}
#: Open games whose prompts were read: they differ in which side one plays, and hide nothing.
OPEN_PROMPTS = ("Alquerque", "Breakthrough", "Othello", "QuantumTicTacToe", "Santorini", "ThreePlayerTicTacToe")
#: Games whose source LEAST_PYTHON reads and no earlier version.
LATER_PYTHON = ("Checkers", "Chess", "IteratedStagHunt", "ReverseTicTacToe", "UltimateTexasHoldem")


def world_of(game: str) -> str:
    """The folder of a game's class."""
    return str(textarena().envs.registration.ENV_REGISTRY[game].entry_point).split(".")[-2]


def base_ids() -> list[str]:
    """The ids without the suffix of a form of observations, in order."""
    return sorted(one for one in textarena().envs.registration.ENV_REGISTRY if not one.endswith(("-raw", "-train")))


@dataclasses.dataclass(kw_only=True)
class Play:
    """What one game said, and how.

    Attributes:
        texts: The observations.
        is_public: Whether every message but a prompt and a notice of an invalid move went to all players.
        step_us: Microseconds of processor time a step.
    """

    texts: list[str]
    is_public: bool
    step_us: float


class Session:
    """One game, played move by move."""

    def __init__(self, maker: GameMaker, num_players: int, seed: int, player_seed: int = 7) -> None:
        context = GameContext(random.Random(seed), gamemaster=lambda _: "Yes")
        self.game = PlayedGame(maker(context), context, num_players=num_players, seed=seed)
        self.player = LegalPlayer(random.Random(f"player {player_seed}"))
        self.texts: list[str] = []
        self.is_public = True
        self._has_open_prompts = world_of(maker.game) in OPEN_PROMPTS
        self.seconds = 0.0
        self.num_steps = 0

    def move(self) -> bool:
        """Play one move; False when the game is over."""
        if self.game.done:
            return False
        self._look()
        text = self.game.observe()
        self.texts.append(text)
        said = self.player.answer(text, self.game)
        start = time.thread_time()  # the process's clock is coarse under a limit of its time
        outcome, seat = self.game.move(said), self.game.player
        self.seconds += time.thread_time() - start
        self.is_public &= outcome.done or outcome.invalid or self._was_told(said, seat)
        self.num_steps += 1
        if self.game.done:
            self.texts.append(repr(sorted(self.game.rewards().items())))
        return True

    def _was_told(self, said: str, seat: int) -> bool:
        """Whether the player who is next to move was told what was said."""
        waiting = self.game.state.observations[seat]
        return any(one[2].name == "PLAYER_ACTION" and one[1] == said for one in waiting)

    def _look(self) -> None:
        """Compare what waits for the players: what one is to see and another is not hides something."""
        waiting = [
            [str(one[1]) for one in messages if one[2].name not in ("PROMPT", "GAME_ADMIN")]
            for messages in self.game.state.observations.values()
        ]
        longest = max(waiting, key=len)
        self.is_public &= all(longest[len(longest) - len(one) :] == one for one in waiting)
        prompts = {
            re.sub(r"\d|'[XO]'|\b(?:[XO]|white|black|red|blue)\b", "", str(one[1]), flags=re.IGNORECASE)
            for messages in self.game.state.observations.values()
            for one in messages
            if one[2].name == "PROMPT"
        }
        self.is_public &= len(prompts) <= 1 or self._has_open_prompts

    def play(self) -> Play:
        """Play on to the end, or for ``NUM_MOVES`` moves."""
        for _ in range(NUM_MOVES):
            if not self.move():
                break
        return Play(texts=self.texts, is_public=self.is_public, step_us=1e6 * self.seconds / max(1, self.num_steps))


def players_of(game: str, maker: GameMaker) -> tuple[int, int]:
    """Find the numbers of players that a game starts and plays with."""
    if world_of(game) in PLAYERS:
        return PLAYERS[world_of(game)]
    works: list[int] = []
    for count in range(1, MOST_PLAYERS + 1):
        try:
            session = Session(maker, count, 1)
            for _ in range(3):
                session.move()
            works.append(count)
        except Exception:  # noqa: BLE001  # foreign code says in its own ways that it cannot
            if works:
                break
    if not works:
        Session(maker, 2, 1).move()  # raises what is wrong
        raise RuntimeError("it starts with no number of players")
    return min(works), max(works)


def entry_of(game: str) -> GameEntry:
    """Play a game and say what was found."""
    world = world_of(game)
    needs_model = world in (*GAMEMASTER_GAMES, *JURY_GAMES)
    status: Status = "gamemaster" if needs_model else "words" if world in WORD_GAMES else "ok"
    try:
        maker = GameMaker(game, has_gamemaster=needs_model)
        fewest, most = players_of(game, maker)
        return _played(game, maker, GameEntry(min_players=fewest, max_players=most, status=status))
    except Exception as error:  # noqa: BLE001  # foreign code
        return _broken(error)


def _played(game: str, maker: GameMaker, entry: GameEntry) -> GameEntry:
    alone = Session(maker, entry.min_players, 7)
    play = alone.play()
    beside, other = Session(maker, entry.min_players, 7), Session(maker, entry.min_players, 8, player_seed=8)
    varies = any(Session(maker, entry.min_players, seed).play().texts != play.texts for seed in (8, 9, 10, 11))
    before = random.getstate()
    for _ in range(NUM_MOVES):
        beside.move()
        other.move()
    is_equal = beside.texts == play.texts and random.getstate() == before
    return dataclasses.replace(
        entry,
        reason="a fault is patched" if world_of(game) in (*PATCHED_STATES, *PATCHED_GAMES) else "",
        min_python=LEAST_PYTHON if world_of(game) in LATER_PYTHON else "",
        reproducible=is_equal,
        seeds_matter=varies or _starts_vary(maker, entry.min_players),
        hidden=entry.max_players > 1 and not (play.is_public and _addresses_all(maker)),
        step_us=round(play.step_us, 1),
    )


def _starts_vary(maker: GameMaker, num_players: int) -> bool:
    """Whether seeds give different tables at the start, where a secret may lie that random moves do not touch."""
    tables = [_table(Session(maker, num_players, seed)) for seed in (7, 7, 8, 9, 10, 11)]
    return tables[0] == tables[1] and any(table != tables[0] for table in tables[2:])


def _table(session: Session) -> str:
    return re.sub(r" at 0x\w+", "", repr(session.game.state.game_state))


def transcripts(games: Sequence[str], hash_seed: int) -> dict[str, str]:
    """Play games in a process of another hash seed, and give a digest of what each said."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "tools.textarena_catalogue", "--digests", *games]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # after what a game may print as it is imported


def _digest(game: str) -> str:
    needs_model = world_of(game) in (*GAMEMASTER_GAMES, *JURY_GAMES)
    maker = GameMaker(game, has_gamemaster=needs_model)
    fewest, _ = players_of(game, maker)
    texts = [Session(maker, fewest, seed).play().texts for seed in (7, 8)]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _addresses_all(maker: GameMaker) -> bool:
    """Whether no line of the game's source sends a message to one player."""
    source = inspect.getsource(sys.modules[maker.module])
    return not re.search(r"to_id\s*=\s*(?!-1\b)", source)


def _broken(error: BaseException) -> GameEntry:
    """Say why a game does not run; one whose source a newer Python may read is not called broken by this one."""
    cause = error.__cause__ if isinstance(error, ConfigError) and error.__cause__ is not None else error
    reason = f"{type(cause).__name__}: {sentence_of(cause, 200)}"
    if isinstance(cause, SyntaxError) and "f-string" in str(cause):
        needs = f"its source needs Python {LEAST_PYTHON}; nothing was played"
        return GameEntry(min_players=2, max_players=2, min_python=LEAST_PYTHON, reason=needs)
    return GameEntry(min_players=1, max_players=MOST_PLAYERS, status="broken", reason=_without_paths(reason))


def _without_paths(text: str) -> str:
    return re.sub(r"(?:/[\w.@-]+)+/(?=[\w.-]+)", "", text)


def _work(game: str) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    return dataclasses.asdict(entry_of(game))


def measure(games: Sequence[str], num_workers: int, time_limit_s: float = TIME_LIMIT_S) -> dict[str, dict[str, Any]]:
    """Play the games, each in a process of its own that may take ``time_limit_s`` of processor time."""
    context = multiprocessing.get_context("forkserver")
    found: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(num_workers) as threads:
        for game, entry in zip(
            games, threads.map(functools.partial(_in_process, context, time_limit_s), games), strict=True
        ):
            found[game] = entry
            print(game, entry["status"], entry["reason"], file=sys.stderr, flush=True)
    return found


def _in_process(context: Any, time_limit_s: float, game: str) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, game, time_limit_s))
    process.start()
    sender.close()
    too_slow = f"it did not come to an end of {NUM_MOVES} moves in {time_limit_s:.0f} s"
    try:
        if receiver.poll(WAIT_S):
            return receiver.recv()
        reason = too_slow
    except EOFError:
        process.join()
        reason = too_slow if process.exitcode == -signal.SIGXCPU else "it ended the process that played it"
    finally:
        process.kill()
        process.join()
    return dataclasses.asdict(GameEntry(min_players=1, max_players=1, status="broken", reason=reason))


def _send(sender: Any, game: str, time_limit_s: float) -> None:
    seconds = math.ceil(time_limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # however busy the machine is
    sender.send(_work(game))


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the games named on the command line, or all, and write what was found of them into the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("games", nargs="*")
    parser.add_argument("--output", type=Path, default=CATALOGUE_FILE)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S, help="of processor time, for each game")
    parser.add_argument("--digests", action="store_true", help="print digests of the games named, and write no file")
    options = parser.parse_args(arguments)
    if options.digests:
        logging.disable(logging.CRITICAL)
        print(json.dumps({game: _digest(game) for game in options.games}))
        return 0
    known: dict[str, Any] = json.loads(options.output.read_text()).get("games", {}) if options.output.exists() else {}
    found = measure(options.games or base_ids(), options.workers, options.time_limit_s)
    played = [game for game in found if found[game]["step_us"] is not None]
    one, other = transcripts(played, 1), transcripts(played, 2)
    for game in played:
        found[game]["reproducible"] &= one[game] == other[game]
    games: dict[str, Any] = {**(known if options.games else {}), **found}
    lines = ",\n".join(f"  {json.dumps(game)}: {json.dumps(games[game])}" for game in sorted(games))
    version = importlib.metadata.version("textarena")
    options.output.write_text(f'{{"textarena": "{version}", "games": {{\n{lines}\n}}}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
