"""Sessions of TextArena's games have random streams of their own, whatever is played beside them."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TextArena.games import GameFactory, PlayedGame
from agentsgym.envs.TextArena.isolation import GameContext, numpy_standin, random_standin, textarena
from agentsgym.rollouts.thread_pool import EnvThreadPool

MOVES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "Mastermind-v0": ["[1 2 3 4]", "[5 6 1 2]", "[6 5 4 3]"],
    "FrozenLake-v0": ["[up]", "[down]", "[left]", "[right]"],
    "KuhnPoker-v0": ["[check]", "[bet]", "[call]", "[fold]"],
    "LiarsDice-v0": ["[Bid: 1, 2]", "[Bid: 2, 3]", "[Bid: 3, 6]", "[Call]"],
    "2048-v0": ["[up]", "[down]", "[left]", "[right]"],
    "Wordle-v0": ["[crane]", "[slate]", "[built]", "[money]"],
    "Secretary-v0": ["[continue]", "[continue]", "[accept]"],
    "PigDice-v0": ["[roll]", "[hold]"],
}
GAMES = tuple(MOVES)


@cache
def env_of(game: str) -> TextArenaEnv:
    return TextArenaEnv(env_config={"game": game, "max_steps_per_episode": 8})


class Session:
    """One session that is played hook by hook, with moves from a stream of its own."""

    def __init__(self, number: int) -> None:
        self.env = env_of(GAMES[number % len(GAMES)])
        self.name = f"session {number}"
        self.state = self.env.start_session(self.name, {}, seed=number)
        self.moves = random.Random(number)
        self.texts: list[Any] = []

    def move(self) -> None:
        if len(self.texts) >= 6 or self.state["game"].done:
            return
        text = self.env._format_prompt(self.state, 0)
        output = self.moves.choice(MOVES[self.env.game])
        self.state, *rest = self.env._step_episode(self.name, self.state, output)
        self.texts.append((text, output, *rest))


def alone(number: int) -> list[Any]:
    session = Session(number)
    for _ in range(6):
        session.move()
    return session.texts


@settings(max_examples=10, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 199), min_size=8, max_size=8, unique=True),
    schedule=st.lists(st.integers(0, 7), min_size=20, max_size=60),
)
def test_sessions_that_interleave_answer_what_they_answer_alone(numbers: list[int], schedule: list[int]) -> None:
    expected = [alone(number) for number in numbers]
    before, before_numpy = random.getstate(), np.random.get_state()[1].tolist()
    sessions = [Session(number) for number in numbers]
    for index in schedule:
        sessions[index].move()
    assert random.getstate() == before
    assert np.random.get_state()[1].tolist() == before_numpy
    for session, texts in zip(sessions, expected, strict=True):
        assert session.texts == texts[: len(session.texts)]


def test_threads_play_what_one_thread_plays() -> None:
    expected = [alone(number) for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(alone, range(40))) == expected


def test_rollouts_in_a_pool_of_threads_equal_those_without() -> None:
    config = {"game": "LiarsDice-v0", "num_players": 3, "max_steps_per_episode": 6}
    tasks = [{"seed": seed} for seed in range(6)]
    plain, pooled = TextArenaEnv(env_config=config), TextArenaEnv(env_config=config)
    with EnvThreadPool(4) as pool:
        found = pooled.rollout(tasks, LegalAgent(pooled, seed=1), pool=pool)
    expected = plain.rollout(tasks, LegalAgent(plain, seed=1))
    assert [one.messages for one in found] == [one.messages for one in expected]


def raw_play(game: Any, num_players: int, seed: int, actions: Sequence[str]) -> list[Any]:
    game.reset(num_players=num_players, seed=seed)
    seen: list[Any] = []
    for action in actions:
        seat, messages = game.get_observation()
        seen.append((seat, [next(same) for _, same in itertools.groupby(messages, key=lambda one: one[1])]))
        done, _ = game.step(action)
        if done:
            break
    return [seen, game.state.rewards, game.state.turn]


ACTIONS = {
    "GuessTheNumber-v0": ["[7]", "[12]", "[3]", "[19]"],
    "FrozenLake-v0": ["[down]", "[right]", "[down]", "[right]", "[down]"],
    "2048-v0": ["[up]", "[left]", "[down]", "[right]", "[up]"],
    "KuhnPoker-v0": ["[check]", "[check]", "[check]", "[check]"],  # its bets, and a message answered twice, are mended
    "PigDice-v0": ["[roll]", "[roll]", "[hold]", "[roll]"],
    "Secretary-v0": ["[continue]", "[continue]", "[accept]"],
    "Minesweeper-v0": ["[3 3]", "[0 0]", "[7 7]"],
    "LiarsDice-v0": ["[Bid: 1, 2]", "[Bid: 2, 3]", "[Call]"],
}


@pytest.mark.parametrize("game", ACTIONS)
def test_a_game_draws_what_the_global_generator_would_have_given(game: str) -> None:
    maker = GameFactory(game)
    for num_players in (1, 2):
        context = GameContext(random.Random(0))
        try:
            with context:
                isolated = raw_play(maker(context), num_players, 11, ACTIONS[game])
            break
        except AssertionError:
            continue
    state = random.getstate()
    try:
        bare = raw_play(textarena().make(f"{game}-raw"), num_players, 11, ACTIONS[game])
    finally:
        random.setstate(state)
    assert isolated == bare


def test_outside_of_a_session_a_standin_is_the_module() -> None:
    standin = random_standin()
    state = random.getstate()
    found = standin.random()
    random.setstate(state)
    assert found == random.random()
    assert standin.Random is random.Random


def test_numpys_global_generator_is_private_too() -> None:
    standin = numpy_standin(np)
    before = np.random.get_state()[1].tolist()
    draws = []
    for _ in range(2):
        with GameContext(random.Random(3)):
            draws.append(standin.random.randint(0, 1000, size=5).tolist())
    assert draws[0] == draws[1]
    assert np.random.get_state()[1].tolist() == before
    assert standin.array([1]).tolist() == [1]


def test_a_generator_kept_by_a_constructor_is_that_of_each_session() -> None:
    standin = random_standin()
    kept = SimpleNamespace(draw=standin.random)
    with GameContext(random.Random(5)):
        assert kept.draw() == random.Random(5).random()


def test_nested_contexts_leave_the_outer_one_in_place() -> None:
    standin = random_standin()
    with GameContext(random.Random(1)):
        first = standin.random()
        with GameContext(random.Random(1)):
            assert standin.random() == first
        again = random.Random(1)
        again.random()
        assert standin.random() == again.random()


def test_a_copied_game_goes_on_by_itself() -> None:
    context = GameContext(random.Random(2))
    game = PlayedGame(GameFactory("GuessTheNumber-v0")(context), context, num_players=1, seed=1)
    twin = copy.deepcopy(game)
    game.observe()
    game.move("[5]")
    assert (twin.state.turn, game.state.turn) == (0, 1)


def test_an_environment_is_rebuilt_from_its_pickle() -> None:
    env = TextArenaEnv(env_config={"game": "Mastermind-v0", "max_steps_per_episode": 4})
    twin = pickle.loads(pickle.dumps(env))
    tasks = [{"seed": 3}]
    assert (
        twin.rollout(tasks, LegalAgent(twin, seed=2))[0].messages
        == env.rollout(tasks, LegalAgent(env, seed=2))[0].messages
    )


def test_rollouts_of_a_task_start_alike_and_seeds_start_apart() -> None:
    env = TextArenaEnv(env_config={"game": "FrozenLake-v0", "max_steps_per_episode": 1})
    rollouts = env.rollout([{"seed": seed} for seed in range(8)], LegalAgent(env), num_rollouts=3)
    starts = [one.messages[0]["content"] for one in rollouts]
    assert all(len(set(starts[k : k + 3])) == 1 for k in range(0, 24, 3))
    assert len(set(starts)) > 4


def test_a_sampler_with_the_tasks_seed_does_not_know_the_secret() -> None:
    env = TextArenaEnv(env_config={"game": "GuessTheNumber-v0", "max_steps_per_episode": 1, "game_options": {}})
    hits = 0
    for seed in range(60):
        state = env.start_session("a", {}, seed=seed)
        hits += state["game"].state.game_state["game_number"] == random.Random(seed).randint(1, 20)
    assert hits < 15  # chance gives 3
