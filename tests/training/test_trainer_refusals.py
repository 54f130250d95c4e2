"""What is refused at construction, and what the settings default to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import GuessNumber, policy, settings, tasks, trainer_of
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError, TaskError
from agentsgym.testing import chat_tokenizer
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.rules import _NAMES, _REFUSED, _TOGETHER, _WANTED, LOSS_TYPES
from agentsgym.training.trainer import GRPOEnvTrainer


def of_ones_own(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> Sequence[Sequence[float]]:
    """An estimator that may look at values."""
    return [[0.0] * len(rollout.turn_rewards) for rollout in rollouts]


# For each setting that is refused, a value that is and the others that TRL wants along with it.
REFUSED_VALUES: dict[str, dict[str, Any]] = {
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "multi_objective_aggregation": {"multi_objective_aggregation": "normalize_then_sum"},
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


# For each setting of our own that is a number or a text: values that it may not have, and some that it may.
UNWANTED: dict[str, tuple[list[Any], list[Any]]] = {
    "discount": ([1.1, -0.1, float("nan"), "high", None], [0, 0.5, 1.0]),
    "potential_weight": ([float("inf"), "1", None], [0.5]),
    "max_turn_tokens": ([0, 2.5, True], [1]),
    "max_completion_length": ([0, None], [1]),
    "temperature": ([0.0, -1.0], [0.1]),
    "max_failed_fraction": ([1.5, -0.1], [0.0, 1.0]),
    "truncation_penalty": ([float("nan"), None], [-1.0, 0.0]),
    "max_resamples": ([0, 1.5], [1]),
    "min_group_size": ([0, -1, 1.5], [1, 2]),
    "value_learning_rate": ([0.0, -1e-3, "high"], [None, 1e-3]),
    "value_loss_weight": ([0.0, None], [0.5]),
    "sampler_correction_min": ([-0.1, "low"], [None]),
    "sampler_correction_max": ([0.0, float("inf")], [None]),
    "num_env_workers": ([0, 1.5], [1]),
    "turn_timeout_s": ([0, -1.0], [None, 0.5]),
    "episode_timeout_s": ([float("inf")], [None, 2]),
    "drift_interval": ([-1, 0.5], [0, 3]),
    "stop_strings": (["\n", [""], [1]], [None, [], ["\n"]]),
}


def test_every_setting_that_is_checked_is_tested() -> None:
    assert [name for name, _, _ in _WANTED] == list(UNWANTED)


@pytest.mark.parametrize(("name", "wanted"), [(name, wanted) for name, wanted, _ in _WANTED])
def test_an_impossible_value_is_named(name: str, wanted: str, tmp_path: Path) -> None:
    refused, accepted = UNWANTED[name]
    for value in refused:
        with pytest.raises(ConfigError) as refusal:
            settings(tmp_path, **{name: value})
        assert str(refusal.value) == f"GRPOEnvConfig.{name} must be {wanted}, got {value!r}"
    for value in accepted:
        along = next((more for key, more in ALONG.items() if key == (name, value)), {})
        assert getattr(settings(tmp_path, **{name: value}, **along), name) == value


# What a value needs beside it so that it is not refused for another reason.
ALONG: dict[tuple[str, Any], dict[str, Any]] = {
    ("value_head", "shared"): {"advantage_estimator": "turn_gae"},
    ("value_head", "separate"): {"advantage_estimator": "bilevel_gae"},
    ("value_learning_rate", 1e-3): {"advantage_estimator": "turn_gae", "value_head": "separate"},
}


@pytest.mark.parametrize(("name", "known"), [(name, known) for name, choices in _NAMES.items() for known in choices])
def test_every_known_name_is_accepted(name: str, known: str | None, tmp_path: Path) -> None:
    assert getattr(settings(tmp_path, **{name: known}, **ALONG.get((name, known), {})), name) == known


@pytest.mark.parametrize("name", _NAMES)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, tmp_path: Path) -> None:
    nearest = [choice for choice in _NAMES[name] if choice][-1]
    misspelt = f"{nearest}s"
    with pytest.raises(ConfigError) as refusal:
        settings(tmp_path, **{name: misspelt})
    assert str(refusal.value) == f"GRPOEnvConfig.{name} is unknown: {misspelt!r}; did you mean {nearest!r}?"


def test_what_trl_also_allows_for_scale_rewards_goes_by_its_name(tmp_path: Path) -> None:
    assert [settings(tmp_path, scale_rewards=value).scale_rewards for value in (True, False)] == ["group", "none"]


def test_trls_mask_of_truncated_completions_is_ours_of_truncated_rollouts(tmp_path: Path) -> None:
    """TRL's looks at the last token, which is an observation's where a game ended between two turns."""
    args = settings(tmp_path, mask_truncated_completions=True)
    assert (args.mask_truncated_completions, args.truncated_rollouts) == (False, "mask")
    assert settings(tmp_path).truncated_rollouts == "keep"


# (setting to blame, words of the reason, settings that do not go together, neighbours that do).
TOGETHER: list[tuple[str, str, dict[str, Any], list[dict[str, Any]]]] = [
    (
        "top_entropy_quantile",
        "TRL's quantile",
        {"top_entropy_quantile": 0.5, "layout": "turn"},
        [{"top_entropy_quantile": 0.5}, {"layout": "turn"}],
    ),
    ("min_group_size", "all would be dropped", {"min_group_size": 5}, [{"min_group_size": 4}]),
    (
        "generation_kwargs",
        "without use_vllm",
        {"generation_kwargs": {"top_k": 3}},
        [{"generation_kwargs": {}}, {"generation_kwargs": {"top_k": 3}, "use_vllm": True}],
    ),
    (
        "sampler_correction",
        "under vLLM it is",
        {"sampler_correction": "token_mask", "use_vllm": True},
        [{"sampler_correction": "token_mask"}, {"use_vllm": True}],
    ),
    (
        "sampler_correction",
        "nothing without a mode",
        {"sampler_correction_max": 3.0},
        [
            {"sampler_correction_max": 3.0, "sampler_correction": "token_truncate"},
            {"sampler_correction_min": 0.1, "sampler_correction": "token_mask"},
        ],
    ),
    (
        "sampler_correction",
        "lower bound must lie below",
        {"sampler_correction": "token_mask", "sampler_correction_min": 2.0},
        [
            {"sampler_correction": "token_mask", "sampler_correction_min": 2.0, "sampler_correction_max": 3.0},
            {"sampler_correction": "sequence_mask", "sampler_correction_max": 0.1},
        ],
    ),
    (
        "vllm_importance_sampling_mode",
        "must be those of single tokens",
        {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "geometric_mask"},
        [
            {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
            {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
            {"use_vllm": True, "loss_type": "dapo", "vllm_importance_sampling_mode": "geometric_mask"},
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
            {
                "use_vllm": True,
                "loss_type": "vespo",
                "vllm_importance_sampling_mode": "sequence_mask",
                "vllm_importance_sampling_correction": False,
            },
        ],
    ),
    (
        "use_bias_correction_kl",
        "the ratio of its whole row",
        {"use_bias_correction_kl": True, "beta": 0.1, "importance_sampling_level": "sequence"},
        [
            {"use_bias_correction_kl": True, "beta": 0.1},
            {"use_bias_correction_kl": False, "beta": 0.1, "importance_sampling_level": "sequence"},
            {"use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
        ],
    ),
    *(
        (
            "loss_aggregation",
            "an aggregation of their own",
            {"loss_aggregation": "turn", "loss_type": loss_type},
            [{"loss_type": loss_type}, {"loss_aggregation": "turn", "loss_type": "dapo"}],
        )
        for loss_type in ("grpo", "bnpo", "dr_grpo", "sapo", "luspo")
    ),
    *(
        (
            "loss_aggregation",
            "an aggregation of their own",
            {"loss_aggregation": name, "loss_type": "grpo"},
            [{"loss_aggregation": name, "loss_type": loss_type} for loss_type in ("dapo", "cispo", "vespo")],
        )
        for name in ("token", "trajectory", "group", "constant")
    ),
    (
        "loss_type",
        "bnpo divides by",
        {"layout": "turn", "loss_type": "bnpo"},
        [{"loss_type": "bnpo"}, *({"layout": "turn", "loss_type": name} for name in LOSS_TYPES if name != "bnpo")],
    ),
    *(
        (
            "beta",
            "weigh the KL of each row",
            {"layout": "turn", "beta": 0.1, "loss_type": loss_type},
            [{"beta": 0.1, "loss_type": loss_type}, {"layout": "turn", "loss_type": loss_type}],
        )
        for loss_type in ("grpo", "sapo", "luspo")
    ),
    *(
        ("entropy_coef", "entropy bonus", {"layout": "turn", **bonus}, [bonus, {"layout": "turn"}])
        for bonus in ({"entropy_coef": 0.01}, {"use_adaptive_entropy": True, "entropy_coef": 0.0})
    ),
    *(
        (
            "value_head",
            "needs values",
            {"advantage_estimator": name},
            [{"advantage_estimator": name, "value_head": head} for head in ("shared", "separate")],
        )
        for name in ("turn_gae", "bilevel_gae")
    ),
    (
        "value_head",
        "look at values",
        {"value_head": "shared"},
        [{"value_head": "shared", "advantage_estimator": of_ones_own}],
    ),
    (
        "value_head",
        "sharded weights",
        {"value_head": "shared", "advantage_estimator": "turn_gae", "fsdp": True},
        [{"value_head": "shared", "advantage_estimator": "turn_gae"}, {"fsdp": True}],
    ),
    (
        "value_head",
        "compiled model",
        {"value_head": "shared", "advantage_estimator": "turn_gae", "torch_compile": True},
        [{"value_head": "separate", "advantage_estimator": "turn_gae", "torch_compile": True}],
    ),
    (
        "value_head",
        "fp16",
        {"value_head": "shared", "advantage_estimator": "turn_gae", "fp16": True},
        [{"fp16": True}, {"value_head": "shared", "advantage_estimator": "turn_gae", "bf16": True}],
    ),
    (
        "value_learning_rate",
        "no value head",
        {"value_learning_rate": 1e-3},
        [{"value_learning_rate": 1e-3, "value_head": "separate", "advantage_estimator": "turn_gae"}],
    ),
    (
        "truncated_rollouts",
        "laid them out",
        {"truncated_rollouts": "penalise", "advantage_estimator": "reward"},
        [
            {"truncated_rollouts": "penalise"},
            {"truncated_rollouts": "mask", "advantage_estimator": "reward"},
            {"advantage_estimator": "reward"},
        ],
    ),
]


@pytest.mark.parametrize(("name", "words", "changes", "neighbours"), TOGETHER)
def test_what_does_not_go_together_is_refused_and_its_neighbours_are_not(
    name: str, words: str, changes: dict[str, Any], neighbours: list[dict[str, Any]], tmp_path: Path
) -> None:
    [reason] = [reason for blamed, _, reason in _TOGETHER if blamed == name and words in reason]
    given = changes.get(name, getattr(settings(tmp_path), name))
    with pytest.raises(ConfigError) as refusal:
        settings(tmp_path, **changes)
    assert str(refusal.value) == f"GRPOEnvConfig({name}={given!r}) is refused: {reason}"
    for neighbour in neighbours:
        settings(tmp_path, **neighbour)


def test_every_pair_that_is_refused_is_tested() -> None:
    tested = {(name, reason) for name, words, *_ in TOGETHER for _, _, reason in _TOGETHER if words in reason}
    assert {(name, reason) for name, _, reason in _TOGETHER} <= tested


def test_an_unknown_estimator_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gigpo'"):
        settings(tmp_path, advantage_estimator="gippo")


def test_an_estimator_that_no_checkpoint_could_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a function of a module"):
        settings(tmp_path, advantage_estimator=lambda rollouts, **_: [])


def built(folder: Path, **arguments: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    given = {"env": GuessNumber(tokenizer), "args": settings(folder), "train_dataset": tasks(), **arguments}
    return GRPOEnvTrainer(given.pop("model", model), **given)


def test_a_history_that_is_rewritten_is_refused(tmp_path: Path) -> None:
    _, tokenizer = policy()
    with pytest.raises(ConfigError, match=r"history.*rewrites history.*layout='turn' or history='append'"):
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
    with pytest.raises(ConfigError, match="env has no tokenizer: build it with the policy's"):
        built(tmp_path, env=GuessNumber(), processing_class=tokenizer)


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env must be a MultistepEnv or None.*GuessNumber\(tokenizer, env_config\)"):
        built(tmp_path, env=GuessNumber)


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
    line = ["--output_dir", str(tmp_path), "--layout", "turn", "--loss_type", "bnpo"]
    with pytest.raises(ConfigError, match=r"loss_type='bnpo'.*layout='turn'"):
        HfArgumentParser((GRPOEnvConfig,)).parse_args_into_dataclasses(line)


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


def test_the_settings_of_trl_are_refused_by_name(tmp_path: Path) -> None:
    model, tokenizer = policy()
    args: Any = GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match=r"args must be a GRPOEnvConfig, .* got a GRPOConfig"):
        GRPOEnvTrainer(model, GuessNumber(tokenizer), args, train_dataset=tasks())


@pytest.mark.parametrize(
    ("changes", "is_told"), [({}, True), ({"epsilon_high": 0.3}, True), ({"epsilon_high": 5.0}, False)]
)
def test_a_bound_of_cispo_that_cuts_every_token_is_told(
    changes: dict[str, float], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings(tmp_path, loss_type="cispo", **changes)
    assert ("set epsilon_high=5.0" in caplog.text) == is_told


def test_a_best_model_that_is_never_saved_is_refused(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "num_iterations": 2}
    for evaluated, saved in ((3, 3), (3, 6), (1, 2)):
        with pytest.raises(ConfigError, match=rf"generation cycle \(2\).*set eval_steps \({evaluated}\)"):
            settings(tmp_path, eval_steps=evaluated, save_steps=saved, **best).align_saving()
    settings(tmp_path, eval_steps=4, save_steps=4, **best).align_saving()


def test_truncated_rollouts_are_not_both_masked_and_penalised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="masked or penalised, got both"):
        settings(tmp_path, mask_truncated_completions=True, truncated_rollouts="penalise")
