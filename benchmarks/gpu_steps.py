"""Training steps for the benchmark of a GPU: our trainer, TRL's, adapters, long rows."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and TRL leave parts of their signatures untyped.

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentsgym import CopiedPolicyAgent, Field, GRPOEnvConfig, GRPOEnvTrainer, ScriptedAgent
from agentsgym.fields import is_int
from agentsgym.interop import environment_reward, prompt_dataset, rollout_func
from benchmarks.gpu_measures import LORA, Rows, Sample, Setup, Size, load
from benchmarks.shared_prefix import now
from benchmarks.stock_trl import ANSWER_TOKENS, Echo, by_hand

MEMORY_TURNS: Final = 4


class Row(NamedTuple):
    """A way to train.

    Attributes:
        trainer: Whose it is.
        settings: Fields of ``GRPOEnvConfig``.
        adapters: Whether only LoRA is trained.
    """

    trainer: str = "agentsgym"
    settings: Mapping[str, Any] = MappingProxyType({})
    adapters: bool = False


ROWS: Final = {
    "`GRPOEnvTrainer`": Row(),
    "`GRPOEnvTrainer`, LoRA": Row(adapters=True),
    "`GRPOEnvTrainer`, `max_staleness=1`": Row(settings={"max_staleness": 1, "max_steps": 3}),
    "TRL, `rollout_func` of agentsgym": Row(trainer="trl"),
    "TRL, `rollout_func` by hand": Row(trainer="by hand"),
}


class StepClock(TrainerCallback):
    """Takes the time of each optimizer step, its rollouts included."""

    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self._device, self._start = device, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin."""
        self._start = now(self._device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the step took."""
        self.seconds.append(now(self._device) - self._start)
        self._start = now(self._device)


class LongEcho(Echo):
    """Echo with observations of any length."""

    config_fields: ClassVar = {"num_words": Field(default=12, expected="a positive int", valid=is_int(1))}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return " ".join(f"{state['rng'].randrange(100)}" for _ in range(self.env_config["num_words"]))


def settings_of(setup: Setup, folder: Path) -> dict[str, Any]:
    """The settings that all trainers share."""
    size, on_gpu = setup.size, setup.device == "cuda"
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "gradient_checkpointing": on_gpu,
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": 2,
        "per_device_train_batch_size": min(8, size.episodes),
        "gradient_accumulation_steps": max(1, size.episodes // 8),
        "num_generations": min(8, size.episodes),
        "max_completion_length": size.train_turns * 64,
    }


def ours(row: Row, setup: Setup, folder: Path, *, words: int = 12, num_turns: int = 0, **changes: Any) -> Any:
    """Our trainer, with other words per observation, turns, or settings."""
    policy = load(setup, torch.float32)
    settings: dict[str, Any] = {**settings_of(setup, folder), "max_turn_tokens": ANSWER_TOKENS, **row.settings}
    args = GRPOEnvConfig(**{**settings, **changes})
    env = LongEcho(policy.tokenizer, {"max_steps_per_episode": num_turns or setup.size.train_turns, "num_words": words})
    more: dict[str, Any] = {"peft_config": LoraConfig(**LORA)} if row.adapters else {}
    if args.max_staleness:
        more["agent"] = CopiedPolicyAgent(*policy, max_turn_tokens=ANSWER_TOKENS)
    return GRPOEnvTrainer(policy.model, env, args, train_dataset=_rows(setup.size), **more)


def of_trl(row: Row, setup: Setup, folder: Path) -> Any:
    """TRL's trainer with a rollout function and the function of its rewards."""
    turns = setup.size.train_turns
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
    return Dataset.from_list([{"task_data": {"seed": seed}} for seed in range(4 * size.episodes)])


def train(row: Row, setup: Setup, folder: Path) -> Generator[Sample]:
    """Train in this process: each sample is the second step of a new trainer."""
    while True:
        yield from timed(ours(row, setup, folder) if row.trainer == "agentsgym" else of_trl(row, setup, folder), setup)


def timed(trainer: Any, setup: Setup) -> list[Sample]:
    """Return the time of each step but the first, which warms up, with the peak memory of all.

    Where rollouts are played ahead, the last step does not count either, since none are played beside it.
    """
    clock, on_gpu = StepClock(setup.device), setup.device == "cuda"
    trainer.add_callback(clock)
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer.train()
    finally:
        if isinstance(trainer, GRPOEnvTrainer):
            trainer.close()
    peak = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {}
    stop = -1 if getattr(trainer.args, "max_staleness", 0) else None
    return [{"step_s": seconds, **peak} for seconds in clock.seconds[1:stop]]


def step_rows(setup: Setup, folder: Path) -> Rows:
    """Seconds of a training step and its peak memory."""
    return {name: train(row, setup, folder) for name, row in ROWS.items()}


def memory_rows(setup: Setup, folder: Path) -> Rows:
    """Peak memory and time of a step over rows of growing length, with and without recomputed activations."""
    small = setup._replace(size=setup.size._replace(episodes=min(8, setup.size.episodes)))
    return {
        f"{length:,} tokens, {'recomputed' if recomputes else 'kept'}": long_steps(small, folder, length, recomputes)
        for length in setup.size.lengths
        for recomputes in (False, True)
    }


def long_steps(setup: Setup, folder: Path, length: int, recomputes: bool) -> Generator[Sample]:
    """Steps over rows of about that many tokens."""
    tokenizer = load(setup, torch.float32).tokenizer
    words = max(1, round((length / MEMORY_TURNS - ANSWER_TOKENS) * 8 / len(tokenizer(" 37" * 8).input_ids)))
    env = LongEcho(tokenizer, {"max_steps_per_episode": MEMORY_TURNS, "num_words": words})
    [one] = env.rollout([{"seed": 0}], ScriptedAgent(["37"] * MEMORY_TURNS))
    changes: dict[str, Any] = {"gradient_checkpointing": recomputes, "max_completion_length": 2 * length}
    while True:
        found = timed(ours(Row(), setup, folder, words=words, num_turns=MEMORY_TURNS, **changes), setup)
        yield from ({"tokens": len(one.token_ids), **sample} for sample in found)
