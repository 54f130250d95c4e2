"""Scripted players for evaluation and imitation, and a bound that no player can beat.

A player reads only the gamemaster's messages in the conversation, not the environment's state.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentsgym.agents import scripted_player
from agentsgym.envs.spec import Anchors
from agentsgym.envs.TwentyQuestions.env import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.gamemaster import NO, SOMETIMES, YES
from agentsgym.envs.TwentyQuestions.knowledge import Candidates
from agentsgym.errors import ConfigError
from agentsgym.types import TurnRequest

_NUM_RANDOM_GAMES: Final = 256  # whose rewards are averaged into the anchor
_VALUE_OF_REPLY = {YES: "yes", NO: "no", SOMETIMES: "sometimes"}


@dataclass(slots=True, kw_only=True)
class Notes(scripted_player.Notes):
    """A player's memory of one episode.

    Attributes:
        candidates: The mask of the objects that are consistent with all answers.
        unasked: The properties that have not been asked about.
        mask_by_reply: The mask of the objects that each possible reply to the last turn is consistent with.
        num_questions: The number of questions before the first guess; -1 if it is not fixed.
        guessed: The objects guessed so far.
    """

    candidates: int
    unasked: list[str]
    mask_by_reply: Mapping[str, int] = field(default_factory=dict[str, int])
    num_questions: int = -1
    guessed: set[str] = field(default_factory=set[str])


class Player(scripted_player.ScriptedPlayer[Notes]):
    """The base class of players that use the knowledge base; subclasses choose the actions.

    Args:
        env: The environment, which defines the objects, the properties and the number of turns.
        seed: The seed of every conversation's random stream.
    """

    def __init__(self, env: TwentyQuestionsEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._knowledge = env.knowledge
        self._table: Candidates = env.candidates
        self._style = env.style
        self._first_prompts = tuple(env.style.first_prompts())

    def _is_new_episode(self, request: TurnRequest) -> bool:
        return request.messages[-1]["content"].startswith(self._first_prompts)

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator, candidates=self._table.all, unasked=list(self._table.properties))

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        for reply, mask in notes.mask_by_reply.items():
            if request.messages[-1]["content"].startswith(reply):
                notes.candidates &= mask
        return self._choose(notes)

    def _choose(self, notes: Notes) -> str:
        raise NotImplementedError

    def _must_guess(self, notes: Notes) -> bool:
        return notes.turn >= self._num_turns - 1 or not notes.unasked or notes.candidates.bit_count() == 1

    def _ask(self, notes: Notes, key: str) -> str:
        notes.unasked.remove(key)
        notes.mask_by_reply = {
            reply: self._table.mask_by_value[key][_VALUE_OF_REPLY[meant]]
            for meant, reply in self._style.replies.items()
            if meant in _VALUE_OF_REPLY
        }
        return self._knowledge.properties[key].question

    def _guess(self, notes: Notes, name: str) -> str:
        notes.guessed.add(name)
        notes.mask_by_reply = {"": ~self._table.bit[name]}  # any reply: "Yes." to a kind, or not understood ("a tie")
        return self._style.guess(self._knowledge.objects[name])

    def _guess_any(self, notes: Notes) -> str:
        """Guess a random candidate, or any unguessed object if none is left (the secret is not one of the objects)."""
        fitting = self._table.names(notes.candidates)
        unguessed = [name for name in self._table.objects if name not in notes.guessed]
        return self._guess(notes, notes.generator.choice(fitting or unguessed or list(self._table.objects)))


class RandomPlayer(Player):
    """Asks random unasked questions; in its last turn, or once one candidate is left, guesses a random candidate."""

    def _choose(self, notes: Notes) -> str:
        if self._must_guess(notes):
            return self._guess_any(notes)
        return self._ask(notes, notes.generator.choice(notes.unasked))


class GreedyPlayer(Player):
    """Picks the question or guess with the most expected information; a strong upper reference.

    Ties go to a guess, then to the first property. If a wrong guess ends the game, it asks until one object is left.
    """

    def _choose(self, notes: Notes) -> str:
        if self._must_guess(notes):
            return self._guess_first(notes)
        best = max(notes.unasked, key=lambda key: self._information(notes.candidates, key))
        gain = self._information(notes.candidates, best)
        num = notes.candidates.bit_count()
        guess_gain = 0.0 if self._style.is_final_guess or not num else _entropy([1, num - 1])
        return self._guess_first(notes) if gain <= guess_gain + 1e-12 else self._ask(notes, best)

    def _information(self, candidates: int, key: str) -> float:
        """Return the expected information of a question: the entropy of its answer over the candidates, in bits."""
        return _entropy([(candidates & mask).bit_count() for mask in self._table.mask_by_value[key].values()])

    def _guess_first(self, notes: Notes) -> str:
        fitting = self._table.names(notes.candidates)
        return self._guess(notes, fitting[0]) if fitting else self._guess_any(notes)


class ImitationPlayer(Player):
    """The demonstrator for a warm start: asks random questions that split the candidates, then guesses one.

    Its games contain all questions in all orders and guesses at every stage, so a policy learns which object fits which
    answers; reinforcement learning then improves how questions depend on the answers. The number of questions is drawn
    per game, from half the turns to all but the last.
    """

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        notes = super()._begin(request, generator)
        notes.num_questions = generator.randint(self._num_turns // 2, self._num_turns - 1)
        return notes

    def _choose(self, notes: Notes) -> str:
        if notes.turn >= notes.num_questions or not notes.unasked:
            return self._guess_any(notes)
        splitting = [
            key
            for key in notes.unasked
            if sum(notes.candidates & mask != 0 for mask in self._table.mask_by_value[key].values()) > 1
        ]
        return self._ask(notes, notes.generator.choice(splitting or notes.unasked))


def anchors_of(env: TwentyQuestionsEnv) -> Callable[[Mapping[str, Any]], Anchors | None] | None:
    """Return the mean rewards of random and of greedy play, which is close to optimal, averaged over all secrets.

    At the first call, the random player plays at least 256 games, and the greedy player one per secret. None if a
    ``gamemaster`` other than the built-in one answers.
    """
    if env.env_config["gamemaster"] is not None:
        return None
    return lambda task: _played(env) if env.is_candidate(task["solution"]) else None


@functools.lru_cache(maxsize=8)  # several of these games may be mixed
def _played(env: TwentyQuestionsEnv) -> Anchors:
    tasks = [{"solution": name, "seed": seed} for seed, name in enumerate(env.secrets)]
    random_mean, greedy_mean = (
        statistics.fmean(one.final_reward for one in env.rollout(tasks, player, num_rollouts=number))
        for player, number in ((RandomPlayer(env), math.ceil(_NUM_RANDOM_GAMES / len(tasks))), (GreedyPlayer(env), 1))
    )
    return Anchors(random=random_mean, optimal=max(random_mean, greedy_mean), exact=False)


def lower_bound_questions(num_objects: int, *, answers: int = 2) -> float:
    """Return the expected number of turns, including the right guess, of the best player if any question were possible.

    Let f(n) be the total number of turns over n equally likely objects: f(0) = 0, f(1) = 1 and ``f(n) = n + min(f(n-1),
    min f(i) + f(j))`` over i + j = n with i, j < n; a guess leaves n - 1 objects. With three answers (including
    "Sometimes."), the inner minimum is over three parts. The bound is f(n) / n; with the limited questions of a
    knowledge base, no player can do better.

    Args:
        num_objects: The number of possible secrets, at least 1.
        answers: The number of possible answers: 2 (yes, no) or 3 (yes, no, sometimes).

    Raises:
        ConfigError: A number is out of range.

    >>> lower_bound_questions(20), lower_bound_questions(64)
    (4.8, 6.5)
    """
    if num_objects < 1 or answers not in (2, 3):
        raise ConfigError(f"num_objects must be at least 1 and answers 2 or 3, got {num_objects!r} and {answers!r}")
    total = [0, 1]
    for n in range(2, num_objects + 1):
        # split[m] is the best total for m objects in two parts, each smaller than n
        split = [min(total[i] + total[m - i] for i in range(max(0, m - n + 1), m // 2 + 1)) for m in range(n + 1)]
        best = split[n] if answers == 2 else min(total[i] + split[n - i] for i in range(n))
        total.append(n + min(total[n - 1], best))
    return total[num_objects] / num_objects


def _entropy(counts: list[int]) -> float:
    total = sum(counts)
    return -sum(count / total * math.log2(count / total) for count in counts if count) if total else 0.0
