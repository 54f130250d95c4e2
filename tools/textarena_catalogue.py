"""Generate ``catalogue.json`` by playing every game: ``python -m tools.textarena_catalogue``.

Each game is played with legal random moves where they can be found, alone and interleaved with other games, in a
separate process with a limit of processor time, so that a busy machine makes no game slow. The tables of this file hold
what playing does not show: which sources need a newer Python, and the number of players of games that accept any
number. Games that need a newer Python are played with it, as in ``python3.12 -m tools.textarena_catalogue Chess-v0``,
which leaves all other entries unchanged.
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
from agentsgym.envs.TextArena.games import GameFactory, PlayedGame
from agentsgym.envs.TextArena.isolation import GameContext, textarena
from agentsgym.envs.TextArena.patches import GAMEMASTER_GAMES, JURY_GAMES, PATCHED_GAMES, PATCHED_STATES
from agentsgym.envs.TextArena.players import LegalPlayer
from agentsgym.errors import ConfigError
from agentsgym.texts import sentence_of

MOST_PLAYERS = 15
NUM_MOVES = 24
TIME_LIMIT_S = 60.0  # of CPU time
WAIT_S = 900.0  # wall-clock time, for a game that blocks
LEAST_PYTHON = "3.12"  # allows quotes of the same kind inside f-strings
WORD_GAMES = (
    "Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee", "WordChains", "WordLadder", "WordSearch",
    "Wordle",
)  # fmt: skip
#: The numbers of players of games that accept numbers with which they cannot be played.
PLAYERS = {
    "Hanabi": (2, 5),
    "MarketEntryGame": (2, 15),
    "PublicGoodsGame": (2, 15),
    "QuantumTicTacToe": (2, 2),
    "SecretMafia": (6, 15),
    "SpiteAndMalice": (2, 2),
}
#: Games whose prompts differ only in the side that a player is on, as checked by hand, so nothing is hidden.
OPEN_PROMPTS = ("Alquerque", "Breakthrough", "Othello", "QuantumTicTacToe", "Santorini", "ThreePlayerTicTacToe")
#: Games whose source needs LEAST_PYTHON.
LATER_PYTHON = ("Checkers", "Chess", "IteratedStagHunt", "ReverseTicTacToe", "UltimateTexasHoldem")


def world_of(game: str) -> str:
    """The folder of a game's class."""
    return str(textarena().envs.registration.ENV_REGISTRY[game].entry_point).split(".")[-2]


def base_ids() -> list[str]:
    """The ids without the suffix that selects the form of observations, in order."""
    return sorted(one for one in textarena().envs.registration.ENV_REGISTRY if not one.endswith(("-raw", "-train")))


class Session:
    """One game, played move by move.

    Attributes:
        texts: The observations.
        is_public: Whether every message except prompts and notices of invalid moves went to all players.
        seconds: The processor time of all steps.
    """

    def __init__(self, maker: GameFactory, num_players: int, seed: int, player_seed: int = 7) -> None:
        context = GameContext(random.Random(seed), gamemaster=lambda _: "Yes")
        self.game = PlayedGame(maker(context), context, num_players=num_players, seed=seed)
        self.player = LegalPlayer(random.Random(f"player {player_seed}"))
        self.texts: list[str] = []
        self.is_public = True
        self._has_open_prompts = world_of(maker.game) in OPEN_PROMPTS
        self.seconds = 0.0
        self.num_steps = 0

    def move(self) -> bool:
        """Play one move; False if the game is over."""
        if self.game.done:
            return False
        self._compare_views()
        text = self.game.observe()
        self.texts.append(text)
        action = self.player.answer(text, self.game)
        start = time.thread_time()  # the process's clock is coarse under a limit of its time
        is_valid, seat = self.game.move(action), self.game.player
        self.seconds += time.thread_time() - start
        waiting = self.game.state.observations[seat]
        is_shown = any(one[2].name == "PLAYER_ACTION" and one[1] == action for one in waiting)
        self.is_public &= self.game.done or not is_valid or is_shown
        self.num_steps += 1
        if self.game.done:
            self.texts.append(repr(sorted(self.game.rewards().items())))
        return True

    def _compare_views(self) -> None:
        """Compare the players' waiting messages: one that some players see and others do not is hidden."""
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

    def play(self) -> Session:
        """Play to the end, or for ``NUM_MOVES`` moves, and return the session."""
        for _ in range(NUM_MOVES):
            if not self.move():
                break
        return self


