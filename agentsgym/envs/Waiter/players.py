"""Scripted waiters, who see only what their notes contain."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.fields import is_fraction, require
from agentsgym.types import TurnRequest

if TYPE_CHECKING:
    from agentsgym.envs.Waiter.env import WaiterEnv


class ReferencePlayer(ScriptedPlayer[Notes]):
    """Plays optimally: notes every order, and serves what the note contains."""

    def __init__(self, env: WaiterEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._guests: list[str] = env.env_config["guests"]
        self._drinks: list[str] = env.env_config["drinks"]
        self._summary_prompt: str = env.env_config["summary_prompt"]

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        last = request.messages[-1]["content"]
        orders = self._known_orders([message["content"] for message in request.messages])
        if last == self._summary_prompt:
            return " ".join(f"{guest} {self._noted(orders.get(guest), notes.generator)}" for guest in self._guests)
        guest = last.removesuffix("?")
        return self._served(orders.get(guest), notes.generator) if guest in self._guests else "ok"

    def _known_orders(self, texts: list[str]) -> dict[str, str]:
        orders: dict[str, str] = {}
        for words in (text.split() for text in texts):
            if words[1:2] == ["orders"]:
                orders[words[0]] = words[2].removesuffix(".")
            elif len(words) == 2 * len(self._guests) and words[::2] == self._guests:
                orders |= dict(zip(words[::2], words[1::2], strict=True))
        return orders

    def _noted(self, drink: str | None, generator: random.Random) -> str:
        return drink or generator.choice(self._drinks)

    def _served(self, drink: str | None, generator: random.Random) -> str:
        return drink or generator.choice(self._drinks)


class RandomPlayer(ReferencePlayer):
    """Notes and serves any drink."""

    def _noted(self, drink: str | None, generator: random.Random) -> str:
        return generator.choice(self._drinks)

    def _served(self, drink: str | None, generator: random.Random) -> str:
        return generator.choice(self._drinks)


class ImitationPlayer(ReferencePlayer):
    """The demonstrator for a warm start: serves what the note contains, but notes any drink in a fraction of cases.

    Args:
        env: The environment, as in :class:`ReferencePlayer`.
        seed: The seed, as in :class:`ReferencePlayer`.
        noise: This fraction, in [0, 1].
    """

    def __init__(self, env: WaiterEnv, seed: int = 0, *, noise: float = 0.3) -> None:
        super().__init__(env, seed)
        require("noise", noise, is_fraction, "a number in [0, 1]")
        self._noise = noise

    def _noted(self, drink: str | None, generator: random.Random) -> str:
        return super()._noted(None if generator.random() < self._noise else drink, generator)
