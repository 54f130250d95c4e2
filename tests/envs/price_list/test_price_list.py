"""The price list: tasks, tools, players whose play is known exactly, words and rows."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, TaskError, evaluate, make, tiny_policy
from agentsgym.envs.PriceList import GOODS, ImitationPlayer, PriceListEnv, RandomPlayer, ReferencePlayer
from agentsgym.envs.PriceList.env import KINDS, Question
from agentsgym.tiny import call_text

PATH = "agentsgym.envs.PriceList.PriceListEnv"
TINY = {"system_prompt": ""}


@given(st.lists(st.sampled_from(GOODS), min_size=1, max_size=2, unique=True), st.one_of(st.none(), st.integers(1, 99)))
def test_a_question_that_is_written_is_read_again(goods: list[str], times: int | None) -> None:
    question = Question(goods=tuple(goods), times=times if len(goods) == 1 else None)
    assert Question.parse(question.text()) == question
    assert Question.parse(question.text() + " Now!") is None


def test_the_reference_player_always_wins_in_the_fewest_turns() -> None:
    env = PriceListEnv()
    tasks = env.tasks(90)
    trajectories = env.rollout(tasks, ReferencePlayer(env))
    assert all(one.final_reward == 1.0 and one.success for one in trajectories)
    fewest = [2 if task["times"] is None and len(task["goods"]) == 1 else 3 for task in tasks]
    assert [one.num_turns for one in trajectories] == fewest
    two = next(one for one, task in zip(trajectories, tasks, strict=True) if len(task["goods"]) == 2)
    calls = [call["function"]["name"] for message in two.messages for call in message.get("tool_calls", ())]
    assert calls in (["price", "price", "add"], [])  # they are in the record once calls are recorded apart from text


def test_random_play_earns_what_info_holds_and_no_more() -> None:
    env = PriceListEnv(env_config={"kinds": ["price", "sum"], "wrong_answer_reward": -1.0})
    result = evaluate(env, RandomPlayer(env), env.tasks(700))
    info = result.trajectories[0].info
    assert info["random_reward"] == pytest.approx(1 / 18 - 17 / 18)
    assert info["optimal_reward"] == 1.0
    assert result.reward is not None
    assert result.reward.low <= info["random_reward"] <= result.reward.high


def test_the_more_noise_the_less_is_won() -> None:
    env = PriceListEnv()
    tasks = env.tasks(120)
    rates = [evaluate(env, ImitationPlayer(env, noise=noise), tasks).reward for noise in (0.0, 0.3, 0.9)]
    means = [rate.mean for rate in rates if rate]
    assert means[0] == 1.0
    assert means[0] > means[1] > means[2]
    with pytest.raises(ConfigError, match="noise must be a number in"):
        ImitationPlayer(env, noise=2)


def test_tasks_are_plain_balanced_and_of_their_seed_and_part() -> None:
    env = PriceListEnv()
    tasks = env.tasks(30, seed=3)
    assert tasks == env.tasks(30, seed=3)
    seeds = {part: {task["seed"] for task in env.tasks(200, part=part)} for part in ("train", "eval")}
    assert not seeds["train"] & seeds["eval"]
    assert sum(task["times"] is not None for task in tasks) == sum(len(task["goods"]) == 2 for task in tasks) == 10
    dataset = PriceListEnv.get_train_dataset({"kinds": ["sum"]}, size=4, seed=3)
    assert dataset[0]["env_class_path"] == PATH
    built = make(dataset[0])
    assert isinstance(built, PriceListEnv)
    assert all(one.success for one in built.rollout(dataset, ReferencePlayer(built)))
    assert PriceListEnv.get_eval_dataset(size=3)[0]["task_data"] == env.tasks(1, part="eval")[0]


def test_every_token_of_an_episode_is_a_word_of_its_own() -> None:
    text_env = PriceListEnv(env_config=TINY)
    _, tokenizer = tiny_policy(text_env)
    for player in (ReferencePlayer(text_env), ImitationPlayer(text_env, noise=0.7)):
        for trajectory in text_env.rollout(text_env.tasks(60), player):
            for message in trajectory.messages:
                calls = [call["function"] for call in message.get("tool_calls", ())]
                for text in (message["content"], *(call_text(one["name"], one["arguments"]) for one in calls)):
                    ids = tokenizer(text).input_ids
                    assert tokenizer.unk_token_id not in ids, text
                    assert tokenizer.decode(ids) == text
    assert len(tokenizer) < 140


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"goods": ["pear"]}, "two or more lower-case words"),
        ({"goods": ["pear", "Egg"]}, "two or more lower-case words"),
        ({"kinds": []}, "a non-empty list of names from price, sum, product"),
        ({"kinds": ["prize"]}, "a non-empty list of names from price, sum, product"),
        ({"max_price": 0}, "a positive int"),
        ({"kind": ["sum"]}, "did you mean 'kinds'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PriceListEnv(env_config=config)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"goods": ["pear"]}, "'prices'"),
        ({"goods": ["pear"], "prices": {"egg": 1}}, "'goods'"),
        ({"goods": ["egg"], "prices": {"egg": "1"}}, "'prices'"),
        ({"goods": ["egg"], "prices": {"egg": 1}, "times": 0}, "'times'"),
        ({"goods": ["egg"], "prices": {"egg": 1}, "time": 2}, "did you mean 'times'"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused(task: dict[str, Any], message: str) -> None:
    env = PriceListEnv()
    with pytest.raises(TaskError, match=message):
        env.rollout([task], ReferencePlayer(env))


def test_a_player_reports_it_where_it_cannot_read_the_question() -> None:
    class Other(PriceListEnv):
        def _question(self, state: dict[str, Any]) -> str:
            return "How are you?"

    env = Other()
    [trajectory] = env.rollout(env.tasks(1), ReferencePlayer(env))
    assert "cannot parse the question" in str(trajectory.error)


def test_sessions_are_apart_and_a_copy_plays_alike() -> None:
    env = PriceListEnv()
    tasks = env.tasks(12)
    together = [one.messages for one in env.rollout(tasks, ReferencePlayer(env))]
    alone = [env.rollout([task], ReferencePlayer(env))[0].messages for task in tasks]
    copied = [one.messages for one in pickle.loads(pickle.dumps(env)).rollout(tasks, ReferencePlayer(env))]
    assert together == alone == copied


def test_all_kinds_are_requested() -> None:
    assert KINDS == ("price", "sum", "product")
    env = PriceListEnv(env_config={"kinds": ["product"], "max_price": 5})
    assert env.max_answer == 20
    assert all(task["times"] in (2, 3, 4) for task in env.tasks(20))
