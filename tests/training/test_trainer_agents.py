"""Who plays: agents of one's own, and episodes or agents that break."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from games import NUMBERS, TextAgent, has_moved, logged, trainer_of

from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.errors import AgentsGymError


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
