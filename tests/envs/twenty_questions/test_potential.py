"""Information as a potential: the best moves of a small game, by exact enumeration, are those of the win alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv

GAME: dict[str, Any] = {
    "objects": ["bee", "apple", "car", "dog", "kite"],
    "properties": ["animal", "edible", "fly"],
    "max_steps_per_episode": 4,
    "invalid_penalty": 0.0,
}
DISCOUNT = 0.9  # so that a faster win is better
State = tuple[int, int]  # the mask of the candidates, and the turns that are left


class Solver:
    """Values of every move in every state, where the secret is each of the candidates with equal probability."""

    def __init__(self, reward_scheme: str, weight: float) -> None:
        self.env = TwentyQuestionsEnv(None, {**GAME, "reward_scheme": reward_scheme})
        self.weight = weight
        knowledge = self.env.knowledge
        self.moves = [knowledge.properties[key].question for key in GAME["properties"]]
        self.moves += [knowledge.objects[name].guess for name in GAME["objects"]]
        self.values = cache(self._values)

    def outcome(self, state: State, secret: str, move: str) -> tuple[float, State | None]:
        """The shaped reward of a move and the next state; None if it ends the game."""
        mask, turns = state
        begun = {**self.env._initialize_episode("s", {"solution": secret}), "candidates": mask, "turns_left": turns}
        after, reward, is_over, _ = self.env._step_episode("s", begun, move)
        is_over = is_over or turns == 1
        potential = 0.0 if is_over else self.env._potential(after)
        shaped = reward + self.weight * (DISCOUNT * potential - self.env._potential(begun))
        return shaped, None if is_over else (after["candidates"], turns - 1)

    def _values(self, state: State) -> dict[str, float]:
        secrets = self.env.candidates.names(state[0])
        found = {}
        for move in self.moves:
            outcomes = [self.outcome(state, secret, move) for secret in secrets]
            found[move] = sum(r + DISCOUNT * (self.best(n) if n else 0.0) for r, n in outcomes) / len(secrets)
        return found

    def best(self, state: State) -> float:
        return max(self.values(state).values())

    def best_moves(self, state: State) -> set[str]:
        return {move for move, value in self.values(state).items() if value > self.best(state) - 1e-9}


def states(solver: Solver) -> list[State]:
    """Every state that any play can reach."""
    found = {(solver.env.candidates.all, GAME["max_steps_per_episode"])}
    waiting = [*found]
    while waiting:
        state = waiting.pop()
        for secret in solver.env.candidates.names(state[0]):
            for move in solver.moves:
                after = solver.outcome(state, secret, move)[1]
                if after and after not in found:
                    found.add(after)
                    waiting.append(after)
    return sorted(found)


@pytest.mark.parametrize("weight", [0.3, 1.0, 5.0])
def test_a_potential_changes_no_best_move(weight: float) -> None:
    plain, shaped = Solver("win", 0.0), Solver("win", weight)
    reached = states(plain)
    assert len(reached) > 20
    assert {len(plain.best_moves(state)) for state in reached} > {1}
    for state in reached:
        assert shaped.best_moves(state) == plain.best_moves(state), state
        begun = {**plain.env._initialize_episode("s", {"solution": "bee"}), "candidates": state[0]}
        expected = plain.best(state) - weight * plain.env._potential(begun)
        assert shaped.best(state) == pytest.approx(expected)


def test_information_as_a_plain_reward_changes_best_moves() -> None:
    plain, informed = Solver("win", 0.0), Solver("win_plus_information", 0.0)
    assert any(informed.best_moves(state) != plain.best_moves(state) for state in states(plain))
