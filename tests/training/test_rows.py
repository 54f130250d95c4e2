"""From dataset rows to environments, seeds and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from games import GuessNumber, SayBlue, policy
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Agent, ConfigError, StopReason, TaskError, Trajectory, Turn, register
from agentsgym.batch.layouts import Layout, trajectory_rows, turn_rows
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.envs.datasets.environments import Environments, group_seeds
from agentsgym.rollouts.driver import drive
from agentsgym.testing import chat_tokenizer
from agentsgym.training.tensors.loss_types import LOSS_TYPES
from agentsgym.training.tensors.token_batch import TokenBatch

TOKENIZER = policy()[1]
GUESS, BLUE = "tests.GuessNumber", "tests.SayBlue"


@pytest.fixture
def _games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})
    register(GuessNumber, GUESS)
    register(SayBlue, BLUE)


def drawn(picture: str, *, logprobs: list[float] | None = None, failed: bool = False) -> Trajectory:
    """'.' is an environment token, any letter an agent token, one letter a turn; '|' opens a segment."""
    turns: list[Turn] = []
    length = 0
    for part in picture.split("|"):
        turns += [
            Turn(
                start=length + part.index(letter),
                stop=length + part.rindex(letter) + 1,
                reward=0.0,
                prompt_start=length,
            )
            for letter in sorted({*part} - {"."})
        ]
        length += len(part)
    return Trajectory(
        token_ids=list(range(1, length + 1)),
        turns=turns,
        messages=[],
        final_reward=0.0,
        stop_reason=StopReason.FAILED if failed else StopReason.DONE,
        logprobs=logprobs,
    )


def stacked(trajectories: list[Trajectory], layout: Layout = trajectory_rows, **changes: int) -> TokenBatch:
    rows = [row for index, trajectory in enumerate(trajectories) for row in layout(index, trajectory)]
    return TokenBatch.stack(trajectories, rows, **{"pad_token_id": 77, **changes})


single = partial(turn_rows, merge=False)


def test_rows_are_stacked_and_padded_on_the_right() -> None:
    rows = [drawn("..aa.b"), drawn("..a"), drawn("..aa", failed=True)]
    batch = stacked(rows)
    mask = batch.agent_token_mask([True, True, False])
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 77, 77, 77], [1, 2, 3, 4, 77, 77]]
    assert batch.attention_mask.tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert batch.turn_index.tolist() == [[-1, -1, 0, 0, -1, 1], [-1, -1, 0, -1, -1, -1], [-1, -1, 0, 0, -1, -1]]
    assert mask.tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0], [0] * 6]
    assert batch.tensor([[9.0, 9.0, 1.0, 2.0, 9.0, 3.0], [9.0, 9.0, 4.0], [5.0] * 4]).tolist() == [
        [9, 9, 1, 2, 9, 3],
        [9, 9, 4, 0, 0, 0],
        [5, 5, 5, 5, 0, 0],
    ]
    assert {tensor.dtype for tensor in (batch.ids, batch.attention_mask, batch.turn_index, mask)} == {torch.long}


def test_rows_of_a_rewritten_rollout_stand_beneath_each_other() -> None:
    batch = stacked([drawn("..a.b|...c"), drawn(".a")], turn_rows)
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 77], [1, 2, 77, 77, 77]]
    assert batch.turn_index.tolist() == [[-1, -1, 0, -1, 1], [-1, -1, -1, 2, -1], [-1, 0, -1, -1, -1]]
    assert batch.tensor([list(range(9)), [10.0, 11.0]]).tolist() == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 0],
        [10, 11, 0, 0, 0],
    ]
    assert batch.agent_token_mask([False, True]).tolist() == [[0] * 5, [0] * 5, [0, 1, 0, 0, 0]]


@pytest.mark.parametrize(("num_rows", "num_fillers"), [(0, 0), (2, 0), (3, 1), (6, 4)])
def test_rows_that_fill_a_batch_up_hold_nothing_to_learn(num_rows: int, num_fillers: int) -> None:
    batch = stacked([drawn("..a.b"), drawn(".a")], num_rows=num_rows)
    mask = batch.agent_token_mask([True, True])
    tensors = batch.ids, batch.attention_mask, batch.turn_index, mask, batch.tensor([[1.0] * 5, [1.0] * 2])
    assert {tensor.shape for tensor in tensors} == {(2 + num_fillers, 5)}
    ids, attention_mask, turn_index, mask, values = (tensor[2:] for tensor in tensors)
    assert ids.tolist() == [[77] * 5] * num_fillers
    assert attention_mask.tolist() == [[1, 1, 1, 0, 0]] * num_fillers  # a model that attends to nothing gives NaN
    assert (turn_index == -1).all()
    assert not mask.any()
    assert not values.any()


@pytest.mark.parametrize(("multiple_of", "width"), [(1, 6), (4, 8), (6, 6)])
def test_the_width_is_rounded_up(multiple_of: int, width: int) -> None:
    batch = stacked([drawn("..aa.b")], multiple_of=multiple_of)
    assert {tensor.shape for tensor in (batch.ids, batch.attention_mask, batch.turn_index)} == {(1, width)}


def test_a_token_that_nothing_stands_before_is_not_trained() -> None:
    assert stacked([drawn("aa.b")]).agent_token_mask([True]).tolist() == [[0, 1, 0, 1]]
    assert stacked([drawn("aa.b")], single).agent_token_mask([True]).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert stacked([drawn("a.b|cd")], turn_rows).agent_token_mask([True]).tolist() == [[0, 0, 1], [0, 1, 0]]


def test_rows_without_any_token_still_have_columns_for_the_loss() -> None:
    batch = stacked([drawn("", failed=True)] * 2)
    assert batch.ids.tolist() == [[77] * 3] * 2
    assert not batch.attention_mask.any()


@pytest.mark.parametrize("loss_type", ["grpo", "sapo"])
def test_parts_of_a_rollout_weigh_what_they_hold_of_it_where_each_row_is_a_mean(loss_type: str) -> None:
    batch = stacked([drawn("..aaa.b|.cc"), drawn(".a"), drawn(".a|.b")], turn_rows, num_rows=8)
    mask = batch.agent_token_mask([True, True, False])
    assert batch.row_weights(mask, LOSS_TYPES[loss_type])[:, 0].tolist() == pytest.approx(
        [4 / 6, 2 / 6, 1, 0, 0, 1, 1, 1]
    )


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "dr_grpo", "luspo", "vespo"])
def test_rows_weigh_alike_where_each_token_does(loss_type: str) -> None:
    batch = stacked([drawn("..aaa.b|.cc"), drawn(".a")], turn_rows, num_rows=4)
    assert torch.equal(batch.row_weights(batch.agent_token_mask([True, True]), LOSS_TYPES[loss_type]), torch.ones(4, 1))


@given(
    pictures=st.lists(st.sampled_from(["..aa.b", ".a|..bb.c", "ab", "a|b", ".", "", "...aaa|.b|.c.d"]), min_size=1),
    num_rows=st.integers(0, 12),
)
def test_each_rollout_weighs_the_same_in_one_row_or_in_many(pictures: list[str], num_rows: int) -> None:
    trajectories = list(map(drawn, pictures))
    for layout in (turn_rows, single):
        batch = stacked(trajectories, layout, num_rows=num_rows)
        mask = batch.agent_token_mask([True] * len(pictures))
        weights = batch.row_weights(mask, LOSS_TYPES["grpo"]) / mask.sum(1, keepdim=True).clamp(
            min=1
        )  # of a token in a row's mean
        totals = torch.zeros(len(pictures))
        for row, total in zip(batch.rows, (weights * mask).sum(1), strict=False):
            totals[row.rollout] += total
        learnt = [
            sum(mask[i].any().item() for i, row in enumerate(batch.rows) if row.rollout == j) > 0
            for j in range(len(pictures))
        ]
        torch.testing.assert_close(totals, torch.tensor(learnt, dtype=torch.float32))
        for j in range(len(pictures)):  # and each of its tokens as much as any other
            own = [weights[i].item() for i, row in enumerate(batch.rows) if row.rollout == j and mask[i].any()]
            assert own == pytest.approx(own[:1] * len(own))


def test_values_on_tokens_go_back_to_rollouts_and_turns() -> None:
    trajectories = [drawn("..aaa.b|.cc"), drawn("."), drawn(".a.b")]
    values = [
        [100 * index + position for position in range(len(row.token_ids))] for index, row in enumerate(trajectories)
    ]
    for layout in (turn_rows, single):
        batch = stacked(trajectories, layout, num_rows=9)
        assert batch.by_turn(batch.tensor(values), [3, 0, 2]) == [[[2, 3, 4], [6], [8, 9]], [], [[201], [203]]]


def test_logprobs_are_stacked_if_every_row_that_counts_has_them() -> None:
    known = drawn("..a", logprobs=[0.0, 0.0, -1.5])
    assert stacked([known, drawn(".aaa")]).recorded_logprobs is None
    rows = [known, drawn(".aaa", failed=True)]
    logprobs = stacked(rows, num_rows=3).recorded_logprobs
    assert logprobs is not None
    assert logprobs.tolist() == [[0.0, 0.0, -1.5, 0.0], [0.0] * 4, [0.0] * 4]


def test_logprobs_go_to_the_row_of_their_segment() -> None:
    rows = [drawn("..a|.bc", logprobs=[0.0, 0.0, -1.0, 0.0, -2.0, -3.0])]
    logprobs = stacked(rows, turn_rows).recorded_logprobs
    assert logprobs is not None
    assert logprobs.tolist() == [[0.0, 0.0, -1.0], [0.0, -2.0, -3.0]]


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
    ("rows", "complaint"),
    [
        (
            [{"env_class_path": BLUE, "task_data": {}}],
            f"a dataset row is for the environment '{BLUE}', but this environment is '{GUESS}'",
        ),
        (
            [{"task_data": {}}, {"env_class_path": "tests.Chess", "task_data": {}}],
            r"^row 1 of the dataset: a dataset row is for the environment 'tests\.Chess'",
        ),
        ([{"env_config": {"max_steps_per_episode": 3}, "task_data": {}}], "env_config.*leave env=None"),
        ([{"env_config": {"max_step": 3}, "task_data": {}}], "max_step"),
        ([{"prompt": "Hello"}], r"needs 'task_data' \(a dict\), got the columns \['prompt'\]"),
        ([{"task_data": "seed 1"}], "needs 'task_data'"),
        ([], "the dataset must contain at least one row, got none"),
    ],
)
def test_rows_of_another_game_are_refused(rows: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Environments(GuessNumber(TOKENIZER), TOKENIZER).check(rows)


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
    with pytest.raises(ConfigError, match=r"env\.tokenizer must be the policy's tokenizer"):
        Environments(env, TOKENIZER)


def test_an_equal_tokenizer_will_do() -> None:
    env = GuessNumber(policy()[1])
    assert Environments(env, TOKENIZER).of({"task_data": {}}) is env


def test_a_task_keeps_its_own_seed_and_gets_one_if_it_has_none() -> None:
    environments = Environments(GuessNumber(TOKENIZER), TOKENIZER)
    rows = [{"task_data": task} for task in ({"seed": 5}, {"seed": None}, {})]
    places = [(4, 0), (4, 1), (5, 0)]
    trials = environments.trials(rows, [101, 102, 103], places=places, max_turn_tokens=3, max_completion_length=50)
    assert [trial.seed for trial in trials] == [5, 102, 103]
    assert [trial.task_data["seed"] for trial in trials] == [5, 102, 103]
    assert [(trial.task_index, trial.rollout_index) for trial in trials] == places
    assert rows[1] == {"task_data": {"seed": None}}  # a row is not written to
    assert {(trial.budget.turn, trial.budget.completion) for trial in trials} == {(3, 50)}


def test_a_task_that_cannot_be_played_is_reported_before_anything_is_played() -> None:
    environments = Environments(GuessNumber(TOKENIZER), TOKENIZER)
    with pytest.raises(TaskError, match="must be an int"):
        environments.trials([{"task_data": {"seed": "one"}}], [1], places=[(0, 0)])


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
        with pytest.raises(ConfigError, match="but the environment was created with"):
            environments.check([{**rows[0], "env_config": other}])


def test_a_row_with_a_callable_that_the_environment_lacks_is_refused() -> None:
    row = {"env_config": {"gamemaster": always_no}, "task_data": {"solution": "clock"}}
    with pytest.raises(ConfigError, match="but the environment was created with"):
        Environments(TwentyQuestionsEnv(TOKENIZER), TOKENIZER).check([row])


class Silent(Agent):
    """Answers nothing."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, None]:
        return "", None


def test_trials_of_two_games_are_played_together() -> None:
    environments = Environments(GuessNumber(TOKENIZER), TOKENIZER)
    trials = environments.trials([{"task_data": {}}], [1], places=[(0, 0)]) + SayBlue(TOKENIZER).trials([{}])
    played = drive(trials, Silent())
    assert [len(trajectory.turns) for trajectory in played] == [4, 2]
