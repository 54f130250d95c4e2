"""Rollouts that run ahead of training: how old a turn may be, what it bears, and that nothing is lost."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from games import GuessNumber, Snapshots, policy, settings, tasks
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from agentsgym import Preempted
from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import CopiedPolicyAgent, PolicyAgent
from agentsgym.agents.trained import BatchStart, TrainedPolicy
from agentsgym.errors import AgentsGymError, ConfigError, TooManyFailuresError
from agentsgym.store.reader import RolloutStore
from agentsgym.training.generation.asynchronous import AsyncRolloutGenerator
from agentsgym.training.selection.curriculum import Curriculum
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Trajectory, TurnRequest

BATCH = {"per_device_train_batch_size": 16, "num_generations": 4}  # four groups
LONG = 3  # the seed of the task whose episodes take their time


class UnevenGame(GuessNumber):
    """One task's turns take longer than a whole update."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if self.seeds[session_id] == LONG:
            time.sleep(0.1)
        return super()._step_episode(session_id, state, action)

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.seeds = {**getattr(self, "seeds", {}), session_id: task_data["seed"]}
        return super()._initialize_episode(session_id, task_data)


class Slow(TrainerCallback):
    """Makes every update take its time."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.05)


class SignalAt(TrainerCallback):
    """Sends SIGTERM once a step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


def ahead(folder: Path, *, env_class: type[GuessNumber] = UnevenGame, callbacks: Any = (), **changes: Any) -> Any:
    """A trainer whose sampler has a copy of the weights, and that copy's twin before training."""
    model, tokenizer = policy()
    own = {"peft_config": changes.pop("peft_config")} if "peft_config" in changes else {}
    values: dict[str, Any] = {
        **BATCH,
        "max_staleness": 2,
        "max_steps": 6,
        "env_pool": "threads",
        "store_rollouts": str(folder / "rollouts"),
        **changes,
    }
    return GRPOEnvTrainer(
        model,
        env_class(tokenizer),
        settings(folder, **values),
        tasks(8),
        eval_dataset=tasks(2) if "eval_steps" in changes else None,
        agent=CopiedPolicyAgent(model, tokenizer, max_turn_tokens=4),
        callbacks=[*callbacks],
        **own,
    )


def records(folder: Path) -> list[Any]:
    return [one for one in RolloutStore(folder / "rollouts").records() if one.source == "training"]


def versions(trajectory: Trajectory) -> list[Any]:
    return [turn.policy_version for turn in trajectory.turns]


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_no_turn_is_older_than_it_may_be_and_long_episodes_are_waited_for(tmp_path: Path, max_staleness: int) -> None:
    trainer = ahead(tmp_path, max_staleness=max_staleness)
    trainer.train()
    played = records(tmp_path)
    assert len(played) == 6 * 16
    for one in played:
        own = versions(one.trajectory)
        assert own == sorted(own)
        assert all(0 <= one.step - version <= max_staleness for version in own)
    assert Counter(one.trajectory.task_data["seed"] for one in played) == dict.fromkeys(range(8), 12)
    assert trainer.generator.order.state_dict() == {"low": 24, "above": []}
    logs = [log for log in trainer.state.log_history if "staleness/mean" in log]
    assert len(logs) == 6
    assert 0 < max(log["staleness/max"] for log in logs) <= max_staleness
    assert all(0 <= log["staleness/mean"] <= log["staleness/max"] for log in logs)
    assert any(thread.name == "agentsgym-rollouts" for thread in threading.enumerate()) is False


class PreparedGame(UnevenGame):
    """Notes how many episodes it must be ready for."""

    requested: ClassVar[list[int]]

    def _prepare_play(self, tasks: Any, num_live: int) -> None:
        self.requested.append(num_live)


def test_an_environment_is_made_ready_for_all_that_may_be_live_in_each_batch(tmp_path: Path) -> None:
    requested = PreparedGame.requested = []
    ahead(tmp_path, env_class=PreparedGame, max_steps=3).train()
    assert set(requested) == {16}
    assert 1 < len(requested) <= 3


def test_weights_that_cannot_be_copied_are_refused_with_what_helps(tmp_path: Path) -> None:
    trainer = ahead(tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="pass the PeftModel itself to agent and trainer"):
        trainer.train()


