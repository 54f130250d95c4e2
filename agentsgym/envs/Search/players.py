"""Players of the generated world to measure against: one that finds every fact, one that leaves it to chance.

A player reads the conversation and nothing else of the environment.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.envs.Search.env import SearchEnv
from agentsgym.envs.Search.moves import TOOL
from agentsgym.envs.Search.world import FACTS, path_of_question
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, Message, ToolCall, TurnRequest

_PASSAGE = re.compile(
    r"^(?:\[\d+\] (?P<title>.+)\n|(?:<information>)?Doc \d+\(Title: (?P<tagged>.+?)\) )(?P<text>.+)$", re.M
)
_NAME = re.compile(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)?\b")


@dataclass(slots=True)
class Notes:
    """A player's memory of one conversation.

    Attributes:
        generator: The conversation's random stream.
        entity: What the facts found so far lead to.
        path: The relations that are still to be followed.
        names: Names that were seen.
    """

    generator: random.Random
    entity: str = ""
    path: tuple[str, ...] = ()
    names: list[str] = field(default_factory=list[str])


class _Player(Agent):
    """Says searches and answers in the environment's format.

    Args:
        env: The environment.
        seed: Makes the random stream of every conversation.
    """

    def __init__(self, env: SearchEnv, seed: int = 0) -> None:
        self._format: str = env.env_config["format"]
        self._num_turns: int = env.env_config["max_steps_per_episode"]
        self._seed = seed
        self._conversations = itertools.count()

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session; ``agent_state`` is a :class:`Notes`."""
        return [self._play(request) for request in requests]

    def _play(self, request: TurnRequest) -> Action:
        new = _new_texts(request.messages)
        notes: Notes = request.agent_state or self._new_notes(new[-1])
        if request.agent_state is not None and path_of_question(new[-1]):  # the next episode, history kept
            notes = self._new_notes(new[-1])
        query, answer = self._choose(notes, new)
        if query is None:
            return Action(text=f"<answer>{answer}</answer>" if self._format == "tags" else answer, agent_state=notes)
        if self._format == "tags":
            return Action(text=f"<search>{query}</search>", agent_state=notes)
        return Action(text="", tool_calls=[ToolCall(name=TOOL, arguments={"query": query})], agent_state=notes)

    def _new_notes(self, question: str) -> Notes:
        stream = random.Random(derive_seed(type(self).__name__, self._seed, next(self._conversations)))
        return Notes(stream)

    def _choose(self, notes: Notes, new: Sequence[str]) -> tuple[str | None, str]:
        raise NotImplementedError


class ReferencePlayer(_Player):
    """Looks up one entity after the other, and answers when the last fact is found; "unknown" where one is missing."""

    def _new_notes(self, question: str) -> Notes:
        notes = super()._new_notes(question)
        notes.entity, notes.path = path_of_question(question) or ("unknown", ())
        return notes

    def _choose(self, notes: Notes, new: Sequence[str]) -> tuple[str | None, str]:
        for title, text in _passages(new):
            fact = FACTS[notes.path[0]].search(text) if notes.path and title == notes.entity else None
            if fact:
                notes.entity, notes.path = fact["value"], notes.path[1:]
                break
        else:
            if notes.names:  # it has searched, and its entity was not found
                notes.entity, notes.path = "unknown", ()
        notes.names.append(notes.entity)
        return (notes.entity if notes.path else None), notes.entity


class RandomPlayer(_Player):
    """Searches for names that it has seen, for as many turns as it draws, and answers with one of them."""

    def _choose(self, notes: Notes, new: Sequence[str]) -> tuple[str | None, str]:
        notes.names += [name for text in new for name in _NAME.findall(text)]
        name = notes.generator.choice(notes.names or ["unknown"])
        return (None if notes.generator.random() < 1 / self._num_turns else name), name


def _new_texts(messages: Sequence[Message]) -> list[str]:
    """What the environment has said since the last answer."""
    texts = [
        message["content"]
        for message in itertools.takewhile(lambda message: message["role"] != "assistant", reversed(messages))
        if message["role"] != "system"
    ]
    return texts[::-1]


def _passages(texts: Sequence[str]) -> list[tuple[str, str]]:
    found: list[Any] = [match for text in texts for match in _PASSAGE.finditer(text)]
    return [(match["title"] or match["tagged"], match["text"]) for match in found]
