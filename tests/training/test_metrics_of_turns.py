"""What a run logs by turn and by row: against brute force on the very batches that it trained on."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import SayBlue, correcting, policy, settings, tasks, trainer_of
from test_folded_weights import Noisy
from test_trl_interface import EPSILON, Batch

from agentsgym import GRPOEnvTrainer, ScoredRollout, Trajectory

STEPS = {
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 5e-2,
}
PER_TURN = ("entropy", "ratio", "clip_ratio", "advantage", "advantage_std", "reward", "active_fraction")


def later_is_better(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> Sequence[Sequence[float]]:
    """An estimator of which it is known what it gives each turn."""
    return [[k + reward for k, reward in enumerate(rollout.turn_rewards)] for rollout in rollouts]


class Recorder:
    """Keeps what a trainer plays, and what each of its micro-batches looks like from the model's own logits."""

    def __init__(self, trainer: GRPOEnvTrainer) -> None:
        self.played: list[list[Trajectory]] = []
        self.steps: dict[int, list[dict[str, torch.Tensor]]] = defaultdict(list)
        self._trainer, self._play, self._compute_loss = trainer, trainer.generator.generate, trainer.compute_loss
        trainer.generator.generate, trainer.compute_loss = self.play, self.compute_loss  # type: ignore[method-assign]

    def play(self, *args: Any, **kwargs: Any) -> Any:
        played = self._play(*args, **kwargs)
        if self._trainer.model.training:
            self.played.append(played.trajectories)
        return played

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        if model.training:
            self.steps[self._trainer.state.global_step + 1].append(self._looked_at(model, inputs))
        return self._compute_loss(model, inputs, *args, **kwargs)

    def _looked_at(self, model: Any, inputs: Batch) -> dict[str, torch.Tensor]:
        ids = inputs["prompt_completion_ids"]
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits[:, :-1]
        probabilities = logits.log_softmax(-1)
        logps = probabilities.gather(2, ids[:, 1:, None])[..., 0]
        old = inputs["old_per_token_logps"]
        return {
            "turn_index": inputs["turn_index"][:, 1:],
            "advantages": inputs["advantages"][:, 1:],
            "entropy": -(probabilities.exp() * probabilities).sum(-1),
            "log_ratio": torch.zeros_like(logps) if old is None else logps - old[:, 1:],
        }


def expected_of_loss(batches: Iterable[dict[str, torch.Tensor]], level: str) -> dict[str, float]:
    """Entropy, ratio and clip by turn index, and the effective sample size, in a loop over rows and tokens."""
    tokens: defaultdict[str, list[float]] = defaultdict(list)
    weights: list[float] = []
    for batch in batches:
        for row, turns in enumerate(batch["turn_index"].tolist()):
            places = [place for place, k in enumerate(turns) if k >= 0]
            differences = [batch["log_ratio"][row, place].item() for place in places]
            if places:
                weights.append(math.exp(sum(differences)))
            if level == "sequence" and places:
                differences = [sum(differences) / len(places)] * len(places)
            for place, difference in zip(places, differences, strict=True):
                ratio, advantage = math.exp(difference), batch["advantages"][row, place].item()
                name = f"turn_{turns[place]:02d}"
                tokens[f"entropy/{name}"].append(batch["entropy"][row, place].item())
                tokens[f"ratio/{name}"].append(ratio)
                is_clipped = ratio > 1 + EPSILON if advantage > 0 else ratio < 1 - EPSILON and advantage < 0
                tokens[f"clip_ratio/{name}"].append(float(is_clipped))
    fraction = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    return {**{name: fmean(values) for name, values in tokens.items()}, "effective_sample_size": fraction}


