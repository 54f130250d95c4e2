from __future__ import annotations

import functools
import itertools
from functools import cache
from typing import Any

import pytest
from small_game import OBJECTS, PROPERTIES

from agentsgym import ConfigError, Trajectory, evaluate
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.envs.players import anchors_of
from agentsgym.envs.TwentyQuestions import GreedyPlayer, ImitationPlayer, RandomPlayer, lower_bound_questions

GAME = {"objects": OBJECTS, "properties": PROPERTIES, "max_steps_per_episode": 7, "final_guess": True}
ENV = TwentyQuestionsEnv(None, GAME)
TASKS = [{"solution": name, "seed": i} for i, name in enumerate(OBJECTS)]


def win_rate(trajectories: list[Trajectory]) -> float:
    return sum(bool(trajectory.success) for trajectory in trajectories) / len(trajectories)


def output(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "assistant"]


def talks(trajectories: list[Trajectory]) -> list[list[str]]:
    return [output(trajectory) for trajectory in trajectories]


def test_greedy_play_wins_the_demo_every_time() -> None:
    trajectories = ENV.rollout(TASKS, GreedyPlayer(ENV))
    turns = [len(trajectory.turns) for trajectory in trajectories]
    assert win_rate(trajectories) == 1.0
    assert max(turns) <= 7
    assert lower_bound_questions(20) <= sum(turns) / 20 <= 5.7


def test_random_play_wins_less_than_sixty_percent_of_the_demo() -> None:
    trajectories = ENV.rollout(TASKS, RandomPlayer(ENV, seed=0), 40)
    assert 0.4 < win_rate(trajectories) < 0.6
    assert all(len(set(talk)) == len(talk) for talk in talks(trajectories))


def test_greedy_play_of_the_whole_knowledge_base() -> None:
    env = TwentyQuestionsEnv(None, {"reward_scheme": "win"})
    tasks = [{"solution": name} for name in env.candidates.objects]
    trajectories = env.rollout(tasks, GreedyPlayer(env))
    turns = sum(len(trajectory.turns) for trajectory in trajectories) / len(tasks)
    assert win_rate(trajectories) == 1.0
    assert lower_bound_questions(len(tasks), answers=3) <= turns <= 6.5


def test_a_guess_that_is_also_true_of_the_secret_is_ruled_out() -> None:
    env = TwentyQuestionsEnv(None, {"objects": "both"})
    assert win_rate(env.rollout([{"solution": name} for name in ("bow tie", "bowling ball")], GreedyPlayer(env))) == 1.0


def test_a_guess_of_the_random_player_fits_all_answers() -> None:
    for trajectory in ENV.rollout(TASKS, RandomPlayer(ENV, seed=3), 5):
        guess = output(trajectory)[-1]
        [name] = [name for name in OBJECTS if ENV.knowledge.objects[name].guess == guess]
        questions = {ENV.knowledge.properties[key].question: key for key in PROPERTIES}
        contents = [message["content"] for message in trajectory.messages]
        for question, reply in itertools.pairwise(contents):
            if question in questions:
                value = ENV.knowledge.objects[name].values[questions[question]]
                assert reply.startswith({"yes": "Yes.", "no": "No."}[value])


def test_the_demonstrator_guesses_once_between_half_the_turns_and_the_last() -> None:
    trajectories = ENV.rollout(TASKS, ImitationPlayer(ENV, seed=0), 10)
    assert {len(trajectory.turns) for trajectory in trajectories} == {4, 5, 6, 7}
    guesses = {ENV.knowledge.objects[name].guess for name in OBJECTS}
    assert all(talk[-1] in guesses and not guesses & set(talk[:-1]) for talk in talks(trajectories))


def test_the_demonstrator_poses_what_distinguishes_the_objects_in_play() -> None:
    keys = {ENV.knowledge.properties[key].question: key for key in PROPERTIES}
    values = {name: ENV.knowledge.objects[name].values for name in OBJECTS}
    for trajectory in ENV.rollout(TASKS, ImitationPlayer(ENV, seed=1), 3):
        in_play, unasked = set(OBJECTS), set(PROPERTIES)
        for question in output(trajectory)[:-1]:
            reporting = {key for key in unasked if len({values[name][key] for name in in_play}) > 1}
            key = keys[question]
            assert key in (reporting or unasked)
            secret = OBJECTS[trajectory.task_index]
            in_play = {name for name in in_play if values[name][key] == values[secret][key]}
            unasked.remove(key)


