"""Scripted players: baselines for evaluation, and a demonstrator for imitation.

A player reads only the question and the results of its tool calls, not the environment's state.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from agentsgym.agents import scripted_player
from agentsgym.envs.PriceList.env import PriceListEnv, Question
from agentsgym.errors import AgentError
from agentsgym.fields import is_fraction, require
from agentsgym.texts import shown
from agentsgym.types import Action, ToolCall, TurnRequest


@dataclass(slots=True, kw_only=True)
class Notes(scripted_player.Notes):
    """A player's memory of one episode.

    Attributes:
        question: The question of the episode.
        prices: The prices that were looked up.
        value: The result of the calculation; None until it is known.
        calls: The tool calls of the last turn.
    """

    question: Question
    prices: dict[str, int] = field(default_factory=dict[str, int])
    value: int | None = None
    calls: tuple[ToolCall, ...] = ()


class ReferencePlayer(scripted_player.ScriptedPlayer[Notes]):
    """Plays optimally: every look-up in one turn, the calculation in the next, then the answer.

    Args:
        env: The environment, which defines the goods, the numbers and the number of turns.
        seed: The seed of every conversation's random stream.
    """

    def __init__(self, env: PriceListEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._goods: list[str] = list(env.env_config["goods"])
        self._max_price: int = env.env_config["max_price"]
        self._max_answer = env.max_answer

    def _is_new_episode(self, request: TurnRequest) -> bool:
        last = request.messages[-1]
        return last["role"] == "user" and Question.parse(last["content"]) is not None

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        text = request.messages[-1]["content"]
        if (question := Question.parse(text)) is None:
            raise AgentError(f"the PriceList players cannot parse the question {shown(text)}")
        return Notes(generator=generator, question=question)

    def _play(self, request: TurnRequest, notes: Notes) -> str | Action:
        results = request.messages[len(request.messages) - len(notes.calls) :]
        wanted = _calculation(notes)
        for call, result in zip(notes.calls, results, strict=True):
            if not result["content"].isdecimal():
                continue
            if call.name == "price":
                notes.prices[call.arguments["good"]] = int(result["content"])
            elif wanted is not None and (call.name, call.arguments) == (wanted.name, wanted.arguments):
                notes.value = int(result["content"])
        move = self._choose(notes)
        notes.calls = move if isinstance(move, tuple) else ()
        return Action(text="", tool_calls=move) if isinstance(move, tuple) else str(move)

    def _choose(self, notes: Notes) -> int | tuple[ToolCall, ...]:
        """Choose an answer, or calls: look up unknown prices, then calculate, then answer."""
        unknown = [name for name in notes.question.goods if name not in notes.prices]
        if unknown:
            return tuple(ToolCall(name="price", arguments={"good": name}) for name in unknown)
        calculation = _calculation(notes)
        if calculation is None:
            return notes.prices[notes.question.goods[0]]
        return (calculation,) if notes.value is None else notes.value

    def _random_move(self, notes: Notes, *, must_answer: bool = False) -> int | tuple[ToolCall, ...]:
        """Draw an answer or a call with equal probability, or always an answer if ``must_answer`` is true."""
        rng = notes.generator
        if must_answer or rng.random() < 0.5:
            return rng.randint(1, self._max_answer)
        name = rng.choice(("price", "add", "multiply"))
        if name == "price":
            return (ToolCall(name=name, arguments={"good": rng.choice(self._goods)}),)
        a, b = (rng.randint(1, self._max_price) for _ in range(2))
        return (ToolCall(name=name, arguments={"a": a, "b": b}),)


class RandomPlayer(ReferencePlayer):
    """Makes a random call or gives a random answer, with equal probability; in its last turn it answers."""

    def _choose(self, notes: Notes) -> int | tuple[ToolCall, ...]:
        return self._random_move(notes, must_answer=notes.turn >= self._num_turns - 1)


class ImitationPlayer(ReferencePlayer):
    """The demonstrator for a warm start, which often replaces the optimal action with a random one.

    Args:
        env: The environment, as in :class:`ReferencePlayer`.
        seed: The seed, as in :class:`ReferencePlayer`.
        noise: The probability of a random action per turn, in [0, 1].
    """

    def __init__(self, env: PriceListEnv, seed: int = 0, *, noise: float = 0.5) -> None:
        super().__init__(env, seed)
        require("noise", noise, is_fraction, "a number in [0, 1]")
        self._noise = noise

    def _choose(self, notes: Notes) -> int | tuple[ToolCall, ...]:
        if notes.generator.random() >= self._noise:
            return super()._choose(notes)
        return self._random_move(notes)


def _calculation(notes: Notes) -> ToolCall | None:
    """The call that computes the answer from the prices; None if no calculation is needed or possible yet."""
    question = notes.question
    if any(name not in notes.prices for name in question.goods):
        return None
    if question.times is not None:
        return ToolCall(name="multiply", arguments={"a": question.times, "b": notes.prices[question.goods[0]]})
    if len(question.goods) == 1:
        return None
    return ToolCall(name="add", arguments=dict(zip("ab", (notes.prices[name] for name in question.goods), strict=True)))
