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
import torch
from games import logged, settings, tasks, trainer_of
from test_trl_seam import ROWS, parameter_gradients, prepared

from agentsgym.agents.base import Agent
from agentsgym.credit.advantages import ESTIMATORS, gigpo
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError
from agentsgym.training.crediting import Crediting
from agentsgym.training.rules import CRITICS
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


def warnings_of(
    folder: Path, caplog: pytest.LogCaptureFixture, batch: Sequence[Trajectory], **changes: Any
) -> list[str]:
    """What is said of a batch of groups of four that comes three times."""
    crediting = Crediting(settings(folder, **{"scale_rewards": "none", **changes}))
    scored = [ScoredRollout.from_trajectory(one, group=index // 4) for index, one in enumerate(batch)]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        for _ in range(3):
            crediting.selected(scored, batch)
    return [record.getMessage() for record in caplog.records]


STEADY = [rollout([0.5, 1.0]), rollout([0.25, 0.0])] * 4
FAILED = rollout([1.0], stop_reason=StopReason.FAILED)
TRUNCATED = rollout([1.0, 1.0], stop_reason=StopReason.MAX_TURNS)


@pytest.mark.parametrize(
    ("batch", "changes", "is_told"),
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
def test_a_batch_that_nothing_is_learnt_from_is_told(
    batch: list[Trajectory], changes: dict[str, Any], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = ["no rollout of the generation batch is left to learn from: all failed or were filtered out"]
    told = [message for message in warnings_of(tmp_path, caplog, batch, **changes) if "one rollout" not in message]
    assert told == (wanted if is_told else [])


@pytest.mark.parametrize(
    ("batch", "changes", "is_told"),
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
def test_a_rollout_with_nothing_to_hold_it_against_is_told(
    batch: list[Trajectory], changes: dict[str, Any], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = warnings_of(tmp_path, caplog, batch, **changes)
    assert ["min_group_size=2 leaves such groups out" in message for message in told] == [True] * is_told


@pytest.mark.parametrize(
    ("estimator", "paid", "is_told"),
    [("return_to_go", 2.0, True), ("rebn", 2.0, True), ("grpo", 2.0, False), ("return_to_go", 1.5, False)],
)
def test_a_final_reward_that_no_turn_was_paid_is_told(
    estimator: str, paid: float, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = [dataclasses.replace(STEADY[0], final_reward=paid), *STEADY[1:]]
    told = warnings_of(tmp_path, caplog, batch, advantage_estimator=estimator)
    assert ["set env_config['turn_credit'] to 'final'" in message for message in told] == [True] * is_told


@pytest.mark.parametrize(
    ("estimator", "discount", "is_told"),
    [
        *((name, 0.9, True) for name in ("grpo", "rloo", "rae", "mt_grpo", "reward")),
        *((name, 0.9, False) for name in ("return_to_go", "rebn", "gigpo")),
        ("grpo", 1.0, False),
    ],
)
def test_a_discount_that_does_nothing_is_told(
    estimator: str, discount: float, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = warnings_of(tmp_path, caplog, STEADY, advantage_estimator=estimator, discount=discount)
    assert [message for message in told if "discount" in message] == [
        f"discount=0.9 does nothing: {estimator!r} has no sum over turns"
    ] * is_told


def test_a_discount_of_potentials_does_something(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batch = [
        dataclasses.replace(one, turns=[dataclasses.replace(turn, potential=0.5) for turn in one.turns])
        for one in STEADY
    ]
    told = warnings_of(tmp_path, caplog, batch, advantage_estimator="mt_grpo", potential_weight=1.0, discount=0.5)
    assert not [message for message in told if "discount" in message]


def test_a_batch_without_agent_tokens_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = warnings_of(tmp_path, caplog, [rollout([0.5, 1.0], num_tokens=0)] * 8)
    assert ["no rollout of the generation batch has an agent token" in message for message in told] == [True]


def test_paying_the_final_reward_on_every_turn_is_refused_where_turns_are_summed(tmp_path: Path) -> None:
    for estimator in ("return_to_go", "mt_grpo"):
        with pytest.raises(ConfigError, match=f"'{estimator}' adds what turns are paid.*use turn_credit='final'"):
            trainer_of(tmp_path, env_config={"turn_credit": "repeat_final"}, advantage_estimator=estimator)
    trainer_of(tmp_path, env_config={"turn_credit": "repeat_final"}, advantage_estimator="grpo")
    trainer_of(tmp_path, env_config={"turn_credit": "final"})


def unsure(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """An estimator that does not know what the last turn is worth."""
    return [[*([0.0] * (len(one.turn_rewards) - 1)), math.nan] for one in rollouts]


def brief(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """An estimator that looks at first turns alone."""
    return [[0.0] for _ in rollouts]


def silent(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> None:
    """An estimator that forgets to return what it found."""


def wordy(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[str]]:
    """An estimator that says what it thinks."""
    return [["good"] * len(one.turn_rewards) for one in rollouts]


def empty(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[list[None]]]:
    """An estimator that has a list for the tokens, and nothing in it."""
    return [[[None]] * len(one.turn_rewards) for one in rollouts]


def whole(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[float]:
    """An estimator that gives a number for a whole rollout."""
    return [one.final_reward for one in rollouts]


def test_an_estimator_that_returns_nothing_is_named(tmp_path: Path) -> None:
    crediting = Crediting(settings(tmp_path, advantage_estimator=silent))
    scored = [ScoredRollout.from_trajectory(rollout([0.5, 1.0]), group=0)]
    with pytest.raises(ConfigError, match=r"'silent' must return one list of numbers for each of 1 rollouts, got None"):
        crediting.turn_advantages(scored, is_training=True)


def of_tensors(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[Any]]:
    """An estimator that computes with torch, one turn whole and one token by token."""
    return [[torch.tensor(one.final_reward), [torch.tensor(0.5)] * one.token_counts[1]] for one in rollouts]


def test_numbers_of_other_types_are_taken_for_what_they_are(tmp_path: Path) -> None:
    crediting = Crediting(settings(tmp_path, advantage_estimator=of_tensors))
    scored = [ScoredRollout.from_trajectory(rollout([0.5, 1.0]), group=0)]
    numbers = crediting.turn_advantages(scored, is_training=True)
    assert numbers == [[1.5, [0.5, 0.5]]]
    assert crediting.metrics(scored, numbers)["advantage/turn_01"] == 0.5


def long_winded(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[list[float]]]:
    """An estimator that has more numbers than the turns have tokens."""
    return [[[0.0] * 3] * len(one.turn_rewards) for one in rollouts]


def at_once(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[Any]]:
    """An estimator that gives a tensor in place of a list."""
    return [[torch.zeros(2)] * len(one.turn_rewards) for one in rollouts]


def huge(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[int]]:
    """An estimator that knows no bounds."""
    return [[10**400] * len(one.turn_rewards) for one in rollouts]


@pytest.mark.parametrize(
    ("estimator", "given"),
    [
        (long_winded, r"\[2, 2\] tokens.*\[0\.0, 0\.0, 0\.0\]"),
        (at_once, "tensor"),
        (huge, "1000"),
        (unsure, "nan"),
        (brief, r"\[0.0\]"),
        (wordy, "'good'"),
        (empty, r"\[\[None\]"),
        (whole, r"got 1\.5"),
    ],
)
def test_numbers_that_are_none_are_named(estimator: Any, given: str, tmp_path: Path) -> None:
    crediting = Crediting(settings(tmp_path, advantage_estimator=estimator))
    scored = [ScoredRollout.from_trajectory(rollout([0.5, 1.0]), group=0)]
    with pytest.raises(ConfigError, match=rf"'{estimator.__name__}' must return one finite number.*rollout 0.*{given}"):
        crediting.turn_advantages(scored, is_training=True)


def keyed(*keys: Sequence[Any]) -> list[Trajectory]:
    return [rollout([0.5, 1.0], keys=own) for own in keys]


ALONE = [[f"{i}-{k}" for k in range(2)] for i in range(8)]


@pytest.mark.parametrize(
    ("batch", "estimator", "words"),
    [
        (STEADY, "gigpo", ["the game gives no state keys"]),
        (STEADY, functools.partial(gigpo, step_weight=0.5), ["the game gives no state keys"]),
        (STEADY, "grpo", []),
        (keyed(*[("a", None)] * 8), "gigpo", []),
        (keyed(*ALONE), "gigpo", ["too fine for 4 rollouts a task"]),
        (keyed(*ALONE), "grpo", []),
        (keyed(*ALONE[:7], ALONE[6]), "gigpo", []),  # 12 of 16 alone
        (keyed(*[("a", "b")] * 8), "gigpo", []),
    ],
)
def test_gigpo_without_groups_of_states_is_told(
    batch: list[Trajectory], estimator: Any, words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = warnings_of(tmp_path, caplog, batch, advantage_estimator=estimator)
    assert len(told) == len(words)
    assert all(part in message for part, message in zip(words, told, strict=True))


SPARSE = [rollout([0.0, 1.0]), rollout([0.0, 0.0])] * 4


@pytest.mark.parametrize(
    ("batch", "changes", "is_told"),
    [
        (SPARSE, {"scale_rewards": "group"}, True),
        (SPARSE, {"scale_rewards": "batch"}, False),
        (SPARSE, {"scale_rewards": "none"}, False),
        (STEADY, {"scale_rewards": "group"}, False),
        ([*SPARSE[:7], STEADY[0]], {"scale_rewards": "group"}, False),
        (SPARSE, {"scale_rewards": "group", "num_generations": 16, "per_device_train_batch_size": 16}, False),
    ],
)
def test_the_spread_of_small_groups_under_sparse_reward_is_told(
    batch: list[Trajectory], changes: dict[str, Any], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = warnings_of(tmp_path, caplog, batch, **changes)
    assert len(told) == is_told
    assert all("scale_rewards='group' with 4 rollouts a task" in message for message in told)


LONG = [rollout([0.5, 1.0], num_tokens=251)] * 8
PRODUCT = "ratios that multiply those of all tokens of a row, 502 agent tokens on average"
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
        ({"sampler_correction": "sequence_mask"}, [PRODUCT]),
        ({"sampler_correction": "sequence_truncate"}, [PRODUCT]),
        ({"sampler_correction": "token_truncate"}, []),
        ({"sampler_correction": "geometric_mask"}, []),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, []),  # without vLLM nobody reads it
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
def test_ratios_of_long_rows_are_told(
    changes: dict[str, Any], words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = warnings_of(tmp_path, caplog, LONG, **changes)
    assert len(told) == len(words)
    assert all(part in message for part, message in zip(words, told, strict=True))
    assert warnings_of(tmp_path, caplog, STEADY, **changes) == []


def test_a_run_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        trainer_of(tmp_path, max_steps=3, env_config={"max_steps_per_episode": 1}).train()
    assert caplog.text.count("scale_rewards='group'") == 1


class Silent(Agent):
    """Says nothing, in no tokens."""

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        return [Action(text="", token_ids=[], logprobs=[], finish_reason="length") for _ in requests]


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": Silent()},
        {"agent": Silent(), "num_iterations": 2, "importance_sampling_level": "sequence"},
        {"agent": Silent(), "num_iterations": 2, "loss_type": "vespo", "off_policy_mask_threshold": 0.1},
        *(
            {"agent": Silent(), "sampler_correction": mode, "loss_aggregation": aggregation}
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
def test_a_run_without_anything_to_learn_from_stays_where_it_is(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **changes)
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert logged(trainer, "loss") == logged(trainer, "grad_norm") == [0.0, 0.0]
    assert all((one == other).all() for one, other in zip(weights, trainer.model.parameters(), strict=True))
    for log in trainer.state.log_history:
        assert all(math.isfinite(value) for value in log.values() if isinstance(value, float))


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_of_one_are_finite(estimator: str, scale: str, tmp_path: Path) -> None:
    head = {"value_head": "shared"} if ESTIMATORS[estimator] in CRITICS else {}
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
