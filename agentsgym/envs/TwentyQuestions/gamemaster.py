"""The built-in gamemaster, which answers a question that it understands from the knowledge base."""

from __future__ import annotations

import functools
from collections.abc import Collection

from agentsgym.envs.TwentyQuestions.derived import COMPARISON, SIZES
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.envs.TwentyQuestions.language import Language
from agentsgym.envs.TwentyQuestions.parsing import Reader

YES, NO, SOMETIMES, UNKNOWN = "Yes.", "No.", "Sometimes.", "I don't know."
REPLIES = (YES, NO, SOMETIMES, UNKNOWN)
_REPLY_OF_VALUE = {"yes": YES, "no": NO, "sometimes": SOMETIMES}
_OPPOSITE = {YES: NO, NO: YES}


@functools.cache
def load_language() -> Language:
    """Create the language of the bundled knowledge base."""
    return Language(load_knowledge())


@functools.cache
def load_reader() -> Reader:
    """Create the action parser for the bundled knowledge base."""
    return Reader(load_knowledge(), load_language())


class Gamemaster:
    """Answers questions about some properties of the bundled knowledge base."""

    def __init__(self, properties: Collection[str]) -> None:
        self._properties = frozenset(properties)

    def __call__(self, solution: str, question: str) -> str:
        """Answer with one of :data:`REPLIES`; the knowledge base need not contain the object named ``solution``."""
        meaning = load_language().understand(question)
        if meaning is None or not self._is_answered(meaning.key):
            return UNKNOWN
        value = load_knowledge().value(solution, meaning.key)
        reply = UNKNOWN if value is None else _REPLY_OF_VALUE[value]
        return _OPPOSITE.get(reply, reply) if meaning.opposite else reply

    def _is_answered(self, key: str) -> bool:
        """Return whether the game has the property; sizes are compared if it has all sizes, names in any game."""
        if key.startswith(COMPARISON):
            return self._properties.issuperset(SIZES)
        return key in self._properties or ":" in key
