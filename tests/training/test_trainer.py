"""Training runs from end to end: estimators, KL, iterations, mixed games, tables, options, agents of one's own."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset, IterableDataset
from games import TextAgent, has_moved, logged, policy, saved_policy, settings, tasks, trainer_of
from number_games import NUMBERS, GuessNumber, SayBlue
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym import Agent, AgentsGymError, GRPOEnvTrainer, PolicyAgent, ScoredRollout, register
from agentsgym.credit.registry import ESTIMATORS, get_estimator
from agentsgym.credit.returns import gigpo


def half_of_the_reward(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> Sequence[Sequence[float]]:
    """An estimator of one's own."""
    assert (discount, scale) == (0.5, "none")
    return [[reward / 2 for reward in rollout.turn_rewards] for rollout in rollouts]


def own_rewards(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> Sequence[Sequence[float]]:
    """An estimator that shows what it is given."""
    return [rollout.turn_rewards for rollout in rollouts]


@pytest.mark.parametrize(
    ("estimator", "scale"),
    [
        (estimator, scale)
        for estimator in (*ESTIMATORS, functools.partial(gigpo, step_weight=0.5))
        for scale in ("none", "group", "batch")
        if (estimator, scale) != ("reward", "batch")  # which is refused, since nothing would be scaled
    ],
)
def test_every_estimator_trains(estimator: Any, scale: str, tmp_path: Path) -> None:
    head = {"value_head": "shared"} if get_estimator(estimator).traits.reads_values else {}
    changes = {"advantage_estimator": estimator, "scale_rewards": scale, "discount": 0.9, "max_steps": 1, **head}
    trainer = trainer_of(tmp_path, **changes)
    trainer.train()
    assert has_moved(trainer)
    assert math.isfinite(logged(trainer, "loss")[0])
    assert logged(trainer, "grad_norm")[0] > 0


def test_an_estimator_of_ones_own_sets_the_advantages(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, advantage_estimator=half_of_the_reward, scale_rewards="none", discount=0.5)
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    given = batch["advantages"][batch["agent_token_mask"] == 1]
    assert {round(value, 6) for value in given.tolist()} == {0.5, -0.05}
    assert '"half_of_the_reward"' in trainer.args.to_json_string()


@pytest.mark.parametrize(
    ("turn_credit", "token_credit"),
    [
        ("step", "spread"),
        ("step", "last"),
        ("final", "spread"),
        ("final", "last"),
        ("repeat_final", "last"),
        ("spread_final", "spread"),
    ],
)
def test_the_reward_estimator_takes_the_environments_per_token_rewards(
    turn_credit: str, token_credit: str, tmp_path: Path
) -> None:
    env_config = {"turn_credit": turn_credit, "token_credit": token_credit}
    trainer = trainer_of(tmp_path, env_config=env_config, advantage_estimator="reward")
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    logs = trainer._logs
    for row, final_reward, turn_rewards in zip(
        batch["advantages"], logs["rewards"]["environment"], logs["extra"]["turn_rewards"], strict=True
    ):
        times = len(turn_rewards) if turn_credit == "repeat_final" else 1
        assert row.sum().item() == pytest.approx(times * final_reward, abs=1e-5)
        if token_credit == "last":
            assert (row != 0).sum() == (1 if turn_credit == "final" else len(turn_rewards))


@pytest.mark.parametrize("turn_credit", ["step", "final"])
def test_estimators_see_the_credited_turn_rewards(turn_credit: str, tmp_path: Path) -> None:
    env_config = {"turn_credit": turn_credit, "error_allowance": 0}
    trainer = trainer_of(tmp_path, env_config=env_config, advantage_estimator=own_rewards)
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    for row, turn_rewards in zip(batch["advantages"], trainer._logs["extra"]["turn_rewards"], strict=True):
        wanted = turn_rewards if turn_credit == "step" else [0.0] * (len(turn_rewards) - 1) + [sum(turn_rewards)]
        assert {round(value, 5) for value in row.tolist()} == {0.0, *(round(value, 5) for value in wanted)}


def test_rollouts_of_a_group_play_the_same_task_and_groups_do_not(tmp_path: Path) -> None:
    model, tokenizer = policy()
    seen: list[Any] = []

    class Recording(GuessNumber):
        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            seen.append(task_data["seed"])
            return super()._initialize_episode(session_id, task_data)

    dataset = Dataset.from_list([{"task_data": {"number": i}} for i in range(4)])
    GRPOEnvTrainer(model, Recording(tokenizer), settings(tmp_path, max_steps=3), train_dataset=dataset).train()
    groups = [seen[start : start + 4] for start in range(0, len(seen), 4)]
    assert [len(set(group)) for group in groups] == [1] * 6
    assert len(set(seen)) == 6


def test_two_iterations_reuse_rollouts_and_clip(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2, max_steps=6, learning_rate=5e-2)
    trainer.train()
    clipped = logged(trainer, "clip_ratio/region_mean")
    assert len(logged(trainer, "reward")) == 3  # rollouts are played at every second step
    assert clipped[0] == 0.0
    assert clipped[1] > 0.0
    assert all(math.isfinite(value) for value in clipped)


def test_kl_is_zero_at_the_start_and_grows(tmp_path: Path) -> None:
    path = saved_policy(tmp_path / "model")
    trainer = GRPOEnvTrainer(
        AutoModelForCausalLM.from_pretrained(path),
        GuessNumber(AutoTokenizer.from_pretrained(path)),
        settings(tmp_path / "run", beta=0.1, max_steps=3, num_iterations=2),
        train_dataset=tasks(),
    )
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[2] > 1e-4


def test_a_model_may_be_given_by_its_path(tmp_path: Path) -> None:
    path = saved_policy(tmp_path / "model")
    env = GuessNumber(AutoTokenizer.from_pretrained(path))
    args = settings(tmp_path / "run", beta=0.1, max_steps=1, model_init_kwargs={"dtype": "float32"})
    trainer = GRPOEnvTrainer(path, env, args, train_dataset=tasks())
    trainer.train()
    assert logged(trainer, "kl") == [pytest.approx(0.0, abs=1e-6)]


def test_one_run_mixes_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})
    register(GuessNumber, "tests.GuessNumber")
    register(SayBlue, "tests.SayBlue")
    rows = [
        {"env_class_path": f"tests.{name}", "env_config": {"max_steps_per_episode": 2}, "task_data": {"seed": seed}}
        for seed in range(2)
        for name in ("GuessNumber", "SayBlue")
    ]
    model, tokenizer = policy()
    args = settings(tmp_path, log_completions=True, per_device_train_batch_size=16, max_steps=1)
    trainer = GRPOEnvTrainer(model, None, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    openings = [prompt[-1]["content"] for prompt in table["prompt"]]
    assert sorted(openings) == ["Guess a number from one to six."] * 8 + ["Say a color."] * 8
    assert has_moved(trainer)


def test_the_completions_table_shows_the_conversation(tmp_path: Path) -> None:
    env_config = {"system_prompt": "A number, please."}
    trainer = trainer_of(tmp_path, env_config=env_config, log_completions=True, eval_dataset=tasks(4))
    trainer.train()
    for step in (1, 2):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert len(table) == 8
        assert set(table["step"]) == {step}
        for row in table.itertuples():
            assert [message["role"] for message in row.prompt] == ["system", "user"]
            assert [message["role"] for message in row.completion][:2] == ["assistant", "user"][: len(row.completion)]
            assert len(row.completion) == 2 * len(row.turn_rewards) - 1
            assert sum(row.turn_rewards) == pytest.approx(row.environment)
            assert row.stop_reason == ("done" if row.turn_rewards[-1] == 1.0 else "max_turns")
            assert math.isfinite(row.advantage)
    assert table["environment"].mean() == pytest.approx(logged(trainer, "reward")[-1])


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy_coef": 0.01},
        {"top_entropy_quantile": 0.5},
        {"delta": 2.0, "num_iterations": 2},
        {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "num_iterations": 2},
        {"bf16": True, "num_iterations": 2},
        {"shuffle_dataset": False},
    ],
)
def test_options_of_trl_run_as_they_are(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **changes)
    trainer.train()
    assert has_moved(trainer)
    assert all(map(math.isfinite, logged(trainer, "loss")))
    assert logged(trainer, "failed") == [0.0] * len(logged(trainer, "failed"))


