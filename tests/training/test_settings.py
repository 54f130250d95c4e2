"""The settings of a run: which values and combinations are refused, what they default to, command lines."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from games import settings
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from agentsgym import ConfigError, EnvThreadPool, GRPOEnvConfig
from agentsgym.credit.gae import turn_gae
from agentsgym.credit.registry import get_estimator
from agentsgym.recipes.from_values import checked_values
from agentsgym.training.settings import types_of
from agentsgym.training.tensors.importance import CORRECTIONS, ImportanceCorrection
from agentsgym.training.validation import _TRL_CHECKS, _UNSUPPORTED

# For each setting that is refused, a value that is and the others that TRL wants along with it.
REFUSED_VALUES: dict[str, dict[str, Any]] = {
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "chat_template_kwargs": {"chat_template_kwargs": ["enable_thinking"]},
    "report_to": {"report_to": ["wandbb"]},
    "cache_implementation": {"cache_implementation": "static"},
    "remove_unused_columns": {"remove_unused_columns": True},
    "max_tool_calling_iterations": {"max_tool_calling_iterations": 3},
    "ignore_data_skip": {"ignore_data_skip": True},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
}


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name, _, reason in _UNSUPPORTED])
def test_what_would_go_silently_wrong_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    assert name in REFUSED_VALUES, f"give a value of {name!r} that is refused, so that it is tested"
    changes = REFUSED_VALUES[name]
    with pytest.raises(ConfigError) as refusal:
        settings(tmp_path, **changes)
    assert str(refusal.value) == f"GRPOEnvConfig({name}={changes[name]!r}) is not supported: {reason}"
    [is_refused] = [check for other, check, _ in _UNSUPPORTED if other == name]
    assert not is_refused(getattr(settings(tmp_path), name))


def test_every_tested_refusal_is_one() -> None:
    assert {name for name, _, _ in _UNSUPPORTED} == REFUSED_VALUES.keys()


CHECKS = {
    one.name: one.metadata["check"].expected for one in dataclasses.fields(GRPOEnvConfig) if "check" in one.metadata
} | {name: expected for name, (_, expected) in _TRL_CHECKS.items()}
# The names of each setting that is one of a few; and how the sentence about each of the others ends.
CHOICES = {
    name: ast.literal_eval(f"[{expected.removeprefix('one of ')}]")
    for name, expected in CHECKS.items()
    if expected.startswith("one of ")
}
EXPECTED = {name: expected for name, expected in CHECKS.items() if name not in CHOICES}

# For each of those that are a number or a text: values that it may not have, and some that it may.
UNWANTED: dict[str, tuple[list[Any], list[Any]]] = {
    "discount": ([1.1, -0.1, float("nan"), "high", None], [0, 0.5, 1.0]),
    "max_turn_tokens": ([0, 2.5, True], [1]),
    "max_completion_length": ([0, None], [1]),
    "temperature": ([0.0, -1.0], [0.1]),
    "beta": ([-0.1], [0, 0.1]),
    "top_entropy_quantile": ([-0.1, 20.0], [0.0, 0.2, 1.0]),
    "num_iterations": ([0, -1], [1, 2]),
    "max_failed_fraction": ([1.5, -0.1], [0.0, 1.0]),
    "truncated_rollouts": (
        [float("nan"), float("inf"), None, -1.0, True, "penalize", "-1", "nan", "masks"],
        ["keep", "mask", 0, 2.5, "0.5", "1e-1"],
    ),
    "episode_retries": ([-1, 1.5], [0, 2]),
    "min_group_size": ([0, -1, 1.5], [1, 2]),
    "vllm_importance_sampling_clip_min": ([-0.1, "low", float("inf")], [None, 0.0, 0.5]),
    "vllm_importance_sampling_clip_max": ([0.0, -1.0, "high", float("nan")], [None, 2.5, float("inf")]),
    "turn_timeout_s": ([0, -1.0], [None, 0.5]),
    "episode_timeout_s": ([float("inf")], [None, 2]),
    "preemption_grace_s": ([-1.0, "soon"], [None, 0.0, 30]),
    "drift_interval": ([-1, 0.5], [0, 3]),
    "log_metrics": ([[], [1], 1, {}], ["all", "by_turn", ["summary", "loss"], None]),
    "log_conversations": ([-1, 1.5, True, None], [0, 3]),
    "store_rollouts": ([1, ""], [None, True, False, "runs/one"]),
    "stop_strings": (["\n", [""], [1]], [None, [], ["\n"]]),
    "vllm_server_base_url": (
        ["", "a:8000", [], ["a:8000"], ["http://a", "http://a"], "http://a,http://a", "http://a,", [1], 1],
        [None, "https://a:8000", "http://a,http://b", "http://a, http://b", ["http://a", "http://b"]],
    ),
    "max_staleness": ([-1, 0.5, None, True], [0, 6]),
}


def test_every_setting_that_is_checked_is_tested() -> None:
    assert EXPECTED.keys() == UNWANTED.keys()


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_an_impossible_value_is_named(name: str, expected: str, tmp_path: Path) -> None:
    refused, accepted = UNWANTED[name]
    for value in refused:
        with pytest.raises(ConfigError) as refusal:
            settings(tmp_path, **{name: value})
        assert str(refusal.value) == f"GRPOEnvConfig.{name} must be {expected}, got {value!r}"
    for value in accepted:
        along = next((more for key, more in ALONG.items() if key == (name, value)), ALONG_ANY.get(name, {}))
        assert getattr(settings(tmp_path, **{name: value}, **along), name) == value


TYPES = {name: hint for name, hint in types_of(GRPOEnvConfig).items() if name not in CHECKS}
ONE_TYPE = {name: hint for name, hint in TYPES.items() if {hint, *get_args(hint)} & {bool, int, float}}
del ONE_TYPE["observation_loss_weight"]  # or a dict


@pytest.mark.parametrize("wrong", ["abc", [1], {"a": 1}, 10**70, -(10**70), float("nan")])
def test_a_number_or_a_bool_has_its_type_in_python_too(wrong: Any, tmp_path: Path) -> None:
    assert len(ONE_TYPE) > 80
    for name, hint in ONE_TYPE.items():
        if wrong == "abc" and str in get_args(hint):
            continue
        with pytest.raises(ConfigError, match=rf"^GRPOEnvConfig\.{name} must be ") as refusal:
            settings(tmp_path, **{name: wrong})
        assert str(refusal.value).endswith(f", got {wrong!r}")


def test_the_types_in_a_file_are_those_in_python(tmp_path: Path) -> None:
    for wrong, expected in ((True, "a whole number"), (1e3, "a whole number"), (16**70, "a number of at most 63 bits")):
        with pytest.raises(ConfigError, match=f"^GRPOEnvConfig.max_steps must be {expected}, got {wrong}$"):
            settings(tmp_path, max_steps=wrong)
    weights = {"observation_loss_weight": {"tool": 0.05}, "scale_rewards": True, "learning_rate": 1e-4}
    assert checked_values(GRPOEnvConfig, {**weights, "learning_rate": "1e-4"}) == weights
    with pytest.raises(ConfigError, match=r"^learning_rate must be a number, got 'abc'"):
        checked_values(GRPOEnvConfig, {"learning_rate": "abc"})
    args = GRPOEnvConfig(output_dir=tmp_path, learning_rate=np.float32(0.5), max_steps=np.int64(3), use_cpu=True)
    assert (args.learning_rate, args.max_steps, args.output_dir) == (0.5, 3, str(tmp_path))


# What a value needs beside it so that it is not refused for another reason.
ALONG: dict[tuple[str, Any], dict[str, Any]] = {
    ("value_head", "shared"): {"advantage_estimator": "turn_gae"},
    ("value_head", "separate"): {"advantage_estimator": "bilevel_gae"},
    ("retry_seed", "new"): {"episode_retries": 1},
    **{
        (f"vllm_importance_sampling_{end}", bound): {"vllm_importance_sampling_correction": True}
        for end, bounds in (("clip_min", (0.0, 0.5)), ("clip_max", (2.5, math.inf)), ("mode", CORRECTIONS))
        for bound in bounds
    },
}


ALONG_ANY: dict[str, dict[str, Any]] = {"vllm_server_base_url": {"use_vllm": True, "vllm_mode": "server"}}


@pytest.mark.parametrize(("name", "known"), [(name, known) for name, choices in CHOICES.items() for known in choices])
def test_every_known_name_is_accepted(name: str, known: str | None, tmp_path: Path) -> None:
    assert getattr(settings(tmp_path, **{name: known}, **ALONG.get((name, known), {})), name) == known


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str, tmp_path: Path) -> None:
    misspelt = f"{CHOICES[name][-1]}s"
    with pytest.raises(ConfigError) as refusal:
        settings(tmp_path, **{name: misspelt})
    known = ", ".join(map(repr, CHOICES[name]))
    assert str(refusal.value) == f"GRPOEnvConfig.{name} must be one of {known}, got {misspelt!r}"


def test_what_trl_also_allows_for_scale_rewards_goes_by_its_name(tmp_path: Path) -> None:
    assert [settings(tmp_path, scale_rewards=value).scale_rewards for value in (True, False)] == ["group", "none"]


def test_trls_mask_of_truncated_completions_is_ours_of_truncated_rollouts(tmp_path: Path) -> None:
    """TRL's looks at the last token, which is an observation's where a game ended between two turns."""
    args = settings(tmp_path, mask_truncated_completions=True)
    assert args.truncation == settings(tmp_path, truncated_rollouts="mask").truncation == "mask"
    assert (args.mask_truncated_completions, args.truncated_rollouts) == (True, "keep")  # as they were given
    assert settings(tmp_path).truncation == settings(tmp_path).truncated_rollouts == "keep"
    for given, penalty in ((0.5, 0.5), ("0.5", 0.5), ("1e-1", 0.1), (0, 0.0)):
        args = settings(tmp_path, truncated_rollouts=given)
        assert (args.truncation, args.truncation_penalty) == ("penalize", penalty)


def test_the_help_of_a_setting_is_what_its_class_documents() -> None:
    own = {one.name for one in dataclasses.fields(GRPOEnvConfig)} - {one.name for one in dataclasses.fields(GRPOConfig)}
    described = {one.name: dict(one.metadata).get("help") for one in dataclasses.fields(GRPOEnvConfig)}
    assert described["env_pool"].startswith('Executor of the environments: None for the training process, "threads"')
    assert not [name for name in own if not described[name] or "`" in described[name]]
    assert "Token budget of one turn. (default: 256)" in HfArgumentParser((GRPOEnvConfig,)).format_help()


def test_no_more_settings_are_added_to_trls_than_a_person_can_look_through() -> None:
    own = {one.name for one in dataclasses.fields(GRPOEnvConfig)} - {one.name for one in dataclasses.fields(GRPOConfig)}
    assert len(own) <= 29


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"learning_rate": 1e-2, "loss_weight": 1.0}),
        ({"learning_rate": "1e-3"}, {"learning_rate": 1e-3, "loss_weight": 1.0}),  # as YAML reads it
        ('{"loss_weight": 0.5}', {"learning_rate": 1e-2, "loss_weight": 0.5}),
    ],
)
def test_the_options_of_the_value_head_are_those_of_the_policy_unless_given(
    given: Any, expected: dict[str, float], tmp_path: Path
) -> None:
    head = {"advantage_estimator": "turn_gae", "value_head": "shared"}
    assert settings(tmp_path, value_head_kwargs=given, **head).value_head_options == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lr": 1e-3}, r"value_head_kwargs\['lr'\] is unknown; valid names: 'learning_rate', 'loss_weight'"),
        ({"learning_rate": 0}, r"value_head_kwargs\['learning_rate'\] must be a positive number, got 0"),
        ({"loss_weight": None}, r"value_head_kwargs\['loss_weight'\] must be a positive number, got None"),
        (
            "learning_rate=1",
            "value_head_kwargs must be a dict, or a JSON object from a command line, got 'learning_rate=1'",
        ),
    ],
)
def test_options_that_no_value_head_takes_are_refused(given: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings(tmp_path, advantage_estimator="turn_gae", value_head="shared", value_head_kwargs=given)


def test_the_weight_of_shaping_is_an_option_of_every_estimator(tmp_path: Path) -> None:
    for name in ("return_to_go", turn_gae, get_estimator("gigpo", baseline="others")):
        head = {"value_head": "shared"} if name is turn_gae else {}
        args = settings(tmp_path, advantage_estimator=name, estimator_kwargs='{"potential_weight": 0.5}', **head)
        assert args.estimator() == get_estimator(name, potential_weight=0.5)
    for weight in (float("inf"), "1", None):
        with pytest.raises(ConfigError, match="potential_weight must be a finite number, got"):
            settings(tmp_path, estimator_kwargs={"potential_weight": weight})


def test_unknown_settings_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^GRPOEnvConfig has no argument 'discont'; did you mean 'discount'\?$"):
        settings(tmp_path, discont=0.9)
    removed = r"^GRPOEnvConfig has no argument 'fork_budget': training no longer forks .*; leave fork_budget out$"
    with pytest.raises(TypeError, match=removed):
        settings(tmp_path, fork_budget=40)


def test_subclasses_of_the_settings_may_have_arguments_of_their_own(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class WithField(GRPOEnvConfig):
        bonus: float = 0.0

    class WithConstructor(GRPOEnvConfig):
        def __init__(self, bonus: float, **others: Any) -> None:
            super().__init__(**others)
            self.bonus = bonus

    common: Any = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    for own in (WithField, WithConstructor):
        assert own(bonus=0.5, discount=0.9, **common).bonus == 0.5
        with pytest.raises(TypeError, match=f"^{own.__name__} has no argument 'bonsu'; did you mean 'bonus'"):
            own(bonsu=0.5, **common)


def test_an_estimator_that_no_checkpoint_could_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be picklable"):
        settings(tmp_path, advantage_estimator=lambda rollouts, **_: [])


@pytest.mark.parametrize(("has_accelerator", "use_cpu", "bf16"), [(False, False, False), (True, True, False)])
def test_bf16_is_off_on_a_cpu(
    has_accelerator: bool, use_cpu: bool, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    args = GRPOEnvConfig(output_dir=str(tmp_path), use_cpu=use_cpu, report_to="none")
    assert args.bf16 is bf16


def test_bf16_is_on_where_it_is_requested(tmp_path: Path) -> None:
    assert settings(tmp_path, bf16=True).bf16 is True


@pytest.mark.parametrize("parser_class", [HfArgumentParser, TrlParser])
def test_every_setting_can_be_given_on_the_command_line(parser_class: type[HfArgumentParser], tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --use_cpu --advantage_estimator gigpo --discount 0.9 --scale_rewards none"
    line += " --max_turn_tokens 32 --max_completion_length 128 --max_failed_fraction 0.2 --loss_type dr_grpo"
    line += ' --env_pool threads --env_pool_kwargs {"num_workers":2} --truncated_rollouts 0.5'
    line += " --use_vllm --vllm_mode server --vllm_server_base_url http://a,http://b"
    [args] = parser_class((GRPOEnvConfig,)).parse_args_into_dataclasses(line.split())
    given = (args.advantage_estimator, args.discount, args.scale_rewards, args.max_turn_tokens)
    assert given == ("gigpo", 0.9, "none", 32)
    assert (args.max_completion_length, args.max_failed_fraction, args.loss_type) == (128, 0.2, "dr_grpo")
    pool = args.make_env_pool()
    assert (type(pool), pool.num_workers, args.truncation_penalty) == (EnvThreadPool, 2, 0.5)
    assert args.vllm_server_urls == ("http://a", "http://b")


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


@pytest.mark.parametrize(
    ("changes", "is_warned_of"), [({}, True), ({"epsilon_high": 0.3}, True), ({"epsilon_high": 5.0}, False)]
)
def test_a_bound_of_cispo_that_cuts_every_token_is_warned_of(
    changes: dict[str, float], is_warned_of: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings(tmp_path, loss_type="cispo", **changes)
    assert ("epsilon_high=5.0" in caplog.text) == is_warned_of


def test_a_best_model_that_is_never_saved_is_refused(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "num_iterations": 2}
    for evaluated, saved in ((3, 3), (3, 6), (1, 2)):
        with pytest.raises(ConfigError, match=rf"requires eval_steps \({evaluated}\) to be a multiple of 2"):
            settings(tmp_path, eval_steps=evaluated, save_steps=saved, **best).with_aligned_saving()
    settings(tmp_path, eval_steps=4, save_steps=4, **best).with_aligned_saving()


def test_the_correction_follows_the_sampler_in_a_copy_of_the_settings_too(tmp_path: Path) -> None:
    args = settings(tmp_path)
    assert args.importance_correction is None
    copied = dataclasses.replace(args, use_vllm=True, generation_batch_size=None)
    assert copied.importance_correction == ImportanceCorrection(mode="token_truncate", clip_min=None, clip_max=3.0)
    assert copied.vllm_importance_sampling_correction is None
    assert copied.for_trl().vllm_importance_sampling_correction is True  # TRL's own code knows no None
    assert args.for_trl().vllm_importance_sampling_correction is False
