"""The built-in gamemaster, which answers a question that it understands from the knowledge base."""

from __future__ import annotations

import functools
from collections.abc import Collection

from agentsgym.envs.TwentyQuestions.knowledge import COMPARISONS, SIZES, load_knowledge
from agentsgym.envs.TwentyQuestions.language import load_language
from agentsgym.envs.TwentyQuestions.parsing import Reader

YES, NO, SOMETIMES, UNKNOWN = "Yes.", "No.", "Sometimes.", "I don't know."
REPLIES = (YES, NO, SOMETIMES, UNKNOWN)
_REPLY_OF_VALUE = {"yes": YES, "no": NO, "sometimes": SOMETIMES}
_OPPOSITE = {YES: NO, NO: YES}


@functools.cache
def load_reader() -> Reader:
    """Create the action parser for the bundled knowledge base."""
    return Reader(load_knowledge(), load_language().read)


class Gamemaster:
    """Answers questions about some properties of the bundled knowledge base."""

    def __init__(self, properties: Collection[str]) -> None:
        self._properties = frozenset(properties)

    def __call__(self, solution: str, question: str) -> str:
        """Answer with one of :data:`REPLIES`; the knowledge base need not contain the object named ``solution``."""
        meaning = load_language().understand(question)
        if meaning is None:
            return UNKNOWN
        key = meaning.key
        # Sizes are compared if the game has all sizes, names in any game.
        needed = SIZES if key.startswith(COMPARISONS) else () if ":" in key else (key,)
        value = load_knowledge().value(solution, key) if self._properties.issuperset(needed) else None
        reply = UNKNOWN if value is None else _REPLY_OF_VALUE[value]
        return _OPPOSITE.get(reply, reply) if meaning.opposite else reply
