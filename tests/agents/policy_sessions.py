"""Small models, made-up conversations and textbook references: what the tests of the policy agent share."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentsgym import Action, PolicyAgent, SamplingParams, TurnRequest
from agentsgym.agents.answers import stop_token_ids
from agentsgym.agents.policy.decoding_strategy import select_strategy
from agentsgym.testing import chat_tokenizer

TOKENIZER = chat_tokenizer("chatml")
STOPS = list(range(0, 60))  # many, so that turns end early at different places
COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
GEMMA4 = {
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "top_k_experts": 1,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}

KEPT, STEPPED, ALONE, UNCACHED = "kept", "kept, with a forward pass for each new token", "prefilled again", "run again"
# The kind of model, its options, and what becomes of its cache.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", GROUPED, KEPT),
    "llama-eager": ("llama", GROUPED | {"attn_implementation": "eager"}, KEPT),
    "qwen3": ("qwen3", GROUPED, KEPT),
    # absolute positions
    "gpt2": ("gpt2", COMMON, KEPT),
    "opt": ("opt", COMMON | {"ffn_dim": 32, "word_embed_proj_dim": 32}, KEPT),
    # positions as biases
    "bloom": ("bloom", COMMON, KEPT),
    "mpt": ("mpt", COMMON, KEPT),
    "falcon": ("falcon", COMMON | {"alibi": True}, KEPT),
    # experts whose use is balanced in the loss
    "mixtral": ("mixtral", GROUPED | EXPERTS | {"output_router_logits": True}, KEPT),
    # windows and chunks, shorter than the conversations
    "mistral": ("mistral", GROUPED | {"sliding_window": 4}, KEPT),
    "gemma2": ("gemma2", GROUPED | UNTIED | {"sliding_window": 4}, KEPT),
    "gemma3": (
        "gemma3_text",
        GROUPED | UNTIED | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        KEPT,
    ),
    # layers whose numbers of key and value heads differ, experts beside a dense layer
    "gemma4": (
        "gemma4_text",
        GROUPED
        | UNTIED
        | EXPERTS
        | GEMMA4
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        KEPT,
    ),
    "gpt_oss": ("gpt_oss", GROUPED | EXPERTS | {"sliding_window": 4}, KEPT),
    "llama4": (
        "llama4_text",
        GROUPED | EXPERTS | {"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]},
        KEPT,
    ),
    # latent attention
    "deepseek_v3": (
        "deepseek_v3",
        GROUPED | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        KEPT,
    ),
    # sparse attention, whose indexer has a cache of its own
    "deepseek_v32": (
        "deepseek_v32",
        GROUPED
        | EXPERTS
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 6},
        KEPT,
    ),
    # states beside attention, or alone
    "qwen3_next": (
        "qwen3_next",
        GROUPED | EXPERTS | DELTA | {"layer_types": ["linear_attention", "full_attention"]},
        KEPT,
    ),
    "lfm2": ("lfm2", GROUPED | {"layer_types": ["conv", "full_attention"]}, KEPT),
    "bamba": ("bamba", GROUPED | MAMBA2 | {"attn_layer_indices": [1]}, KEPT),
    "falcon_h1": ("falcon_h1", GROUPED | MAMBA2 | {"mamba_d_ssm": 64}, KEPT),
    "zaya": (
        "zaya",
        GROUPED
        | EXPERTS
        | {"num_hidden_layers": 4, "router_hidden_size": 8, "sliding_window": 4}
        | {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
        KEPT,
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        GROUPED
        | EXPERTS
        | DELTA
        | {"layer_types": ["linear_attention", "full_attention"], "hc_count": 2, "hc_lowrank": 8}
        | {
            "ple_layer_ids": [],
            "ple_embed_dim": 8,
            "ngram_vocab_size_base": 64,
            "make_ngram_vocab_size_divisible_by": 8,
        }
        | {"split_ngram_parts": 1, "heads_per_ngram": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1}
        | {"indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2},
        KEPT if Version(transformers.__version__) >= Version("5.21") else ALONE,  # its cache failed before
    ),
    "mamba": ("mamba", COMMON | {"state_size": 8}, STEPPED),
    "jamba": (
        "jamba",
        GROUPED | EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        STEPPED,
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        GROUPED | {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 64},
        ALONE,
    ),
    # caches of another make, or none
    "rwkv": ("rwkv", COMMON | {"attention_hidden_size": 32}, ALONE),
    "openai-gpt": ("openai-gpt", COMMON, ALONE),
}


@cache
def model_of(kind: str) -> PreTrainedModel:
    return new_model(kind)


def new_model(kind: str) -> PreTrainedModel:
    model_type, options, _ = KINDS[kind]
    config = AutoConfig.for_model(model_type, **options)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        implementation = {"attn_implementation": name} if (name := options.get("attn_implementation")) else {}
        model: Any = AutoModelForCausalLM.from_config(config, **implementation).eval()
        for weight in model.parameters():
            if weight.dim() >= 2 and weight.std() < 0.1:  # as small as a default, with which context hardly matters
                torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.eos_token_id = STOPS
    return model


class Session:
    """One conversation of token ids: what was answered and what came back, made up by a private generator."""

    def __init__(self, name: int) -> None:
        self.rng = random.Random(name)
        self.name, self.token_ids, self.state = str(name), list[int](), None
        self.turns: list[tuple[list[int], list[int]]] = []

    def request(self, limit: int | None = None) -> TurnRequest:
        self.token_ids += [self.rng.randrange(60, 400) for _ in range(self.rng.randint(1, 9))]
        return TurnRequest(
            session_id=self.name, messages=[], token_ids=self.token_ids, agent_state=self.state, max_new_tokens=limit
        )

    def record(self, action: Action) -> None:
        ids = list(action.token_ids or ())
        self.turns.append((list(self.token_ids), ids))
        self.token_ids += ids
        self.state = action.agent_state

    @property
    def output(self) -> list[list[int]]:
        return [ids for _, ids in self.turns]


def play(agent: PolicyAgent, sessions: list[Session], limit: int | None = None) -> list[Action]:
    actions = list(agent.act([session.request(limit) for session in sessions]))
    for session, action in zip(sessions, actions, strict=True):
        session.record(action)
    return actions


def greedy_reference(model: PreTrainedModel, prompt: list[int], limit: int) -> list[int]:
    ids = torch.tensor([prompt])
    output: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=sorted(stop_token_ids(model, TOKENIZER)),
        pad_token_id=TOKENIZER.pad_token_id,
    )
    return output[0, len(prompt) :].tolist()


def greedy(model: PreTrainedModel, **options: Any) -> PolicyAgent:
    return PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=0), **options)


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]  # (T, V)


def logprobs_of(model: PreTrainedModel, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Those of a fresh forward pass over the whole row."""
    logits = logits_of(model, prompt + output)[len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Over how many rows and columns each forward pass ran."""
    with torch.no_grad():
        select_strategy(model)  # which runs the model to find out
    passes: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        passes.append(tuple(kwargs["input_ids"].shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def sampled(agent: PolicyAgent) -> list[list[int]]:
    sessions = [Session(n) for n in range(3)]
    for _ in range(2):
        play(agent, sessions, 8)
    agent.finish()
    return [session.token_ids for session in sessions]
