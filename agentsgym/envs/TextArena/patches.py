"""Patch small faults of TextArena's games, and let a user's agent be their gamemaster.

- Countdown, Cryptarithm and Slitherlink pass the arguments of ``add_observation`` and ``set_invalid_move`` in the wrong
  order: messages are numbers and rewards are sentences.
- CharacterConclave omits the type of its observations, which is required.
- DontSayIt compares its turns with a limit that may be None; ScenarioPlanning misspells an argument of a draw.
- Bandit compares the chosen name with the table of all buttons, so that it never finds the best one and rewards each
  choice with its regret: the worst button scores highest. The patch rewards the best with 1, and any other with minus
  its regret.
- Briscola and Golf call a method that their state lacks at the end of a game of three or four players. The patch
  rewards the player whom the game names as its winner, by points, whoever moved last. Briscola's forty cards also leave
  one over for three players, who are then prompted for cards that they do not have: the patch removes one of the twos,
  as is usual, so that all cards are dealt.
- KuhnPoker never adds a bet or a call to the pot, so that every round is worth one chip.
- 2048 lets a long game's score compensate for the missing tile, so that a lost game is rewarded like a won one. The
  patch caps each half of its partial credit at one half.
- KuhnPoker shows the player who is second in a round their card twice.
- FifteenPuzzle calls a method that its state lacks, so that solving it raises.
- Tak misnames an argument of its state's ``set_winner``, so that a road raises; it reports a walk as a tuple, and
  raises on a move without a piece or a square.
- Santorini records who made too many invalid moves, but prompts the same player forever. The patch skips that player,
  and the last one left wins.
- TwoDollar draws its roles from a list in file-system order, which differs between machines.
- WordChains draws from a list in set order, which differs between processes.
- GuessWho, TwentyQuestions, Debate and ScenarioPlanning build clients of a paid service, which require an API key.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from agentsgym.envs.TextArena.isolation import Standin, current_context, textarena

_POKER_MOVE = re.compile(r"\[(check|bet|fold|call)\]", re.IGNORECASE)  # the first one counts
MENDED_STATES = (
    "Briscola", "Golf",
    "Countdown", "Cryptarithm", "Slitherlink", "CharacterConclave", "DontSayIt", "FifteenPuzzle", "ScenarioPlanning",
    "Tak",
)  # fmt: skip
GAMEMASTER_GAMES = ("GuessWho", "TwentyQuestions")
JURY_GAMES = ("Debate", "ScenarioPlanning")


class _Lacking:
    """The methods missing from the states of FifteenPuzzle, Briscola and Golf."""

    game_state: dict[str, Any]

    def set_winners(self, player_ids: list[int], reason: str) -> None:
        self.set_outcome(reward=1, reason=reason)

    def set_outcome(self, reward: float, reason: str) -> None:
        table = self.game_state
        points = table.get("points_won") or {seat: -player["score"] for seat, player in table["players"].items()}
        self.set_winners([max(points, key=lambda seat: points[seat])], reason)  # ties go to the first, as in the games


@functools.cache
def _mended(name: str) -> type[Any]:
    """A TextArena state class whose methods take their arguments in the order in which games pass them."""
    package = textarena()
    base: type[Any] = getattr(package, name)
    kinds = package.ObservationType

    class MendedState(base, _Lacking):
        def add_observation(
            self, message: Any, observation_type: Any = None, from_id: Any = package.GAME_ID, to_id: int = -1
        ) -> None:
            if isinstance(from_id, kinds):
                message, observation_type, from_id = observation_type, from_id, message
            usual = kinds.GAME_MESSAGE if from_id == package.GAME_ID else kinds.PLAYER_ACTION
            super().add_observation(  # pyright: ignore[reportUnknownMemberType]  # the base is chosen at run time
                _text(message), observation_type or usual, from_id=from_id, to_id=to_id
            )

        def check_turn_limit(self) -> bool:
            return self.max_turns is not None and self.turn >= self.max_turns and not self.done

        def set_draw(self, reason: str = "", reson: str = "") -> None:
            super().set_draw(reason=reason or reson)  # pyright: ignore[reportUnknownMemberType]  # as above

        def set_winner(self, player_id: Any = None, reason: str = "", **misnamed: Any) -> None:
            name_winner = cast("Callable[..., None]", super().set_winner)  # pyright: ignore[reportUnknownMemberType]
            name_winner(misnamed.get("player_ids", player_id), reason)

        def set_invalid_move(self, reason: Any, *args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], str) and not isinstance(reason, str):
                reason, args = args[0], (reason, *args[1:])
            forgive = cast("Callable[..., Any]", super().set_invalid_move)  # pyright: ignore[reportUnknownMemberType]
            return forgive(reason, *args, **kwargs)

    MendedState.__name__ = MendedState.__qualname__ = f"Mended{name}"
    return MendedState


def _text(message: Any) -> Any:
    """A game's message as one text, even if a stray comma made it a tuple."""
    return "".join(cast("tuple[str, ...]", message)) if isinstance(message, tuple) else message


