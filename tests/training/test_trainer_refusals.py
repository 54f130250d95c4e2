"""What is refused at construction, and what the settings default to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import GuessNumber, policy, settings, tasks, trainer_of
from transformers import HfArgumentParser
from trl import TrlParser

from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError, TaskError
from agentsgym.testing import chat_tokenizer
from agentsgym.training.config import _REFUSED, GRPOEnvConfig
from agentsgym.training.trainer import GRPOEnvTrainer

# For each setting that is refused, a value that is and the others that TRL wants along with it.
REFUSED_VALUES: dict[str, dict[str, Any]] = {
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "layout": {"layout": "turn"},
    "importance_sampling_level": {"importance_sampling_level": "sequence"},
    "loss_type": {"loss_type": "vespo"},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
    "mask_truncated_completions": {"mask_truncated_completions": True},
    "multi_objective_aggregation": {"multi_objective_aggregation": "normalize_then_sum"},
    "scale_rewards": {"scale_rewards": "turn"},
    "reward_weights": {"reward_weights": [1.0]},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "cache_implementation": {"cache_implementation": "static"},
    "remove_unused_columns": {"remove_unused_columns": True},
    "max_tool_calling_iterations": {"max_tool_calling_iterations": 3},
    "deepspeed": {},  # transformers asks for the package first
}


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name, _, reason in _REFUSED])
def test_what_would_go_silently_wrong_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    assert name in REFUSED_VALUES, f"give a value of {name!r} that is refused, so that it is tested"
    changes = REFUSED_VALUES[name]
    if changes:
        with pytest.raises(ConfigError) as refusal:
            settings(tmp_path, **changes)
        assert str(refusal.value) == f"GRPOEnvConfig({name}={changes[name]!r}) is refused: {reason}"
    else:
        [is_refused] = [check for other, check, _ in _REFUSED if other == name]
        assert is_refused("a configuration")
    [is_refused] = [check for other, check, _ in _REFUSED if other == name]
    assert not is_refused(getattr(settings(tmp_path), name))


def test_every_tested_refusal_is_one() -> None:
    assert {name for name, _, _ in _REFUSED} == REFUSED_VALUES.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("discount", 1.1),
        ("discount", -0.1),
        ("discount", float("nan")),
        ("discount", "high"),
        ("temperature", 0.0),
        ("max_turn_tokens", 0),
        ("max_turn_tokens", 2.5),
        ("max_turn_tokens", True),
        ("max_completion_length", None),
        ("max_failed_fraction", 1.5),
        ("num_env_workers", 0),
        ("turn_timeout_s", 0),
        ("episode_timeout_s", float("inf")),
        ("drift_interval", -1),
        ("drift_interval", 0.5),
        ("stop_strings", "\n"),
        ("stop_strings", [""]),
    ],
)
def test_an_impossible_value_is_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        settings(tmp_path, **{name: value})


def test_an_unknown_pool_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env_pool is unknown: 'thread'; did you mean 'threads'"):
        settings(tmp_path, env_pool="thread")


def test_options_for_vllm_are_refused_without_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_kwargs=\{'top_k': 3\}.*refused without use_vllm.*stop_strings"):
        settings(tmp_path, generation_kwargs={"top_k": 3})


def test_an_unknown_estimator_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gigpo'"):
        settings(tmp_path, advantage_estimator="gippo")


def test_an_unknown_loss_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss_type is unknown: 'dappo'; did you mean 'dapo'"):
        settings(tmp_path, loss_type="dappo")


def test_an_estimator_that_no_checkpoint_could_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a function of a module"):
        settings(tmp_path, advantage_estimator=lambda rollouts, **_: [])


def built(folder: Path, **arguments: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    given = {"env": GuessNumber(tokenizer), "args": settings(folder), "train_dataset": tasks(), **arguments}
    return GRPOEnvTrainer(given.pop("model", model), **given)


def test_a_history_that_is_rewritten_is_refused(tmp_path: Path) -> None:
    _, tokenizer = policy()
    with pytest.raises(ConfigError, match=r"history.*rewrites history.*use history='append'"):
        built(tmp_path, env=GuessNumber(tokenizer, {"history": "rerender"}))


def test_kl_without_a_reference_to_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beta needs a reference model.*save_pretrained"):
        trainer_of(tmp_path, beta=0.1)


def test_evaluation_batches_that_would_cut_a_group_apart_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=tasks(4), num_generations_eval=3)
    with pytest.raises(ConfigError, match=r"multiple of num_generations_eval \(3\).*got 8"):
        trainer.evaluate()


def test_missing_rows_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_dataset is missing"):
        built(tmp_path, train_dataset=None)


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "Hello"}, "needs 'task_data'"),
        ({"task_data": {"seed": 1}, "env_class_path": "elsewhere.Chess"}, "is of 'elsewhere.Chess'"),
        ({"task_data": {"seed": 1}, "env_config": {"max_steps_per_episode": 9}}, "not that of the environment"),
    ],
)
def test_a_row_of_another_game_is_refused(argument: str, row: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        built(tmp_path, **{argument: Dataset.from_list([row] * 2)})


def test_a_row_of_another_game_among_several_evaluation_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 'task_data'"):
        built(tmp_path, eval_dataset={"good": tasks(2), "bad": Dataset.from_list([{"prompt": "Hello"}])})


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_a_task_that_cannot_be_played_is_refused_before_training(argument: str, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"task_data": {"solution": solution, "seed": 1}} for solution in ("clock", None)])
    _, tokenizer = policy()
    good = TwentyQuestionsEnv.get_train_dataset(size=4)
    with pytest.raises(TaskError, match=f"row 1 of {argument}: .*'solution'.*got None"):
        built(tmp_path, env=TwentyQuestionsEnv(tokenizer), **{"train_dataset": good, argument: rows})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"train_dataset": tasks().select([])}, "train_dataset"),
        ({"eval_dataset": tasks().select([])}, "eval_dataset"),
        ({"eval_dataset": {"easy": tasks(), "hard": tasks().select([])}}, r"eval_dataset\['hard'\]"),
    ],
)
def test_an_empty_dataset_is_refused(arguments: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must hold at least one row, got none"):
        built(tmp_path, **arguments)


def test_fewer_rows_than_a_generation_batch_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 2 rows.*\(8 rollouts, 4 a group\), got 1"):
        trainer_of(tmp_path, dataset=tasks(1))
    trainer_of(tmp_path, dataset=tasks(2))
    trainer_of(tmp_path, dataset=tasks(1), num_generations=8)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    """By TRL, which knows what a model that is split over devices makes of them; ours rests on it."""
    args = settings(tmp_path)
    assert args.n_gpu == 0
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"DataParallel.*CUDA_VISIBLE_DEVICES"):
        built(tmp_path, args=args)


def test_an_environment_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    _, tokenizer = policy()
    with pytest.raises(ConfigError, match=r"env\.tokenizer must be the trainer's"):
        built(tmp_path, env=GuessNumber(chat_tokenizer()), processing_class=tokenizer)


def test_an_environment_without_tokenizer_is_refused(tmp_path: Path) -> None:
    _, tokenizer = policy()
    with pytest.raises(ConfigError, match=r"env\.tokenizer must be the trainer's"):
        built(tmp_path, env=GuessNumber(), processing_class=tokenizer)


def test_without_environment_rows_must_name_one(tmp_path: Path) -> None:
    _, tokenizer = policy()
    with pytest.raises(ConfigError, match="env_class_path"):
        built(tmp_path, env=None, processing_class=tokenizer)


def test_something_that_is_no_agent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an agent needs get_action"):
        built(tmp_path, agent="policy")


@pytest.mark.parametrize(("has_accelerator", "use_cpu", "bf16"), [(False, False, False), (True, True, False)])
def test_bf16_is_off_on_a_cpu(
    has_accelerator: bool, use_cpu: bool, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    args = GRPOEnvConfig(output_dir=str(tmp_path), use_cpu=use_cpu, report_to="none")
    assert args.bf16 is bf16


def test_bf16_is_on_where_it_is_asked_for(tmp_path: Path) -> None:
    assert settings(tmp_path, bf16=True).bf16 is True


@pytest.mark.parametrize("parser_class", [HfArgumentParser, TrlParser])
def test_every_setting_can_be_given_on_the_command_line(parser_class: type[HfArgumentParser], tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --use_cpu --advantage_estimator gigpo --discount 0.9 --scale_rewards none"
    line += " --max_turn_tokens 32 --max_completion_length 128 --max_failed_fraction 0.2 --loss_type dr_grpo"
    [args] = parser_class((GRPOEnvConfig,)).parse_args_into_dataclasses(line.split())
    given = (args.advantage_estimator, args.discount, args.scale_rewards, args.max_turn_tokens)
    assert given == ("gigpo", 0.9, "none", 32)
    assert (args.max_completion_length, args.max_failed_fraction, args.loss_type) == (128, 0.2, "dr_grpo")


def test_a_refusal_comes_through_the_command_line_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layout"):
        HfArgumentParser((GRPOEnvConfig,)).parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--layout", "turn"]
        )


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 1),
        ({"num_iterations": 3}, 3),
        ({"steps_per_generation": 4}, 4),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, 3),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 1),
        ({"gradient_accumulation_steps": 2}, 1),
    ],
)
def test_a_cycle_is_the_steps_between_boundaries(changes: dict[str, int], steps: int, tmp_path: Path) -> None:
    assert settings(tmp_path, **changes).steps_per_cycle == steps
