"""What the benchmark of a GPU measures; each function also runs on a CPU, at a tiny size.

Models are built from a configuration, with random weights: speed and memory do not depend on what they write. Every
answer uses its whole budget. Times are wall-clock seconds after synchronizing the device.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and TRL leave parts of their signatures untyped.

from __future__ import annotations

import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import agentsgym
from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, PolicyAgent, Trajectory
from agentsgym.agents.direct import DirectOutputAgent
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES
from agentsgym.interop import environment_reward, prompt_dataset, rollout_func
from agentsgym.testing import chat_tokenizer
from agentsgym.training.drift import logprob_gap
from benchmarks.stock_trl import ANSWER_TOKENS, Echo, by_hand

OBSERVATION_TOKENS: Final = 30  # about the length of Echo's observation, with the tokens of the template


class Size(NamedTuple):
    """How much is measured.

    Attributes:
        hidden_size: Width of the random model.
        num_layers: Its layers.
        num_heads: Its attention heads, with half as many for keys and values.
        num_episodes: Episodes that are played at once.
        num_turns: Turns of each.
        num_train_turns: Turns of an episode of a training step.
        num_repeats: How often a time is taken.
        learned: The sizes of the policy that learns Twenty Questions.
        num_warm_steps: Steps of its imitation.
        num_steps: Steps of its reinforcement learning.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_episodes: int
    num_turns: int
    num_train_turns: int
    num_repeats: int
    learned: dict[str, int]
    num_warm_steps: int
    num_steps: int


SIZES: Final = {
    "full": Size(1024, 28, 16, 64, 32, 16, 3, {"hidden_size": 512, "num_layers": 8, "num_heads": 8}, 1500, 300),
    "tiny": Size(32, 2, 2, 2, 3, 2, 2, {"hidden_size": 32, "num_layers": 1, "num_heads": 2}, 3, 1),
}


class Policy(NamedTuple):
    """A model on its device, and its tokenizer."""

    model: Any
    tokenizer: Any


def make_policy(size: Size, device: str, dtype: torch.dtype) -> Policy:
    """Make a random model in the shape of Qwen3-0.6B at the full size, with a small vocabulary."""
    tokenizer: Any = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=3 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads // 2,
        head_dim=2 * size.hidden_size // size.num_heads,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return Policy(model.to(device=device, dtype=dtype), tokenizer)


def seconds_of(work: Callable[[], Any], device: str) -> float:
    """Time a call, with what it left running on the device."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    gc.collect()
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def peak_of(work: Callable[[], Any], device: str) -> float | None:
    """Gigabytes that the device held at most during a call; None on a CPU."""
    if device != "cuda":
        work()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    return round(torch.cuda.max_memory_allocated() / 1e9, 2)


def play(agent: Any, tokenizer: Any, size: Size) -> list[Trajectory]:
    """Play the talking game with an agent."""
    env = Echo(tokenizer, {"max_steps_per_episode": size.num_turns})
    tasks = [{"seed": number} for number in range(size.num_episodes)]
    return env.rollout(tasks, agent, max_concurrent=size.num_episodes)


def speed_of(agent: Any, tokenizer: Any, size: Size, device: str) -> float:
    """Agent tokens a second, the median of some runs behind one that warms up."""
    counts: list[int] = []

    def work() -> None:
        played = play(agent, tokenizer, size)
        if failed := [one.error for one in played if one.error is not None]:
            raise RuntimeError(f"{len(failed)} of {len(played)} episodes failed: {failed[0]}")
        counts.append(sum(sum(one.agent_token_mask) for one in played))

    times = [seconds_of(work, device) for _ in range(size.num_repeats + 1)]
    rates = [count / taken for count, taken in zip(counts[1:], times[1:], strict=True)]
    return round(statistics.median(rates), 1)


def policy_agent(policy: Policy) -> PolicyAgent:
    """The agent, whose answers are as long as their budget."""
    agent = PolicyAgent(*policy, max_turn_tokens=ANSWER_TOKENS)
    agent.stop_token_ids = frozenset()
    return agent


@torch.no_grad()
def play_bare(model: Any, size: Size) -> None:
    """Run the same numbers of tokens through the model with a cache, and take the likeliest: no sampling, no game."""
    cache = DynamicCache(config=model.config)
    for _ in range(size.num_turns):
        ids = torch.full((size.num_episodes, OBSERVATION_TOKENS), 65, device=model.device)
        for _ in range(ANSWER_TOKENS):
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)


def measure_sampling(size: Size, device: str, folder: Path) -> dict[str, Any]:
    """Tokens a second over many turns: our agent, the model alone, and vLLM where it is installed."""
    policy = make_policy(size, device, torch.bfloat16 if device == "cuda" else torch.float32)
    policy.model.eval()
    num_tokens = size.num_episodes * size.num_turns * ANSWER_TOKENS
    alone = [seconds_of(lambda: play_bare(policy.model, size), device) for _ in range(size.num_repeats + 1)][1:]
    found: dict[str, Any] = {
        "parameters": sum(one.numel() for one in policy.model.parameters()),
        "model_alone": round(num_tokens / statistics.median(alone), 1),
        "policy_agent": speed_of(policy_agent(policy), policy.tokenizer, size, device),
        "peak_gb": peak_of(lambda: play(policy_agent(policy), policy.tokenizer, size), device),
        "vllm": None,
    }
    if importlib.util.find_spec("vllm") is not None:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        found["vllm"] = vllm_speed(folder, policy.tokenizer, size, device)
    return found


def vllm_speed(folder: Path, tokenizer: Any, size: Size, device: str) -> float:
    """Agent tokens a second of vLLM's engine in this process."""
    untyped: Any = importlib.import_module("vllm").LLM  # optional, and slow to import
    options: dict[str, Any] = {"gpu_memory_utilization": 0.4} if device == "cuda" else {"enforce_eager": True}
    llm = untyped(str(folder), max_model_len=4096, **options)
    agent = DirectOutputAgent(llm, tokenizer=tokenizer, max_new_tokens=ANSWER_TOKENS, temperature=1.0, ignore_eos=True)
    try:
        return speed_of(agent, tokenizer, size, device)
    finally:
        llm.llm_engine.engine_core.shutdown()


