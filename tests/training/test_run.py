"""A whole training run through its one object: what it keeps and writes, what a signal and its end leave."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import RECOMPUTED, GuessNumber, TextAgent, policy, settings, tasks, trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import ModelConfig

from agentsgym import ConfigError, PolicyAgent, SamplingParams, TrainingRun, register
from agentsgym.recipes import scripts


class Stop(TrainerCallback):
    """Sends this process a signal at the end of an optimizer step."""

    def __init__(self, signum: signal.Signals, step: int = 1) -> None:
        self.signum, self.step = signum, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.signum)


def task_data(num_tasks: int = 8) -> list[dict[str, Any]]:
    return [{"seed": seed} for seed in range(num_tasks)]


def run_of(folder: Path, model_config: ModelConfig | None = None, **changes: Any) -> tuple[TrainingRun, GuessNumber]:
    run = TrainingRun(policy(), settings(folder, **changes), model_config)
    return run, GuessNumber(run.tokenizer)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_saved(run: TrainingRun) -> None:
    """What lies in ``model/`` is the policy as it is now."""
    saved = AutoModelForCausalLM.from_pretrained(run.output / "model").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in run.model.state_dict().items())


def summary_of(run: TrainingRun) -> dict[str, Any]:
    return json.loads((run.output / "summary.json").read_text(encoding="utf-8"))


def test_a_run_from_the_first_evaluation_to_the_summary(tmp_path: Path) -> None:
    run, env = run_of(tmp_path)
    run.evaluate("numbers", env, task_data(), TextAgent(), label="says the numbers")
    run.warm_start(run.play("demonstrations", env, task_data(), TextAgent()), 3, use_cpu=True)
    assert_saved(run)
    before = run.evaluate("before", env, task_data(), num_rollouts=2)
    warmed = weights(run.model)
    curve = run.learning_curve(references=["numbers"])
    state = run.learn(env, tasks(), callbacks=[curve])
    assert state is not None
    assert state.global_step == 2
    assert any(not torch.equal(warmed[name], tensor) for name, tensor in run.model.state_dict().items())
    assert_saved(run)
    run.evaluate("after", env, task_data())
    run.write_transcripts("after")
    run.write_summary(note=Path("anything"), seed="replaced")
    summary = summary_of(run)
    assert list(summary) == ["numbers", "before", "after", "seconds", "seed", "interrupted", "note"]
    assert (summary["note"], summary["seed"], summary["interrupted"]) == ("anything", "replaced", False)
    assert before.num_episodes == summary["before"]["num_episodes"] == 16
    assert list(summary["seconds"]) == [
        "says the numbers", "demonstrations", "warm start", "before", "reinforcement learning", "after",
    ]  # fmt: skip
    assert (tmp_path / "transcripts_after.txt").read_text(encoding="utf-8").count("=== task ") == 8
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert run.phases.status == 0


def test_equal_settings_and_seeds_give_equal_policies_and_evaluations(tmp_path: Path) -> None:
    found: list[tuple[Any, Any]] = []
    for name in ("one", "other"):
        run, env = run_of(tmp_path / name, seed=5)
        run.warm_start(run.play("demonstrations", env, task_data(), TextAgent()), 2, use_cpu=True)
        run.learn(env, tasks())
        evaluation = run.evaluate("after", env, task_data())
        found.append((weights(run.model), [played.token_ids for played in evaluation.trajectories]))
    (one, first), (other, second) = found
    assert first == second
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_of_several_environments_are_evaluated_and_trained_on_without_one(tmp_path: Path) -> None:
    register(GuessNumber, "GuessOfRuns")
    rows: list[dict[str, Any]] = [
        {"env_class_path": "GuessOfRuns", "env_config": {"max_steps_per_episode": turns}, "task_data": {"seed": seed}}
        | {"environment": f"{turns} turns"}
        for seed in range(4)
        for turns in (1, 2)
    ]
    run, _ = run_of(tmp_path)
    before = run.evaluate("before", None, rows)
    assert {name: part.num_episodes for name, part in before.by_environment.items()} == {"1 turns": 4, "2 turns": 4}
    state = run.learn(None, Dataset.from_list(rows))
    assert state is not None
    assert any("win_rate/by_environment/1 turns" in log for log in state.log_history)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_in_the_warm_start_keeps_the_policy_and_skips_what_would_be_learned(
    signum: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppingBar(Stop, scripts.LossBar):
        def __init__(self, label: str, num_steps: int, **options: Any) -> None:
            scripts.LossBar.__init__(self, label, num_steps, **options)
            self.signum, self.step = signum, 2

    monkeypatch.setattr("agentsgym.recipes.run.LossBar", StoppingBar)
    run, env = run_of(tmp_path)
    before = weights(run.model)
    demonstrations = run.play("demonstrations", env, task_data(), TextAgent())
    run.warm_start(demonstrations, 50, use_cpu=True)
    assert (run.phases.interrupted, run.phases.status) == (True, status)
    assert any(not torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    stopped = weights(run.model)
    run.warm_start(demonstrations, 3, use_cpu=True)
    assert run.learn(env, tasks()) is None
    assert all(torch.equal(stopped[name], tensor) for name, tensor in run.model.state_dict().items())
    assert_saved(run)
    run.evaluate("after", env, task_data())
    run.write_summary()
    assert summary_of(run)["interrupted"] is True


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_in_training_keeps_the_policy_and_a_checkpoint_that_goes_on_to_the_same_end(
    signum: signal.Signals, status: int, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 100, "max_steps": 3}
    whole, env = run_of(tmp_path / "whole", **saving)
    whole.learn(env, tasks())
    run, env = run_of(tmp_path / "stopped", **saving)
    run.learn(env, tasks(), callbacks=[Stop(signum)])
    assert (run.phases.interrupted, run.phases.status) == (True, status)
    assert_saved(run)
    assert (run.output / "checkpoint-1").is_dir()
    resumed, env = run_of(tmp_path / "stopped", **saving, resume_from_checkpoint="auto")
    resumed.learn(env, tasks())
    expected = weights(whole.model)
    assert all(torch.equal(expected[name], tensor) for name, tensor in resumed.model.state_dict().items())


def test_adapters_are_merged_and_a_reference_is_loaded_from_where_the_policy_was_saved(tmp_path: Path) -> None:
    run, env = run_of(tmp_path, ModelConfig(use_peft=True, lora_target_modules=["q_proj", "v_proj"]), beta=0.1)
    start = weights(run.model)
    run.learn(env, tasks())
    assert (tmp_path / "start" / "model.safetensors").exists()
    after = run.model.state_dict()
    assert after.keys() == start.keys()
    moved = {name for name in start if not torch.equal(start[name], after[name])}
    assert moved == {name for name in start if "q_proj" in name or "v_proj" in name}
    assert_saved(run)


def test_a_learning_curve_names_the_evaluation_that_is_missing(tmp_path: Path) -> None:
    run, env = run_of(tmp_path)
    with pytest.raises(ConfigError, match="no evaluation is named 'before'; nothing has been evaluated yet"):
        run.learning_curve()
    run.evaluate("befor", env, task_data(2))
    with pytest.raises(ConfigError, match="no evaluation is named 'before'; did you mean 'befor'"):
        run.learning_curve()


def test_the_policy_is_sampled_alike_at_each_call_unless_seeded(tmp_path: Path) -> None:
    run, env = run_of(tmp_path)
    agents = [run.policy(), run.policy(), run.policy(seed=7)]
    one, same, other = ([played.token_ids for played in env.rollout(task_data(), agent)] for agent in agents)
    assert one == same != other


def test_the_whole_run_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", page.partition("\n## Whole runs\n")[2], re.M | re.S)[1]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "training.md", "exec"), {})
    written = {path.name for path in (tmp_path / "outputs" / "whole_run").iterdir()}
    assert written == {
        "model", "learning_curve.png", "transcripts_before.txt", "transcripts_after.txt", "summary.json",
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, RECOMPUTED, {"num_iterations": 2}])
def test_a_trained_model_is_saved_as_it_plays(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **changes)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trained, reloaded = trainer.model, AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert trained.config.use_cache
    assert reloaded.config.use_cache
    games = []
    for model in (trained, reloaded):
        agent = PolicyAgent(model, tokenizer, sampling=SamplingParams(temperature=0.0), max_turn_tokens=4)
        played = GuessNumber(tokenizer).rollout([{"seed": seed} for seed in range(4)], agent)
        games.append([game.token_ids for game in played])
    assert games[0] == games[1]
    ids = torch.tensor([games[0][0]])
    with torch.no_grad():
        assert torch.equal(trained.eval()(input_ids=ids).logits, reloaded(input_ids=ids).logits)


def test_a_trained_model_generates_with_its_cache(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    widths: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = {"input_ids": torch.tensor([[6, 7, 8]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    trainer.model.eval().generate(**prompt, do_sample=False, max_new_tokens=4, min_new_tokens=4)
    assert widths == [3, 1, 1, 1]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_copy_of_a_trained_model_runs_on_its_own_weights(bf16: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bf16=bf16)
    trainer.train()
    model, ids = trainer.model.eval(), torch.tensor([[6, 7, 8]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        twin = copy.deepcopy(model)
        assert torch.allclose(twin(input_ids=ids).logits, before, atol=0.1 if bf16 else 0.0)
        twin.lm_head.weight.zero_()
        assert (twin(input_ids=ids).logits == 0).all()
        assert torch.equal(model(input_ids=ids).logits, before)
