"""Judged variants of the guessing game, which need no model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from games import GuessNumber

from agentsgym import Action, Agent, AsyncAgent, Criterion, Judge, TurnRequest


def verdict(request: TurnRequest) -> Action:
    """Count the words "one" in what was answered, or rank candidates by it."""
    prompt = request.messages[-1]["content"]
    parts = re.split(r"^CANDIDATE \d+$", prompt, flags=re.MULTILINE)[1:]
    counts = [len(re.findall(r"^\| .*\bone\b", part, re.MULTILINE)) for part in parts or [prompt]]
    grade = sorted(range(1, len(parts) + 1), key=lambda n: -counts[n - 1]) if parts else min(10, counts[0])
    return Action(text=json.dumps({"reason": "Counted.", "ones": grade}))


class Counting(Agent):
    """Judges in batches."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        return [*map(verdict, requests)]


class CountingAlone(AsyncAgent):
    """Judges many requests at once."""

    async def aact(self, request: TurnRequest) -> Action:
        return verdict(request)


class Judged(GuessNumber):
    """Scored for the word "one"."""

    judges = Judge(Counting(), rubric=Criterion("ones", "How often?", scale=(0, 10)))


class Ranked(GuessNumber):
    """Ranked by the word "one"."""

    judges = Judge(CountingAlone(), rubric={"ones": "Who says it most often?"}, scope="group")
