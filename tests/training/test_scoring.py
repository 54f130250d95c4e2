"""Which log-probabilities a batch is trained with, the sampler's drift, and rollouts recorded elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, TextAgent, logged, policy, settings, tasks, trainer_of

from agentsgym import Action, ConfigError, GRPOEnvTrainer, PolicyAgent, RolloutStore, TaskError, Trajectory
from agentsgym.envs.recorded import RecordedEnv
from agentsgym.training._trl import TRLInterface

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


@pytest.mark.parametrize("changes", [{}, {"drift_interval": 1, "max_steps": 1, "agent": TextAgent()}])
def test_drift_is_not_reported_unless_requested_and_known(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **changes)
    trainer.train()
    assert not any(name in log for log in trainer.state.log_history for name in DRIFT)


def test_a_sampler_that_is_off_is_reported(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, drift_interval=1, max_steps=1)
    trainer.agent = Overconfident(trainer.model, trainer.processing_class)
    trainer.train()
    assert logged(trainer, DRIFT[0])[0] == pytest.approx(1.0, abs=1e-4)
    assert logged(trainer, DRIFT[1])[0] < 0.6


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
    own = TRLInterface(trainer).score(*scored)[0]
    reported = (own + 1).clamp(max=0)
    torch.testing.assert_close(batch["old_per_token_logps"][mask], reported[mask], atol=1e-5, rtol=0)
    assert batch["importance_sampling_ratio"] is None


def test_where_the_sampler_reports_none_the_old_ones_are_the_models(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2, agent=TextAgent())
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    scored = (batch["prompt_completion_ids"], batch["attention_mask"], batch["agent_token_mask"])
    torch.testing.assert_close(batch["old_per_token_logps"], TRLInterface(trainer).score(*scored)[0])


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


Recorded = Callable[[int], tuple[list[Trajectory], list[Trajectory]]]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Rollouts of a policy for a number of tasks, and the same read from a store."""

    def read(num_tasks: int) -> tuple[list[Trajectory], list[Trajectory]]:
        model, tokenizer = policy()
        agent = PolicyAgent(model, tokenizer, max_turn_tokens=4)
        played = GuessNumber(tokenizer).rollout([row["task_data"] for row in tasks(num_tasks)], agent, 4)
        with RolloutStore.writer(tmp_path / "store") as writer:
            for one in played:
                writer.add(one)
        return played, [*RolloutStore(tmp_path / "store")]

    return read


def trainer_on(folder: Path, trajectories: list[Trajectory], **changes: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    env = RecordedEnv(tokenizer, trajectories, num_generations=4)
    options: dict[str, Any] = {"layout": "turn", "max_steps": 1, **changes}
    return GRPOEnvTrainer(model, env, settings(folder, **options), train_dataset=env.rows())


def test_stored_rollouts_are_trained_as_those_that_were_played(recorded: Recorded, tmp_path: Path) -> None:
    played, read = recorded(2)
    assert [one.token_ids for one in read] == [one.token_ids for one in played]
    batches: list[Any] = []
    for trajectories in (played, read):
        trainer = trainer_on(tmp_path, trajectories, vllm_importance_sampling_correction=True)
        trainer.train()
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
        assert max(logged(trainer, "grad_norm")) > 0
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
        batches.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
    assert any(not torch.equal(batches[0][name], one) for name, one in policy()[0].state_dict().items())
    assert all(torch.equal(batches[0][name], one) for name, one in batches[1].items())


def test_every_task_group_is_trained_once_in_an_epoch(recorded: Recorded, tmp_path: Path) -> None:
    _, read = recorded(4)
    trainer = trainer_on(tmp_path, read, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=4)
    seen: list[str] = []
    generate = trainer.generator.generate

    def watched(*given: Any) -> Any:
        batch = generate(*given)
        seen.extend(str(one.token_ids) for one in batch.trajectories)
        return batch

    trainer.generator.generate = watched
    trainer.train()
    assert sorted(seen) == sorted(str(one.token_ids) for one in read)


def test_a_task_group_of_another_size_is_rejected(recorded: Recorded, tmp_path: Path) -> None:
    _, read = recorded(2)
    with pytest.raises(ConfigError, match="num_generations must be 4"):
        trainer_on(tmp_path, read, num_generations=8).train()


def test_rollouts_that_cannot_be_trained_on_are_named(recorded: Recorded) -> None:
    _, read = recorded(1)
    tokenizer = policy()[1]
    with pytest.raises(ConfigError, match=r"multiple of num_generations \(3\) rollouts, got 4 with task_index=0"):
        RecordedEnv(tokenizer, read, num_generations=3)
    with pytest.raises(TaskError, match="first must be the index"):
        RecordedEnv(tokenizer, read, num_generations=2).check_task({"first": 1})
    with pytest.raises(ConfigError, match=r"trajectories\[1\] cannot be trained on"):
        RecordedEnv(tokenizer, [read[0], dataclasses.replace(read[1], turns=[])], num_generations=2)
