"""What the benchmark of a GPU measures beside training steps: sampling, log-probabilities, and shared prefixes.

A row is a generator: it loads what it needs, warms up, and then takes a sample each time that it is advanced. Every
answer uses its whole budget.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers leaves parts of its signatures untyped.

from __future__ import annotations

import gc
import importlib
import importlib.util
import random
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from agentsgym import PolicyAgent, Trajectory
from agentsgym.agents.direct import DirectOutputAgent
from agentsgym.agents.policy.loading import load_model
from agentsgym.agents.policy.merged import MergedPolicyAgent
from agentsgym.tiny import tiny_tokenizer
from agentsgym.training.drift import logprob_gap
from benchmarks import shared_prefix
from benchmarks.stock_trl import ANSWER_TOKENS, Echo

Sample = Mapping[str, float]
Rows = Mapping[str, Generator[Sample] | str]  # each row's samples, or why it is left out
LORA: Final[dict[str, Any]] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
PRECISIONS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Vocabulary, width, width of the MLPs, layers, heads, heads of keys and values.
SHAPES: Final = {
    "tiny": (512, 32, 64, 2, 2, 1),
    "135m": (49_152, 576, 1536, 30, 9, 3),  # SmolLM2-135M
    "1b": (128_256, 2048, 8192, 16, 32, 8),  # Llama 3.2 1B
}


class Size(NamedTuple):
    """How much is measured."""

    episodes: int  # played at once
    turns: int  # of each
    train_turns: int  # of an episode of a training step
    samples: int  # of each row
    lengths: tuple[int, ...]  # about how many tokens the rows have whose memory is measured


SIZES: Final = {"full": Size(64, 16, 8, 3, (1024, 4096, 8192)), "tiny": Size(2, 2, 2, 2, (64, 128))}


class Setup(NamedTuple):
    """Where and of what everything is measured."""

    model: str  # folder or name
    device: str  # "cuda" or "cpu"
    size: Size


class Policy(NamedTuple):
    """A model on its device, with its tokenizer."""

    model: Any
    tokenizer: Any


def random_model(shape: str, folder: Path) -> str:
    """Write a model of random weights, and a tokenizer of as many words, into a folder; nothing is downloaded."""
    vocabulary, width, inner, layers, heads, kv_heads = SHAPES[shape]
    words = [*map(str, range(100)), " ".join(map(str, range(vocabulary - 103)))]  # there are 4 control tokens
    tokenizer: Any = tiny_tokenizer(words)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=16_384, bos_token_id=None,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load(setup: Setup, dtype: torch.dtype | None = None) -> Policy:
    """Load the model onto its device, by default in bfloat16, or on a CPU in float32."""
    default = torch.bfloat16 if setup.device == "cuda" else torch.float32
    model, tokenizer = load_model(setup.model, dtype=dtype or default)
    return Policy(model.to(setup.device).eval(), tokenizer)


def play(agent: Any, tokenizer: Any, size: Size) -> list[Trajectory]:
    """Play the talking game with an agent."""
    env = Echo(tokenizer, {"max_steps_per_episode": size.turns})
    played = env.rollout([{"seed": seed} for seed in range(size.episodes)], agent, max_concurrent=size.episodes)
    if failed := [one.error for one in played if one.error is not None]:
        raise RuntimeError(f"{len(failed)} of {len(played)} episodes failed: {failed[0]}")
    return played


def rates(work: Callable[[], Any], setup: Setup) -> Generator[Sample]:
    """Agent tokens a second, behind a run that warms up."""
    num_tokens = setup.size.episodes * setup.size.turns * ANSWER_TOKENS
    work()
    while True:
        gc.collect()
        start = shared_prefix.now(setup.device)
        work()
        yield {"rate": num_tokens / (shared_prefix.now(setup.device) - start)}


def policy_agent(policy: Policy, kind: type[PolicyAgent] = PolicyAgent) -> PolicyAgent:
    """The agent, whose answers are as long as their budget."""
    agent = kind(*policy, max_turn_tokens=ANSWER_TOKENS)
    agent.stop_token_ids = frozenset()
    return agent


def observation_tokens(tokenizer: Any) -> int:
    """The length of Echo's observation."""
    message = {"role": "user", "content": " ".join(["37"] * 12)}
    return len(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False))


@torch.no_grad()
def play_bare(policy: Policy, size: Size, decode: Any = None, cache: Any = None) -> torch.Tensor:
    """Run the same numbers of tokens through the model with a cache, and take the likeliest: no sampling, no game.

    Passes of one token are ``decode``'s, a compiled model, where it is given with a cache of one size. Returns the last
    logits, (B, 1, V).
    """
    cache = DynamicCache(config=policy.model.config) if cache is None else cache
    logits = torch.empty(0)
    for _ in range(size.turns):
        ids = torch.full((size.episodes, observation_tokens(policy.tokenizer)), 65, device=policy.model.device)
        for place in range(ANSWER_TOKENS):
            run = decode if place and decode is not None else policy.model
            logits = run(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:]
            ids = logits.argmax(-1)
    return logits


