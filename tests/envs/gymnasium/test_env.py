from __future__ import annotations

import copy
import pickle
import random
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from agentsgym import EnvProcessPool, EnvThreadPool, RandomAgent, ScriptedAgent, StopReason, evaluate, make, mix
from agentsgym.envs.Gymnasium import GymnasiumEnv, OptimalPlayer, RandomPlayer
from agentsgym.errors import ConfigError, MissingDependencyError, TaskError
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Trajectory

DRY: dict[str, Any] = {"make_kwargs": {"is_slippery": False}}
READY = ["FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"]
MAP = ["SHF", "FFF", "HFG"]


class Corridor(gymnasium.Env[int, int]):
    """Three fields in a row; action 1 goes on, 0 raises on the last field."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    action_space = Discrete(2)
    observation_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.place == 2 and action == 0:
            raise RuntimeError("the wall fell down")
        self.place += action
        return self.place, float(self.place == 3), self.place == 3, False, {}


def play(config: dict[str, Any], actions: list[str], task: dict[str, Any] | None = None) -> Trajectory:
    agent = ScriptedAgent(actions, repeat_last=True)
    [trajectory] = GymnasiumEnv(None, config).rollout([task or {"seed": 0}], agent)
    return trajectory


def user_texts(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "user"]


def test_a_game_is_shown_played_and_won() -> None:
    trajectory = play(DRY, ["down", "[down]", "go right", "right", "down", "right"])
    texts = user_texts(trajectory)
    assert texts[0] == "[S] F F F\nF H F H\nF F F H\nH F F G"
    assert texts[1] == "S F F F\n[F] H F H\nF F F H\nH F F G"
    assert len(texts) == 6
    assert trajectory.turn_rewards == [0, 0, 0, 0, 0, 1]
    assert trajectory.success is True
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.info["optimal_reward"] == 1.0


def test_a_hole_ends_the_game_lost() -> None:
    trajectory = play(DRY, ["right", "down"])
    assert (trajectory.success, trajectory.stop_reason, trajectory.final_reward) == (False, StopReason.DONE, 0.0)


def test_an_invalid_action_names_what_would_be_right_and_changes_nothing() -> None:
    trajectory = play(DRY, ["jump", "down"])
    assert trajectory.turns[0].invalid
    assert "Answer with one of these actions: [left], [down], [right], [up]." in user_texts(trajectory)[1]
    assert user_texts(trajectory)[2].startswith("S F F F\n[F]")
    assert play(DRY, ["jump"]).stop_reason is StopReason.INVALID


def test_our_limit_and_the_games_own_both_end_an_episode_as_truncated() -> None:
    assert play({**DRY, "max_steps_per_episode": 7}, ["left"]).num_turns == 7
    own = play({**DRY, "max_steps_per_episode": 300}, ["left"])
    assert (own.num_turns, own.stop_reason) == (100, StopReason.MAX_TURNS)
    assert own.info["truncated"] is True
    assert own.success is False


@pytest.mark.parametrize("game_id", READY)
def test_players_earn_what_the_values_state(game_id: str) -> None:
    env = GymnasiumEnv(None, {"id": game_id})
    tasks = [{"seed": seed} for seed in range(120)]
    for player, name in ((OptimalPlayer(env), "optimal_reward"), (RandomPlayer(env, seed=1), "random_reward")):
        trajectories = env.rollout(tasks, player)
        gaps = [one.final_reward - one.info[name] for one in trajectories]
        assert np.mean(gaps) == pytest.approx(0.0, abs=4 * float(np.std(gaps)) / 120**0.5 + 0.02)
        assert not any(one.failed or turn.invalid for one in trajectories for turn in one.turns)


def test_evaluation_places_the_players_at_the_ends_of_the_scale() -> None:
    env = GymnasiumEnv(None, {"id": "Taxi-v4"})
    tasks = [{"seed": seed} for seed in range(100)]
    best, blind = (
        evaluate(env, player, tasks).fraction_of_optimal for player in (OptimalPlayer(env), RandomPlayer(env))
    )
    assert best is not None
    assert best.mean == pytest.approx(1.0)
    assert blind is not None
    assert blind.low - 0.1 < 0 < blind.high + 0.1


def test_every_state_of_the_taxi_looks_different_and_the_marks_name_what_is_where() -> None:
    exact = GymnasiumEnv(None, {"id": "Taxi-v4"}).exact_values()
    assert exact is not None
    assert len(exact.frames) == 500
    waiting = [frame for frame in exact.frames if "(" in frame]
    assert len(waiting) == 400
    assert all("[" in frame and "<" in frame for frame in waiting)
    assert all(frame.count("{") == 1 for frame in exact.frames if frame not in waiting)


def test_a_task_brings_a_map_of_its_own() -> None:
    task = {"seed": 1, "map": MAP}
    env = GymnasiumEnv(None, DRY)
    [trajectory] = env.rollout([task], OptimalPlayer(env))
    assert user_texts(trajectory)[0] == "[S] H F\nF F F\nH F G"
    assert (trajectory.success, trajectory.num_turns) == (True, 4)


@pytest.mark.parametrize("wrong", [[], "SG", ["SF", "G"], ["SF", "FF"], ["SS", "FG"], ["SX", "FG"], [1]])
def test_a_map_that_is_none_is_refused_before_anything_is_played(wrong: Any) -> None:
    with pytest.raises(TaskError, match="must be a list of strings of equal length, made of the letters S, F, H and G"):
        GymnasiumEnv(None, DRY).rollout([{"map": wrong}], RandomAgent(["left"]))
    with pytest.raises(TaskError, match="is only valid for FrozenLake"):
        GymnasiumEnv(None, {"id": "Taxi-v4"}).rollout([{"map": MAP}], RandomAgent(["left"]))


def test_random_maps_are_solvable_and_those_of_training_and_evaluation_never_meet() -> None:
    options: dict[str, Any] = {"size": 60, "random_maps": True, "map_size": 3}
    maps = [
        {tuple(row["task_data"]["map"]) for row in rows}
        for rows in (GymnasiumEnv.get_train_dataset(DRY, **options), GymnasiumEnv.get_eval_dataset(DRY, **options))
    ]
    assert not maps[0] & maps[1]
    env = GymnasiumEnv(None, DRY)
    for desc in maps[0] | maps[1]:
        exact = env.exact_values(list(desc))
        assert exact is not None
        assert exact.values.optimal[20, 0] == 1.0


def test_rows_make_their_environment_and_play_in_it() -> None:
    rows = GymnasiumEnv.get_train_dataset({"id": "CliffWalking-v1"}, size=3)
    env = make(rows[0])
    assert isinstance(env, GymnasiumEnv)
    trajectories = env.rollout(list(rows), OptimalPlayer(env))
    assert [one.final_reward for one in trajectories] == [-13.0] * 3


def test_interleaved_sessions_play_what_they_play_alone_and_leave_global_generators_alone() -> None:
    env = GymnasiumEnv(None, {"id": "Blackjack-v1"})
    before = random.getstate(), str(np.random.get_state())
    tasks = [{"seed": seed} for seed in range(20)]
    together = env.rollout(tasks, ScriptedAgent(["hit", "hit", "stick"], repeat_last=True), 2)
    assert (random.getstate(), str(np.random.get_state())) == before
    for index, task in enumerate(tasks):
        [alone] = env.rollout([task], ScriptedAgent(["hit", "hit", "stick"], repeat_last=True))
        assert alone.messages == together[2 * index].messages == together[2 * index + 1].messages
    assert len({user_texts(one)[0] for one in together}) > 5


@pytest.mark.parametrize("pool", [lambda: EnvThreadPool(2), lambda: EnvProcessPool(1)])
def test_pools_give_what_one_thread_gives(pool: Any) -> None:
    env = GymnasiumEnv(chat_tokenizer(), {})
    tasks = [{"seed": seed} for seed in range(8)]
    here = env.rollout(tasks, RandomPlayer(env))
    with pool() as workers:
        there = env.rollout(tasks, RandomPlayer(env), pool=workers)
    assert [one.messages for one in here] == [one.messages for one in there]
    assert [one.final_reward for one in here] == [one.final_reward for one in there]


def test_an_environment_is_copied_and_pickled_with_its_tables_left_out() -> None:
    env = GymnasiumEnv(None, {"id": "Taxi-v4"})
    env.exact_values()
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert other.rollout([{"seed": 1}], OptimalPlayer(other))[0].success
    assert len(pickle.dumps(env)) < 20_000


def test_a_callable_makes_the_game_and_another_shows_it() -> None:
    config = {"id": Corridor, "actions": ["stay", "go"], "render": lambda game, observation: f"Field {observation}."}
    trajectory = play({**config, "success": "reward"}, ["go"])
    assert user_texts(trajectory) == ["Field 0.", "Field 1.", "Field 2."]
    assert (trajectory.success, trajectory.final_reward) == (True, 1.0)
    assert "optimal_reward" not in trajectory.info


def test_a_game_that_raises_fails_its_own_episode_and_no_other() -> None:
    env = GymnasiumEnv(None, {"id": Corridor, "actions": ["stay", "go"]})
    agent = RandomAgent(["stay", "go"], seed=0)
    trajectories = env.rollout([{"seed": seed} for seed in range(40)], agent)
    failed = [one for one in trajectories if one.failed]
    assert 0 < len(failed) < 40
    assert "RuntimeError: the wall fell down" in str(failed[0].error)


def test_an_observation_is_shown_as_numbers_where_nothing_else_is() -> None:
    trajectory = play({"id": "CartPole-v1", "max_steps_per_episode": 2}, ["1"])
    assert user_texts(trajectory)[0].startswith("Observation: (")
    assert trajectory.success is None


def test_games_of_one_conversation_are_distinguished() -> None:
    env = GymnasiumEnv(None, {**DRY, "episodes_per_trial": 2, "keep_history": True})
    [trajectory] = env.rollout([{"seed": 0}], OptimalPlayer(env))
    assert [text.startswith("A new game begins.\n[S]") for text in user_texts(trajectory)] == [True, *[False] * 5] * 2
    assert trajectory.final_reward == 2.0
    assert "optimal_reward" not in trajectory.info  # which is of one episode


class Photographs(Corridor):
    observation_space = Box(0, 255, (64, 64, 3), dtype=np.uint8)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"id": "FrozenLak-v1"}, r"got 'FrozenLak-v1'; did you mean 'FrozenLake-v1'\?"),
        ({"id": "Taxi-v3"}, r"did you mean 'Taxi-v4'\?"),
        ({"id": "os:Thing-v0"}, "must be an id without a module"),
        ({"id": "Pendulum-v1"}, "supports only Discrete action spaces, but this one is Box"),
        ({"id": "Blackjack-v1", "render": "ansi"}, r"the render mode 'ansi', only \['human', 'rgb_array'\]"),
        ({"make_kwargs": {"is_slipery": True}}, "cannot be created with the arguments"),
        ({"make_kwargs": {"map_name": None}}, "would draw a map that does not depend on the seed"),
        ({"make_kwargs": {"render_mode": "human"}}, "must be 'ansi' or omitted, got 'human'"),
        ({"id": lambda: 7}, "must return a gymnasium.Env, got 7"),
        ({"id": Photographs}, "an observation has 12288 numbers"),
        ({"actions": {"fly": 9}}, "must name actions from 0 to 3"),
        ({"actoins": ["a"]}, r"did you mean 'actions'\?"),
        ({"success": "maybe"}, "must be 'auto', 'reward', 'terminated', or a callable"),
    ],
)
def test_a_configuration_that_does_not_go_gives_the_reason(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        GymnasiumEnv(None, config)


def test_the_optimal_player_needs_a_game_that_is_known() -> None:
    with pytest.raises(ConfigError, match="supports only environments with known exact values"):
        OptimalPlayer(GymnasiumEnv(None, {"id": "CartPole-v1"}))
    fickle = GymnasiumEnv(None, {"id": "Taxi-v4", "make_kwargs": {"fickle_passenger": True}})
    assert fickle.exact_values() is None
    with pytest.raises(ConfigError, match="registered id, since dataset rows are plain JSON, got a callable"):
        GymnasiumEnv.get_train_dataset({"id": Corridor})


def test_a_thought_that_never_closes_is_no_action() -> None:
    trajectory = play(DRY, ["<think>The goal is to the right, so first I"])
    assert all(turn.invalid for turn in trajectory.turns)


def test_a_package_that_a_game_needs_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any, **__: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled(
            "Box2D is not installed, you can install it by run `pip install swig` followed by "
            '`pip install "gymnasium[box2d]"`'
        ) from ModuleNotFoundError("No module named 'Box2D'", name="Box2D")

    wanted = r"'Box2D' is not installed; install it with: pip install swig && pip install \"gymnasium\[box2d\]\""
    monkeypatch.setattr(gymnasium.envs.registration, "load_env_creator", make)
    with pytest.raises(MissingDependencyError, match=wanted):
        GymnasiumEnv(None, {"id": "CartPole-v1"})
    monkeypatch.undo()
    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(MissingDependencyError, match=wanted):
        GymnasiumEnv(None, {"id": "CartPole-v1"})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"idd": "CartPole-v1"}, r"env_config\['idd'\] is unknown; did you mean 'id'"),
        ({"id": "CartPole-v77"}, "must be the id of an environment registered with Gymnasium, got 'CartPole-v77'"),
        ({"max_steps_per_episode": 0}, "max_steps_per_episode"),
    ],
)
def test_rows_of_a_wrong_configuration_are_refused(config: dict[str, Any], text: str) -> None:
    for method in (GymnasiumEnv.get_train_dataset, GymnasiumEnv.get_eval_dataset):
        with pytest.raises(ConfigError, match=text):
            method(config)
    with pytest.raises(ConfigError, match=text):
        mix({"a": (GymnasiumEnv, config)})
