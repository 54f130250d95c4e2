"""Games in plain English for a small pretrained model: what it must learn is to play well, not to speak."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from datasets import Dataset

from agentsgym import Field, MultistepEnv
from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.fields import is_bool, is_int
from agentsgym.seeding import derive_seed
from agentsgym.types import TurnRequest


class NumberGuessing(MultistepEnv):
    """Find a number by bisection.

    The reward is 1 for finding the number, and -0.1 for every answer that does not name exactly one number. With
    ``information_reward``, a guess also earns the information in its reply: log(n / m) / log(highest) if it leaves m of
    n possible numbers, which sums to 1 over a game that finds the number.
    """

    config_fields: ClassVar = {
        "highest": Field(default=100, expected="an int above 1", valid=is_int(2)),
        "information_reward": Field(default=False, expected="True or False", valid=is_bool),
    }

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Any) -> Dataset:  # noqa: ARG003
        """Return rows whose seeds determine the numbers; the options are ``size`` (4096) and ``seed``."""
        return _rows("train", **{"size": 4096, **options})

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Any) -> Dataset:  # noqa: ARG003
        """Return rows with other seeds; the options are ``size`` (256) and ``seed``."""
        return _rows("eval", **{"size": 256, **options})

    def _initialize_episode(self, session_id: str, task_data: Mapping[str, Any]) -> dict[str, Any]:
        highest = self.env_config["highest"]
        reply = f"I am thinking of a number from 1 to {highest}. Guess it: answer with one number."
        secret = self.rng(session_id).randint(1, highest)
        return {"done": False, "secret": secret, "reply": reply, "possible": (1, highest)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["reply"]

    def _last_message(self, state: dict[str, Any]) -> str:
        return state["reply"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        numbers = re.findall(r"\d+", action)
        if len(numbers) != 1:
            return {**state, "reply": "Name one number."}, -0.1, False, {"invalid": True, "success": False}
        guess, secret = int(numbers[0]), state["secret"]
        found = guess == secret
        low, high = state["possible"]
        possible = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        hint = f"{'Higher' if guess < secret else 'Lower'}. It is from {possible[0]} to {possible[1]}."
        reply = "Right." if found else hint
        reward = float(found)
        if self.env_config["information_reward"]:
            num_left = 1 if found else possible[1] - possible[0] + 1
            reward += math.log((high - low + 1) / num_left) / math.log(self.env_config["highest"])
        return {**state, "reply": reply, "possible": possible}, reward, found, {"success": found}


class CarelessGuesser(ScriptedPlayer[Notes]):
    """Guesses at random; half of the time among all numbers, otherwise among those that are still possible."""

    def __init__(self, env: NumberGuessing, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._highest: int = env.env_config["highest"]

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        possible = re.search(r"from (\d+) to (\d+)", request.messages[-1]["content"])
        is_careful = notes.generator.random() < 0.5
        low, high = map(int, possible.groups()) if possible and is_careful else (1, self._highest)
        return str(notes.generator.randint(low, high))


def _rows(part: str, *, size: int, seed: int = 0) -> Dataset:
    seeds: dict[str, Any] = {"task_data": [{"seed": derive_seed(part, seed, index)} for index in range(size)]}
    return cast("Any", Dataset).from_dict(seeds)