def test_a_stream_of_rows_trains(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"task_data": {"seed": i}} for i in range(8)]))
    trainer = trainer_of(tmp_path, dataset=stream)
    trainer.train()
    assert has_moved(trainer)


def test_token_budgets_are_kept(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_turn_tokens=3, max_completion_length=17)
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    mask, attention_mask = batch["agent_token_mask"], batch["attention_mask"]
    first = mask.argmax(1)
    assert ((attention_mask.sum(1) - first) <= 17).all()
    runs = [len(run) for row in mask for run in "".join(map(str, row.tolist())).split("0") if run]
    assert max(runs) <= 3
    assert "max_tokens" in trainer._logs["extra"]["stop_reason"]


def test_gigpo_without_state_keys_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    estimators = ["gigpo", functools.partial(gigpo, step_weight=0.5), "grpo"]
    counts = []
    for estimator in estimators:
        model, tokenizer = policy()
        args = settings(tmp_path, advantage_estimator=estimator)
        trainer = GRPOEnvTrainer(model, SayBlue(tokenizer), args, train_dataset=tasks())
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer.train()
        counts.append(caplog.text.count("the environment returns no state keys, so 'gigpo' has no turns to compare"))
    assert counts == [1, 1, 0]
    with caplog.at_level(logging.WARNING):
        trainer_of(tmp_path, advantage_estimator="gigpo").train()
    assert "the environment returns no state keys, so 'gigpo' has no turns to compare" not in caplog.text


