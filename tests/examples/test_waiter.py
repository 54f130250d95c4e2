"""Orders that only notes preserve."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import EnvProcessPool, EnvThreadPool, PolicyAgent, ScriptedAgent, check_env, evaluate, tiny_policy
from agentsgym.envs.players import random_player
from agentsgym.errors import ConfigError, TaskError
from examples.waiter import ImitationPlayer, ReferencePlayer, WaiterEnv

TASKS = WaiterEnv().tasks(400)
APPENDED: dict[str, Any] = {"history": "append", "summarize_over_tokens": None}


@given(st.integers(0, 2**31), st.integers(2, 5), st.integers(0, 6))
def test_whoever_notes_everything_serves_everyone(seed: int, num_guests: int, num_remarks: int) -> None:
    guests = ["Anna", "Ben", "Clara", "Dora", "Emil"][:num_guests]
    env = WaiterEnv(env_config={"guests": guests, "num_remarks": num_remarks, "max_steps_per_episode": 16})
    [played] = env.rollout(env.tasks(1, seed=seed), ReferencePlayer(env))
    assert played.success
    assert played.final_reward == pytest.approx(1)
    assert played.info["right"] == 1
    assert len(played.turns) == 2 * num_guests + num_remarks + played.info.get("num_notes", 0)


def test_the_orders_are_gone_when_the_guests_are_served() -> None:
    _, tokenizer = tiny_policy(WaiterEnv())
    env = WaiterEnv(tokenizer)
    for played in env.rollout(TASKS[:50], ReferencePlayer(env)):
        assert played.info["num_notes"] == 2
        for turn in played.turns[-3:]:
            assert turn.prompt_messages is not None
            prompt = " ".join(message["content"] for message in turn.prompt_messages)
            assert prompt.count(" orders ") == 1  # the first message stays


def test_random_play_serves_one_guest_in_four() -> None:
    env = WaiterEnv()
    played = evaluate(env, random_player(env, 1), TASKS)
    assert played.reward.mean == pytest.approx(0.25, abs=0.05)
    assert played.fraction_of_optimal.mean == pytest.approx(0, abs=0.07)


def test_the_demonstrator_notes_three_in_ten_orders_at_random() -> None:
    env = WaiterEnv(env_config=APPENDED)
    assert evaluate(env, ImitationPlayer(env), TASKS[:20]).reward.mean == 1  # nothing is lost without notes
    _, tokenizer = tiny_policy(env)
    noted = WaiterEnv(tokenizer)
    right = evaluate(noted, ImitationPlayer(noted), TASKS).metrics["right"].mean
    kept = 0.7 + 0.3 / 4  # by one note; some guests are served after a second one
    assert kept * kept + (1 - kept) ** 2 / 3 < right < kept


def test_only_the_right_drink_is_rewarded_and_the_order_of_serving_is_drawn() -> None:
    env = WaiterEnv(env_config=APPENDED)
    played = env.rollout(TASKS[:20], ScriptedAgent(["tea"], repeat_last=True))
    for one in played:
        orders = dict(
            m["content"].removesuffix(".").split(" orders ") for m in one.messages if " orders " in m["content"]
        )
        assert one.final_reward == pytest.approx(sum(drink == "tea" for drink in orders.values()) / 3)
        assert not any(turn.reward for turn in one.turns[:7])
    assert len({tuple(m["content"] for m in one.messages[-6::2]) for one in played}) > 1


def test_it_keeps_the_contract_and_has_every_word() -> None:
    model, tokenizer = tiny_policy(WaiterEnv())
    env = WaiterEnv(tokenizer)
    check_env(env, TASKS[:4], agent=PolicyAgent(model, tokenizer, max_turn_tokens=8))  # raises if it does not
    texts = [m["content"] for one in env.rollout(TASKS[:50], ReferencePlayer(env)) for m in one.messages]
    assert not any(tokenizer.unk_token_id in tokenizer.encode(text) for text in texts)


def test_notes_are_the_same_in_line_in_threads_in_processes_and_as_a_copy() -> None:
    _, tokenizer = tiny_policy(WaiterEnv())
    env = WaiterEnv(tokenizer)

    def played(env: WaiterEnv, pool: EnvThreadPool | EnvProcessPool | None = None) -> list[Any]:
        return [(one.messages, one.token_ids) for one in env.rollout(TASKS[:4], ReferencePlayer(env), pool=pool)]

    in_line = played(env)
    with EnvThreadPool(2) as threads, EnvProcessPool(2) as processes:
        assert played(env, threads) == played(env, processes) == in_line
    assert played(pickle.loads(pickle.dumps(env))) == in_line


def test_training_and_evaluation_share_no_combination_of_orders() -> None:
    rows = {"train": WaiterEnv.get_train_dataset(size=2000), "eval": WaiterEnv.get_eval_dataset(size=500)}
    combinations = {part: Counter(tuple(row["task_data"]["orders"].values()) for row in rows[part]) for part in rows}
    assert not combinations["train"].keys() & combinations["eval"].keys()
    assert [len(combinations[part]) for part in rows] == [48, 16]  # all 4 ** 3
    for part, counts in combinations.items():
        for place in range(3):  # each guest orders each drink equally often
            drinks = Counter(orders[place] for orders in counts.elements())
            assert all(0.2 < count / len(rows[part]) < 0.3 for count in drinks.values())
    assert WaiterEnv().tasks(3, seed=5) == WaiterEnv().tasks(3, seed=5) != WaiterEnv().tasks(3, seed=6)


def test_a_task_determines_the_episode() -> None:
    env = WaiterEnv()
    orders = {"Anna": "tea", "Ben": "tea", "Clara": "water"}
    tasks = [{"orders": orders, "seed": 3}, {"orders": dict(reversed(orders.items())), "seed": 3}]
    first, second = (one.messages for one in env.rollout(tasks, ReferencePlayer(env)))
    assert first == second
    heard = [message["content"] for message in first if " orders " in message["content"]]
    assert heard == [f"{guest} orders {drink}." for guest, drink in orders.items()]


@pytest.mark.parametrize(
    "orders",
    [
        None,
        ["tea", "tea", "tea"],
        {"Anna": "tea", "Ben": "tea"},
        {"Anna": "tea", "Ben": "tea", "Dora": "tea"},
        {"Anna": "tea", "Ben": "tea", "Clara": "gin"},
        {"Anna": "tea", "Ben": "tea", "Clara": ["tea"]},
    ],
)
def test_a_task_with_other_orders_is_refused(orders: Any) -> None:
    sentence = r"must map each of Anna, Ben, Clara to one of tea, coffee, juice, water, got "
    with pytest.raises(TaskError, match=sentence):
        WaiterEnv().rollout([{"orders": orders, "seed": 1}], ScriptedAgent(["ok"]))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"guests": ["Anna", "Anna"]}, r"\['guests'\] must be a list of two or more different words, got"),
        ({"drinks": ["tea"]}, r"\['drinks'\] must be a list of two or more different words, got"),
        ({"num_remarks": -1}, r"\['num_remarks'\] must be a non-negative int, got -1"),
        ({"num_remarks": 5}, r"must allow a turn for each order, remark and guest to serve, 11, got 10"),
        ({"noise": 1}, "unknown"),
    ],
)
def test_what_cannot_be_played_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WaiterEnv(env_config=config)


def test_the_system_prompt_has_the_rules_and_can_be_replaced() -> None:
    [played] = WaiterEnv().rollout(TASKS[:1], ScriptedAgent(["ok"], repeat_last=True))
    assert played.messages[0]["role"] == "system"
    assert "answer the ordered drink" in played.messages[0]["content"]
    own = WaiterEnv(env_config={"system_prompt": "Take every order."})
    assert "Take every order." in own.vocabulary_texts()


def test_noise_is_a_fraction() -> None:
    with pytest.raises(ConfigError, match=r"noise must be a number in \[0, 1\], got 2"):
        ImitationPlayer(WaiterEnv(), noise=2)
