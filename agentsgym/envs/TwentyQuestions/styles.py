"""The messages and the rules of guessing of each ``style`` of the game."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from agentsgym.envs.TextArena import SPEC as TEXT_ARENA
from agentsgym.envs.TwentyQuestions.gamemaster import NO, REPLIES, UNKNOWN, YES
from agentsgym.envs.TwentyQuestions.knowledge import KnowledgeBase, KnownObject
from agentsgym.envs.TwentyQuestions.parsing import Guess, Move, Question, Reader, core, normalize
from agentsgym.errors import ConfigError

FIRST_PROMPT: Final = "I am thinking of an object. Ask your first question."
LAST_TURN: Final = "This is your last turn: name the object."
NOT_UNDERSTOOD: Final = "I don't know what you mean."

_SYSTEM_PROMPT = (
    "Let's play Twenty Questions. I am thinking of an object, and you find out which one it is. You have {turns}. "
    'In each turn ask me one question about the object; I answer "Yes.", "No.", "Sometimes." or "I don\'t know.". '
    'To guess the object, ask for it by name, as in "Is it a clock?", or write it in brackets, as in [clock]. '
    "{wrong_guess}{limits} Answer with your question or your guess alone."
)
_REWORD = f' "{NOT_UNDERSTOOD}" means that I need it in other words.'
_NO_SPELLING = " I do not answer questions about the letters or the length of its name."
_WRONG_GUESS = {
    True: "You have a single guess: a wrong one ends the game.",
    False: 'A wrong guess is answered "No." like any other question.',
}


class Style:
    """The style of this library.

    Attributes:
        last_turn: The sentence that ends the prompt of the last turn.
        replies: The wording of each possible reply.
        not_understood: The reply to a question that is not understood: ``NOT_UNDERSTOOD``. In a game with listed
            properties, whose vocabulary is small, or with a custom gamemaster, it is the one for unknown answers.
        is_final_guess: Whether a wrong guess ends the game.
    """

    last_turn = LAST_TURN
    replies: ClassVar[Mapping[str, str]] = {reply: reply for reply in REPLIES}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.num_turns: int = config["max_steps_per_episode"]
        self.is_final_guess: bool = config["final_guess"]
        self._is_hard: bool = config["hardcore"]
        self._has_spelling: bool = config["spelling"]
        is_open = config["properties"] == "all" and config["gamemaster"] is None
        self.not_understood: str = NOT_UNDERSTOOD if is_open else self.replies[UNKNOWN]

    def system_prompt(self) -> str | None:
        """Return the system message."""
        turns = "1 turn" if self.num_turns == 1 else f"{self.num_turns} turns"
        limits = _REWORD * (self.not_understood == NOT_UNDERSTOOD) + _NO_SPELLING * (not self._has_spelling)
        return _SYSTEM_PROMPT.format(turns=turns, wrong_guess=_WRONG_GUESS[self.is_final_guess], limits=limits)

    def first_prompts(self) -> list[str]:
        """Return every message that can open a game."""
        return [FIRST_PROMPT]

    def first_prompt(self, solution: str) -> str:
        """Return the message that opens a game with this secret."""
        return FIRST_PROMPT

    def objects(self, knowledge: KnowledgeBase) -> list[str]:
        """Return the objects that are possible secrets by default."""
        return [name for name, known in knowledge.objects.items() if known.hard == self._is_hard]

    def guess(self, known: KnownObject) -> str:
        """Return the guess of an object in canonical wording."""
        return known.guess

    def allowed(self, reply: str) -> str:
        """Return a reply, or "I don't know." in place of one of the four that this style lacks."""
        return UNKNOWN if reply in REPLIES and reply not in self.replies else reply

    def parse(self, reader: Reader, action: str, solution: str) -> Move:
        """Parse an action."""
        return reader.parse(action, solution)


class TextArenaStyle(Style):
    """The style of TextArena's ``TwentyQuestions-v0``, whose words and opening are read from the package.

    Everything is a question except a guess in brackets, and a wrong guess loses. As in the package, there is no
    "Sometimes" but "I don't know". TextArena accepts any guess that contains the secret; here it must be its name.
    """

    last_turn = "You have no more questions: write your guess in brackets."
    replies: ClassVar[Mapping[str, str]] = {YES: "Yes", NO: "No", UNKNOWN: "I don't know"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.is_final_guess = True
        if self._is_hard:
            raise ConfigError(
                "env_config['hardcore'] must be False with style 'textarena', as the knowledge base lacks most of its "
                "hardcore words. Use style 'agentsgym', or name a hardcore word as the 'solution' of a task"
            )
        self.not_understood = self.replies[UNKNOWN]
        self._themes = _themes_of_words()

    def system_prompt(self) -> str | None:
        """Return None, since the opening explains the game."""
        return None

    def first_prompts(self) -> list[str]:
        """Return the opening of each theme."""
        return [self._opening(theme) for theme in dict.fromkeys(self._themes.values())]

    def first_prompt(self, solution: str) -> str:
        """Return the opening, which names the theme of the secret ("things" if it is not one of TextArena's words)."""
        return self._opening(self._themes.get(solution, "things"))

    def objects(self, knowledge: KnowledgeBase) -> list[str]:
        """Return those of TextArena's words that the knowledge base contains."""
        return [*dict.fromkeys(knowledge.names[word] for word in self._themes if word in knowledge.names)]

    def guess(self, known: KnownObject) -> str:
        """Return the name in brackets."""
        return f"[{known.name}]"

    def parse(self, reader: Reader, action: str, solution: str) -> Move:
        """Parse a guess in brackets; any other text is a question, which may name an object."""
        guess = re.search(r"\[([a-zA-Z\s-]+)\]", action)
        if guess and "?" not in action:
            return Guess(name=reader.canonical(guess[1]))
        move = reader.parse(action, solution)
        return Question(text=f"is its name [{move.name}]" if isinstance(move, Guess) else core(normalize(action)))

    def _opening(self, theme: str) -> str:
        game = TEXT_ARENA.load("textarena.envs.TwentyQuestions.env").TwentyQuestionsEnv
        return game._prompt(SimpleNamespace(hardcore=False, game_theme=theme), 0, {})


@functools.cache
def _themes_of_words() -> dict[str, str]:
    """Return the theme of each of TextArena's words."""
    module = TEXT_ARENA.load("textarena.envs.TwentyQuestions")
    text = resources.files(module).joinpath("twenty_questions_words.json").read_text(encoding="utf-8")
    by_theme: Mapping[str, list[str]] = json.loads(text)["basic"]
    return {word: theme for theme, words in by_theme.items() for word in words}


STYLES: Final[Mapping[str, type[Style]]] = {"agentsgym": Style, "textarena": TextArenaStyle}
