"""Environments for the tests of ``check_env``: one without a fault, and others with exactly one each."""

from __future__ import annotations

import random
import threading
from typing import Any, ClassVar

import numpy as np

from agentsgym import MultistepEnv

RULES = "Guess my number. It lies from 1 to 9, and after each guess I say whether it is higher or lower."
Step = tuple[dict[str, Any], float, bool, dict[str, Any]]


class Sound(MultistepEnv):
    """Guess a number in six turns."""

    default_config: ClassVar = {"max_steps_per_episode": 6, "error_allowance": 6}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "secret": self.rng(session_id).randint(1, 9), "text": RULES, "turn": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        return state["text"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        try:
            guess = int(action)
        except ValueError:
            return {**state, "text": "A number, please."}, 0.0, False, {"success": False, "invalid": True}
        won = guess == state["secret"]
        text = "Higher." if guess < state["secret"] else "Lower."
        return {**state, "text": text, "turn": state["turn"] + 1}, float(won), won, {"success": won}


class ReadsPythonsGenerator(Sound):
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {**super()._initialize_episode(session_id, task_data), "secret": random.randint(1, 9)}


class SeedsNumpysGenerator(Sound):
    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        np.random.seed(0)
        return super()._step_episode(session_id, state, action)


class DrawsWhatNobodySees(Sound):
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        start = super()._initialize_episode(session_id, task_data)
        return {**start, "table": {"hidden": [random.Random().random()]}, "session": f"game {session_id}"}


class IsNeverTheSame(Sound):
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        start = super()._initialize_episode(session_id, task_data)
        return {**start, "text": f"{RULES} This is game {session_id}."}


class CountsGames(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_games = 0

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.num_games += 1
        return {**super()._initialize_episode(session_id, task_data), "text": f"{RULES} Game {self.num_games}."}


class KeepsTheSecretOnItself(Sound):
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        state = super()._initialize_episode(session_id, task_data)
        self.secret = state["secret"]
        return state

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        return super()._step_episode(session_id, {**state, "secret": self.secret}, action)


class SharesOneDict(Sound):
    START: ClassVar = {"done": False, "secret": 5, "text": RULES, "turn": 0}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return self.START


class WritesIntoTheStateAsItReads(Sound):
    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        state["shown"] = state.get("shown", 0) + 1
        return state["text"]


class PaysNan(Sound):
    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        return state, float("nan"), False, {}


class ComesAliveAgain(Sound):
    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        turn = state["turn"] + 1
        return {**state, "turn": turn, "text": "Go on."}, 0.0, turn == 2, {"success": True}


class SaysItAllAgain(Sound):
    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        return RULES if step == 0 else f"{RULES}\n{state['text']}"


class BeginsEveryPromptWithItsRules(Sound):
    rules = "You guess my number, which lies from 1 to 9.\nI say whether it is higher or lower.\nAnswer with a number."

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {**super()._initialize_episode(session_id, task_data), "text": "What is it?"}

    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        return f"{self.rules}\n{state['text']}"


class Accumulates(Sound):
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {**super()._initialize_episode(session_id, task_data), "text": "Say a number now."}

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        return {**state, "text": f"{state['text']}\n> {action}\nNo."}, 0.0, False, {"success": False}


class RepeatsTheSystemMessage(Sound):
    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        return [{"role": "system", "content": "Play well."}, {"role": "user", "content": state["text"]}]


class CannotBePickled(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.words = (word for word in "abc")


class LosesItsLuckInPickles(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offset = 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "offset": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        return f"{state['text']} ({step + self.offset})"


class PaysARoleThatNobodyHas(Sound):
    def _role(self, state: dict[str, Any]) -> str:
        return "X"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        next_state, reward, done, info = super()._step_episode(session_id, state, action)
        return next_state, reward, done, {**info, "rewards": {"X": reward, "Y": -reward}}


class DoesNotSayWhoseTheRewardIs(Sound):
    def _role(self, state: dict[str, Any]) -> str:
        return "XO"[state["turn"] % 2]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        next_state, _, done, info = super()._step_episode(session_id, state, action)
        return {**next_state, "turn": state["turn"] + 1}, 0.5, done, info


class SaysWhoseTheRewardIs(DoesNotSayWhoseTheRewardIs):
    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        next_state, reward, done, info = super()._step_episode(session_id, state, action)
        return next_state, reward, done, {**info, "rewards": {"X": reward, "O": reward}}


class Breaks(Sound):
    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        raise OSError("the board is gone")


def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: The word.
    """
    return word


def untyped(word):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Look up a word."""
    return word


def silent(word: str) -> str:
    return word


class HasATool(Sound):
    TOOLS: ClassVar[list[Any]] = [look_up]

    def _tools(self) -> Any:
        return self.TOOLS

    def _step_action(self, session_id: str, state: dict[str, Any], action: Any) -> Step:
        calls = [call for call in action.tool_calls if not call.error]
        text = f"You looked up {calls[0].arguments['word']}." if calls else "Call the tool."
        done = bool(calls) and state["turn"] >= 1
        return {**state, "text": text, "turn": state["turn"] + 1}, float(bool(calls)), done, {"success": done}


class HasAToolWithoutTypes(HasATool):
    TOOLS: ClassVar[list[Any]] = [untyped]


class HasAToolWithoutDescription(HasATool):
    TOOLS: ClassVar[list[Any]] = [
        {
            "type": "function",
            "function": {
                "name": "silent",
                "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
            },
        }
    ]


class PlaysTwice(Sound):
    """Sound, in several episodes a trial."""

    default_config: ClassVar = {"max_steps_per_episode": 3, "error_allowance": 3, "episodes_per_trial": 2}


class Hangs(Sound):
    """Does not come back, until it is let go."""

    gate: ClassVar = threading.Event()

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        self.gate.wait(60)
        raise RuntimeError("it was let go")