def bare(setup: Setup) -> Generator[Sample]:
    """The model alone."""
    policy = load(setup)
    yield from rates(lambda: play_bare(policy, setup.size), setup)


def compiled(setup: Setup, **compiler: Any) -> Generator[Sample]:
    """The model alone, compiled. The cache stays where it is, as CUDA graphs need."""
    policy = load(setup)
    length = setup.size.turns * (observation_tokens(policy.tokenizer) + ANSWER_TOKENS)
    cache = StaticCache(config=policy.model.config, max_cache_len=length)
    decode = torch.compile(policy.model, **compiler)
    yield from rates(lambda: (cache.reset(), play_bare(policy, setup.size, decode, cache)), setup)


def agent(setup: Setup, kind: type[PolicyAgent] = PolicyAgent, *, adapters: bool = False) -> Generator[Sample]:
    """Our agent."""
    policy = load(setup)
    if adapters:
        policy = policy._replace(model=get_peft_model(policy.model, LoraConfig(**LORA)).eval())
    yield from rates(lambda: play(policy_agent(policy, kind), policy.tokenizer, setup.size), setup)


def vllm(setup: Setup, folder: Path) -> Generator[Sample]:
    """The engine of vLLM, in this process."""
    policy = load(setup)
    for part in policy:
        part.save_pretrained(folder)
    untyped: Any = importlib.import_module("vllm").LLM  # optional, and slow to import
    options: dict[str, Any] = {"gpu_memory_utilization": 0.4} if setup.device == "cuda" else {"enforce_eager": True}
    llm = untyped(str(folder), max_model_len=4096, **options)
    direct: Any = {"max_new_tokens": ANSWER_TOKENS, "temperature": 1.0, "ignore_eos": True}
    player = DirectOutputAgent(llm, tokenizer=policy.tokenizer, **direct)
    try:
        yield from rates(lambda: play(player, policy.tokenizer, setup.size), setup)
    finally:
        llm.llm_engine.engine_core.shutdown()


def sampling_rows(setup: Setup, folder: Path) -> Rows:
    """Tokens a second over many turns."""
    on_gpu, has_vllm = setup.device == "cuda", importlib.util.find_spec("vllm") is not None
    return {
        "the model alone": bare(setup),
        "the model alone, compiled": compiled(setup, mode="reduce-overhead") if on_gpu else "compiled on GPUs only",
        "`PolicyAgent`": agent(setup),
        "`PolicyAgent`, LoRA": agent(setup, adapters=True),
        "`PolicyAgent`, LoRA merged": agent(setup, MergedPolicyAgent, adapters=True),
        "vLLM": vllm(setup, folder / "vllm") if has_vllm else "vLLM is not installed",
    }


def gap(setup: Setup, dtype: torch.dtype) -> Generator[Sample]:
    """How far log-probabilities of sampling are from those of one pass over the whole trajectory."""
    policy = load(setup, dtype)
    found = logprob_gap(policy.model, play(policy_agent(policy), policy.tokenizer, setup.size))
    yield {"mean": found.mean_gap, "largest": found.largest_gap, "kl": found.kl_k3}


def gap_rows(setup: Setup, _: Path) -> Rows:
    """The gap by precision."""
    return {name: gap(setup, dtype) for name, dtype in PRECISIONS.items()}


def sharing(setup: Setup, one: tuple[bool, str], other: tuple[bool, str]) -> Generator[Sample]:
    """Compare two ways of a task group's loss and gradient, each with or without sharing, in a precision."""
    model = shared_prefix.with_head(load(setup, torch.float32).model).train()
    rows = shared_prefix.stacked(shared_prefix.group(random.Random(0), 500)[: setup.size.episodes])
    batch = {name: tensor.to(setup.device) for name, tensor in rows.items()}
    batch["prompt_completion_ids"] %= model.config.vocab_size

    def step(shares: bool, precision: str) -> shared_prefix.Step:
        with torch.autocast(setup.device, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            return shared_prefix.step(model, batch, shares=shares)

    for way in (one, other):  # warms up
        step(*way)
    while True:
        first, second = step(*one), step(*other)
        yield {
            "ratio": second.seconds / first.seconds,
            "logprob": float((first.logprobs - second.logprobs).abs().max()),
            "gradient": float((first.gradient - second.gradient).norm() / second.gradient.norm()),
        }


def sharing_rows(setup: Setup, _: Path) -> Rows:
    """Shared prefixes; on a GPU, the kernel that they need computes in half precision alone."""
    rows: dict[str, Any] = {name: sharing(setup, (True, name), (False, name)) for name in PRECISIONS}
    if setup.device == "cuda":
        rows["float32"] = "no kernel attends to several rows in float32"
    return rows | {"bfloat16 and float32, both without": sharing(setup, (False, "bfloat16"), (False, "float32"))}