@pytest.mark.parametrize("player", [RandomPlayer, GreedyPlayer, ImitationPlayer])
def test_the_same_seed_plays_the_same_games_however_they_are_interleaved(player: Any) -> None:
    together = talks(ENV.rollout(TASKS, player(ENV, 5), 2))
    assert together == talks(ENV.rollout(TASKS, player(ENV, 5), 2, max_concurrent=3))
    assert together == talks(ENV.rollout(TASKS, player(ENV, 5), 2, max_concurrent=1))
    if player is not GreedyPlayer:
        assert together != talks(ENV.rollout(TASKS, player(ENV, 6), 2))
        assert together[0] != together[1]


@pytest.mark.parametrize("player", [RandomPlayer, GreedyPlayer, ImitationPlayer])
@pytest.mark.parametrize("solution", ["testword", "fridge"])
def test_players_go_on_when_the_secret_is_none_of_their_objects(player: Any, solution: str) -> None:
    for config in (GAME, {**GAME, "final_guess": False, "max_steps_per_episode": 60}):
        env = TwentyQuestionsEnv(None, config)
        [trajectory] = env.rollout([{"solution": solution}], player(env))
        assert not trajectory.failed, trajectory.error
        assert trajectory.success is False


@pytest.mark.parametrize("player", [RandomPlayer, GreedyPlayer])
def test_players_start_afresh_with_each_episode_of_a_conversation(player: Any) -> None:
    game = {**GAME, "reward_scheme": "win"}
    env = TwentyQuestionsEnv(None, {**game, "episodes_per_trial": 3, "keep_history": True, "max_steps_per_episode": 17})
    for trajectory in env.rollout(TASKS[:5], player(env)):
        guesses = [turn.episode for turn in trajectory.turns if turn.reward == 1.0]
        assert guesses == [0, 1, 2]


def test_greedy_play_names_objects_where_a_wrong_guess_costs_no_more_than_a_question() -> None:
    env = TwentyQuestionsEnv(None, {"objects": ["dog", "cat"], "properties": "all"})
    lengths = [
        len(trajectory.turns)
        for trajectory in env.rollout([{"solution": n} for n in ("dog", "cat")], GreedyPlayer(env))
    ]
    assert lengths == [1, 2]


@functools.cache
def best_sum(objects: tuple[int, ...], answers: int) -> int:
    """The least total of turns over all secrets in ``objects``, every way of answering tried."""
    if len(objects) <= 1:
        return len(objects)
    totals = [best_sum(objects[1:], answers)]
    for labels in itertools.product(range(answers), repeat=len(objects)):
        if len(set(labels)) > 1:
            parts = [tuple(o for o, label in zip(objects, labels, strict=True) if label == a) for a in range(answers)]
            totals.append(sum(best_sum(part, answers) for part in parts))
    return len(objects) + min(totals)


@pytest.mark.parametrize(("num_objects", "answers"), [*((n, 2) for n in range(1, 8)), *((n, 3) for n in range(1, 7))])
def test_the_lower_bound_is_what_exhaustive_search_finds(num_objects: int, answers: int) -> None:
    expected = best_sum(tuple(range(num_objects)), answers) / num_objects
    assert lower_bound_questions(num_objects, answers=answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_objects", "expected"), [(8, 3.5), (16, 4.5), (20, 4.8), (32, 5.5), (64, 6.5), (158, 7.785)]
)
def test_the_lower_bound_has_known_values(num_objects: int, expected: float) -> None:
    assert lower_bound_questions(num_objects) == pytest.approx(expected, abs=5e-4)


def test_the_lower_bound_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError):
        lower_bound_questions(0)
    with pytest.raises(ConfigError):
        lower_bound_questions(5, answers=4)


def test_evaluations_are_placed_between_random_and_greedy_play() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "reward_scheme": "win", "max_steps_per_episode": 4})
    references = anchors_of(env)
    assert references is not None
    known = references({"solution": "bees"})  # by any name of an object
    assert known is not None
    every = env.rollout(TASKS, GreedyPlayer(env))
    assert known.optimal == win_rate(every)
    assert 0 < known.random < known.optimal
    assert references({"solution": "not an object"}) is None
    found = evaluate(env, GreedyPlayer(env), TASKS, references=references).fraction_of_optimal
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert anchors_of(TwentyQuestionsEnv(None, {**GAME, "gamemaster": lambda solution, question: "No."})) is None


OF_FIVE: dict[str, Any] = {
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
        self.env = TwentyQuestionsEnv(None, {**OF_FIVE, "reward_scheme": reward_scheme})
        self.weight = weight
        knowledge = self.env.knowledge
        self.moves = [knowledge.properties[key].question for key in OF_FIVE["properties"]]
        self.moves += [knowledge.objects[name].guess for name in OF_FIVE["objects"]]
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
    found = {(solver.env.candidates.all, OF_FIVE["max_steps_per_episode"])}
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
