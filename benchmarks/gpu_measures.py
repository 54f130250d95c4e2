"""What the benchmark of a GPU measures, except for training steps; each function also runs on a CPU, at a tiny size.

Every answer uses its whole budget. Times are wall-clock seconds after synchronizing the device.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers leaves parts of its signatures untyped.

from __future__ import annotations

import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import DynamicCache

from agentsgym import PolicyAgent, Trajectory
from agentsgym.agents.direct import DirectOutputAgent
from agentsgym.agents.policy.loading import load_model
from agentsgym.training.drift import logprob_gap
from benchmarks.stock_trl import ANSWER_TOKENS, Echo

OBSERVATION_TOKENS: Final = 30  # about the length of Echo's observation, with the tokens of the template


class Size(NamedTuple):
    """How much is measured.

    Attributes:
        num_episodes: Episodes that are played at once.
        num_turns: Turns of each.
        num_train_turns: Turns of an episode of a training step.
        num_repeats: How often a time is taken.
        lengths: Approximate numbers of tokens of the rows whose memory is measured.
    """

    num_episodes: int
    num_turns: int
    num_train_turns: int
    num_repeats: int
    lengths: tuple[int, ...]


SIZES: Final = {"full": Size(64, 32, 16, 3, (1024, 2048, 4096, 8192)), "tiny": Size(2, 3, 2, 2, (64, 128))}


class Setup(NamedTuple):
    """Where and of what everything is measured.

    Attributes:
        model: Folder or name of the model.
        device: ``"cuda"`` or ``"cpu"``.
        size: How much is measured.
    """

    model: str
    device: str
    size: Size


class Policy(NamedTuple):
    """A model on its device, and its tokenizer."""

    model: Any
    tokenizer: Any


def load(setup: Setup, dtype: torch.dtype) -> Policy:
    """Load the model, and move it to its device."""
    model, tokenizer = load_model(setup.model, dtype=dtype)
    return Policy(model.to(setup.device).eval(), tokenizer)


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
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    return round(torch.cuda.max_memory_allocated() / 1e9, 2)


def play(agent: Any, tokenizer: Any, size: Size) -> list[Trajectory]:
    """Play the talking game with an agent."""
    env = Echo(tokenizer, {"max_steps_per_episode": size.num_turns})
    tasks = [{"seed": number} for number in range(size.num_episodes)]
    return env.rollout(tasks, agent, max_concurrent=size.num_episodes)


def speed_of(agent: Any, tokenizer: Any, setup: Setup) -> float:
    """Agent tokens a second, the median of some runs behind one that warms up."""
    counts: list[int] = []

    def work() -> None:
        played = play(agent, tokenizer, setup.size)
        if failed := [one.error for one in played if one.error is not None]:
            raise RuntimeError(f"{len(failed)} of {len(played)} episodes failed: {failed[0]}")
        counts.append(sum(sum(one.agent_token_mask) for one in played))

    times = [seconds_of(work, setup.device) for _ in range(setup.size.num_repeats + 1)]
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


def measure_sampling(setup: Setup, folder: Path) -> dict[str, Any]:
    """Tokens a second over many turns: our agent, the model alone, and vLLM where it is installed."""
    size, device = setup.size, setup.device
    policy = load(setup, torch.bfloat16 if device == "cuda" else torch.float32)
    num_tokens = size.num_episodes * size.num_turns * ANSWER_TOKENS
    alone = [seconds_of(lambda: play_bare(policy.model, size), device) for _ in range(size.num_repeats + 1)][1:]
    found: dict[str, Any] = {
        "parameters": sum(one.numel() for one in policy.model.parameters()),
        "model_alone": round(num_tokens / statistics.median(alone), 1),
        "policy_agent": speed_of(policy_agent(policy), policy.tokenizer, setup),
        "peak_gb": peak_of(lambda: play(policy_agent(policy), policy.tokenizer, size), device),
        "vllm": None,
    }
    if importlib.util.find_spec("vllm") is not None:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        found["vllm"] = vllm_speed(folder, policy.tokenizer, setup)
    return found


def vllm_speed(folder: Path, tokenizer: Any, setup: Setup) -> float:
    """Agent tokens a second of vLLM's engine in this process."""
    untyped: Any = importlib.import_module("vllm").LLM  # optional, and slow to import
    options: dict[str, Any] = {"gpu_memory_utilization": 0.4} if setup.device == "cuda" else {"enforce_eager": True}
    llm = untyped(str(folder), max_model_len=4096, **options)
    agent = DirectOutputAgent(llm, tokenizer=tokenizer, max_new_tokens=ANSWER_TOKENS, temperature=1.0, ignore_eos=True)
    try:
        return speed_of(agent, tokenizer, setup)
    finally:
        llm.llm_engine.engine_core.shutdown()


def measure_gap(setup: Setup, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """How far log-probabilities of sampling are from those of one pass over the whole trajectory, by precision."""
    found: dict[str, float] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        policy = load(setup, dtype)
        gap = logprob_gap(policy.model, play(policy_agent(policy), policy.tokenizer, setup.size))
        found |= {f"{name}_mean": gap.mean_gap, f"{name}_largest": gap.largest_gap, f"{name}_kl": gap.kl_k3}
    return found
