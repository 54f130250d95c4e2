"""Which log-probabilities a batch is trained with, and what is reported about the sampler's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import TextAgent, logged, tasks, trainer_of

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.training._trl import TRLInterface
from agentsgym.types import Action

DRIFT = ("sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/mean", "sampling/kl/k3")


class Overconfident(PolicyAgent):
    """Answers that each token was e times as likely as it was, up to certainty."""

    def act(self, requests: Any) -> list[Action]:
        return [
            Action(
                text=action.text,
                token_ids=action.token_ids,
                logprobs=[min(0.0, logprob + 1) for logprob in action.logprobs or ()],
                agent_state=action.agent_state,
                finish_reason=action.finish_reason,
            )
            for action in super().act(requests)
        ]


def test_drift_is_reported_every_so_many_generation_batches(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, drift_interval=2, max_steps=5)
    trainer.train()
    for name in DRIFT:
        steps = [log["step"] for log in trainer.state.log_history if name in log]
        assert steps == [1, 3, 5]
    assert max(logged(trainer, DRIFT[0])) < 1e-5
    assert logged(trainer, DRIFT[1]) == pytest.approx([1.0] * 3, abs=1e-5)


def test_drift_is_not_reported_unless_requested(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    assert not any(name in log for log in trainer.state.log_history for name in DRIFT)


def test_a_sampler_that_is_off_is_reported(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, drift_interval=1, max_steps=1)
    trainer.agent = Overconfident(trainer.model, trainer.processing_class)
    trainer.train()
    assert logged(trainer, DRIFT[0])[0] == pytest.approx(1.0, abs=1e-4)
    assert logged(trainer, DRIFT[1])[0] < 0.6


def test_text_without_log_probabilities_has_no_drift_to_report(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, drift_interval=1, max_steps=1, agent=TextAgent())
    trainer.train()
    assert not any(name in log for log in trainer.state.log_history for name in DRIFT)


def test_drift_at_another_temperature_is_the_samplers_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, drift_interval=1, max_steps=1, temperature=0.6, top_k=3, top_p=0.9)
    trainer.train()
    assert logged(trainer, DRIFT[0])[0] < 1e-5


def test_the_old_log_probabilities_are_the_samplers_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2)
    trainer.agent = Overconfident(trainer.model, trainer.processing_class)
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    mask = batch["agent_token_mask"] == 1
    scored = (batch["prompt_completion_ids"], batch["attention_mask"], batch["agent_token_mask"])
    own = TRLInterface(trainer).score(trainer.model, *scored)[0]
    reported = (own + 1).clamp(max=0)
    torch.testing.assert_close(batch["old_per_token_logps"][mask], reported[mask], atol=1e-5, rtol=0)
    assert batch["importance_sampling_ratio"] is None


def test_where_the_sampler_reports_none_the_old_ones_are_the_models(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2, agent=TextAgent())
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    scored = (batch["prompt_completion_ids"], batch["attention_mask"], batch["agent_token_mask"])
    torch.testing.assert_close(batch["old_per_token_logps"], TRLInterface(trainer).score(trainer.model, *scored)[0])


def test_a_turn_ends_with_a_stop_string(tmp_path: Path) -> None:
    free = trainer_of(tmp_path, max_turn_tokens=8)._generate_and_score_completions(list(tasks(8)))
    trainer = trainer_of(tmp_path, max_turn_tokens=8, stop_strings=["o"])
    trainer._generate_and_score_completions(list(tasks(8)))
    output = [
        message["content"]
        for conversation in trainer._logs["completion"]
        for message in conversation
        if message["role"] == "assistant"
    ]
    assert free["agent_token_mask"].any()
    assert output
    assert not any("o" in text for text in output)
