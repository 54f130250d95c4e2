"""The algorithm on one page: a short run of it learns, and its loss is that of the trainer's definition."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentsgym.types import StopReason, Trajectory, Turn
from examples import one_page


def test_a_short_run_prints_its_progress_and_earns_more(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = one_page.train(num_steps=20, num_tasks=4)
    assert len(rewards) == 20
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 10", "step 20"]
    assert sum(rewards[-5:]) > sum(rewards[:5])


def test_the_loss_is_the_mean_over_agent_tokens_of_what_each_was_worth() -> None:
    def model(ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(*ids.shape, 8))  # each token has the probability 1/8

    rollouts = [
        Trajectory(
            token_ids=range(length),
            turns=[Turn(start=1, stop=3, reward=0.0)],
            messages=[],
            final_reward=0.0,
            stop_reason=StopReason.DONE,
        )
        for length in (3, 5)
    ]
    advantages = [[0.0, 2.0, 1.0], [9.0, -1.0, 4.0, 9.0, 9.0]]  # what is no agent token's is left out
    loss = one_page.policy_loss(model, rollouts, advantages, pad_token_id=0)
    assert loss.item() == pytest.approx(math.log(8) * (2 + 1 - 1 + 4) / 4)
