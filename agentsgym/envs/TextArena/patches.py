"""Patch bugs in TextArena's games, and let a user's agent be their gamemaster.

- Countdown, Cryptarithm and Slitherlink pass the arguments of ``add_observation`` and ``set_invalid_move`` in the wrong
  order, so messages are numbers and rewards are sentences.
- CharacterConclave omits the type of its observations, which is required.
- DontSayIt compares its turns with a limit that may be None; ScenarioPlanning misspells an argument of a draw.
- Bandit compares the chosen name with the table of all buttons, so it never recognizes the best one and rewards each
  choice with its regret: the worst button scores highest. The patch rewards the best button with 1, and any other
  button with minus its regret.
- Briscola and Golf call a method that their state lacks at the end of a game of three or four players. The patch
  rewards the player whom the game names as its winner, by points, whoever moved last. Briscola's forty cards also leave
  one over for three players, who are then prompted for cards that they do not have: the patch removes one of the twos,
  as is usual, so that all cards are dealt.
- KuhnPoker never adds a bet or a call to the pot, so every round is worth one chip, and shows the second player of a
  round their card twice.
- 2048 lets a long game's score compensate for the missing tile, so a lost game may be rewarded like a won one. The
  patch caps each half of its partial credit at one half.
- FifteenPuzzle calls a method that its state lacks, so solving it raises an exception.
- Tak misnames an argument of its state's ``set_winner``, so completing a road raises an exception; it reports a walk as
  a tuple, and raises an exception on a move without a piece or a square. Checkers calls a wrong method with a wrong
  argument when a player has no legal move.
- Santorini records who made too many invalid moves, but prompts the same player forever. The patch skips that player,
  and the last one left wins.
- TwoDollar draws its roles from a list in file-system order, which differs between machines.
- WordChains draws from a list in set order, which differs between processes.
- GuessWho, TwentyQuestions, Debate and ScenarioPlanning build clients of a paid service, which require an API key.
"""
# The base classes are known only at run time:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from agentsgym.envs.TextArena.isolation import Standin, current_context, textarena
from agentsgym.envs.TextArena.observations import GAME_ID

_POKER_MOVE = re.compile(r"\[(check|bet|fold|call)\]", re.IGNORECASE)  # the first one counts
PATCHED_STATES = (
    "Briscola", "Checkers", "Golf",
    "Countdown", "Cryptarithm", "Slitherlink", "CharacterConclave", "DontSayIt", "FifteenPuzzle", "ScenarioPlanning",
    "Tak",
)  # fmt: skip
GAMEMASTER_GAMES = ("GuessWho", "TwentyQuestions")
JURY_GAMES = ("Debate", "ScenarioPlanning")
#: The base of a patch for the type checker: patches are combined with TextArena's classes when a game is made.
_Original: Any = object


class _State(_Original):
    """Accepts arguments in the order in which the games pass them."""

    def add_observation(
        self, message: Any, observation_type: Any = None, from_id: Any = GAME_ID, to_id: int = -1
    ) -> None:
        kinds = textarena().ObservationType
        if isinstance(from_id, kinds):
            message, observation_type, from_id = observation_type, from_id, message
        if isinstance(message, tuple):  # caused by a stray comma in a game
            message = "".join(cast("tuple[str, ...]", message))
        usual = kinds.GAME_MESSAGE if from_id == GAME_ID else kinds.PLAYER_ACTION
        super().add_observation(message, observation_type or usual, from_id=from_id, to_id=to_id)

    def check_turn_limit(self) -> bool:
        return self.max_turns is not None and self.turn >= self.max_turns and not self.done

    def set_draw(self, reason: str = "", reson: str = "") -> None:
        super().set_draw(reason=reason or reson)

    def set_winner(self, player_id: Any = None, reason: str = "", **misnamed: Any) -> None:
        super().set_winner(misnamed.get("player_ids", player_id), reason)

    def set_winners(self, player_ids: Any = None, reason: str = "", player_id: int | None = None) -> None:
        if player_id is None:
            super().set_winners(player_ids, reason)
        else:
            self.set_winner(player_id, reason)

    def set_invalid_move(self, reason: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str) and not isinstance(reason, str):
            reason, args = args[0], (reason, *args[1:])
        return super().set_invalid_move(reason, *args, **kwargs)


class _MissingMethods:
    """The methods missing from the states of FifteenPuzzle, Briscola and Golf."""

    game_state: dict[str, Any]

    def set_winners(self, player_ids: list[int], reason: str) -> None:
        self.set_outcome(reward=1, reason=reason)

    def set_outcome(self, reward: float, reason: str) -> None:
        table = self.game_state
        points = table.get("points_won") or {seat: -player["score"] for seat, player in table["players"].items()}
        self.set_winners([max(points, key=lambda seat: points[seat])], reason)  # ties go to the first, as in the games


@functools.cache
def patched_state(name: str) -> type[Any]:
    """Return the patched version of one of TextArena's state classes, such as ``"TwoPlayerState"``."""
    return type(f"Patched{name}", (_State, getattr(textarena(), name), _MissingMethods), {})


class _Chances(dict[str, float]):
    """The buttons' success probabilities, in a dict that compares equal to the name of the best button."""

    __hash__ = None  # as every dict

    def __eq__(self, other: object) -> bool:
        return other == max(self, key=lambda name: self[name]) if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _Bandit(_Original):
    def reset(self, *args: Any, **kwargs: Any) -> None:
        super().reset(*args, **kwargs)
        table = self.state.game_state
        table["ground_truth"] = _Chances(table["ground_truth"])

    def _regret(self, button: str) -> float:
        return -super()._regret(button)


