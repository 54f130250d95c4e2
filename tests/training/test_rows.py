"""From dataset rows to environments, seeds and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from games import GuessNumber, SayBlue, policy
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.agents.base import Agent
from agentsgym.envs import registry
from agentsgym.envs.registry import register
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError, TaskError
from agentsgym.rollouts.driver import drive
from agentsgym.testing import chat_tokenizer
from agentsgym.training.batches import recorded_logprobs, row_tensors
from agentsgym.training.rows import Environments, group_seeds
from agentsgym.types import StopReason, Trajectory, Turn

TOKENIZER = policy()[1]
GUESS, BLUE = "tests.GuessNumber", "tests.SayBlue"


@pytest.fixture
def _games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register(GuessNumber, GUESS)
    register(SayBlue, BLUE)


def drawn(picture: str, *, logprobs: list[float] | None = None, failed: bool = False) -> Trajectory:
    """'.' is an environment token, any letter an agent token, one letter a turn."""
    turns = [
        Turn(start=picture.index(letter), stop=picture.rindex(letter) + 1, reward=0.0)
        for letter in sorted(set(picture) - {"."})
    ]
    return Trajectory(
        token_ids=list(range(1, len(picture) + 1)),
        turns=turns,
        messages=[],
        final_reward=0.0,
        stop_reason=StopReason.FAILED if failed else StopReason.DONE,
        logprobs=logprobs,
    )


def test_rows_are_stacked_and_padded_on_the_right() -> None:
    rows = [drawn("..aa.b"), drawn("..a"), drawn("..aa", failed=True)]
    advantages = [[9.0, 9.0, 1.0, 2.0, 9.0, 3.0], [9.0, 9.0, 4.0], [5.0] * 4]
    tensors = row_tensors(rows, advantages, pad_token_id=77)
    assert tensors["prompt_completion_ids"].tolist() == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 77, 77, 77],
        [1, 2, 3, 4, 77, 77],
    ]
    assert tensors["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert tensors["agent_token_mask"].tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0], [0] * 6]
    assert tensors["advantages"].tolist() == [[0, 0, 1, 2, 0, 3], [0, 0, 4, 0, 0, 0], [0] * 6]


@pytest.mark.parametrize(("multiple_of", "width"), [(1, 6), (4, 8), (6, 6)])
def test_the_width_is_rounded_up(multiple_of: int, width: int) -> None:
    tensors = row_tensors([drawn("..aa.b")], [[0.0] * 6], pad_token_id=0, multiple_of=multiple_of)
    assert {tensor.shape for tensor in tensors.values()} == {(1, width)}


def test_a_token_that_nothing_stands_before_is_not_trained() -> None:
    tensors = row_tensors([drawn("aa.b")], [[1.0] * 4], pad_token_id=0)
    assert tensors["agent_token_mask"].tolist() == [[0, 1, 0, 1]]
    assert tensors["advantages"].tolist() == [[0.0, 1.0, 0.0, 1.0]]


def test_rows_without_any_token_still_have_columns_for_the_loss() -> None:
    tensors = row_tensors([drawn("", failed=True)] * 2, [[], []], pad_token_id=7)
    assert tensors["prompt_completion_ids"].tolist() == [[7] * 3] * 2
    assert not tensors["attention_mask"].any()


def test_logprobs_are_stacked_if_every_row_that_counts_has_them() -> None:
    like = torch.zeros(2, 4)
    known = drawn("..a", logprobs=[0.0, 0.0, -1.5])
    assert recorded_logprobs([known, drawn(".aaa")], like) is None
    stacked = recorded_logprobs([known, drawn(".aaa", failed=True)], like)
    assert stacked is not None
    assert stacked.tolist() == [[0.0, 0.0, -1.5, 0.0], [0.0] * 4]


@given(num_groups=st.integers(1, 5), num_rollouts=st.integers(1, 5), part=st.integers(0, 3))
def test_rows_of_a_group_share_a_seed_and_groups_do_not(num_groups: int, num_rollouts: int, part: int) -> None:
    seeds = group_seeds(num_groups * num_rollouts, num_rollouts, 7, "train", part)
    groups = [set(seeds[start : start + num_rollouts]) for start in range(0, len(seeds), num_rollouts)]
    assert all(len(group) == 1 for group in groups)
    assert len(set(seeds)) == num_groups
    assert not set(seeds) & set(group_seeds(len(seeds), num_rollouts, 7, "train", part + 1))
    assert not set(seeds) & set(group_seeds(len(seeds), num_rollouts, 7, "eval", part))


@pytest.mark.usefixtures("_games")
def test_each_row_gets_its_own_environment_and_equal_rows_share_one() -> None:
    environments = Environments(None, TOKENIZER)
    short = {"max_steps_per_episode": 1}
    rows: list[dict[str, Any]] = [
        {"env_class_path": GUESS, "env_config": None, "task_data": {}},
        {"env_class_path": GUESS, "env_config": short, "task_data": {}},
        {"env_class_path": BLUE, "env_config": short, "task_data": {}},
        {"env_class_path": GUESS, "env_config": dict(short), "task_data": {"seed": 3}},
    ]
    guess, guess_once, blue, again = map(environments.of, rows)
    assert [type(env) for env in (guess, guess_once, blue)] == [GuessNumber, GuessNumber, SayBlue]
    assert again is guess_once
    assert guess is not guess_once
    assert guess_once.env_config["max_steps_per_episode"] == 1
    assert all(env.tokenizer is TOKENIZER for env in (guess, guess_once, blue))


@pytest.mark.usefixtures("_games")
@pytest.mark.parametrize("config", [None, {}, {"max_steps_per_episode": 4}, {"error_allowance": 99}])
def test_a_row_may_name_the_environment_given_and_its_configuration_in_part(config: dict[str, Any] | None) -> None:
    env = GuessNumber(TOKENIZER)
    row = {"env_class_path": GUESS, "env_config": config, "task_data": {}}
    assert Environments(env, TOKENIZER).of(row) is env
    assert Environments(env, TOKENIZER).of({"task_data": {}}) is env


@pytest.mark.usefixtures("_games")
@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"env_class_path": BLUE, "task_data": {}}, f"a dataset row is of '{BLUE}'.*is '{GUESS}'"),
        ({"env_config": {"max_steps_per_episode": 3}, "task_data": {}}, "env_config.*leave env=None"),
        ({"env_config": {"max_step": 3}, "task_data": {}}, "max_step"),
        ({"prompt": "Hello"}, r"needs 'task_data' \(a dict\), got the columns \['prompt'\]"),
        ({"task_data": "seed 1"}, "needs 'task_data'"),
    ],
)
def test_a_row_of_another_game_is_refused(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Environments(GuessNumber(TOKENIZER), TOKENIZER).check([row])


@pytest.mark.usefixtures("_games")
@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"env_class_path": "tests.Chess", "task_data": {}}, "'tests.Chess' is not registered"),
        ({"task_data": {}}, "'env_class_path'"),
        ({"env_class_path": GUESS, "env_config": {"max_step": 3}, "task_data": {}}, "max_step"),
    ],
)
def test_a_row_whose_environment_cannot_be_built_is_refused(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Environments(None, TOKENIZER).check([row])


@pytest.mark.parametrize("env", [GuessNumber(), GuessNumber(chat_tokenizer())])
def test_another_tokenizer_than_the_policys_is_refused(env: GuessNumber) -> None:
    with pytest.raises(ConfigError, match=r"env\.tokenizer must be the trainer's"):
        Environments(env, TOKENIZER)


def test_an_equal_tokenizer_will_do() -> None:
    env = GuessNumber(policy()[1])
    assert Environments(env, TOKENIZER).of({"task_data": {}}) is env


def test_a_task_keeps_its_own_seed_and_gets_one_if_it_has_none() -> None:
    environments = Environments(GuessNumber(TOKENIZER), TOKENIZER)
    rows = [{"task_data": task} for task in ({"seed": 5}, {"seed": None}, {})]
    trials = environments.trials(rows, [101, 102, 103], max_turn_tokens=3, max_completion_length=50)
    assert [trial.seed for trial in trials] == [5, 102, 103]
    assert [trial.task_data["seed"] for trial in trials] == [5, 102, 103]
    assert [trial.task_index for trial in trials] == [0, 1, 2]
    assert rows[1] == {"task_data": {"seed": None}}  # a row is not written to
    assert {(trial.budget.turn, trial.budget.completion) for trial in trials} == {(3, 50)}


def test_a_task_that_cannot_be_played_is_told_before_anything_is_played() -> None:
    environments = Environments(GuessNumber(TOKENIZER), TOKENIZER)
    with pytest.raises(TaskError, match="must be an int"):
        environments.trials([{"task_data": {"seed": "one"}}], [1])


class Picky(GuessNumber):
    """Plays only what has a number."""

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        if "number" not in task_data:
            raise TaskError("task_data needs a 'number'")


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ({}, "row 1 of the rows: task_data needs a 'number'"),
        ({"number": 1, "seed": "one"}, "row 1 of the rows: task_data['seed'] must be an int or None, got 'one'"),
        ({"number": 1, "seed": True}, "row 1 of the rows: task_data['seed'] must be an int or None, got True"),
        ({"number": 1, "seed": 1.5}, "row 1 of the rows: task_data['seed'] must be an int or None, got 1.5"),
    ],
)
def test_checking_rows_finds_the_one_whose_task_cannot_be_played(task: dict[str, Any], complaint: str) -> None:
    good = [{"task_data": {"number": 1, "seed": seed}} for seed in (0, None)]
    environments = Environments(Picky(TOKENIZER), TOKENIZER)
    environments.check(good)
    with pytest.raises(TaskError) as refusal:
        environments.check([good[0], {"task_data": task}, good[1]], "the rows")
    assert str(refusal.value) == complaint


def test_checking_rows_names_the_row_of_another_game() -> None:
    rows = [{"task_data": {}}, {"env_class_path": "tests.Chess", "task_data": {}}]
    with pytest.raises(ConfigError, match=r"^row 1 of the dataset: a dataset row is of 'tests\.Chess'"):
        Environments(GuessNumber(TOKENIZER), TOKENIZER).check(rows)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="the dataset must hold at least one row, got none"):
        Environments(GuessNumber(TOKENIZER), TOKENIZER).check([])


def always_no(solution: str, question: str) -> str:
    """A gamemaster of one's own."""
    return "No."