def training_logs(trainer: GRPOEnvTrainer) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if "grad_norm" in log]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("logging_steps", [1, 2])
def test_entropy_ratio_and_clip_are_means_over_the_tokens_since_the_last_log(
    logging_steps: int, level: str, tmp_path: Path
) -> None:
    evaluated = {"eval_dataset": tasks(2), "eval_strategy": "steps", "eval_steps": 1}  # which must not count
    changes = {"importance_sampling_level": level, "logging_steps": logging_steps, **evaluated, **STEPS}
    trainer = trainer_of(tmp_path, env_config={"error_allowance": 0}, num_layers=2, **changes)
    recorder = Recorder(trainer)
    trainer.train()
    logs = training_logs(trainer)
    assert [log["step"] for log in logs] == [*range(logging_steps, 5, logging_steps)]
    for log in logs:
        steps = range(log["step"] - logging_steps + 1, log["step"] + 1)
        expected = expected_of_loss([batch for step in steps for batch in recorder.steps[step]], level)
        reported = {
            name: value
            for name, value in log.items()
            if name == "effective_sample_size" or name.startswith(("entropy/", "ratio/", "clip_ratio/turn"))
        }
        assert reported == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert {name for name in reported if name.startswith("ratio/")} >= {"ratio/turn_00", "ratio/turn_01"}
    last = logs[-1]
    assert abs(last["ratio/turn_00"] - 1) > 1e-3
    assert 0 < last["clip_ratio/turn_00"] < 1 or level == "sequence"
    assert last["effective_sample_size"] < 0.999


