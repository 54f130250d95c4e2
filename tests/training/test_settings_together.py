"""Combinations of settings that are refused, and their neighbors that are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from games import correcting, settings

from agentsgym import ConfigError, ScoredRollout
from agentsgym.training.tensors.loss_types import LOSS_TYPES
from agentsgym.training.validation import _COMBINATIONS


def of_ones_own(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> Sequence[Sequence[float]]:
    """An estimator that may look at values."""
    return [[0.0] * len(rollout.turn_rewards) for rollout in rollouts]


# (setting to blame, words of the reason, settings that do not go together, neighbors that do).
TOGETHER: list[tuple[str, str, dict[str, Any], list[dict[str, Any]]]] = [
    (
        "top_entropy_quantile",
        "TRL's quantile",
        {"top_entropy_quantile": 0.5, "layout": "turn"},
        [{"top_entropy_quantile": 0.5}, {"layout": "turn"}],
    ),
    *(
        (
            "vllm_server_base_url",
            "requires use_vllm=True",
            {"vllm_server_base_url": given, "use_vllm": True, "vllm_mode": "colocate"},
            [{"vllm_server_base_url": given, "use_vllm": True, "vllm_mode": "server"}],
        )
        for given in ("http://a", ["http://a", "http://b"])
    ),
    *(
        (
            "merge_adapters_for_sampling",
            "not vLLM or an agent with a copy",
            {"merge_adapters_for_sampling": True} | other,
            [{"merge_adapters_for_sampling": True}, other],
        )
        for other in ({"use_vllm": True}, {"max_staleness": 1})
    ),
    (
        "max_staleness",
        "cannot sample during training",
        {"max_staleness": 1, "use_vllm": True, "vllm_mode": "colocate"},
        [{"max_staleness": 1, "use_vllm": True, "vllm_mode": "server"}, {"use_vllm": True, "vllm_mode": "colocate"}],
    ),
    (
        "max_staleness",
        "require the correction for the sampler",
        {"max_staleness": 1, "vllm_importance_sampling_correction": False},
        [{"max_staleness": 1}, {"vllm_importance_sampling_correction": False}],
    ),
    (
        "max_staleness",
        "cannot be resampled",
        {"max_staleness": 1, "zero_variance_groups": "resample"},
        [{"max_staleness": 1, "zero_variance_groups": "drop"}, {"zero_variance_groups": "resample"}],
    ),
    ("retry_seed", "no rollout is replayed", {"retry_seed": "new"}, [{"retry_seed": "new", "episode_retries": 1}]),
    ("min_group_size", "every group would be dropped", {"min_group_size": 5}, [{"min_group_size": 4}]),
    (
        "generation_kwargs",
        "requires use_vllm",
        {"generation_kwargs": {"top_k": 3}},
        [{"generation_kwargs": {}}, {"generation_kwargs": {"top_k": 3}, "use_vllm": True}],
    ),
    *(
        (
            "vllm_importance_sampling_correction",
            "have no effect without a correction",
            bounds,
            [
                {**bounds, "vllm_importance_sampling_correction": True},
                {**bounds, "use_vllm": True},
                {**bounds, "use_vllm": True, "vllm_importance_sampling_correction": False},  # TRL has them there
            ],
        )
        for name, value in (("clip_min", 0.1), ("clip_max", 3.0), ("mode", "token_mask"))
        for bounds in ({f"vllm_importance_sampling_{name}": value},)
    ),
    *(
        (
            "vllm_importance_sampling_mode",
            "lower bound must be below",
            {**correcting("token_mask", low=low), **sampler},
            [correcting("token_mask", low=low, high=4.0) | sampler, correcting("sequence_mask", high=0.1) | sampler],
        )
        for low, sampler in ((2.0, {}), (3.0, {"use_vllm": True}))
    ),
    (
        "vllm_importance_sampling_mode",
        "must be that of a single token",
        {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "geometric_mask"},
        [
            {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
            {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
            {"use_vllm": True, "loss_type": "dapo", "vllm_importance_sampling_mode": "geometric_mask"},
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
            "mean over all agent tokens",
            {"loss_aggregation": "turn", "loss_type": loss_type},
            [{"loss_type": loss_type}, {"loss_aggregation": "turn", "loss_type": "dapo"}],
        )
        for loss_type in ("grpo", "bnpo", "dr_grpo", "sapo", "luspo")
    ),
    *(
        (
            "loss_aggregation",
            "mean over all agent tokens",
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
            "weight the KL of each row",
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
            "requires values",
            {"advantage_estimator": name},
            [{"advantage_estimator": name, "value_head": head} for head in ("shared", "separate")],
        )
        for name in ("turn_gae", "bilevel_gae")
    ),
    (
        "value_head",
        "use values",
        {"value_head": "shared"},
        [{"value_head": "shared", "advantage_estimator": of_ones_own}],
    ),
    (
        "sync_ref_model",
        "sharded checkpoints do not contain",
        {"sync_ref_model": True, "beta": 0.1, "fsdp": True},
        [{"sync_ref_model": True, "beta": 0.1}, {"beta": 0.1, "fsdp": True}],
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
        "value_head_kwargs",
        "requires a value head",
        {"value_head_kwargs": {"learning_rate": 1e-3}},
        [
            {"value_head_kwargs": options, "value_head": "separate", "advantage_estimator": "turn_gae"}
            for options in ({"learning_rate": 1e-3}, '{"loss_weight": 0.5}', {})
        ],
    ),
    (
        "scale_rewards",
        "unchanged and unscaled",
        {"scale_rewards": "batch", "advantage_estimator": "reward"},
        [
            {"scale_rewards": "batch"},
            *({"scale_rewards": scale, "advantage_estimator": "reward"} for scale in ("group", "none")),
        ],
    ),
    (
        "truncated_rollouts",
        "masks the rollouts that it penalizes",
        {"truncated_rollouts": 0.5, "mask_truncated_completions": True},
        [
            {"truncated_rollouts": 0.5},
            {"mask_truncated_completions": True},
            {"truncated_rollouts": "mask", "mask_truncated_completions": True},
        ],
    ),
    (
        "truncated_rollouts",
        "per-token rewards unchanged",
        {"truncated_rollouts": 0.5, "advantage_estimator": "reward"},
        [
            {"truncated_rollouts": 0.5},
            {"truncated_rollouts": "mask", "advantage_estimator": "reward"},
            {"advantage_estimator": "reward"},
        ],
    ),
]


@pytest.mark.parametrize(("name", "words", "changes", "neighbors"), TOGETHER)
def test_what_does_not_go_together_is_refused_and_its_neighbors_are_not(
    name: str, words: str, changes: dict[str, Any], neighbors: list[dict[str, Any]], tmp_path: Path
) -> None:
    [reason] = [reason for blamed, _, reason in _COMBINATIONS if blamed == name and words in reason]
    given = changes.get(name, getattr(settings(tmp_path), name))
    with pytest.raises(ConfigError) as refusal:
        settings(tmp_path, **changes)
    assert str(refusal.value) == f"GRPOEnvConfig({name}={given!r}) is not supported: {reason}"
    for neighbor in neighbors:
        settings(tmp_path, **neighbor)


def test_every_pair_that_is_refused_is_tested() -> None:
    tested = {(name, reason) for name, words, *_ in TOGETHER for _, _, reason in _COMBINATIONS if words in reason}
    assert {(name, reason) for name, _, reason in _COMBINATIONS} <= tested
