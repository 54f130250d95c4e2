"""Two ranks under DeepSpeed ZeRO, in tests and in examples/launch, against one process that holds everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_run
import zero_run
from games import policy
from launch import launch
from launched_runs import check_as_one_process, make_policy, train_alone, train_on_two_ranks
from transformers import AutoModelForCausalLM
from whole_models import check_kept, mixed_folder

ON_CPU = {"use_cpu": False, "bf16": False}
WAYS = {1: ["whole"], 2: ["whole"], 3: ["gathered", "in_step"]}  # how the policy is sampled
SCENARIOS = {
    1: [*zero_run.SOME],
    2: [*zero_run.TRAINED],
    3: [name for name in zero_run.TRAINED if name not in zero_run.NOT_SHARDED],
}
TRAINED = [(stage, way, name) for stage, ways in WAYS.items() for way in ways for name in SCENARIOS[stage]]
EACH_WAY = [(stage, way) for stage, ways in WAYS.items() for way in ways]
Outcomes = list[dict[str, Any]]


def write_config(folder: Path, stage: int, **changes: Any) -> Path:
    """A config of DeepSpeed that leaves to the settings what these state."""
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    if stage == 3:  # nothing is kept gathered from one layer to the next
        names = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        zero |= dict.fromkeys(names, 0)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    place = folder / "zero.json"
    place.write_text(json.dumps({**auto, "zero_optimization": zero, **changes}))
    return place


def launch_zero(script: Path, config: Path, *arguments: Path | str, timeout_s: float = 1800) -> Any:
    """Run a script on two ranks under DeepSpeed, which compiles for a minute when it first runs on a machine."""
    return launch(
        *(script, *arguments),
        timeout_s=timeout_s,
        options=("--use_deepspeed", "--deepspeed_config_file", str(config)),
        variables={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all training begins with."""
    folder = tmp_path_factory.mktemp("base")
    policy()[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def one_process(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What one process that packs no rows came to in a scenario."""
    found: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in found:
            trainer = zero_run.trainer_of(name, tmp_path_factory.mktemp("one"), base, shared_prefix="off")
            trainer.train()
            found[name] = zero_run.outcome(trainer)
        return found[name]

    return run


@pytest.fixture(scope="session")
def ranks(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Outcomes]]:
    """The folder in which two ranks left what they saved at a stage, and the outcomes of each."""
    found: dict[int, tuple[Path, Outcomes]] = {}

    def run(stage: int) -> tuple[Path, Outcomes]:
        if stage not in found:
            folder = tmp_path_factory.mktemp(f"zero{stage}")
            reported = ",".join(WAYS[stage]), ",".join(SCENARIOS[stage])
            done = launch_zero(Path(zero_run.__file__), write_config(folder, stage), base, folder, *reported)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
            found[stage] = folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        return found[stage]

    return run


@pytest.mark.parametrize(("stage", "way", "name"), TRAINED)
def test_two_ranks_train_as_one_process_does(stage: int, way: str, name: str, ranks: Any, one_process: Any) -> None:
    one = one_process(name)
    first, second = (outcomes[f"{way} {name}"] for outcomes in ranks(stage)[1])
    assert first["agent"] == ("ShardedPolicyAgent" if way == "in_step" else "PolicyAgent")
    assert (first["num_held"] == 0) == (stage == 3)
    assert first["shares"] is second["shares"] is not one["shares"]
    assert first["weights"] == second["weights"]
    assert any(one["grad_norm"])
    # Where micro-batches are others, so is TRL's mean over them.
    uncompared = {"kl", "entropy"} if "accumulated" in name or "rewritten" in name else set[str]()
    for key in zero_run.WATCHED:
        if key not in uncompared:
            assert first[key] == pytest.approx(one[key], abs=1e-6, rel=1e-6), key
    for key, weights in one["weights"].items():
        torch.testing.assert_close(torch.tensor(first["weights"][key]), torch.tensor(weights), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("stage", "way"), EACH_WAY)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(stage: int, way: str, ranks: Any) -> None:
    for outcomes in ranks(stage)[1]:
        both = outcomes[f"{way} resumed"]
        assert len(both["straight"]["loss"]) == 6
        for key in ("weights", "loss", "grad_norm"):
            assert both["resumed"][key] == both["straight"][key], key


@pytest.mark.parametrize(("stage", "way"), EACH_WAY)
def test_what_is_saved_is_the_whole_model(stage: int, way: str, ranks: Any) -> None:
    folder, (first, _) = ranks(stage)
    saved = AutoModelForCausalLM.from_pretrained(folder / way / "dapo" / "saved")
    assert first[f"{way} dapo"]["weights"] == {key: weights.tolist() for key, weights in saved.named_parameters()}


def test_a_trained_folder_has_every_tensor_of_the_one_it_began_with(tmp_path: Path) -> None:
    folder, changes = mixed_folder("gemma3", tmp_path / "model"), json.dumps({**ON_CPU, "ddp_backend": "gloo"})
    done = launch_zero(Path(whole_run.__file__), write_config(tmp_path, 2), tmp_path, folder, changes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    check_kept(folder, tmp_path / "out" / "model")


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that all training begins with."""
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The run in one process."""
    return train_alone(tmp_path_factory.mktemp("alone") / "run", policy_folder)


@pytest.mark.parametrize(
    ("name", "is_gathered", "agent"),
    [("zero2", True, "PolicyAgent"), ("zero3", True, "PolicyAgent"), ("zero3", False, "ShardedPolicyAgent")],
)
def test_two_ranks_train_what_one_process_does(
    name: str, is_gathered: bool, agent: str, alone: Path, policy_folder: Path, tmp_path: Path
) -> None:
    on_cpu = {**ON_CPU, "ddp_backend": "gloo", "ds3_gather_for_generation": is_gathered}
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    printed = train_on_two_ranks(name, tmp_path / "run", policy_folder, variables, **on_cpu)
    assert "DEEPSPEED, 2 processes: step 2" in printed
    check_as_one_process(name, tmp_path / "run", alone, agent=agent)
