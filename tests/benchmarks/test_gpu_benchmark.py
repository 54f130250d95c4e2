"""The benchmark of a GPU: its measurements run at a tiny size, its page says what they found, and none is made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_measures
from benchmarks.gpu_measures import SIZES

TINY = SIZES["tiny"]
pytestmark = pytest.mark.filterwarnings("default")  # TRL's trainers


def test_sampling_and_the_gap_of_precisions_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measures.importlib.util, "find_spec", lambda name: None)  # no vLLM
    found = gpu_measures.measure_sampling(TINY, "cpu", tmp_path)
    assert min(found["policy_agent"], found["model_alone"]) > 0
    assert (found["vllm"], found["peak_gb"]) == (None, None)
    gap = gpu_measures.measure_gap(TINY, "cpu")
    assert gap["float32_largest"] < 1e-4 < gap["bfloat16_largest"] < 1
    assert gap["bfloat16_mean"] <= gap["bfloat16_largest"]


def test_the_bare_model_runs_as_many_tokens_as_the_episodes_have() -> None:
    policy = gpu_measures.make_policy(TINY, "cpu", torch.float32)
    counts: list[int] = []
    hook = policy.model.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    gpu_measures.play_bare(policy.model, TINY)
    hook.remove()
    per_turn = gpu_measures.OBSERVATION_TOKENS + gpu_measures.ANSWER_TOKENS - 1
    assert sum(counts) == TINY.num_episodes * TINY.num_turns * per_turn
    played = gpu_measures.play(gpu_measures.policy_agent(policy), policy.tokenizer, TINY)
    answers = TINY.num_turns * gpu_measures.ANSWER_TOKENS
    assert [sum(one.agent_token_mask) for one in played] == [answers] * TINY.num_episodes


def test_steps_of_all_trainers_are_measured(tmp_path: Path) -> None:
    found = gpu_measures.measure_steps(TINY, "cpu", tmp_path)
    assert list(found) == ["GRPOEnvTrainer", "TRL, rollout_func of agentsgym", "TRL, rollout_func by hand"]
    assert all(one["step_s"] > 0 and one["peak_gb"] is None for one in found.values())


def test_a_policy_learns_and_its_curve_is_there(tmp_path: Path) -> None:
    found = gpu_measures.measure_learning(TINY, "cpu", tmp_path / "run")
    assert {"random", "before", "after"} <= found.keys()
    assert all(0 <= low <= mean <= high <= 1 for mean, low, high in (found["before"], found["after"]))
    assert (tmp_path / "run" / "learning_curve.png").is_file()


FOUND: dict[str, Any] = {
    "machine": {"device": "a fine GPU", "torch": "1", "transformers": "2", "trl": "3"},
    "left_out": {},
    "seconds": 12.3,
    "sampling": {"parameters": 4e8, "model_alone": 1000.0, "policy_agent": 800.0, "peak_gb": 1.5, "vllm": 3000.0},
    "gap": {f"{name}_{key}": 1e-3 for name in ("float32", "bfloat16") for key in ("mean", "largest", "kl")},
    "steps": {"GRPOEnvTrainer": {"step_s": 1.25, "peak_gb": 7.5}},
    "learning": {"parameters": 3e7, "before": [0.3, 0.2, 0.4], "after": [0.9, 0.8, 1.0], "seconds": {"x": 60.0}},
}


def test_the_section_says_what_was_found_and_what_was_not() -> None:
    text = gpu.section(FOUND, SIZES["full"])
    for said in ("On a fine GPU", "| `PolicyAgent` | 800 | 0.80 |", "| vLLM | 3,000 | 3.00 |", "| 1.25 | 7.5 |"):
        assert said in text
    assert "before 30.0% [20.0%, 40.0%], after 90.0% [80.0%, 100.0%]" in text
    without = {name: value for name, value in FOUND.items() if name != "steps"} | {"left_out": {"steps": "OutOfMemory"}}
    assert "Not measured: steps (OutOfMemory)." in gpu.section(without, SIZES["full"])


def test_what_fails_is_told_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    for name in ("sampling", "steps", "learning"):
        monkeypatch.setattr(gpu, f"measure_{name}", lambda *_: {"number": 1})
    monkeypatch.setattr(gpu, "measure_gap", fail)
    found = gpu.measure(TINY, "cpu", tmp_path)
    assert found["left_out"] == {"gap": "RuntimeError: no memory"}
    assert found["steps"] == {"number": 1}
    monkeypatch.setattr(gpu, "LAST_START_S", -math.inf)
    assert set(gpu.measure(TINY, "cpu", tmp_path)["left_out"]) == {"sampling", "gap", "steps", "learning"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = gpu.PAGE.read_text()
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 3
    assert capsys.readouterr().err == "no GPU is at hand: nothing was measured, and benchmarks.md is as it was\n"
    assert gpu.PAGE.read_text() == before
    assert gpu.page_with(before, "text").count(gpu.END) == 1
