"""A player of Twenty Questions that words its questions in many ways, for a language model to imitate."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from agentsgym.envs.TwentyQuestions import ImitationPlayer
from agentsgym.envs.TwentyQuestions.language import load_language
from agentsgym.envs.TwentyQuestions.players import Notes

_PARAPHRASES: Final = Path(__file__).parents[1] / "tests/envs/twenty_questions/paraphrases.csv"
_MAX_WORDS: Final = 8


class FreeAsker(ImitationPlayer):
    """Asks random questions that split the candidates, half of them in other words than the knowledge base's."""

    def __init__(self, env: Any, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._wordings = short_paraphrases()

    def _ask(self, notes: Notes, key: str) -> str:
        own = super()._ask(notes, key)
        others = self._wordings.get(key)
        return notes.generator.choice(others) if others and notes.generator.random() < 0.5 else own


def short_paraphrases() -> dict[str, list[str]]:
    """Return the wordings of each property, of at most 8 words, that the gamemaster understands."""
    language = load_language()
    found: defaultdict[str, list[str]] = defaultdict(list)
    with _PARAPHRASES.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            text = row["question"].strip().rstrip("?.!")
            meaning = language.understand(text)
            is_right = meaning is not None and (meaning.key, meaning.opposite) == (row["property"], False)
            if is_right and len(text.split()) <= _MAX_WORDS:
                found[row["property"]].append(f"{text[0].upper()}{text[1:]}?")
    return dict(found)