def players_of(game: str, maker: GameFactory) -> tuple[int, int]:
    """Find the numbers of players with which a game can be started and played."""
    if world_of(game) in PLAYERS:
        return PLAYERS[world_of(game)]
    works: list[int] = []
    for count in range(1, MOST_PLAYERS + 1):
        try:
            session = Session(maker, count, 1)
            for _ in range(3):
                session.move()
            works.append(count)
        except Exception:  # noqa: BLE001  # third-party code may raise anything
            if works:
                break
    if not works:
        Session(maker, 2, 1).move()  # raises the reason
        raise RuntimeError("it starts with no number of players")
    return min(works), max(works)


def entry_of(game: str) -> GameEntry:
    """Play a game and return its entry."""
    world = world_of(game)
    needs_model = world in (*GAMEMASTER_GAMES, *JURY_GAMES)
    status: Status = "gamemaster" if needs_model else "words" if world in WORD_GAMES else "ok"
    try:
        maker = GameFactory(game, has_gamemaster=needs_model)
        fewest, most = players_of(game, maker)
        return _played(game, maker, GameEntry(min_players=fewest, max_players=most, status=status))
    except Exception as error:  # noqa: BLE001  # foreign code
        return _broken(error)


def _played(game: str, maker: GameFactory, entry: GameEntry) -> GameEntry:
    play = Session(maker, entry.min_players, 7).play()
    beside, other = Session(maker, entry.min_players, 7), Session(maker, entry.min_players, 8, player_seed=8)
    varies = any(Session(maker, entry.min_players, seed).play().texts != play.texts for seed in (8, 9, 10, 11))
    before = random.getstate()
    for _ in range(NUM_MOVES):
        beside.move()
        other.move()
    is_equal = beside.texts == play.texts and random.getstate() == before
    if not varies:  # the tables at the start may hold a secret that random moves do not touch
        starts = [Session(maker, entry.min_players, seed).game.state.game_state for seed in (7, 7, 8, 9, 10, 11)]
        tables = [re.sub(r" at 0x\w+", "", repr(start)) for start in starts]
        varies = tables[0] == tables[1] and any(table != tables[0] for table in tables[2:])
    addresses_one = re.search(r"to_id\s*=\s*(?!-1\b)", inspect.getsource(sys.modules[maker.module])) is not None
    return dataclasses.replace(
        entry,
        reason="a fault is patched" if world_of(game) in (*PATCHED_STATES, *PATCHED_GAMES) else "",
        min_python=LEAST_PYTHON if world_of(game) in LATER_PYTHON else "",
        reproducible=is_equal,
        seeds_matter=varies,
        hidden=entry.max_players > 1 and (addresses_one or not play.is_public),
        step_us=round(1e6 * play.seconds / max(1, play.num_steps), 1),
    )


def transcripts(games: Sequence[str], hash_seed: int) -> dict[str, str]:
    """Play games in a process with another hash seed, and return a digest of each one's texts."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "tools.textarena_catalogue", "--digests", *games]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # after the output of imports


def _digest(game: str) -> str:
    needs_model = world_of(game) in (*GAMEMASTER_GAMES, *JURY_GAMES)
    maker = GameFactory(game, has_gamemaster=needs_model)
    fewest, _ = players_of(game, maker)
    texts = [Session(maker, fewest, seed).play().texts for seed in (7, 8)]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _broken(error: BaseException) -> GameEntry:
    """Make the entry of a game that does not run; it is not broken if a newer Python may parse its source."""
    cause = error.__cause__ if isinstance(error, ConfigError) and error.__cause__ is not None else error
    reason = f"{type(cause).__name__}: {sentence_of(cause, 200)}"
    if isinstance(cause, SyntaxError) and "f-string" in str(cause):
        needs = f"its source needs Python {LEAST_PYTHON}; nothing was played"
        return GameEntry(min_players=2, max_players=2, min_python=LEAST_PYTHON, reason=needs)
    return GameEntry(
        min_players=1,
        max_players=MOST_PLAYERS,
        status="broken",
        reason=re.sub(r"(?:/[\w.@-]+)+/(?=[\w.-]+)", "", reason),
    )


def measure(games: Sequence[str], num_workers: int, time_limit_s: float = TIME_LIMIT_S) -> dict[str, dict[str, Any]]:
    """Play the games, each in a separate process that may take ``time_limit_s`` of processor time."""
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
    too_slow = f"it did not finish {NUM_MOVES} moves in {time_limit_s:.0f} s"
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
    logging.disable(logging.CRITICAL)
    sender.send(dataclasses.asdict(entry_of(game)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the games named on the command line, or all, and write their entries into the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("games", nargs="*")
    parser.add_argument("--output", type=Path, default=CATALOGUE_FILE)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S, help="processor time for each game")
    parser.add_argument("--digests", action="store_true", help="only print digests of the named games")
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