class _Chances(dict[str, float]):
    """The buttons' chances, a dict that compares equal to the name of the best button."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as every dict

    def __eq__(self, other: object) -> bool:
        return other == max(self, key=lambda name: self[name]) if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def _mended_bandit(base: type[Any]) -> type[Any]:
    class MendedBandit(base):
        def reset(self, *args: Any, **kwargs: Any) -> None:
            super().reset(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]  # as above
            table = self.state.game_state
            table["ground_truth"] = _Chances(table["ground_truth"])

        def _regret(self, button: str) -> float:
            regret = cast("Callable[[str], float]", super()._regret)  # pyright: ignore[reportUnknownMemberType]
            return -regret(button)

    return MendedBandit


def _mended_briscola(base: type[Any]) -> type[Any]:
    class MendedBriscola(base):
        deck: list[dict[str, Any]]

        def _init_game(self) -> None:
            whole = self.deck
            if self.state.num_players == 3:
                two = next(card for card in whole if card["rank"] == "2")
                self.deck = [card for card in whole if card is not two]
            super()._init_game()  # pyright: ignore[reportUnknownMemberType]  # as above
            self.deck = whole

    return MendedBriscola


def _mended_poker(base: type[Any]) -> type[Any]:
    class MendedPoker(base):
        def step(self, action: str) -> Any:
            self._put_in(action)
            play = cast("Callable[[str], Any]", super().step)  # pyright: ignore[reportUnknownMemberType]
            return play(action)

        def _init_round(self) -> None:
            super()._init_round()  # pyright: ignore[reportUnknownMemberType]  # as above
            for waiting in self.state.observations.values():
                if len(waiting) > 1 and waiting[-1][1] == waiting[-2][1]:
                    del waiting[-1]

        def _put_in(self, action: str) -> None:
            """Add the chip of a legal bet or call to the pot, before a showdown pays it out."""
            found, table = _POKER_MOVE.search(action), self.state.game_state
            move = found[1].lower() if found else ""
            if move in ("bet", "call") and move in table["current_legal_action_tree"]:
                table["pot"] += 1
                table["player_chips"][self.state.current_player_id] -= 1

    return MendedPoker


def _mended_2048(base: type[Any]) -> type[Any]:
    class Mended2048(base):
        def _get_percentage_completion(self) -> float:
            largest = self._max_tile() / self.target_tile
            if largest >= 1:
                return 1.0
            score = self.state.game_state["score"] / (1.5 * self._min_score_to_reach_tile(self.target_tile))
            return 0.5 * min(1.0, score) + 0.5 * largest

    return Mended2048


def _mended_tak(base: type[Any]) -> type[Any]:
    class MendedTak(base):
        def _is_valid_placement(self, allocation: Any) -> bool:
            rule = cast("Callable[..., bool]", super()._is_valid_placement)  # pyright: ignore[reportUnknownMemberType]
            return _is_allowed(rule, allocation)

        def _is_valid_movement(self, source: Any, allocation: Any) -> bool:
            rule = cast("Callable[..., bool]", super()._is_valid_movement)  # pyright: ignore[reportUnknownMemberType]
            return _is_allowed(rule, source, allocation)

    return MendedTak


def _is_allowed(rule: Callable[..., bool], *move: Any) -> bool:
    """Whether a rule allows a move; a move with missing or non-numeric parts is not allowed."""
    try:
        return rule(*move)
    except (IndexError, TypeError, ValueError):
        return False


def _mended_santorini(base: type[Any]) -> type[Any]:
    class MendedSantorini(base):
        def step(self, action: str) -> Any:
            play = cast("Callable[[str], Any]", super().step)  # pyright: ignore[reportUnknownMemberType]
            done, info = play(action)
            state = self.state
            out = state.current_player_id
            left = [seat for seat in range(state.num_players) if state.is_player_alive(seat)]
            if done or out in left:
                return done, info
            if len(left) == 1:
                state.set_winners(left, reason=f"Player {out} made too many invalid moves.")
            else:
                state.manually_set_current_player_id(state.next_alive_player(), force=True)
            return state.done, info

    return MendedSantorini


def _mended_two_dollar(base: type[Any]) -> type[Any]:
    class MendedTwoDollar(base):
        def _load_available_roles(self) -> dict[str, Any]:
            load = cast("Callable[[], dict[str, Any]]", super()._load_available_roles)  # pyright: ignore[reportUnknownMemberType]
            return dict(sorted(load().items()))

    return MendedTwoDollar


def _mended_chains(base: type[Any]) -> type[Any]:
    class MendedChains(base):
        def __init__(self) -> None:
            super().__init__()  # pyright: ignore[reportUnknownMemberType]  # as above
            self.word_list: list[str] = sorted(self.word_list)

    return MendedChains


MENDED_GAMES: Mapping[str, Callable[[type[Any]], type[Any]]] = {
    "Bandit": _mended_bandit,
    "Briscola": _mended_briscola,
    "Game2048": _mended_2048,
    "KuhnPoker": _mended_poker,
    "Santorini": _mended_santorini,
    "Tak": _mended_tak,
    "TwoDollar": _mended_two_dollar,
    "WordChains": _mended_chains,
}


@functools.cache
def mended_class(game_class: type[Any]) -> type[Any]:
    """The patched class of a game; TextArena's own class is unchanged."""
    name = game_class.__module__.split(".")[-2]
    if name not in MENDED_GAMES:
        return game_class
    mended = MENDED_GAMES[name](game_class)
    mended.__name__ = mended.__qualname__ = f"Mended{name}"
    return mended