def test_rows_are_padded_to_a_multiple(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, pad_to_multiple_of=16, max_steps=1)
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    assert batch["prompt_completion_ids"].shape[1] % 16 == 0
    trainer.train()


def with_failures(num_broken: int) -> Dataset:
    """Eight tasks, of which some cannot be started."""
    return Dataset.from_list([{"task_data": {"seed": i, "cannot_start": i < num_broken}} for i in range(8)])


def test_a_run_survives_a_few_broken_episodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = with_failures(1)
    trainer = trainer_of(tmp_path, dataset=dataset, max_failed_fraction=0.5, max_steps=4)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert sorted(logged(trainer, "failed")) == [0.0, 0.0, 0.0, 0.5]
    assert "there is no such number" in caplog.text
    assert all(map(math.isfinite, logged(trainer, "loss")))
    assert has_moved(trainer)


def test_broken_episodes_are_in_no_baseline(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_failed_fraction=1.0, advantage_estimator="rloo", scale_rewards="none")
    rows = [{"task_data": {"seed": 0, "cannot_start": broken}} for broken in (False, True, True, False)] * 2
    batch = trainer._generate_and_score_completions(rows)
    rewards = trainer._logs["rewards"]["environment"]
    for first, last in ((0, 3), (4, 7)):
        difference = rewards[first] - rewards[last]
        for row, expected in ((first, difference), (last, -difference)):
            on_agent = batch["advantages"][row][batch["agent_token_mask"][row] == 1]
            assert on_agent.tolist() == pytest.approx([expected] * len(on_agent))
    assert not batch["agent_token_mask"][[1, 2, 5, 6]].any()


def test_a_run_stops_when_too_many_episodes_break_and_gives_the_reason(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dataset=with_failures(8), max_failed_fraction=0.5)
    with pytest.raises(AgentsGymError, match=r"8 of 8 rollouts failed.*max_failed_fraction = 0\.5") as failure:
        trainer.train()
    assert "Traceback" in str(failure.value)
    assert 'raise RuntimeError("there is no such number")' in str(failure.value)


class Raising(TextAgent):
    """Gives up in every conversation but the first."""

    def get_action(self, messages: Sequence[Any], agent_state: Any) -> tuple[str, Any]:
        raise RuntimeError("no idea")


def test_an_agent_that_raises_is_a_broken_episode_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, agent=Raising())
    with pytest.raises(AgentsGymError, match="no idea"):
        trainer.train()


def test_an_agent_that_gives_only_text_trains_and_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, agent=TextAgent(), max_steps=3, max_turn_tokens=8)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count("text without token ids") == 1
    assert logged(trainer, "exact") == [0.0] * 3
    # All rollouts of a group are the same game, so that there is nothing to compare.
    assert logged(trainer, "frac_reward_zero_std") == [1.0] * 3
    assert not has_moved(trainer)


def test_text_is_trained_where_its_rewards_differ(tmp_path: Path) -> None:
    class Changing(Agent):
        def __init__(self) -> None:
            self.calls = 0

        def get_action(self, messages: Any, agent_state: Any) -> tuple[str, None]:
            self.calls += 1
            return NUMBERS[self.calls % 6], None

    trainer = trainer_of(tmp_path, agent=Changing(), max_turn_tokens=8)
    trainer.train()
    assert has_moved(trainer)


def test_a_policy_agent_of_ones_own_is_as_good_as_the_default(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path)
    plain.train()
    own = trainer_of(tmp_path)
    own.agent = PolicyAgent(own.model, own.processing_class, max_turn_tokens=4)
    own.train()
    assert logged(own, "loss") == logged(plain, "loss")
