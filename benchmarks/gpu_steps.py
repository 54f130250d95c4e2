"""Training steps for the benchmark of a GPU: our trainer, TRL's, vLLM in and out of the process, shards, long rows.

Rows that start engines or ranks run in processes of their own: ``python -m benchmarks.gpu_steps`` runs one of them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and TRL leave parts of their signatures untyped.

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from agentsgym import CopiedPolicyAgent, Field, GRPOEnvConfig, GRPOEnvTrainer, ScriptedAgent
from agentsgym.agents.policy.loading import converted
from agentsgym.fields import is_int
from agentsgym.interop import environment_reward, prompt_dataset, rollout_func
from benchmarks.gpu_measures import Setup, Size, load, peak_of
from benchmarks.stock_trl import ANSWER_TOKENS, Echo, by_hand

logger = logging.getLogger(__name__)
ROOT: Final = Path(__file__).parents[1]
TIMEOUT_S: Final = 300.0
MEMORY_TURNS: Final = 4
# Of processes without a GPU; the names with VLLM are read when it is imported.
ON_CPU: Final = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way to train.

    Attributes:
        trainer: Whose it is.
        settings: Fields of ``GRPOEnvConfig``.
        shards: Name of the configuration of examples/launch that it runs under; None to run in one process.
        engine: Where vLLM samples; None for the trained model itself.
    """

    trainer: str = "agentsgym"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shards: str | None = None
    engine: str | None = None

    def missing(self, device: str) -> str | None:
        """Why it cannot run here; None if it can."""
        num_gpus = torch.cuda.device_count()
        if self.engine and importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed"
        if (self.shards or self.engine == "server") and device == "cuda" and num_gpus < 2:
            return "it takes two GPUs"
        if self.shards == "zero2" and importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed"
        return None


ROWS: Final = {
    "`GRPOEnvTrainer`": Row(),
    "`GRPOEnvTrainer`, `max_staleness=1`": Row(settings={"max_staleness": 1}),
    "TRL, `rollout_func` of agentsgym": Row(trainer="trl"),
    "TRL, `rollout_func` by hand": Row(trainer="by hand"),
    "`GRPOEnvTrainer`, FSDP2": Row(shards="fsdp2"),
    "`GRPOEnvTrainer`, ZeRO-2": Row(shards="zero2"),
    "`GRPOEnvTrainer`, vLLM colocated": Row(engine="colocate"),
    "`GRPOEnvTrainer`, vLLM server": Row(engine="server"),
    "`GRPOEnvTrainer`, vLLM server, `max_staleness=1`": Row(engine="server", settings={"max_staleness": 1}),
}


class StepClock(TrainerCallback):
    """Takes the time of each optimizer step, its rollouts included."""

    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self._device, self._start = device, 0.0

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin."""
        self._start = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the step took."""
        now = self._now()
        self.seconds.append(now - self._start)
        self._start = now


class LongEcho(Echo):
    """Echo with observations of any length."""

    config_fields: ClassVar = {"num_words": Field(default=12, expected="a positive int", valid=is_int(1))}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return " ".join(f"{state['rng'].randrange(100)}" for _ in range(self.env_config["num_words"]))