class _Briscola(_Original):
    deck: list[dict[str, Any]]

    def _init_game(self) -> None:
        full_deck = self.deck
        if self.state.num_players == 3:
            two = next(card for card in full_deck if card["rank"] == "2")
            self.deck = [card for card in full_deck if card is not two]
        super()._init_game()
        self.deck = full_deck


class _Game2048(_Original):
    def _get_percentage_completion(self) -> float:
        largest = self._max_tile() / self.target_tile
        if largest >= 1:
            return 1.0
        score = self.state.game_state["score"] / (1.5 * self._min_score_to_reach_tile(self.target_tile))
        return 0.5 * min(1.0, score) + 0.5 * largest


class _KuhnPoker(_Original):
    def step(self, action: str) -> Any:
        found, table = _POKER_MOVE.search(action), self.state.game_state
        move = found[1].lower() if found else ""
        if move in ("bet", "call") and move in table["current_legal_action_tree"]:
            # Before the step, since a showdown distributes the pot.
            table["pot"] += 1
            table["player_chips"][self.state.current_player_id] -= 1
        return super().step(action)

    def _init_round(self) -> None:
        super()._init_round()
        for waiting in self.state.observations.values():
            if len(waiting) > 1 and waiting[-1][1] == waiting[-2][1]:
                del waiting[-1]


class _Santorini(_Original):
    def _generate_player_prompt(self, player_id: int, game_state: Any) -> str:
        return super()._generate_player_prompt(
            player_id, {**game_state, "valid_moves": self._get_valid_moves(player_id)}
        )

    def step(self, action: str) -> Any:
        done, info = super().step(action)
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


class _Tak(_Original):
    def _is_valid_placement(self, allocation: Any) -> bool:
        return _is_allowed(super()._is_valid_placement, allocation)

    def _is_valid_movement(self, source: Any, allocation: Any) -> bool:
        return _is_allowed(super()._is_valid_movement, source, allocation)


def _is_allowed(rule: Callable[..., bool], *move: Any) -> bool:
    """Whether a rule allows a move; a move with missing or non-numeric parts is not allowed."""
    try:
        return rule(*move)
    except (IndexError, TypeError, ValueError):
        return False


class _TwoDollar(_Original):
    def _load_available_roles(self) -> dict[str, Any]:
        return dict(sorted(super()._load_available_roles().items()))


class _WordChains(_Original):
    def __init__(self) -> None:
        super().__init__()
        self.word_list: list[str] = sorted(self.word_list)


#: The patches of game classes, by the folder of the class.
PATCHED_GAMES: Mapping[str, type[Any]] = {
    "Bandit": _Bandit,
    "Briscola": _Briscola,
    "Game2048": _Game2048,
    "KuhnPoker": _KuhnPoker,
    "Santorini": _Santorini,
    "Tak": _Tak,
    "TwoDollar": _TwoDollar,
    "WordChains": _WordChains,
}


@functools.cache
def patched_class(game_class: type[Any]) -> type[Any]:
    """Return the patched class of a game; TextArena's class is unchanged."""
    name = game_class.__module__.split(".")[-2]
    patch = PATCHED_GAMES.get(name)
    return game_class if patch is None else type(f"Patched{name}", (patch, game_class), {})


class _TextArenaWithPatchedStates(Standin):
    """Stands in for the package ``textarena`` in a game's module."""

    def __getattr__(self, name: str) -> Any:
        return patched_state(name) if name.endswith("PlayerState") else super().__getattr__(name)


class _Agents(Standin):
    """Stands in for ``textarena.agents``, so that any language model a game constructs is the gamemaster."""

    def __getattr__(self, name: str) -> Any:
        context = current_context()
        if name == "OpenRouterAgent" and context is not None and context.gamemaster is not None:
            return _Gamemaster
        return super().__getattr__(name)


class _Gamemaster:
    """Forwards prompts to the gamemaster of the current game."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, prompt: str) -> str:
        context = current_context()
        if context is None or context.gamemaster is None:
            raise RuntimeError(
                "the game called its gamemaster, but none is set for this call: play the game through its environment"
            )
        return context.gamemaster(prompt)


class Jury:
    """A jury with the interface that TextArena's games use; the gamemaster is prompted once per juror."""

    def __init__(self, options: list[str], jury_size: int = 5, **_: Any) -> None:
        self.options = options
        self.jury_size = jury_size

    def evaluate(self, context: str) -> dict[str, float]:
        """Return each option's fraction of the votes that name one; all 0 if none does."""
        choices = ", ".join(f"'{option}'" for option in self.options)
        prompt = f"You are a juror.\n\n{context}\n\nAnswer with one of {choices} and nothing else."
        votes: list[str] = []
        for _ in range(self.jury_size):
            answer = _Gamemaster()(prompt).lower()
            votes += [option for option in self.options if option.lower() in answer][:1]
        return {option: votes.count(option) / max(1, len(votes)) for option in self.options}


def bind_patches(module: ModuleType) -> None:
    """Replace the name ``ta`` in the modules of games that need patches."""
    game = module.__name__.removeprefix("textarena.envs.").removesuffix(".env")
    real = vars(module).get("ta")
    if isinstance(real, ModuleType) and game in PATCHED_STATES:
        vars(module)["ta"] = _TextArenaWithPatchedStates(real)
    elif isinstance(real, ModuleType) and game in GAMEMASTER_GAMES:
        vars(module)["ta"] = Standin(real, agents=_Agents(real.agents))