def test_adapters_are_copied_where_agent_and_trainer_get_the_model_that_has_them(tmp_path: Path) -> None:
    base, tokenizer = policy()
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    args = settings(tmp_path, **BATCH, max_staleness=1, max_steps=3, learning_rate=0.1)
    agent = CopiedPolicyAgent(model, tokenizer, max_turn_tokens=4)
    before = [one.clone() for one in agent.model.parameters()]
    trainer = GRPOEnvTrainer(model, GuessNumber(tokenizer), args, tasks(8), agent=agent)
    trainer.train()
    changed = [not torch.equal(one, own) for one, own in zip(before, agent.model.parameters(), strict=True)]
    is_adapter = ["lora" in name for name, _ in agent.model.named_parameters()]
    assert any(changed)
    assert all(adapter for adapter, moved in zip(is_adapter, changed, strict=True) if moved)


class SeedParts(TrainerCallback):
    """What draws are seeded with after each step and each evaluation."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.agent: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(self.agent._seed_parts)

    on_evaluate = on_step_end


def test_what_begins_after_an_evaluation_draws_anew(tmp_path: Path) -> None:
    parts = SeedParts()
    trainer = ahead(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, callbacks=[parts])
    parts.agent = trainer.agent
    trainer.train()
    assert len(parts.found) == len(set(parts.found)) == 6
    assert all("ahead" in str(one) for one in parts.found)


def test_every_turn_was_sampled_by_the_version_it_bears(tmp_path: Path) -> None:
    snapshots = Snapshots(policy()[0])
    trainer = ahead(tmp_path, max_staleness=3, callbacks=[snapshots], learning_rate=3e-2)
    trainer.train()
    model, _ = policy()
    num_mixed = 0
    for one in records(tmp_path):
        trajectory = one.trajectory
        num_mixed += len(set(versions(trajectory))) > 1
        ids = torch.tensor([trajectory.token_ids])
        for turn in trajectory.turns:
            model.load_state_dict(snapshots.weights[turn.policy_version])
            with torch.no_grad():
                table = model(ids).logits[0, :-1].log_softmax(-1)
            expected = [table[i - 1, trajectory.token_ids[i]].item() for i in range(turn.start, turn.stop)]
            assert trajectory.logprobs[turn.start : turn.stop] == pytest.approx(expected, abs=1e-4)
    assert num_mixed


def test_the_loss_weighs_each_token_by_how_far_the_weights_have_moved(tmp_path: Path) -> None:
    trainer = ahead(tmp_path, max_staleness=2, learning_rate=3e-2, callbacks=[Slow()])
    trainer.train()
    logs = [log for log in trainer.state.log_history if "sampling/importance_sampling_ratio/max" in log]
    assert max(log["sampling/importance_sampling_ratio/max"] for log in logs) > 1.01
    assert all(log["sampling/effective_sample_size_of_tokens"] <= 1 for log in logs)
    assert min(log["sampling/effective_sample_size_of_tokens"] for log in logs) < 0.9999
    assert logs[0]["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-3)  # all of the first version


def test_an_evaluation_leaves_what_is_in_play_alone(tmp_path: Path) -> None:
    trainer = ahead(tmp_path, eval_strategy="steps", eval_steps=2, num_generations_eval=4)
    trainer.train()
    assert len([log for log in trainer.state.log_history if "eval_reward" in log]) == 3
    assert trainer.generator.order.state_dict() == {"low": 24, "above": []}


def test_a_run_that_was_ended_goes_on_with_what_was_in_play(tmp_path: Path) -> None:
    first = ahead(tmp_path, save_strategy="steps", save_steps=2, callbacks=[SignalAt(3)])
    with pytest.raises(Preempted) as left:
        first.train()
    assert left.value.checkpoint is not None
    resumed = ahead(tmp_path, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.generator.order.state_dict() == {"low": 24, "above": []}
    played = Counter((one.step, one.trajectory.task_data["seed"]) for one in records(tmp_path))
    assert sum(played.values()) == 6 * 16  # every group was trained on once, over both runs
    assert sorted(Counter(step for step, _ in played.elements()).items()) == [(step, 16) for step in range(6)]
    assert Counter(seed for _, seed in played.elements()) == dict.fromkeys(range(8), 12)


def test_a_synchronous_checkpoint_goes_on_ahead_and_ahead_goes_on_synchronously(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    ahead(tmp_path, max_steps=2, **options).train()
    model, tokenizer = policy()
    plain = GRPOEnvTrainer(model, GuessNumber(tokenizer), settings(tmp_path, **BATCH, max_steps=4, **options), tasks(8))
    plain.train(resume_from_checkpoint=True)
    resumed = ahead(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert resumed.generator.order.state_dict() == {"low": 24, "above": []}


def test_episodes_that_fail_are_played_again_or_stop_the_run(tmp_path: Path) -> None:
    class Failing(GuessNumber):
        num_failed = 0

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            if type(self).num_failed < 5:
                type(self).num_failed += 1
                raise RuntimeError("the game broke")
            return super()._step_episode(session_id, state, action)

    trainer = ahead(tmp_path / "again", env_class=Failing, episode_retries=3, env_pool=None)
    trainer.train()
    assert sum(one.trajectory.num_retries for one in records(tmp_path / "again")) == 5
    Failing.num_failed = -1000
    with pytest.raises(TooManyFailuresError, match="the game broke"):
        ahead(tmp_path / "stops", env_class=Failing).train()


def test_an_agent_that_cannot_go_on_ends_the_run(tmp_path: Path) -> None:
    trainer = ahead(tmp_path)
    act, left = trainer.agent.act, [3]

    def breaking(requests: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ConfigError("no weights any more")
        return act(requests)

    trainer.agent.act = breaking
    with pytest.raises(AgentsGymError, match="no weights any more"):
        trainer.train()


def test_the_correction_for_the_sampler_is_on_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path, max_staleness=1).corrects_for_sampler
    assert not settings(tmp_path).corrects_for_sampler


def test_parts_of_task_groups_are_refused(tmp_path: Path) -> None:
    trainer = ahead(tmp_path)
    args = copy.copy(trainer.args)
    args.per_device_train_batch_size = 6
    with pytest.raises(ConfigError, match=r"a multiple of num_generations \(4\), got 6"):
        AsyncRolloutGenerator(trainer.environments, trainer.agent, args, tasks(8), None)


TRAINED_ITSELF = r"or a TrainedPolicy with samples_during_updates=True; got PolicyAgent"


@pytest.mark.parametrize(
    ("make", "rows", "problem"),
    [
        (lambda *_: None, tasks(8), TRAINED_ITSELF),
        (PolicyAgent, tasks(8), TRAINED_ITSELF),
        (CopiedPolicyAgent, tasks(8).to_iterable_dataset(), "which an IterableDataset does not allow"),
    ],
)
def test_weights_that_change_and_rows_in_a_stream_are_refused(
    make: Any, rows: Any, problem: str, tmp_path: Path
) -> None:
    model, tokenizer = policy()
    args = settings(tmp_path, max_staleness=1, **BATCH)
    with pytest.raises(ConfigError, match=problem):
        GRPOEnvTrainer(model, GuessNumber(tokenizer), args, rows, agent=make(model, tokenizer))


class Remote(Agent, TrainedPolicy):
    """A user's sampler: it has a copy of the weights, and keeps a note for each session."""

    logprobs_match_trained_weights = False
    samples_during_updates = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._inner = CopiedPolicyAgent(model, tokenizer, max_turn_tokens=4)
        self.begun, self.forgotten = set[str](), list[str]()

    def prepare(self, start: BatchStart) -> None:
        self._inner.prepare(start)

    def weights_changed(self) -> None:
        self._inner.weights_changed()

    def forget(self, session_ids: Sequence[str]) -> None:
        self.forgotten += session_ids

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Any]:
        self.begun |= {request.session_id for request in requests}
        return self._inner.act(requests)


def test_a_policy_of_ones_own_samples_during_updates_and_forgets_each_session_once(tmp_path: Path) -> None:
    model, tokenizer = policy()
    agent = Remote(model, tokenizer)
    args = settings(tmp_path, **BATCH, max_staleness=1, max_steps=3)
    GRPOEnvTrainer(model, GuessNumber(tokenizer), args, tasks(8), agent=agent).train()
    assert len(agent.forgotten) == len(set(agent.forgotten)) == 3 * 16
    assert set(agent.forgotten) <= agent.begun


def test_a_curriculum_draws_the_groups_that_begin(tmp_path: Path) -> None:
    rows = [{"task_data": {"seed": seed}, "level": seed % 2} for seed in range(8)]
    model, tokenizer = policy()
    trainer = GRPOEnvTrainer(
        model,
        GuessNumber(tokenizer),
        settings(tmp_path, **BATCH, max_staleness=2, max_steps=6),
        Dataset.from_list(rows),
        agent=CopiedPolicyAgent(model, tokenizer, max_turn_tokens=4),
        curriculum=Curriculum("level", min_results=4, window=32),
    )
    trainer.train()
    assert trainer.curriculum is not None
    assert sum(len(won) for _, won in trainer.curriculum.state_dict()["results"]) > 32