def test_a_gamemaster_of_ones_own_plays_the_games_rows() -> None:
    config = {"max_steps_per_episode": 7, "reward_scheme": "win"}
    env = TwentyQuestionsEnv(TOKENIZER, {**config, "gamemaster": always_no})
    rows = list(TwentyQuestionsEnv.get_train_dataset(config, size=3))
    environments = Environments(env, TOKENIZER)
    environments.check(rows)
    assert environments.of(rows[0]) is env
    for other in ({**config, "reward_scheme": "lmrl"}, {**config, "gamemaster": None}):
        with pytest.raises(ConfigError, match="not that of the environment given"):
            environments.check([{**rows[0], "env_config": other}])


def test_a_row_with_a_callable_that_the_environment_lacks_is_refused() -> None:
    row = {"env_config": {"gamemaster": always_no}, "task_data": {"solution": "clock"}}
    with pytest.raises(ConfigError, match="not that of the environment given"):
        Environments(TwentyQuestionsEnv(TOKENIZER), TOKENIZER).check([row])


class Silent(Agent):
    """Says nothing."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, None]:
        return "", None


def test_trials_of_two_games_are_played_together() -> None:
    environments = Environments(GuessNumber(TOKENIZER), TOKENIZER)
    trials = environments.trials([{"task_data": {}}], [1]) + SayBlue(TOKENIZER).trials([{}])
    played = drive([trial.play() for trial in trials], Silent())
    assert [len(trajectory.turns) for trajectory in played] == [4, 2]