def expected_of_rollouts(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """What is reported of rewards, advantages, step groups and ends, from the rollouts of groups of four."""
    played = [rollout for rollout in rollouts if not rollout.failed]
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in played:
        for k, turn in enumerate(rollout.turns):
            rewards[k].append(turn.reward)
    expected: dict[str, float] = {}
    for k, values in rewards.items():
        expected[f"reward/turn_{k:02d}"] = fmean(values)
        expected[f"active_fraction/turn_{k:02d}"] = len(values) / len(played)
        expected[f"advantage/turn_{k:02d}"] = k + fmean(values)
        expected[f"advantage_std/turn_{k:02d}"] = stdev(values) if len(values) > 1 else 0.0
    sizes = Counter(
        (index // 4, turn.state_key)
        for index, rollout in enumerate(rollouts)
        if not rollout.failed
        for turn in rollout.turns
    ).values()
    expected["step_groups/mean_size"] = fmean(sizes)
    expected["step_groups/max_size"] = max(sizes)
    expected["step_groups/singleton_fraction"] = sum(size == 1 for size in sizes) / sum(sizes)
    for reason in ("done", "max_turns", "max_tokens", "invalid"):
        expected[f"stop/{reason}"] = fmean(rollout.stop_reason == reason for rollout in rollouts)
    groups = [{rollout.final_reward for rollout in played_of(rollouts, group)} for group in range(len(rollouts) // 4)]
    expected["groups/kept"] = 1.0
    expected["frac_reward_zero_std"] = fmean(len(finals) == 1 for finals in groups if finals)
    return expected


def played_of(rollouts: Sequence[Trajectory], group: int) -> list[Trajectory]:
    return [rollout for rollout in rollouts[4 * group : 4 * group + 4] if not rollout.failed]


@pytest.mark.parametrize("layout", ["trajectory", "turn"])
def test_rewards_advantages_and_ends_are_those_of_the_rollouts(layout: str, tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        num_layers=2,
        advantage_estimator=later_is_better,
        layout=layout,
        max_steps=3,
        max_completion_length=24,
        max_failed_fraction=0.5,
        env_config={"error_allowance": 1},
        dataset=Dataset.from_list([{"task_data": {"seed": seed, "breaks": seed == 3}} for seed in range(6)]),
    )
    recorder = Recorder(trainer)
    trainer.train()
    assert len(recorder.played) == 3
    stopped = {rollout.stop_reason.value for batch in recorder.played for rollout in batch}
    assert {"failed", "done", "invalid"} <= stopped
    for log, rollouts in zip(training_logs(trainer), recorder.played, strict=True):
        expected = expected_of_rollouts(rollouts)
        prefixes = ("reward/", "active_fraction/", "advantage", "step_groups/", "stop/", "groups/", "frac_reward")
        reported = {name: value for name, value in log.items() if name.startswith(prefixes)}
        assert reported == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_what_a_generation_batch_gave_is_reported_once_while_it_is_used_twice(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **STEPS)
    trainer.train()
    logs = training_logs(trainer)
    by_step = [{name.split("/")[0] for name in log if "/turn_" in name} for log in logs]
    of_the_loss = {"entropy", "ratio", "clip_ratio"}
    assert by_step == [set(PER_TURN), of_the_loss] * 2
    assert all("effective_sample_size" in log for log in logs)
    assert [log["effective_sample_size"] == pytest.approx(1.0, abs=1e-6) for log in logs] == [True, False] * 2


def test_groups_that_are_dropped_are_reported(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, zero_variance_groups="drop", max_steps=3)
    recorder = Recorder(trainer)
    trainer.train()
    fractions = [
        fmean(len({rollout.final_reward for rollout in played_of(rollouts, group)}) > 1 for group in range(2))
        for rollouts in recorder.played
    ]
    assert [log["groups/kept"] for log in training_logs(trainer)] == fractions
    assert {0.5, 1.0} & {*fractions}


@pytest.mark.parametrize("loss_type", ["sapo", "vespo"])
def test_a_loss_without_a_clip_reports_none(loss_type: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, loss_type=loss_type, max_steps=1)
    trainer.train()
    [log] = training_logs(trainer)
    assert "ratio/turn_00" in log
    assert not any(name.startswith("clip_ratio/turn") for name in log)


def test_a_game_without_state_keys_reports_no_step_groups(tmp_path: Path) -> None:
    model, tokenizer = policy()
    trainer = GRPOEnvTrainer(model, SayBlue(tokenizer), settings(tmp_path, max_steps=1), train_dataset=tasks())
    trainer.train()
    [log] = training_logs(trainer)
    assert "advantage/turn_00" in log
    assert not any(name.startswith("step_groups/") for name in log)


def test_the_sampler_is_reported_by_rows_and_tokens(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **correcting("token_mask", low=0.8, high=1.2), **STEPS)
    trainer.agent = Noisy(trainer.model, trainer.processing_class, max_turn_tokens=4)
    recorder = Recorder(trainer)
    trainer.train()
    logs = training_logs(trainer)
    assert ["sampling/cut_fraction" in log for log in logs] == [True, False] * 2
    for log, rollouts in zip(logs[::2], recorder.played, strict=True):
        # The sampler is the model, but for what it reports: the ratio is that of the noise.
        differences = [
            [-Noisy.noise * math.cos(token) for turn in one.turns for token in one.token_ids[turn.start : turn.stop]]
            for one in rollouts
        ]
        ratios = [math.exp(difference) for row in differences for difference in row]
        assert log["sampling/cut_fraction"] == pytest.approx(fmean(not 0.8 <= ratio <= 1.2 for ratio in ratios))
        assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(fmean(ratios), rel=1e-4)
        weights = [math.exp(sum(row)) for row in differences if row]
        fraction = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
        assert log["sampling/effective_sample_size"] == pytest.approx(fraction, rel=1e-3)
        assert 0 < log["sampling/cut_fraction"] < 1
        assert log["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)  # of the updates, not of the sampler


def test_an_evaluation_logs_its_rollouts_and_nothing_of_training(tmp_path: Path) -> None:
    evaluated = {"eval_dataset": tasks(2), "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(tmp_path, **evaluated, **correcting("token_truncate"))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "eval_reward" in log]
    assert len(logs) == 2
    for log in logs:
        assert {"eval_reward/turn_00", "eval_active_fraction/turn_00", "eval_stop/done", "eval_entropy"} <= log.keys()
        trained = ("advantage", "ratio/", "entropy/", "clip_ratio/turn", "effective_sample", "step_groups/", "groups/")
        assert not any(name.removeprefix("eval_").startswith(trained) for name in log)
    for log in training_logs(trainer):
        assert not any(name.startswith("eval_") for name in log)
