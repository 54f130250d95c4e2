"""What DeepSpeed is given before it starts, and what its config must not contradict; it need not be installed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from accelerate.utils import DistributedType
from games import policy, settings

from agentsgym import ConfigError, MissingDependencyError, PolicyAgent
from agentsgym.agents.policy.sharded import ShardedPolicyAgent, policy_agent_type
from agentsgym.training import zero
from agentsgym.training.lifecycle.checkpoint_files import write_manifest
from agentsgym.training.lifecycle.resuming import facts_of, find_resume_point
from agentsgym.training.model_checks import check_parts

LAUNCHED = "ACCELERATE_USE_DEEPSPEED"


def plugin_of(stage: int = 2, mismatches: tuple[str, ...] = (), **config: Any) -> Any:
    """Accelerate's plugin as far as it is read."""
    config = {"zero_optimization": {"stage": stage}, **config}
    return SimpleNamespace(zero_stage=stage, hf_ds_config=SimpleNamespace(config=config, mismatches=[*mismatches]))


def accelerator_of(plugin: Any) -> Any:
    return SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, is_fsdp2=False, state=SimpleNamespace(deepspeed_plugin=plugin)
    )


def given(**values: Any) -> Any:
    """Settings as they are before they are checked."""
    return SimpleNamespace(**{"deepspeed": None, "use_cpu": False, "ddp_backend": None, **values})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed seems to be installed, on a machine without an accelerator."""
    monkeypatch.setattr(zero, "find_spec", lambda name: name)
    monkeypatch.setattr(zero.torch.accelerator, "is_available", lambda: False)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install 'agentsgym\\[deepspeed\\]'"):
        zero.check_launch(given(deepspeed="zero2.json"))
    monkeypatch.setenv(LAUNCHED, "true")
    with pytest.raises(MissingDependencyError, match="pip install 'agentsgym\\[deepspeed\\]'"):
        zero.check_launch(given())


def test_nothing_is_demanded_of_a_run_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    monkeypatch.setenv(LAUNCHED, "false")
    args = given(use_cpu=True)
    zero.check_launch(args)
    assert args.ddp_backend is None


@pytest.mark.usefixtures("installed")
def test_on_cpus_the_launcher_starts_deepspeed_and_the_settings_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="leave it out, and start with `accelerate launch --use_deepspeed"):
        zero.check_launch(given(deepspeed={"zero_optimization": {"stage": 2}}))
    monkeypatch.setenv(LAUNCHED, "true")
    with pytest.raises(ConfigError, match="each rank would train its own model"):
        zero.check_launch(given(use_cpu=True))
    monkeypatch.setenv("CXX", "sh")  # on every machine
    args = given()
    zero.check_launch(args)
    assert args.ddp_backend == "gloo"
    args = given(ddp_backend="mpi")
    zero.check_launch(args)
    assert args.ddp_backend == "mpi"


@pytest.mark.usefixtures("installed")
def test_a_missing_compiler_is_reported_before_deepspeed_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "true")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="'no-such-compiler' was not found: install a C\\+\\+ compiler"):
        zero.check_launch(given())


def test_a_config_that_contradicts_the_settings_is_refused_with_both_values(tmp_path: Path) -> None:
    mismatches = ("- ds gradient_accumulation_steps=4 vs hf gradient_accumulation_steps=1",)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4 there, and gradient_accumulation_steps=1 in"):
        zero.check_config(settings(tmp_path), plugin_of(mismatches=mismatches))


@pytest.mark.parametrize(
    ("config", "message"),
    [({"stage": 0}, "ZeRO stage 0"), ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size above 1")],
)
def test_a_config_that_would_train_otherwise_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        zero.check_config(settings(tmp_path), plugin_of(**config))


def test_a_config_without_values_is_given_those_of_the_settings(tmp_path: Path) -> None:
    plugin = plugin_of()
    zero.check_config(settings(tmp_path, max_grad_norm=0.5), plugin)
    config = plugin.hf_ds_config.config
    assert (config["gradient_clipping"], config["train_micro_batch_size_per_gpu"]) == (0.5, 8)
    plugin = plugin_of(gradient_clipping=0.25, train_batch_size=16)
    zero.check_config(settings(tmp_path, max_grad_norm=0.5), plugin)
    assert plugin.hf_ds_config.config["gradient_clipping"] == 0.25
    assert "train_micro_batch_size_per_gpu" not in plugin.hf_ds_config.config


def test_checkpoints_without_a_whole_model_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = settings(tmp_path, save_strategy="steps")
    whole = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    with caplog.at_level(logging.WARNING):
        zero.check_config(args, plugin_of(stage=3, zero_optimization=whole))
        assert not caplog.messages
        zero.check_config(args, plugin_of(stage=3))
    assert "zero_to_fp32.py" in caplog.text


@pytest.mark.parametrize(("stage", "gathers"), [(1, True), (2, False), (3, True), (3, False)])
def test_only_zero_3_that_does_not_gather_samples_in_step(stage: int, *, gathers: bool) -> None:
    agent_type = policy_agent_type(accelerator_of(plugin_of(stage)), gathers=gathers)
    assert agent_type is (ShardedPolicyAgent if (stage, gathers) == (3, False) else PolicyAgent)


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (
            2,
            {"value_head": "shared", "advantage_estimator": "turn_gae"},
            "DeepSpeed's optimizer updates only the policy's",
        ),
        (3, {"value_head": "shared", "advantage_estimator": "turn_gae"}, "value_head is untested with sharded"),
        (3, {"sync_ref_model": True, "beta": 0.1}, "sync_ref_model is untested with sharded weights"),
    ],
)
def test_what_deepspeed_cannot_train_is_refused_where_the_launcher_names_it(
    stage: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    args = settings(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        check_parts(*policy(), args, accelerator_of(plugin_of(stage)), has_aux_loss=False, has_own_scheduler=False)


def checkpoint(folder: Path, *, num_ranks: int, stage: int) -> Path:
    """A checkpoint by its files' names and what is written of it."""
    place = folder / "checkpoint-1"
    (place / "global_step1").mkdir(parents=True)
    names = ["scheduler.pt", *(f"rng_state_{rank}.pth" for rank in range(num_ranks))]
    if stage:
        names += ["global_step1/zero_mp_rank_00_model_states.pt", "global_step1/zero_mp_rank_00_optim_states.pt"]
    else:
        names += ["pytorch_model.bin", "optimizer.pt"]
    for name in names:
        with ZipFile(place / name, "w") as archive:
            archive.writestr("data", "")
    (place / "trainer_state.json").write_text('{"global_step": 1, "epoch": 0.5}')
    write_manifest(place, num_ranks=num_ranks, zero_stage=stage)
    return place


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ((2, 2), (1, 0), "saved under DeepSpeed ZeRO-2, but this run is without DeepSpeed"),
        ((2, 0), (2, 3), "saved without DeepSpeed, but this run is under DeepSpeed ZeRO-3"),
        ((2, 2), (2, 3), "saved under DeepSpeed ZeRO-2, but this run is under DeepSpeed ZeRO-3"),
        ((2, 3), (4, 3), "saved by 2 ranks under DeepSpeed"),
        ((2, 3), (2, 3), None),
    ],
)
def test_the_state_of_another_engine_is_not_resumed_from(
    saved: tuple[int, int], now: tuple[int, int], message: str | None, tmp_path: Path
) -> None:
    place = checkpoint(tmp_path, num_ranks=saved[0], stage=saved[1])
    args = settings(tmp_path)
    facts = {**facts_of(args, [None] * 8), "num_ranks": now[0], "zero_stage": now[1]}
    if message is None:
        assert find_resume_point(str(place), tmp_path, args, facts, 4).step == 1
        return
    with pytest.raises(ConfigError, match=message):
        find_resume_point(str(place), tmp_path, args, facts, 4)