class _MendedTextArena(Standin):
    """Stands in for the package ``textarena`` in a game's module."""

    def __getattr__(self, name: str) -> Any:
        return _mended(name) if name.endswith("PlayerState") else super().__getattr__(name)


class _Agents(Standin):
    """Stands in for ``textarena.agents``: any language model that a game constructs is the gamemaster."""

    def __getattr__(self, name: str) -> Any:
        context = current_context()
        if name == "OpenRouterAgent" and context is not None and context.gamemaster is not None:
            return _Gamemaster
        return super().__getattr__(name)


class _GamemasterTextArena(Standin):
    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.agents = _Agents(real.agents)


class _Gamemaster:
    """Forwards prompts to the gamemaster of the current game."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, prompt: str) -> str:
        context = current_context()
        if context is None or context.gamemaster is None:
            raise RuntimeError("the game used its gamemaster outside its context")
        return context.gamemaster(prompt)


class Jury:
    """A jury as TextArena's games use it: every juror is the gamemaster, prompted once per juror.

    Args:
        options: The options that a juror may choose from.
        jury_size: The number of jurors.
    """

    def __init__(self, options: list[str], jury_size: int = 5, **_: Any) -> None:
        self.options = options
        self.jury_size = jury_size

    def evaluate(self, context: str) -> dict[str, float]:
        """Return each option's fraction of the votes that name one; all 0 if none does."""
        choices = ", ".join(f"'{option}'" for option in self.options)
        prompt = f"You are a juror.\n\n{context}\n\nAnswer with one of {choices} and nothing else."
        votes = [self._vote(prompt) for _ in range(self.jury_size)]
        counted = [vote for vote in votes if vote is not None]
        return {option: counted.count(option) / max(1, len(counted)) for option in self.options}

    def _vote(self, prompt: str) -> str | None:
        said = _Gamemaster()(prompt).lower()
        return next((option for option in self.options if option.lower() in said), None)


def bind_mends(module: ModuleType) -> None:
    """Bind the name ``ta`` in the modules of games that need patches."""
    game = module.__name__.removeprefix("textarena.envs.").removesuffix(".env")
    real = vars(module).get("ta")
    if isinstance(real, ModuleType) and game in MENDED_STATES:
        vars(module)["ta"] = _MendedTextArena(real)
    elif isinstance(real, ModuleType) and game in GAMEMASTER_GAMES:
        vars(module)["ta"] = _GamemasterTextArena(real)
