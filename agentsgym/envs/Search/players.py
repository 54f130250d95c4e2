"""Baseline players for the generated world: one that finds every fact, and one that acts at random.

A player sees only the conversation, no other part of the environment.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentsgym.agents import scripted_player
from agentsgym.envs.Search.env import SearchEnv
from agentsgym.envs.Search.formats import TOOL
from agentsgym.envs.Search.world import FACTS, path_of_question
from agentsgym.types import Action, Message, ToolCall, TurnRequest

_PASSAGE = re.compile(
    r"^(?:\[\d+\] (?P<title>.+)\n|(?:<information>)?Doc \d+\(Title: (?P<tagged>.+?)\) )(?P<text>.+)$", re.M
)
_NAME = re.compile(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)?\b")


@dataclass(slots=True, kw_only=True)
class Notes(scripted_player.Notes):
    """A player's memory of one conversation.

    Attributes:
        entity: The entity to which the facts found so far lead.
        path: The relations still to be followed.
        names: The names seen so far.
    """

    entity: str
    path: tuple[str, ...]
    names: list[str] = field(default_factory=list[str])


class _Player(scripted_player.ScriptedPlayer[Notes]):
    """Formats searches and answers for the environment."""

    def __init__(self, env: SearchEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._format: str = env.env_config["format"]

    def _is_new_episode(self, request: TurnRequest) -> bool:
        return path_of_question(_new_texts(request.messages)[-1]) is not None

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        # Each episode of a trial counts as a conversation here, so that measured episodes can be replayed.
        entity, path = path_of_question(_new_texts(request.messages)[-1]) or ("unknown", ())
        stream = generator if request.agent_state is None else self._new_stream()
        return Notes(generator=stream, entity=entity, path=path)

    def _play(self, request: TurnRequest, notes: Notes) -> str | Action:
        query, answer = self._choose(notes, _new_texts(request.messages))
        if query is None:
            return f"<answer>{answer}</answer>" if self._format == "tags" else answer
        if self._format == "tags":
            return f"<search>{query}</search>"
        return Action(text="", tool_calls=[ToolCall(name=TOOL, arguments={"query": query})])

    def _choose(self, notes: Notes, new: Sequence[str]) -> tuple[str | None, str]:
        raise NotImplementedError


class ReferencePlayer(_Player):
    """Looks up one entity at a time, and answers once the last fact is found; "unknown" if a fact is missing."""

    def _choose(self, notes: Notes, new: Sequence[str]) -> tuple[str | None, str]:
        for passage in (match for text in new for match in _PASSAGE.finditer(text)):
            is_wanted = notes.path and (passage["title"] or passage["tagged"]) == notes.entity
            fact = FACTS[notes.path[0]].search(passage["text"]) if is_wanted else None
            if fact:
                notes.entity, notes.path = fact["value"], notes.path[1:]
                break
        else:
            if notes.names:  # its search did not find the entity
                notes.entity, notes.path = "unknown", ()
        notes.names.append(notes.entity)
        return (notes.entity if notes.path else None), notes.entity


class RandomPlayer(_Player):
    """Searches for names that it has seen, for a random number of turns, and answers with such a name."""

    def _choose(self, notes: Notes, new: Sequence[str]) -> tuple[str | None, str]:
        notes.names += [name for text in new for name in _NAME.findall(text)]
        name = notes.generator.choice(notes.names or ["unknown"])
        return (None if notes.generator.random() < 1 / self._num_turns else name), name


def _new_texts(messages: Sequence[Message]) -> list[str]:
    """Return the environment's messages since the agent's last turn."""
    texts = [
        message["content"]
        for message in itertools.takewhile(lambda message: message["role"] != "assistant", reversed(messages))
        if message["role"] != "system"
    ]
    return texts[::-1]
