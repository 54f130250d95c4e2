"""What is warned of once, and what comes out as a finite zero."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from games import WORDS, GuessNumber, correcting, logged, policy, settings, tasks, trainer_of
from test_trl_interface import ROWS, parameter_gradients, prepared

from agentsgym.agents.base import Agent
from agentsgym.credit.assignment import AdvantageAssigner, filter_rollouts
from agentsgym.credit.registry import ESTIMATORS, get_estimator
from agentsgym.credit.returns import gigpo
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError
from agentsgym.training.metrics.diagnostics import Diagnostics
from agentsgym.training.metrics.rollouts import RolloutSummary, rollout_metrics
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Action, StopReason, Trajectory, Turn, TurnRequest


def rollout(
    rewards: Sequence[float],
    *,
    keys: Sequence[Any] | None = None,
    num_tokens: int = 2,
    stop_reason: StopReason = StopReason.DONE,
) -> Trajectory:
    """One token of environment before each turn of so many tokens."""
    turns = [
        Turn(
            start=k * (num_tokens + 1) + 1,
            stop=(k + 1) * (num_tokens + 1),
            reward=reward,
            state_key=None if keys is None else keys[k],
        )
        for k, reward in enumerate(rewards)
    ]
    return Trajectory(
        token_ids=range(len(rewards) * (num_tokens + 1)),
        turns=turns,
        messages=[],
        final_reward=sum(rewards),
        stop_reason=stop_reason,
    )


@pytest.fixture
def warnings_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """What is reported of a batch of groups of four that comes three times."""

    def found(batch: Sequence[Trajectory], **changes: Any) -> list[str]:
        args = settings(tmp_path, **changes)
        diagnostics = Diagnostics(args, args.estimator())
        scored = [ScoredRollout.from_trajectory(one, group=index // 4) for index, one in enumerate(batch)]
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="agentsgym"):
            for _ in range(3):
                diagnostics.check(filter_rollouts(scored, args)[0])
        return [record.getMessage() for record in caplog.records]

    return found


STEADY = [rollout([0.5, 1.0]), rollout([0.25, 0.0])] * 4
FAILED = rollout([1.0], stop_reason=StopReason.FAILED)
TRUNCATED = rollout([1.0, 1.0], stop_reason=StopReason.MAX_TURNS)


@pytest.mark.parametrize(
    ("batch", "changes", "is_warned_of"),
    [
        ([FAILED] * 8, {}, True),
        ([FAILED] * 7 + [rollout([1.0])], {}, False),
        ([TRUNCATED] * 8, {}, False),
        ([TRUNCATED] * 8, {"truncated_rollouts": "mask"}, True),
        ([TRUNCATED] * 7 + [rollout([1.0])], {"truncated_rollouts": "mask"}, False),
        ([rollout([0.5, 0.5])] * 8, {"zero_variance_groups": "drop"}, True),
        ([FAILED] * 3 + [rollout([1.0])] + [FAILED] * 4, {"min_group_size": 2}, True),
    ],
)
def test_a_batch_without_anything_to_train_on_is_warned_of(
    batch: list[Trajectory], changes: dict[str, Any], is_warned_of: bool, warnings_of: Any
) -> None:
    wanted = ["no rollout of the generation batch is left to train on: all failed or were filtered out"]
    warned = [message for message in warnings_of(batch, **changes) if "one usable rollout" not in message]
    assert warned == (wanted if is_warned_of else [])


@pytest.mark.parametrize(
    ("batch", "changes", "is_warned_of"),
    [
        ([FAILED] * 3 + STEADY[:5], {}, True),
        ([FAILED] * 3 + STEADY[:5], {"advantage_estimator": "rloo"}, True),
        ([FAILED] * 3 + STEADY[:5], {"advantage_estimator": "rebn"}, False),  # which needs no task groups
        *(
            ([FAILED] * 3 + STEADY[:5], {"estimator_kwargs": {"baseline": baseline}}, False)
            for baseline in ("none", "batch", "role_ema")
        ),
        ([FAILED] * 3 + STEADY[:5], {"min_group_size": 2}, False),
        ([FAILED] * 2 + STEADY[:6], {}, False),
    ],
)
def test_a_rollout_without_a_baseline_is_warned_of(
    batch: list[Trajectory], changes: dict[str, Any], is_warned_of: bool, warnings_of: Any
) -> None:
    warned = warnings_of(batch, **changes)
    assert ["set min_group_size=2 to drop such groups" in message for message in warned] == [True] * is_warned_of


@pytest.mark.parametrize(
    ("estimator", "final_reward", "is_warned_of"),
    [
        *(("return_to_go", 2.0, True), ("rebn", 2.0, True), ("grpo", 2.0, False), ("return_to_go", 1.5, False)),
        (get_estimator("return_to_go", potential_weight=1.0), 2.0, True),
        (get_estimator("mt_grpo", potential_weight=1.0), 2.0, False),  # which reads the final reward itself
    ],
)
def test_a_final_reward_that_no_turn_was_given_is_warned_of(
    estimator: Any, final_reward: float, is_warned_of: bool, warnings_of: Any
) -> None:
    batch = [dataclasses.replace(STEADY[0], final_reward=final_reward), *STEADY[1:]]
    warned = warnings_of(batch, advantage_estimator=estimator)
    assert ["set env_config['turn_credit'] to 'final'" in message for message in warned] == [True] * is_warned_of


@pytest.mark.parametrize(
    ("estimator", "discount", "is_warned_of"),
    [
        *((name, 0.9, True) for name in ("grpo", "rloo", "rae", "mt_grpo", "reward")),
        *((name, 0.9, False) for name in ("return_to_go", "rebn", "gigpo")),
        ("grpo", 1.0, False),
    ],
)
def test_a_discount_that_does_nothing_is_warned_of(
    estimator: str, discount: float, is_warned_of: bool, warnings_of: Any
) -> None:
    warned = warnings_of(STEADY, advantage_estimator=estimator, discount=discount)
    assert [message for message in warned if "discount" in message] == [
        f"discount=0.9 has no effect: {estimator!r} has no sum over turns"
    ] * is_warned_of


def test_a_discount_of_potentials_does_something(warnings_of: Any) -> None:
    batch = [
        dataclasses.replace(one, turns=[dataclasses.replace(turn, potential=0.5) for turn in one.turns])
        for one in STEADY
    ]
    changes = {"advantage_estimator": "mt_grpo", "estimator_kwargs": {"potential_weight": 1.0}, "discount": 0.5}
    warned = warnings_of(batch, **changes)
    assert not [message for message in warned if "discount" in message]


def test_a_batch_without_agent_tokens_is_warned_of(warnings_of: Any) -> None:
    warned = warnings_of([rollout([0.5, 1.0], num_tokens=0)] * 8)
    assert ["no rollout of the generation batch has an agent token" in message for message in warned] == [True]


def test_the_final_reward_for_every_turn_is_refused_where_turns_are_summed(tmp_path: Path) -> None:
    for estimator in ("return_to_go", "mt_grpo"):
        with pytest.raises(ConfigError, match=f"'{estimator}' would count several times.*use turn_credit='final'"):
            trainer_of(tmp_path, env_config={"turn_credit": "repeat_final"}, advantage_estimator=estimator)
    trainer_of(tmp_path, env_config={"turn_credit": "repeat_final"}, advantage_estimator="grpo")
    trainer_of(tmp_path, env_config={"turn_credit": "final"})


def keyed(*keys: Sequence[Any]) -> list[Trajectory]:
    return [rollout([0.5, 1.0], keys=own) for own in keys]


ALONE = [[f"{i}-{k}" for k in range(2)] for i in range(8)]


@pytest.mark.parametrize(
    ("batch", "estimator", "words"),
    [
        (STEADY, "gigpo", ["the environment returns no state keys"]),
        (STEADY, functools.partial(gigpo, step_weight=0.5), ["the environment returns no state keys"]),
        (STEADY, "grpo", []),
        (keyed(*[("a", None)] * 8), "gigpo", []),
        (keyed(*ALONE), "gigpo", ["too fine for 4 rollouts per task"]),
        (keyed(*ALONE), "grpo", []),
        (keyed(*ALONE[:7], ALONE[6]), "gigpo", []),  # 12 of 16 alone
        (keyed(*[("a", "b")] * 8), "gigpo", []),
    ],
)
def test_gigpo_without_groups_of_states_is_warned_of(
    batch: list[Trajectory], estimator: Any, words: list[str], warnings_of: Any
) -> None:
    warned = warnings_of(batch, advantage_estimator=estimator)
    assert len(warned) == len(words)
    assert all(part in message for part, message in zip(words, warned, strict=True))


LONG = [rollout([0.5, 1.0], num_tokens=251)] * 8
PRODUCT = "ratio of a row multiplies those of all its agent tokens, 502 on average"
MEAN = "importance_sampling_level='sequence' clips a mean over 502 agent tokens"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"importance_sampling_level": "sequence"}, []),  # on policy the ratio is 1
        ({"importance_sampling_level": "sequence", "num_iterations": 2}, [MEAN]),
        ({"num_iterations": 2}, []),
        ({"loss_type": "vespo"}, []),
        ({"loss_type": "vespo", "num_iterations": 2}, [PRODUCT]),
        (correcting("sequence_mask"), [PRODUCT]),
        (correcting("sequence_truncate"), [PRODUCT]),
        (correcting("token_truncate"), []),
        (correcting("geometric_mask"), []),
        ({"vllm_importance_sampling_mode": "sequence_mask", "use_vllm": True}, [PRODUCT]),
        (
            {
                "vllm_importance_sampling_mode": "sequence_mask",
                "use_vllm": True,
                "vllm_importance_sampling_correction": False,
            },
            [],
        ),
        ({"use_vllm": True}, []),
    ],
)
def test_ratios_of_long_rows_are_warned_of(changes: dict[str, Any], words: list[str], warnings_of: Any) -> None:
    warned = warnings_of(LONG, **changes)
    assert len(warned) == len(words)
    assert all(part in message for part, message in zip(words, warned, strict=True))
    assert warnings_of(STEADY, **changes) == []


FLAT = "all advantages were zero in 10 consecutive generation batches"


@pytest.mark.parametrize(
    ("rewards", "seen"),
    [([0.0] * 8, "were all 0;"), ([0.5] * 4 + [2.0] * 4, "ranged from 0.5 to 2, without a difference")],
)
def test_ten_batches_in_a_row_without_a_signal_are_warned_of_once(
    rewards: list[float], seen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = settings(tmp_path, advantage_estimator="grpo", num_generations=4)
    assigner, diagnostics = AdvantageAssigner(args), Diagnostics(args, args.estimator())

    def play(*final: float) -> bool:
        batch = [rollout([own]) for own in final]
        scored = [ScoredRollout.from_trajectory(one, group=index // 4) for index, one in enumerate(batch)]
        found = assigner.assign(scored, range(8), batch, [2] * 8, is_training=True)
        diagnostics.check(found.rollouts, is_flat=found.is_flat)
        return FLAT in caplog.text

    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        assert not any(play(*rewards) for _ in range(9))
        assert not play(*rewards[:7], 3.0)  # one rollout that differs ends the row
        assert not any(play(*rewards) for _ in range(9))
        assert all(play(*rewards) for _ in range(15))
    assert caplog.text.count(FLAT) == 1
    assert seen in caplog.text


@pytest.mark.parametrize(("estimator", "is_warned_of"), [("grpo", True), ("reward", False)])
def test_a_run_whose_rewards_are_all_equal_reports_it(
    estimator: str, is_warned_of: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        trainer_of(
            tmp_path,
            max_steps=10,
            advantage_estimator=estimator,
            num_generations=2,
            per_device_train_batch_size=2,
            env_config={"max_steps_per_episode": 1},
            dataset=tasks(8, secret=-1),
        ).train()
    assert caplog.text.count(FLAT) == is_warned_of


def test_a_run_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        trainer_of(tmp_path, max_steps=3, advantage_estimator="grpo", discount=0.5).train()
    assert caplog.text.count("discount=0.5 has no effect") == 1


@pytest.mark.parametrize("max_steps_per_episode", [1, 4])  # in the first, reward is as sparse as it can be
def test_an_ordinary_run_warns_of_nothing(
    max_steps_per_episode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("games.WORDS", [*WORDS, "A number, please.", "Higher.", "Lower."])  # as the game returns them
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        trainer_of(tmp_path, max_steps=3, env_config={"max_steps_per_episode": max_steps_per_episode}).train()
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("agentsgym")]


def test_a_run_whose_policy_cannot_read_the_game_reports_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        trainer_of(tmp_path, max_steps=3, env_config={"max_steps_per_episode": 4}).train()
    [output] = [one for one in caplog.records if one.name == "agentsgym.tokens.unknown_words"]
    assert "has no token for 'Higher.', 'A'" in output.getMessage()


class Silent(Agent):
    """Answers nothing, in no tokens."""

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        return [Action(text="", token_ids=[], logprobs=[], finish_reason="length") for _ in requests]


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": Silent()},
        {"agent": Silent(), "num_iterations": 2, "importance_sampling_level": "sequence"},
        {"agent": Silent(), "num_iterations": 2, "loss_type": "vespo", "off_policy_mask_threshold": 0.1},
        *(
            {"agent": Silent(), **correcting(mode), "loss_aggregation": aggregation}
            for mode, aggregation in [("geometric_mask", "turn"), ("sequence_truncate", "constant")]
        ),
        {"agent": Silent(), "layout": "turn", "loss_type": "grpo", "zero_variance_groups": "resample"},
        {"agent": Silent(), "advantage_estimator": "bilevel_gae", "value_head": "shared"},
        {"env_config": {"max_trajectory_tokens": 1}, "advantage_estimator": "turn_gae", "value_head": "shared"},
        {"env_config": {"max_trajectory_tokens": 1}, "loss_aggregation": "trajectory"},  # no room for one turn
        {"env_config": {"max_trajectory_tokens": 1}, "advantage_estimator": "gigpo", "invalid_turns": "mask_rollout"},
        {"truncated_rollouts": "mask", "env_config": {"max_steps_per_episode": 1}, "dataset": tasks(8, secret=-1)},
    ],
)
def test_a_run_without_anything_to_train_on_stays_where_it_is(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **changes)
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert logged(trainer, "loss") == logged(trainer, "grad_norm") == [0.0, 0.0]
    assert all((one == other).all() for one, other in zip(weights, trainer.model.parameters(), strict=True))
    for log in trainer.state.log_history:
        assert all(math.isfinite(value) for value in log.values() if isinstance(value, float))


@pytest.mark.parametrize(
    ("estimator", "scale"),
    # "reward" has nothing to scale, so that "batch" is refused there.
    [
        (name, scale)
        for name in ESTIMATORS
        for scale in ("none", "group", "batch")
        if (name, scale) != ("reward", "batch")
    ],
)
def test_groups_of_one_are_finite(estimator: str, scale: str, tmp_path: Path) -> None:
    head = {"value_head": "shared"} if get_estimator(estimator).traits.reads_values else {}
    trainer = prepared(tmp_path, advantage_estimator=estimator, scale_rewards=scale, **head)
    broken = [{"task_data": {"seed": 0, "cannot_start": True}}] * 3
    batch = trainer._generate_and_score_completions([*ROWS[:1], *broken, *broken, *ROWS[4:5]])
    assert batch["agent_token_mask"].any(1).tolist() == [True, *[False] * 6, True]
    assert batch["advantages"].isfinite().all()
    if estimator == "grpo":
        assert (batch["advantages"] == 0).all()
    loss = trainer.compute_loss(trainer.model, batch)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in parameter_gradients(trainer, loss))


def test_groups_that_are_too_small_are_left_out(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, advantage_estimator="reward", min_group_size=2)
    broken = [{"task_data": {"seed": 0, "cannot_start": True}}] * 3
    batch = trainer._generate_and_score_completions([*ROWS[:1], *broken, *ROWS[4:]])
    assert batch["agent_token_mask"].any(1).tolist() == [*[False] * 4, *[True] * 4]
    assert trainer._metrics["train"]["groups/kept"] == [0.5]


def test_trls_mask_of_truncated_completions_spares_what_the_game_ended(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, mask_truncated_completions=True, env_config={"max_steps_per_episode": 2})
    batch = trainer._generate_and_score_completions(list(ROWS))
    stopped = trainer._logs["extra"]["stop_reason"]
    assert {*stopped} == {"done", "max_turns"}
    assert batch["agent_token_mask"].any(1).tolist() == [reason == "done" for reason in stopped]
    assert batch["attention_mask"].any(1).all()


class Shaped(GuessNumber):
    """Has rewards of tokens of its own."""

    def _calculate_rewards(self, trajectory: Trajectory) -> list[float]:
        return [9.0 * bit for bit in trajectory.agent_token_mask]


@pytest.mark.parametrize(
    ("kind", "config", "estimator", "unread"),
    [
        (Shaped, {}, "return_to_go", ["Shaped._calculate_rewards"]),
        (Shaped, {"token_credit": "last"}, "grpo", ["Shaped._calculate_rewards", "env_config['token_credit']='last'"]),
        (GuessNumber, {"token_credit": "each"}, "grpo", ["env_config['token_credit']='each'"]),
        (GuessNumber, {}, "grpo", []),
        (Shaped, {"token_credit": "last"}, "reward", []),
    ],
)
def test_rewards_of_tokens_that_the_estimator_does_not_read_are_warned_of_once(
    kind: Any, config: Any, estimator: str, unread: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = policy()
    args = settings(tmp_path, advantage_estimator=estimator, scale_rewards="none")
    rows = [{**row, "env_config": one} for row in tasks(4) for one in (config, {**config, "keep_history": False})]
    GRPOEnvTrainer(model, kind(tokenizer, config), args, train_dataset=Dataset.from_list(rows))
    warned = [record.getMessage() for record in caplog.records if "per-token rewards" in record.getMessage()]
    assert warned == [
        f"{one} changes only per-token rewards, which advantage_estimator={estimator!r} does not read: return the "
        "rewards of turns from _step_episode, or use advantage_estimator='reward'"
        for one in unread
    ]


@pytest.mark.parametrize(("changes", "is_warned_of"), [({}, True), ({"scale_rewards": "none"}, False)])
def test_a_scale_that_is_not_applied_is_warned_of_once(
    changes: Any, is_warned_of: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_of(tmp_path, advantage_estimator="reward", **changes)
    warned = [record.getMessage() for record in caplog.records if "scale_rewards" in record.getMessage()]
    message = "scale_rewards='group' is not applied: advantage_estimator='reward' uses the per-token rewards unscaled"
    assert warned == ([f"{message}; set scale_rewards='none'"] if is_warned_of else [])


def test_the_reward_of_a_turn_without_tokens_is_warned_of_and_counted(warnings_of: Any) -> None:
    turn = dataclasses.replace(STEADY[0].turns[0], start=1, stop=1)
    empty = dataclasses.replace(STEADY[0], turns=[turn], final_reward=turn.reward)
    batch = [empty, *STEADY[1:]]
    [warned] = warnings_of(batch)
    assert warned.startswith("1 turns of a generation batch have a reward, the first of them 0.5, but no tokens")
    assert warnings_of(STEADY) == []
    scored = [ScoredRollout.from_trajectory(one, group=0) for one in batch]
    summaries = [RolloutSummary.of(one, [], score) for one, score in zip(batch, scored, strict=True)]
    assert rollout_metrics(summaries)["unplaced_rewards"] == 1 / 15
