"""The benchmark of a GPU measures at a tiny size, reports what it left out, and writes its page only from a GPU."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentsgym.testing import chat_tokenizer
from benchmarks import gpu, gpu_measures, gpu_steps
from benchmarks.gpu_measures import SIZES, Setup

TINY = SIZES["tiny"]
pytestmark = pytest.mark.filterwarnings("default")  # TRL's trainers


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A tiny random model in a folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer: Any = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Setup(str(folder), "cpu", TINY)


@pytest.fixture
def nothing_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither vLLM nor DeepSpeed is installed."""
    find = importlib.util.find_spec
    hidden = ("vllm", "deepspeed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else find(name, *more))


@pytest.mark.usefixtures("nothing_optional")
def test_sampling_and_the_gap_of_precisions_are_measured(setup: Setup, tmp_path: Path) -> None:
    found = gpu_measures.measure_sampling(setup, tmp_path)
    assert min(found["policy_agent"], found["model_alone"]) > 0
    assert (found["vllm"], found["peak_gb"]) == (None, None)
    gap = gpu_measures.measure_gap(setup, tmp_path)
    assert gap["float32_largest"] < 1e-4 < gap["bfloat16_largest"] < 1
    assert gap["bfloat16_mean"] <= gap["bfloat16_largest"]


def test_the_bare_model_runs_as_many_tokens_as_the_episodes_have(setup: Setup) -> None:
    policy = gpu_measures.load(setup, torch.float32)
    counts: list[int] = []
    hook = policy.model.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    gpu_measures.play_bare(policy.model, TINY)
    hook.remove()
    per_turn = gpu_measures.OBSERVATION_TOKENS + gpu_measures.ANSWER_TOKENS - 1
    assert sum(counts) == TINY.num_episodes * TINY.num_turns * per_turn
    played = gpu_measures.play(gpu_measures.policy_agent(policy), policy.tokenizer, TINY)
    answers = TINY.num_turns * gpu_measures.ANSWER_TOKENS
    assert [sum(one.agent_token_mask) for one in played] == [answers] * TINY.num_episodes


@pytest.mark.usefixtures("nothing_optional")
def test_steps_of_all_trainers_are_measured(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no ranks here")

    monkeypatch.setattr(gpu_steps, "train_apart", fail)
    found = gpu_steps.measure_steps(setup, tmp_path)
    reasons = {name: one.pop("left_out") for name, one in found.items() if "left_out" in one}
    assert reasons == {
        "`GRPOEnvTrainer`, FSDP2": "RuntimeError: no ranks here",
        "`GRPOEnvTrainer`, ZeRO-2": "DeepSpeed is not installed",
        "`GRPOEnvTrainer`, vLLM colocated": "vLLM is not installed",
        "`GRPOEnvTrainer`, vLLM server": "vLLM is not installed",
        "`GRPOEnvTrainer`, vLLM server, `max_staleness=1`": "vLLM is not installed",
    }
    measured = [one for name, one in found.items() if name not in reasons]
    assert len(measured) == 4
    assert all(one["step_s"] > 0 and one["peak_gb"] is None for one in measured)


@pytest.mark.long
def test_a_row_on_ranks_runs_in_processes_of_its_own(setup: Setup, tmp_path: Path) -> None:
    found = gpu_steps.train_apart(gpu_steps.ROWS["`GRPOEnvTrainer`, FSDP2"], setup, tmp_path / "row")
    assert found["step_s"] > 0


def test_the_reason_of_a_failed_process_is_its_first_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\n  Error in a line\n[rank0]: torch.OutOfMemoryError: CUDA\nlater.ChildFailedError: \n")
    assert gpu_steps.last_words(log) == "[rank0]: torch.OutOfMemoryError: CUDA"
    log.write_text("")
    assert gpu_steps.last_words(log) == "no output"


def test_memory_is_measured_by_length(setup: Setup, tmp_path: Path) -> None:
    found = gpu_steps.measure_memory(setup, tmp_path)
    assert list(found) == ["64", "128"]
    short, long = (row["tokens"] for row in found.values())
    assert 32 <= short < long <= 192
    assert all(row[key]["step_s"] > 0 for row in found.values() for key in ("kept", "recomputed"))


FOUND: dict[str, Any] = {
    "machine": {"device": "a fine GPU", "model": "smollm2", "torch": "1", "transformers": "2", "trl": "3"},
    "left_out": {},
    "seconds": 12.3,
    "sampling": {"parameters": 4e8, "model_alone": 1000.0, "policy_agent": 800.0, "peak_gb": 1.5, "vllm": 3000.0},
    "gap": {f"{name}_{key}": 1e-3 for name in ("float32", "bfloat16") for key in ("mean", "largest", "kl")},
    "memory": {
        "1024": {"tokens": 1011, "kept": {"left_out": "out of memory"}, "recomputed": {"step_s": 0.5, "peak_gb": 3.25}}
    },
    "steps": {"`GRPOEnvTrainer`": {"step_s": 1.25, "peak_gb": 7.5}, "other": {"left_out": "it takes two GPUs"}},
}


def test_the_section_names_what_was_found_and_what_was_not() -> None:
    text = gpu.section(FOUND, SIZES["full"])
    for output in (
        "`smollm2` on a fine GPU",
        "| `PolicyAgent` | 800 | 0.80 |",
        "| vLLM | 3,000 | 3.00 |",
        "| 1,011 | out of memory | 3.25 GB, 0.50 s |",
        "| `GRPOEnvTrainer` | 1.25 s | 7.5 |",
        "| other | it takes two GPUs |  |",
    ):
        assert output in text
    without = {name: value for name, value in FOUND.items() if name != "steps"} | {"left_out": {"steps": "OutOfMemory"}}
    assert "Not measured: steps (OutOfMemory)." in gpu.section(without, SIZES["full"])


def test_what_fails_is_reported_and_the_rest_is_measured(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    for name in gpu.MEASURES:
        monkeypatch.setitem(gpu.MEASURES, name, lambda *_: {"number": 1})
    monkeypatch.setitem(gpu.MEASURES, "gap", fail)
    found = gpu.measure(setup, tmp_path)
    assert found["left_out"] == {"gap": "RuntimeError: no memory"}
    assert found["steps"] == {"number": 1}
    monkeypatch.setattr(gpu, "LAST_START_S", -math.inf)
    assert set(gpu.measure(setup, tmp_path)["left_out"]) == set(gpu.MEASURES)


def test_a_run_on_a_cpu_leaves_the_page(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = gpu.PAGE.read_text()
    options = ["--model", setup.model, "--device", "cpu", "--size", "tiny", "--only", "gap", "--json"]
    monkeypatch.setattr("sys.argv", ["gpu", *options])
    assert gpu.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["machine"]["device"] == "a CPU"
    assert "sampling" not in found
    assert gpu.PAGE.read_text() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_reports_it_and_leaves_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = gpu.PAGE.read_text()
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 3
    assert capsys.readouterr().err == "no GPU is at hand: nothing was measured, and benchmarks.md is as it was\n"
    assert gpu.PAGE.read_text() == before
    assert gpu.page_with(before, "text").count(gpu.END) == 1