def settings_of(setup: Setup, folder: Path) -> dict[str, Any]:
    """The settings that all trainers share."""
    size, on_gpu = setup.size, setup.device == "cuda"
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    batch_size = max(1, min(8, size.num_episodes) // num_ranks)
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "gradient_checkpointing": on_gpu,
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": size.num_repeats + 1,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": max(1, size.num_episodes // (batch_size * num_ranks)),
        "num_generations": min(8, size.num_episodes),
        "max_completion_length": size.num_train_turns * 64,
    }


def ours(setup: Setup, folder: Path, changes: Mapping[str, Any], *, words: int = 12, num_turns: int = 0) -> Any:
    """Our trainer, with changed settings, words per observation, or turns."""
    policy = load(setup, torch.float32)
    settings: dict[str, Any] = {**settings_of(setup, folder), "max_turn_tokens": ANSWER_TOKENS, **changes}
    turns = num_turns or setup.size.num_train_turns
    env = LongEcho(policy.tokenizer, {"max_steps_per_episode": turns, "num_words": words})
    args = GRPOEnvConfig(**settings)
    agent = (
        CopiedPolicyAgent(*policy, max_turn_tokens=ANSWER_TOKENS) if args.max_staleness and not args.use_vllm else None
    )
    return GRPOEnvTrainer(policy.model, env, args, train_dataset=_rows(setup.size), agent=agent)


def of_trl(row: Row, setup: Setup, folder: Path) -> Any:
    """TRL's trainer with a rollout function and the function of its rewards."""
    turns = setup.size.num_train_turns
    if row.trainer == "by hand":
        function: Any = by_hand(turns)
        reward: Any = no_reward
    else:
        function = rollout_func(
            lambda tokenizer: Echo(tokenizer, {"max_steps_per_episode": turns}), max_turn_tokens=ANSWER_TOKENS
        )
        reward = environment_reward
    policy = load(setup, torch.float32)
    args = GRPOConfig(**settings_of(setup, folder))
    rows = prompt_dataset(_rows(setup.size))
    return GRPOTrainer(policy.model, reward, args, rows, processing_class=policy.tokenizer, rollout_func=function)


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return no rewards, for rollouts that are played by hand."""
    return [0.0] * len(completions)


def _rows(size: Size) -> Any:
    return Dataset.from_list([{"task_data": {"seed": seed}} for seed in range(4 * size.num_episodes)])


def train(row: Row, setup: Setup, folder: Path) -> dict[str, Any]:
    """Train some steps in this process, and return their median time and the peak memory."""
    trainer = ours(setup, folder, row.settings) if row.trainer == "agentsgym" else of_trl(row, setup, folder)
    return timed(trainer, setup.device)


def timed(trainer: Any, device: str) -> dict[str, Any]:
    """Return the median time of a step, without the first, and the peak memory."""
    clock = StepClock(device)
    trainer.add_callback(clock)
    try:
        peak = peak_of(trainer.train, device)
    finally:
        if isinstance(trainer, GRPOEnvTrainer):
            trainer.close()
    return {"step_s": round(statistics.median(clock.seconds[1:] or clock.seconds), 3), "peak_gb": peak}


def measure_steps(setup: Setup, folder: Path) -> dict[str, dict[str, Any]]:
    """Seconds of a training step and its peak memory, by row; or why a row was left out."""
    found: dict[str, dict[str, Any]] = {}
    timed(ours(setup, folder / "warm_up", {"max_steps": 1}), setup.device)  # what runs first loads the kernels
    for number, (name, row) in enumerate(ROWS.items()):
        reason = row.missing(setup.device)
        if reason is None:
            try:
                run = train_apart if row.shards or row.engine else train
                found[name] = run(row, setup, folder / str(number))
            except Exception as error:  # the other rows are still useful
                logger.exception("%s could not be measured", name)
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            found[name] = {"left_out": reason}
    return found


def measure_memory(setup: Setup, folder: Path) -> dict[str, dict[str, Any]]:
    """Peak memory and time of the second step over rows of growing length, with and without recomputed activations."""
    found: dict[str, dict[str, Any]] = {}
    size = setup.size._replace(num_episodes=min(8, setup.size.num_episodes))
    tokenizer = load(setup, torch.float32).tokenizer
    for length in size.lengths:
        words = max(1, length // (3 * MEMORY_TURNS) - ANSWER_TOKENS)  # "37 " is three tokens
        env = LongEcho(tokenizer, {"max_steps_per_episode": MEMORY_TURNS, "num_words": words})
        row: dict[str, Any] = {"tokens": _tokens_of_prompts(env)}
        for recomputes in (False, True):
            key = "recomputed" if recomputes else "kept"
            changes = {"gradient_checkpointing": recomputes, "max_steps": 2, "max_completion_length": 2 * length}
            try:
                trainer = ours(setup._replace(size=size), folder, changes, words=words, num_turns=MEMORY_TURNS)
                row[key] = timed(trainer, setup.device)
            except torch.OutOfMemoryError:
                row[key] = {"left_out": "out of memory"}
        found[str(length)] = row
    return found


def _tokens_of_prompts(env: LongEcho) -> int:
    [one] = env.rollout([{"seed": 0}], ScriptedAgent(["37"] * MEMORY_TURNS))
    return len(one.token_ids)


def train_apart(row: Row, setup: Setup, folder: Path) -> dict[str, Any]:
    """Train in processes of their own, beside a vLLM server if the row has one."""
    folder.mkdir(parents=True)
    name = next(name for name, one in ROWS.items() if one is row)
    with _server(row, setup, folder) as url:
        task = {"name": name, "setup": setup, "folder": str(folder), "url": url}
        _run(_command(row, setup, json.dumps(task)), folder, visible=row.engine == "server")
    return json.loads((folder / "found.json").read_text())


def _command(row: Row, setup: Setup, task: str) -> list[str]:
    if row.shards is None:
        return [sys.executable, "-m", "benchmarks.gpu_steps", task]
    config = ROOT / "examples" / "launch" / "accelerate" / f"{row.shards}.yaml"
    num_ranks = torch.cuda.device_count() if setup.device == "cuda" else 2
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--num_processes", str(num_ranks), "--num_machines", "1", "--main_process_port", "0"]
    launcher += [] if setup.device == "cuda" else ["--mixed_precision", "no"]
    return [*launcher, "-m", "benchmarks.gpu_steps", task]


def _run(command: list[str], folder: Path, *, visible: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if not torch.cuda.is_available():
        environment |= ON_CPU
    elif visible:  # the server has the other GPU
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise RuntimeError(last_words(folder / "log"))


def last_words(log: Path) -> str:
    """Return the first error in a log, or its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*Error: ", line)]
    return (errors or lines[-1:] or ["no output"])[0]


@contextlib.contextmanager
def _server(row: Row, setup: Setup, folder: Path) -> Generator[str | None]:
    """Serve the model with vLLM on the second GPU, or on the CPU, and yield its address."""
    if row.engine != "server":
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", converted(setup.model)]
    command += ["--max-model-len", "4096", "--logprobs-mode", "processed_logprobs", "--port", str(port)]
    if setup.device == "cuda":
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    else:
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", "32"]
    environment = {**os.environ, **ON_CPU} if setup.device == "cpu" else {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(process, f"{url}/health", folder / "server.log")
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _wait_for(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the vLLM server did not start: {last_words(log)}")


def _use_vllm_on_cpu() -> None:
    """Let TRL's vLLM classes run on a CPU, as in the tests: they exchange weights without NCCL."""
    sys.path.append(str(ROOT / "tests" / "with_vllm"))
    support: Any = importlib.import_module("cpu_support")
    grpo_trainer.VLLMGeneration = support.CPUGeneration


def _shard_on_cpu() -> None:
    """Let accelerate shard on ranks without accelerators, as in the tests."""
    sys.path.append(str(ROOT / "tests" / "training"))
    PartialState(cpu=True)
    importlib.import_module("sharded_run").shard_on_cpu(GRPOEnvTrainer)


def main() -> None:
    """Train one row in this process, and write what was found."""
    task = json.loads(sys.argv[1])
    row, folder = ROWS[task["name"]], Path(task["folder"])
    model, device, size = task["setup"]
    setup = Setup(model, device, Size(*size))
    changes: dict[str, Any] = dict(row.settings)
    if row.engine:
        changes |= {"use_vllm": True, "vllm_mode": row.engine, "vllm_server_base_url": task["url"]}
        changes |= {"vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 4096}
        if device == "cpu":
            _use_vllm_on_cpu()
    if row.shards and device == "cpu":
        changes |= {"use_cpu": row.shards != "zero2", "ddp_backend": "gloo"}
        if row.shards == "fsdp2":
            _shard_on_cpu()
    found = timed(ours(setup, folder / "run", changes), device)
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