def measure_gap(size: Size, device: str) -> dict[str, float]:
    """How far log-probabilities of sampling are from those of one pass over the whole trajectory, by precision."""
    found: dict[str, float] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        policy = make_policy(size, device, dtype)
        policy.model.eval()
        gap = logprob_gap(policy.model, play(policy_agent(policy), policy.tokenizer, size))
        found |= {f"{name}_mean": gap.mean_gap, f"{name}_largest": gap.largest_gap, f"{name}_kl": gap.kl_k3}
    return found


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


def settings_of(size: Size, device: str, folder: Path) -> dict[str, Any]:
    """The settings that all trainers share."""
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": device == "cpu",
        "bf16": device == "cuda",
        "gradient_checkpointing": device == "cuda",
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": size.num_repeats + 1,
        "per_device_train_batch_size": min(8, size.num_episodes),
        "gradient_accumulation_steps": max(1, size.num_episodes // 8),
        "num_generations": min(8, size.num_episodes),
        "max_completion_length": size.num_train_turns * 64,
    }


def ours(size: Size, device: str, folder: Path) -> Any:
    """Our trainer."""
    policy = make_policy(size, device, torch.float32)
    args = GRPOEnvConfig(**settings_of(size, device, folder), max_turn_tokens=ANSWER_TOKENS)
    env = Echo(policy.tokenizer, {"max_steps_per_episode": size.num_train_turns})
    return GRPOEnvTrainer(policy.model, env, args, train_dataset=_rows(size))


def of_trl(function: Any, reward: Any, size: Size, device: str, folder: Path) -> Any:
    """TRL's trainer with a rollout function and the function of its rewards."""
    policy = make_policy(size, device, torch.float32)
    args = GRPOConfig(**settings_of(size, device, folder))
    rows = prompt_dataset(_rows(size))
    return GRPOTrainer(policy.model, reward, args, rows, processing_class=policy.tokenizer, rollout_func=function)


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return the environment's rewards, for rollouts that are played by hand."""
    return [0.0] * len(completions)


def _rows(size: Size) -> Any:
    from datasets import Dataset  # noqa: PLC0415  # slow to import

    return Dataset.from_list([{"task_data": {"seed": seed}} for seed in range(4 * size.num_episodes)])


def measure_steps(size: Size, device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Seconds of a training step and its peak memory: our trainer, and TRL's with two rollout functions."""

    def echo(tokenizer: Any) -> Echo:
        return Echo(tokenizer, {"max_steps_per_episode": size.num_train_turns})

    trainers: dict[str, Callable[[], Any]] = {
        "GRPOEnvTrainer": lambda: ours(size, device, folder),
        "TRL, rollout_func of agentsgym": lambda: of_trl(
            rollout_func(echo, max_turn_tokens=ANSWER_TOKENS), environment_reward, size, device, folder
        ),
        "TRL, rollout_func by hand": lambda: of_trl(by_hand(size.num_train_turns), no_reward, size, device, folder),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, make in trainers.items():
        trainer, clock = make(), StepClock(device)
        trainer.add_callback(clock)
        peak = peak_of(trainer.train, device)
        found[name] = {"step_s": round(statistics.median(clock.seconds[1:]), 3), "peak_gb": peak}
        if isinstance(trainer, GRPOEnvTrainer):
            trainer.close()
        del trainer
        gc.collect()
    return found


def measure_learning(size: Size, device: str, folder: Path) -> dict[str, Any]:
    """Win rates of a larger policy at Twenty Questions, before and after learning; its curve is in the folder."""
    game = {
        "objects": list(DEMO_OBJECTS),
        "properties": list(DEMO_PROPERTIES),
        "max_steps_per_episode": 7,
        "final_guess": True,
        "system_prompt": "",
    }
    is_tiny = size.num_steps == 1
    batch = 8 if is_tiny else 64
    run = agentsgym.train(
        {
            "environments": [{"class": "TwentyQuestions", "env_config": game, "dataset": {"split": "all"}}],
            "tiny": size.learned,
            "warm_start": {
                "player": "imitation",
                "num_episodes": 16 if is_tiny else 8000,
                "max_steps": size.num_warm_steps,
                "observation_loss": True,
                "settings": {"use_cpu": device == "cpu", "learning_rate": 1e-3},
            },
            "training": {
                "output_dir": str(folder),
                "use_cpu": device == "cpu",
                "bf16": False,
                "gradient_checkpointing": False,
                "max_steps": size.num_steps,
                "per_device_train_batch_size": batch,
                "num_generations": 8,
                "max_turn_tokens": 12,
                "advantage_estimator": "gigpo",
                "learning_rate": 3e-4,
                "lr_scheduler_type": "constant",
            },
            "evaluation": {"num_tasks": 8 if is_tiny else 512},
        }
    )
    rates = {name: _rate(found) for name, found in run.evaluations.items()}
    return {"parameters": sum(one.numel() for one in run.model.parameters()), **rates, "seconds": run.phases.seconds}


def _rate(evaluation: Any) -> Sequence[float]:
    rate = evaluation.win_rate
    return [rate.mean, rate.low, rate.high]
