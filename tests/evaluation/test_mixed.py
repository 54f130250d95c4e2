"""Rows of several environments are evaluated in one call, with a summary of each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
from mixed_envs import Guess, LookUp, SayTheColor

from agentsgym import ConfigError, FailurePolicy, RolloutStore, TaskError, evaluate, evaluate_mixed, mix
from agentsgym.evaluation.mixed import pooled
from agentsgym.tiny import call_text


class Player:
    """Answers the color, calls the tool and repeats what it gives, and guesses 1."""

    def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
        requested = messages[-1]["content"]
        if requested.startswith("Say "):
            return requested.removeprefix("Say "), None
        if requested.startswith("What is "):
            return call_text("look_up", {"word": requested.removeprefix("What is ")}), None
        return ("1" if "number" in requested else requested), None


ROWS = mix(
    {
        "color": SayTheColor,
        "guess": (Guess, {"highest": 1, "max_steps_per_episode": 1}, [{"seed": 1}]),
        "hard": (Guess, {"highest": 10**9, "max_steps_per_episode": 2}, [{"seed": 1}]),
        "tool": (LookUp, {}, [{"word": "one"}, {"word": "two"}]),
    },
    size=16,
)


def test_each_environment_has_a_summary_of_its_own() -> None:
    finished: list[Any] = []
    result = evaluate_mixed(Player(), ROWS, num_rollouts=2, on_finish=finished.append)
    rates = {name: part.win_rate and part.win_rate.mean for name, part in result.by_environment.items()}
    assert rates == {"color": 1.0, "guess": 1.0, "hard": 0.0, "tool": 1.0}
    assert {part.num_episodes for part in result.by_environment.values()} == {8}
    assert result.num_episodes == len(finished) == 32
    assert result.win_rate is not None
    assert result.win_rate.mean == 0.75
    assert [one.task_index for one in result.trajectories] == [i // 2 for i in range(32)]
    assert result.as_dict()["by_environment"]["tool"]["mean_turns"] == 2.0


class Rated(SayTheColor):
    """Answers what random and optimal play earn."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        return state, reward, done, {**info, "random_reward": 0.5, "optimal_reward": 1.0}


def test_the_whole_is_placed_only_where_every_environment_is() -> None:
    rated = {"one": Rated, "two": Rated}
    every = evaluate_mixed(Player(), mix(rated))
    assert every.fraction_of_optimal is not None
    assert every.fraction_of_optimal.mean == 1.0
    some = evaluate_mixed(Player(), mix({**rated, "unrated": SayTheColor}))
    assert some.fraction_of_optimal is None
    assert some.by_environment["one"].fraction_of_optimal is not None


def test_equal_seeds_give_equal_episodes() -> None:
    rows = [{**row, "environment": None} for row in ROWS]
    one, other = (evaluate_mixed(Player(), rows, seed=3).as_dict() for _ in range(2))
    assert one == other
    assert set(one["by_environment"]) == {"SayTheColor", "Guess", "LookUp"}


def test_failures_are_counted_by_environment() -> None:
    rows = [*list(ROWS)[:4], {**ROWS[0], "task_data": {"word": "ten"}, "environment": "broken"}]
    rows[4]["env_class_path"] = next(row["env_class_path"] for row in ROWS if row["environment"] == "tool")
    rows[4]["env_config"] = {}
    result = evaluate_mixed(Player(), rows, failures=FailurePolicy(min_group_size=1))
    assert result.by_environment["broken"].num_failed == 1
    assert result.by_environment["broken"].win_rate is None
    assert result.num_failed == 1


COLOR = next(row for row in ROWS if row["environment"] == "color")


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        ([], ConfigError, "at least one row"),
        ("rows", ConfigError, "rows must be a list or dataset of rows"),
        ([{"task_data": {}}], ConfigError, "row 0: a row must be a dict with an 'env_class_path'"),
        ([{"env_class_path": "x"}], ConfigError, "row 0: a row must be a dict with a 'task_data'"),
        ([COLOR, {**COLOR, "task_data": {"colour": 1}}], TaskError, "row 1: "),
    ],
)
def test_rows_that_cannot_be_played_are_named(rows: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        evaluate_mixed(Player(), rows)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="did you mean 'num_rollouts'"):
        evaluate_mixed(Player(), ROWS, num_rollout=2)


class Stopping(Player):
    """Refuses to go on after some answers."""

    def __init__(self, num_answers: int) -> None:
        self.num_answers = num_answers

    def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
        if not self.num_answers:
            raise ConfigError("the key is refused")
        self.num_answers -= 1
        return super().get_action(messages, agent_state)


def test_a_resumed_evaluation_plays_what_is_missing_in_each_environment(tmp_path: Path) -> None:
    rows = [*ROWS, *ROWS]  # every task is there twice, so that equal ones are distinguished
    options: dict[str, Any] = {"store": tmp_path, "agent_name": "player", "num_rollouts": 2, "max_concurrent": 3}
    with pytest.raises(ConfigError, match="the key is refused") as stopped:
        evaluate_mixed(Stopping(40), rows, **options)
    kept = RolloutStore(tmp_path)
    assert 0 < len(kept) == len(stopped.value.trajectories) < 64
    resumed: list[int] = []
    result = evaluate_mixed(Player(), rows, resume=True, on_resume=lambda known: resumed.append(len(known)), **options)
    assert resumed == [len(kept)]
    whole = evaluate_mixed(Player(), rows, num_rollouts=2)
    assert result.as_dict() == whole.as_dict()
    store = RolloutStore(tmp_path)
    assert len(store) == 64
    assert {(one.task_index, one.rollout_index) for one in store} == {(i, j) for i in range(32) for j in range(2)}
    classes = {one.env_class_path for one in store.records()}
    assert {str(one).rpartition(".")[2] for one in classes} == {"SayTheColor", "Guess", "LookUp"}
    again = evaluate_mixed(Stopping(0), rows, resume="failed", **options)
    assert again.as_dict() == whole.as_dict()


def test_a_store_serves_one_environment_alone_as_it_does_in_a_mixture(tmp_path: Path) -> None:
    evaluate_mixed(Player(), ROWS, store=tmp_path, agent_name="player")
    tasks = [row["task_data"] for row in ROWS if row["environment"] == "hard"]
    env = Guess(env_config={"highest": 10**9, "max_steps_per_episode": 2})
    found = evaluate(env, Stopping(0), tasks, store=tmp_path, agent_name="player", resume=True)
    assert found.num_episodes == 4


def test_evaluations_of_single_environments_pool_to_that_of_the_mixture() -> None:
    whole = evaluate_mixed(Player(), ROWS, num_rollouts=2)
    parts: dict[str, Any] = {}
    for name in ("color", "guess", "hard", "tool"):
        rows = [row for row in ROWS if row["environment"] == name]
        parts[name] = evaluate_mixed(Player(), rows, num_rollouts=2)
    found = pooled(parts)
    assert found.reward is not None
    assert whole.reward is not None
    assert (found.num_episodes, found.reward.mean) == (32, pytest.approx(whole.reward.mean))
    assert {name: one.win_rate for name, one in found.by_environment.items()} == {
        name: one.win_rate for name, one in whole.by_environment.items()
    }
    assert len({one.task_index for one in found.trajectories}) == 16
    with pytest.raises(ConfigError, match="parts must contain at least one rollout"):
        pooled({})
